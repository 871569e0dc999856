"""Which frames a TPU computes together: the first of an odd number by itself, the others in equal runs.

A TPU keeps frames in the sublanes of its tiles, and nine fill them badly: so computed a chunk takes two and a
half times what one of eight takes. Each kernel therefore computes the first frame as an image and the others
as it computes frames without it, two, four or eight at a time, and joins them at its end, where XLA sees
through to the parts. Rows of the image may be cut into bands, which fill the sublanes in the place of frames.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_kernels.common.dispatch import Target


def stands_apart(target: Target, x: jax.Array) -> bool:
    """Return whether the first frame is computed by itself: of bfloat16 on a TPU, as has been planned."""
    return x.dtype == jnp.bfloat16 and target.on_tpu


RUNS = 8, 4, 2
"""Frames that are computed together, the longest first."""


def in_parts(target: Target, *arrays: jax.Array | None, time_axis: int = 1) -> list[tuple[Any, ...]]:
    """The arrays' frames that are computed together, in order: all, or where the first one `stands_apart` the
    first one of an odd number, then the others in equal `RUNS`.

    Args:
        target: what is traced for.
        arrays: the first of them says how many frames there are. Where another has fewer, the others stay
            together.
        time_axis: along which they lie.
    """
    whole = arrays[0]
    assert whole is not None
    frames = whole.shape[time_axis]
    if not stands_apart(target, whole):
        return [arrays]
    alone = frames % 2
    run = next(run for run in RUNS if (frames - alone) % run == 0)
    if any(array is not None and array.shape[time_axis] != frames for array in arrays):
        run = frames
    starts = [*range(alone), *range(alone, frames, run)]
    if len(starts) == 1:
        return [arrays]

    def take(start: int, stop: int | None) -> tuple[Any, ...]:
        return tuple(
            None if array is None else jax.lax.slice_in_dim(array, start, stop, axis=time_axis)
            for array in arrays
        )

    return list(map(take, starts, [*starts[1:], None]))


def joined(parts: Sequence[jax.Array], time_axis: int = 1) -> jax.Array:
    """The frames of `in_parts`' results, one after the other."""
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=time_axis)


def is_image_for_tpu(target: Target, x: jax.Array) -> bool:
    """Return whether `x`, frames N T H W C, is an image that a TPU computes by itself."""
    return x.shape[1] == 1 and stands_apart(target, x)


def in_bands(x: Float[Array, "N 1 H W C"], beyond: int, bands: int) -> Float[Array, "N B h W C"]:
    """An image's rows in bands, with rows of their neighbours above and below, zeros beyond the image.

    Args:
        x: an image.
        beyond: how many rows of either neighbour.
        bands: how many, which must divide the rows.
    """
    rows = x.shape[2] // bands
    padded = jnp.pad(x, [(0, 0), (0, 0), (beyond, beyond), (0, 0), (0, 0)])
    cut = (padded[:, :, band * rows : (band + 1) * rows + 2 * beyond] for band in range(bands))
    return jnp.concatenate(list(cut), axis=1)


def of_bands(x: Float[Array, "N B h W C"], beyond: int) -> Float[Array, "N 1 H W C"]:
    """The image of bands, of each without so many rows above and below that are its neighbours' too."""
    own = slice(beyond, x.shape[2] - beyond)
    return jnp.concatenate([x[:, band : band + 1, own] for band in range(x.shape[1])], axis=2)
