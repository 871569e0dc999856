"""Operations on whole frames: convolution frame by frame, repetition, selection, averages of pairs."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from jax_kernels.common.dispatch import Target
from jax_kernels.common.layout import precision_for, zero_of


def conv_frames(
    x_NTHWC: Float[Array, "N T H W I"],
    kernel_HWIO: Float[Array, "kh kw I O"],
    *,
    padding: Sequence[tuple[int, int]],
    stride: int = 1,
) -> Float[Array, "N T H2 W2 O"]:
    """Convolve every frame in 2-D; return float32 sums, not yet rounded.

    Args:
        x_NTHWC: frames.
        kernel_HWIO: the 2-D kernel, in the dtype of the frames.
        padding: numbers of zero rows (above, below) and of zero columns (left, right).
        stride: along rows and columns.
    """
    n, t = x_NTHWC.shape[:2]
    y = lax.conv_general_dilated(
        x_NTHWC.reshape(n * t, *x_NTHWC.shape[2:]),
        kernel_HWIO,
        window_strides=(stride, stride),
        padding=padding,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        precision=precision_for(x_NTHWC.dtype),
        preferred_element_type=jnp.float32,
    )
    return y.reshape(n, t, *y.shape[1:])


MOST_IN_PATCHES = 2**29
"""Most bytes of patches, the pixels under all windows: `conv_patches` writes each pixel once for each tap."""


def conv_patches(
    taps: Sequence[Float[Array, "N T H W I"]], kernel: Float[Array, "*taps kh kw I O"], *, stride: int = 1
) -> Float[Array, "N T H2 W2 O"]:
    """Convolve frames by one matrix product of all windows (patches); return float32 sums.

    Args:
        taps: for each of the kernel's taps of time the frames under it, padded in space already. One array
            for a kernel without the axis of time.
        kernel: one matrix of patches to outputs, when reshaped.
        stride: along rows and columns.
    """
    window_rows, window_columns, _, outputs = kernel.shape[-4:]
    height, width = (
        (size - window) // stride + 1
        for size, window in zip(taps[0].shape[2:4], (window_rows, window_columns), strict=True)
    )
    patches = [  # for each tap of the kernel, the pixels under it in all windows
        tap[
            :,
            :,
            row : row + stride * (height - 1) + 1 : stride,
            column : column + stride * (width - 1) + 1 : stride,
        ]
        for tap in taps
        for row in range(window_rows)
        for column in range(window_columns)
    ]
    return jnp.einsum(
        "nthwi,io->nthwo",
        jnp.concatenate(patches, axis=-1),
        kernel.reshape(-1, outputs),
        precision=precision_for(taps[0].dtype),
        preferred_element_type=jnp.float32,
    )


def repeat_nearest(x: Array, factors: dict[int, int]) -> Array:
    """Upsample by whole factors (nearest): repeat each element `factors[axis]` times along every `axis`.

    It differs from `jnp.repeat` in two ways: it repeats along several axes, the later ones first, and it
    takes whole factors alone, no array of counts. For these `jnp.repeat` is a broadcast and a reshape, and no
    gather by index, which on a mesh would collect all of a sharded axis on every device.
    """
    # Columns before rows and frames, while the array is smallest: where the shards of a width and of its
    # multiple do not line up, devices exchange columns.
    for axis in sorted(factors, reverse=True):
        x = jnp.repeat(x, factors[axis], axis=axis)
    return x


def select_frames(
    target: Target, x_NTHWC: jax.Array, frames: Sequence[int], *, after: jax.Array | None = None
) -> jax.Array:
    """Return `x[:, frames]`; on a TPU, where slicing sublanes is slow, by a matrix of zeros and ones.

    A sum of one finite value and zeros is exact in any dtype (v6e, two of 8 x 480 x 720 x 128: 1.7 ms instead
    of 4.7).

    Args:
        target: the target.
        x_NTHWC: frames.
        frames: indices in order; the same one may come twice.
        after: an array N T H W C, or None. A TPU selects the frames once this array has been computed.
    """
    index = np.asarray(frames)
    if not target.on_tpu:
        return x_NTHWC[:, index]
    picks = jnp.asarray(index[:, None] == np.arange(x_NTHWC.shape[1])[None], x_NTHWC.dtype)
    return _mix_frames(picks if after is None else picks + zero_of(after[0, 0, 0, 0, 0]), x_NTHWC)


def _mix_frames(weights_ST: jax.Array, x_NTHWC: jax.Array) -> jax.Array:
    """Return S weighted sums of the T frames of `x`: a row of `weights` for each sum."""
    return jnp.einsum("st,nthwc->nshwc", weights_ST, x_NTHWC, precision=precision_for(x_NTHWC.dtype))


def average_pairs(target: Target, x_NTHWC: jax.Array, *, first_frame_alone: bool) -> jax.Array:
    """Return the means of pairs of frames; `first_frame_alone` keeps the first frame, before the pairs.

    Frames must be finite. On a TPU the means are a matrix product with 0.5 and 0, which bfloat16 holds
    exactly; 0 times an infinity would be NaN. Reducing pairs of sublanes takes 25.6 ms there (v6e, 8 x 480 x
    720 x 128).
    """
    if target.on_tpu:
        return _average_by_product(x_NTHWC, first_frame_alone=first_frame_alone)
    kept, paired = ([x_NTHWC[:, :1]], x_NTHWC[:, 1:]) if first_frame_alone else ([], x_NTHWC)
    pairs = paired.reshape(paired.shape[0], paired.shape[1] // 2, 2, *paired.shape[2:])
    return jnp.concatenate([*kept, jnp.mean(pairs.astype(jnp.float32), axis=2).astype(paired.dtype)], axis=1)


def _average_by_product(x_NTHWC: jax.Array, *, first_frame_alone: bool) -> jax.Array:
    """Compute `average_pairs` as a matrix product over the frames."""
    length = x_NTHWC.shape[1]
    alone = int(first_frame_alone)  # frames that are kept
    weights = np.zeros((alone + length // 2, length))  # of each frame in each result
    weights[:alone, :alone] = 1
    for pair in range(length // 2):
        weights[alone + pair, alone + 2 * pair : alone + 2 * pair + 2] = 0.5
    return _mix_frames(jnp.asarray(weights, x_NTHWC.dtype), x_NTHWC)
