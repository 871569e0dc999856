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

    `padding` is zeros (before, after) the rows and the columns.
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

    `taps` has the frames under each tap of time, padded already: one array for a kernel without that axis.
    """
    window_rows, window_columns, _, outputs = kernel.shape[-4:]
    height, width = (
        (size - window) // stride + 1
        for size, window in zip(taps[0].shape[2:4], (window_rows, window_columns), strict=True)
    )
    patches = [
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
    """Repeat each element `factors[axis]` times along `axis`: nearest-neighbour upsampling by whole factors.

    A broadcast and a reshape: an index gather would gather the whole of a sharded axis, and with
    `total_repeat_length` jnp.repeat would compute its indices on the device. Columns first, while the array
    is smallest: where the shards of a width and of its multiple do not line up, columns are communicated.
    """
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
        after: N T H W C; a TPU selects once this has been computed.
    """
    index = np.asarray(frames)
    if not target.on_tpu:
        return x_NTHWC[:, index]
    picks = jnp.asarray(index[:, None] == np.arange(x_NTHWC.shape[1])[None], x_NTHWC.dtype)
    return _mix_frames(picks if after is None else picks + zero_of(after[0, 0, 0, 0, 0]), x_NTHWC)


def _mix_frames(weights_ST: jax.Array, x_NTHWC: jax.Array) -> jax.Array:
    """Return S weighted sums of T frames."""
    return jnp.einsum("st,nthwc->nshwc", weights_ST, x_NTHWC, precision=precision_for(x_NTHWC.dtype))


def average_pairs(target: Target, x_NTHWC: jax.Array, *, first_frame_alone: bool) -> jax.Array:
    """Return the means of pairs of frames, which must be finite; `first_frame_alone` keeps the first frame.

    On a TPU it is a matrix product with 0.5 and 0, which bfloat16 holds exactly; 0 times an infinity would be
    NaN. Reducing pairs of sublanes takes 25.6 ms there (v6e, 8 x 480 x 720 x 128).
    """
    if target.on_tpu:
        return _average_by_product(x_NTHWC, first_frame_alone=first_frame_alone)
    first, rest = ([x_NTHWC[:, :1]], x_NTHWC[:, 1:]) if first_frame_alone else ([], x_NTHWC)
    pairs = rest.reshape(rest.shape[0], rest.shape[1] // 2, 2, *rest.shape[2:])
    return jnp.concatenate([*first, jnp.mean(pairs.astype(jnp.float32), axis=2).astype(rest.dtype)], axis=1)


def _average_by_product(x_NTHWC: jax.Array, *, first_frame_alone: bool) -> jax.Array:
    """Compute `average_pairs` as a matrix product over the frames."""
    length = x_NTHWC.shape[1]
    alone = int(first_frame_alone)
    weights = np.zeros((alone + length // 2, length))
    weights[:alone, :alone] = 1
    for pair in range(length // 2):
        weights[alone + pair, alone + 2 * pair : alone + 2 * pair + 2] = 0.5
    return _mix_frames(jnp.asarray(weights, x_NTHWC.dtype), x_NTHWC)
