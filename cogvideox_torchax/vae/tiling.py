"""The plan of tiles and their blending, for torch tensors, JAX and NumPy arrays in any order of axes.

Tiles are cut, run and blended as in diffusers. Diffusers rounds a tile's overlap and its crop separately, so
its output has the wrong size if the overlap is not a whole number of latent pixels. Here both follow from one
number, the latent pixels from one tile's start to the next tile's start.

In this file, tiles are given as a list of rows of tiles, and the axis of the width follows `height_axis`.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from cogvideox_torchax.arrays import values
from cogvideox_torchax.vae.chunks import Step
from cogvideox_torchax.vae.directions import Axes, Direction
from cogvideox_torchax.vae.pixels import to_uint8
from cogvideox_torchax.vae.placement import Placement


@dataclass(frozen=True)
class AxisPlan:
    """The tiles of one spatial axis.

    Attributes:
        spans: the (start, stop) of each tile, in pixels of the input.
        keep: the number of pixels of each tile's output, from its start, that the frame takes after blending.
        blend: the number of pixels of a tile's output, from its start, that are blended with the tile before.
    """

    spans: tuple[tuple[int, int], ...]
    keep: int
    blend: int


@dataclass(frozen=True)
class TilePlan:
    """The tiles of a frame: their rows along the height, and their columns along the width."""

    rows: AxisPlan
    columns: AxisPlan


def plan_axis(size: int, *, tile: int, overlap: float, scale_in: int = 1, scale_out: int = 1) -> AxisPlan:
    """Return the tiles of one axis of `size` input pixels.

    A tile has `tile` latent pixels, and shares the fraction `overlap` of them with the next tile. For each
    latent pixel the input has `scale_in` pixels, and the output `scale_out`.

    Raises:
        ValueError: the overlap is not in [0, 1), or a tile starts less than one latent pixel after the tile
            before it.
    """
    if not 0 <= overlap < 1:
        raise ValueError(
            f"got tiles that overlap by {overlap:.3f} of their size: at least 0 and less than 1 is wanted; "
            "diffusers takes 1/6 of the height and 1/5 of the width"
        )
    # `stride` is the number of latent pixels from a tile's start to the next tile's. Without the 1e-6, `int`
    # would lose a pixel where the product is rounded to just below a whole number.
    stride = int(tile * (1 - overlap) + 1e-6)
    if tile < 1 or stride < 1:
        smallest = math.ceil(1 / (1 - overlap) - 1e-6)  # the smallest tile with a stride of 1 or more
        raise ValueError(
            f"got a tile of {tile} latent pixels with overlap {overlap:.3f}: a tile must advance by at least "
            f"one latent pixel; with this overlap use a tile of {smallest} at least, or a smaller overlap"
        )
    spans = tuple((start, min(start + tile * scale_in, size)) for start in range(0, size, stride * scale_in))
    # In pixels of the output: the part of a tile before the next tile starts, which the frame takes from it,
    # and the overlap, in which the next tile is blended with it.
    return AxisPlan(spans, keep=stride * scale_out, blend=(tile - stride) * scale_out)


@dataclass(frozen=True)
class TileSettings:
    """The size of a tile in latent pixels, and the fractions of it that overlap the next tiles."""

    latent_height: int
    latent_width: int
    overlap_height: float = 1 / 6  # diffusers' defaults
    overlap_width: float = 1 / 5

    def plan(self, direction: Direction, size: Sequence[int], scale: int) -> TilePlan | None:
        """Return the tiles of an input; None if it is no larger than one tile.

        Args:
            direction: `ENCODE` or `DECODE`.
            size: the height and width of the input: in pixels of a video, or in latent pixels.
            scale: the number of a video's pixels for each latent pixel, along one axis.
        """
        height, width = size
        scale_in = direction.scale(scale)
        if height <= self.latent_height * scale_in and width <= self.latent_width * scale_in:
            return None
        # Along one axis a latent pixel stands for `scale` pixels of the video: of the input in encoding, of
        # the output in decoding.
        axis_plan = functools.partial(plan_axis, scale_in=scale_in, scale_out=scale // scale_in)
        return TilePlan(
            rows=axis_plan(height, tile=self.latent_height, overlap=self.overlap_height),
            columns=axis_plan(width, tile=self.latent_width, overlap=self.overlap_width),
        )


def tiled_step(
    step: Step,
    plan: TilePlan,
    axes: Axes,
    placement: Placement | None = None,
    as_uint8: bool = False,
) -> Step:
    """Return a step that runs each chunk in tiles, and joins their results, as bytes if `as_uint8`.

    `step` runs a tile, and returns floats. The cache has the caches of the tiles, in rows. `axes` is the
    order of the chunks' axes, and `placement` the sharding of whole frames on a mesh; None for one device.
    """
    height_axis = axes.index("H")

    def run_tiles(chunk: Any, caches: list[list[Any]] | None) -> tuple[Any, list[list[Any]]]:
        # For arrays of JAX, cutting and joining are compiled: each would otherwise be many small programs.
        tiles = (_cut_on_jax if isinstance(chunk, jax.Array) else cut)(chunk, plan, height_axis)
        caches = caches or [[None] * len(row) for row in tiles]  # None at the start of a video
        results = [list(map(step, *rows)) for rows in zip(tiles, caches, strict=True)]
        outputs, next_caches = ([[result[i] for result in row] for row in results] for i in (0, 1))
        join_and_place = _join_on_jax if isinstance(outputs[0][0], jax.Array) else _join_and_place
        return join_and_place(outputs, plan, height_axis, placement, as_uint8), next_caches

    return run_tiles


def cut(x: Any, plan: TilePlan, height_axis: int) -> list[list[Any]]:
    """Return the tiles of `x`."""
    axes_before = (slice(None),) * height_axis
    return [
        [x[(*axes_before, slice(top, bottom), slice(left, right))] for left, right in plan.columns.spans]
        for top, bottom in plan.rows.spans
    ]


_cut_on_jax = functools.partial(jax.jit, static_argnums=(1, 2))(cut)


def _join_and_place(
    tiles: list[list[Any]], plan: TilePlan, height_axis: int, placement: Placement | None, as_uint8: bool
) -> Any:
    """Return the frames that tiles join to, as bytes if `as_uint8`, and sharded if there is a placement."""
    frames = join(tiles, plan, height_axis)
    frames = to_uint8(frames) if as_uint8 else frames
    # The tiles have no padding any more: here the placement only shards the frames, as it shards results.
    return frames if placement is None else placement.result_without_padding(frames)


_join_on_jax = functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))(_join_and_place)


def join(tiles: Sequence[Sequence[Any]], plan: TilePlan, height_axis: int) -> Any:
    """Blend the tiles' outputs at their edges, crop them and concatenate them.

    Each tile is blended with the blended tile above it, then with the blended tile to its left, as in
    diffusers.
    """
    width_axis = height_axis + 1
    blended: list[list[Any]] = []
    for row, row_tiles in enumerate(tiles):
        blended.append([])
        for column, tile in enumerate(row_tiles):
            if row > 0:
                tile = _blend_edge(blended[row - 1][column], tile, plan.rows.blend, height_axis)
            if column > 0:
                tile = _blend_edge(blended[row][column - 1], tile, plan.columns.blend, width_axis)
            blended[row].append(tile)

    def crop(tile: Any) -> Any:
        tile = _slice_of(tile, height_axis, 0, plan.rows.keep)
        return _slice_of(tile, width_axis, 0, plan.columns.keep)

    joined_rows = [values.concatenate(list(map(crop, row_tiles)), width_axis) for row_tiles in blended]
    return values.concatenate(joined_rows, height_axis)


def _blend_edge(previous: Any, tile: Any, extent: int, axis: int) -> Any:
    """Return a tile whose first `extent` pixels along an axis are blended with the last ones of `previous`.

    The weight of the tile is 0 at its first pixel and rises linearly.
    """
    extent = min(previous.shape[axis], tile.shape[axis], extent)
    if extent == 0:
        return tile
    shape = [1] * len(tile.shape)  # broadcasts over all axes but `axis`
    shape[axis] = extent
    weight: Any = np.linspace(0, 1, extent, endpoint=False, dtype=np.float32).reshape(shape)
    if not isinstance(tile, np.ndarray | jax.Array):  # a torch tensor
        import torch

        weight = torch.as_tensor(weight, device=tile.device)
    previous_edge = _slice_of(previous, axis, previous.shape[axis] - extent, previous.shape[axis])
    tile_edge = _slice_of(tile, axis, 0, extent)
    # The weights are float32, so a mixture of bfloat16 tiles is float32 too.
    mixed = previous_edge * (1 - weight) + tile_edge * weight
    mixed = mixed.astype(tile.dtype) if isinstance(tile, np.ndarray | jax.Array) else mixed.to(tile.dtype)
    return values.concatenate([mixed, _slice_of(tile, axis, extent, tile.shape[axis])], axis)


def _slice_of(x: Any, axis: int, start: int, stop: int) -> Any:
    return x[(slice(None),) * axis + (slice(start, stop),)]
