"""Tiles of torch tensors, in PyTorch or on JAX: cut, and blended with what is done to frames besides."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from cogvideox_torchax import runtime
from cogvideox_torchax.vae import tiling
from cogvideox_torchax.vae.checks import NCTHW
from cogvideox_torchax.vae.pixels import to_uint8

if TYPE_CHECKING:
    from cogvideox_torchax.sharding import Placement

ROWS = NCTHW.of("H")


def _cut(plan: tiling.TilePlan, x: torch.Tensor) -> list[list[torch.Tensor]]:
    return tiling.cut(x, plan, row_axis=ROWS)


@functools.cache
def _jitted(function: Callable[..., Any]) -> Callable[..., Any]:
    return runtime.jit_torch(function)


TENSORS = tiling.ArrayLibrary(
    row_axis=ROWS,
    asarray=lambda array, like: torch.as_tensor(array, device=like.device),
    concatenate=runtime.concatenate,
    take=runtime.take_videos,
    cut=lambda plan, x: (_jitted(_cut) if runtime.on_jax(x) else _cut)(plan, x),
)


def joined(
    plan: tiling.TilePlan, as_uint8: bool, placement: "Placement | None", *, on_jax: bool
) -> Callable[[list[list[torch.Tensor]]], torch.Tensor]:
    """Return what blends a chunk's tiles, as bytes and laid on a mesh where that is asked for."""
    return functools.partial(_jitted(_join) if on_jax else _join, (plan, as_uint8, placement))


def _join(
    static: "tuple[tiling.TilePlan, bool, Placement | None]", outputs: list[list[torch.Tensor]]
) -> torch.Tensor:
    plan, as_uint8, placement = static
    frames = tiling.join(outputs, plan, TENSORS)
    frames = to_uint8(frames) if as_uint8 else frames
    return runtime.torch_view(placement.hand_out)(frames) if placement and runtime.on_jax(frames) else frames
