"""The activations that each latent covers: nearest upsampling of the latents, and the sizes it supports."""

import jax.numpy as jnp
from jaxtyping import Array

from jax_kernels.common.frames import repeat_nearest


def match_frames_and_columns(
    z_NTHWC: Array, activations: tuple[int, ...], *, first_frame_alone: bool
) -> Array:
    """Upsample latents (nearest) to the frames and columns of activations; rows stay.

    Args:
        z_NTHWC: the latents.
        activations: shape (N, T, H, W, C) of the activations.
        first_frame_alone: whether the first latent frame covers the first frame alone, and the latent frames
            after it all frames after the first.
    """
    parts, lengths = _frame_parts(z_NTHWC, activations, first_frame_alone)
    columns = activations[3]
    resized = [
        repeat_nearest(part, {1: length // part.shape[1], 3: columns // part.shape[3]})
        for part, length in zip(parts, lengths, strict=True)
    ]
    return resized[0] if len(resized) == 1 else jnp.concatenate(resized, axis=1)


def _frame_parts(
    z_NTHWC: Array, activations: tuple[int, ...], first_frame_alone: bool
) -> tuple[list[Array], list[int]]:
    """Return the latents as parts along time, and how many frames of the activations each part covers.

    There are two parts if the first latent frame covers the first frame alone, else one. `activations` is a
    shape (N, T, H, W, C).
    """
    frames = activations[1]
    if first_frame_alone and frames > 1:
        return [z_NTHWC[:, :1], z_NTHWC[:, 1:]], [1, frames - 1]
    return [z_NTHWC], [frames]


def check_sizes(z_NTHWC: Array, activations: tuple[int, ...], *, first_frame_alone: bool) -> None:
    """Raise `ValueError` unless the activations' frames, rows and columns are multiples of the latents'.

    `activations` is their shape (N, T, H, W, C).
    """
    for part, length in zip(*_frame_parts(z_NTHWC, activations, first_frame_alone), strict=True):
        wanted = length, *activations[2:4]
        if 0 in part.shape[1:4] or any(n % m for n, m in zip(wanted, part.shape[1:4], strict=True)):
            raise ValueError(
                f"spatial_norm got latents {z_NTHWC.shape} for activations {activations}: frames, rows and "
                "columns of the activations must be whole multiples of the latents'"
            )
