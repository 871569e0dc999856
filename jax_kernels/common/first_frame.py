"""Runs of frames that a TPU computes together: the first of an odd number alone, the rest in equal runs.

A TPU keeps frames in the sublanes of its tiles. Nine fill them badly: together they take two and a half times
as long as eight. Each kernel therefore computes the first of an odd number of frames alone, as an image, and
the others two, four or eight at a time (a run), and joins them at its end. XLA removes a join that the next
kernel's split undoes. An image may be cut into bands of rows, which fill the sublanes in place of frames.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_kernels.common.dispatch import Target


def splits_first_frame(target: Target, x: jax.Array) -> bool:
    """Return whether the first of an odd number of frames is computed alone: of bfloat16 frames on a TPU.

    The module's docstring has the reason.
    """
    return x.dtype == jnp.bfloat16 and target.on_tpu


RUNS = 8, 4, 2
"""Numbers of frames that are computed together, in order of preference."""


def split_frames(target: Target, *arrays: jax.Array | None, time_axis: int = 1) -> list[tuple[Any, ...]]:
    """Split the frames of arrays into runs that are computed together; return each run's arrays, in order.

    On a TPU, in bfloat16, the first of an odd number of frames is a run, and the frames after it are equal
    runs, of the largest of `RUNS` that divides their number. Elsewhere all frames are one run.

    Args:
        target: the target.
        arrays: arrays of frames, or None. The first one is an array and has the number of frames. If another
            has fewer, such as latents, frames after the first stay in one run.
        time_axis: axis of the frames.

    Returns:
        For each run a tuple of its frames in every array, None for None.
    """
    x = arrays[0]
    assert x is not None
    frames = x.shape[time_axis]
    if not splits_first_frame(target, x):
        return [arrays]
    alone = frames % 2  # frames that are computed alone: none, or the first
    run = next(run for run in RUNS if (frames - alone) % run == 0)
    if any(array is not None and array.shape[time_axis] != frames for array in arrays):
        run = frames
    starts = [*range(alone), *range(alone, frames, run)]
    if len(starts) == 1:
        return [arrays]

    def take(start: int, stop: int | None) -> tuple[Any, ...]:
        """Return the frames `start` to `stop`, None for the last one, of every array that is not None."""
        return tuple(
            None if array is None else jax.lax.slice_in_dim(array, start, stop, axis=time_axis)
            for array in arrays
        )

    return list(map(take, starts, [*starts[1:], None]))


def join_frames(parts: Sequence[jax.Array], time_axis: int = 1) -> jax.Array:
    """Concatenate the results of the runs of `split_frames` along time."""
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=time_axis)


def is_image_for_tpu(target: Target, x: jax.Array) -> bool:
    """Return whether `x`, frames N T H W C, is one frame (an image), on a TPU and in bfloat16.

    A TPU's kernels then have other forms, as one frame leaves the sublanes of a tile empty.
    """
    return x.shape[1] == 1 and splits_first_frame(target, x)


def split_bands(x: Float[Array, "N 1 H W C"], overlap: int, bands: int) -> Float[Array, "N B h W C"]:
    """Cut an image's rows into bands, which stand along the axis of frames.

    Args:
        x: an image.
        overlap: rows of the bands above and below that each band has too, zeros beyond the image.
        bands: number of bands B, which must divide the rows.

    Returns:
        Bands of h = H / B + 2 `overlap` rows each.
    """
    rows = x.shape[2] // bands
    padded = jnp.pad(x, [(0, 0), (0, 0), (overlap, overlap), (0, 0), (0, 0)])
    cut = (padded[:, :, band * rows : (band + 1) * rows + 2 * overlap] for band in range(bands))
    return jnp.concatenate(list(cut), axis=1)


def join_bands(x: Float[Array, "N B h W C"], overlap: int) -> Float[Array, "N 1 H W C"]:
    """Join bands to an image; the first and the last `overlap` rows of each band are left out."""
    kept = slice(overlap, x.shape[2] - overlap)
    return jnp.concatenate([x[:, band : band + 1, kept] for band in range(x.shape[1])], axis=2)
