"""Chunks run in tiles: cut, computed as many at a time as a mesh splits a batch over, and blended."""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from cogvideox_torchax import runtime
from cogvideox_torchax.vae import tiling
from cogvideox_torchax.vae.checks import NCTHW
from cogvideox_torchax.vae.pixels import to_uint8

if TYPE_CHECKING:
    from cogvideox_torchax.sharding import Placement

TORCH_ARRAYS = tiling.ArrayLibrary(
    concatenate=lambda parts, axis: torch.cat(list(parts), dim=axis),
    asarray=lambda array, like: torch.as_tensor(array, device=like.device),
)


def run_tiles(
    pieces: Iterable[torch.Tensor],
    plan: tiling.TilePlan,
    start: Callable[[], Callable[[torch.Tensor], torch.Tensor]],
    *,
    dp: int,
    as_uint8: bool,
    placement: "Placement | None",
    join_on_jax: bool,
) -> Iterator[torch.Tensor]:
    """The result of each chunk.

    Args:
        pieces: the chunks (N, C, T, H, W).
        plan: how they are cut.
        start: begins a run, which keeps the cache of the convolutions from a chunk of a tile to its next.
        dp: over how many devices of a mesh a batch is split; as many tiles of one size are run together.
        as_uint8: gives bytes.
        placement: lays the result on a mesh; None without one.
        join_on_jax: whether the results are on JAX.
    """
    pieces = iter(pieces)
    first = next(pieces)
    together = 1 if first.shape[0] % dp == 0 else dp  # else "dp" has the videos to split
    groups = tiling.groups(plan, together)
    runs = [start() for _ in groups]
    join = _jitted_join() if join_on_jax else _join
    for piece in itertools.chain([first], pieces):
        cut = _jitted_cut() if runtime.on_jax(piece) else _cut
        tiles = cut(plan, piece)
        outputs: list[list[Any]] = [[None] * len(row) for row in tiles]
        for group, run in zip(groups, runs, strict=True):
            given = [tiles[row][column] for row, column in group]
            if len(group) == 1:
                results = [run(given[0])]
            else:
                videos = piece.shape[0]
                batch = run(runtime.concatenate(given, 0))
                results = [runtime.take_videos(batch, at, videos) for at in range(0, batch.shape[0], videos)]
            for (row, column), result in zip(group, results, strict=True):
                outputs[row][column] = result
        yield join((plan, as_uint8, placement), outputs)


def _cut(plan: tiling.TilePlan, x: torch.Tensor) -> list[list[torch.Tensor]]:
    return tiling.cut(x, plan, row_axis=NCTHW.of("H"))


def _join(
    static: "tuple[tiling.TilePlan, bool, Placement | None]", outputs: list[list[torch.Tensor]]
) -> torch.Tensor:
    plan, as_uint8, placement = static
    frames = tiling.join(outputs, plan, TORCH_ARRAYS, row_axis=NCTHW.of("H"))
    frames = to_uint8(frames) if as_uint8 else frames
    return runtime.torch_view(placement.hand_out)(frames) if placement and runtime.on_jax(frames) else frames


@functools.cache
def _jitted_cut():
    return runtime.jit_torch(_cut)


@functools.cache
def _jitted_join():
    return runtime.jit_torch(_join)
