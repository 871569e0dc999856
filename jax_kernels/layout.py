"""Small shared pieces: 2-D convolution over frames, precision, nearest upsampling."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float

LARGE_FRAME = 16384
"""Pixels; see `is_large`."""


def precision_for(dtype: jnp.dtype) -> lax.Precision:
    """Full precision for float32, the hardware's own for narrower types.

    By default a TPU multiplies float32 operands in bfloat16 and a recent GPU in TF32; either is a thousand
    times outside the 1e-5 that float32 has to keep here.
    """
    return lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT


def conv_frames(
    x_NTHWC: Float[Array, "N T H W I"],
    kernel_HWIO: Float[Array, "kh kw I O"],
    *,
    padding: Sequence[tuple[int, int]],
    stride: int | tuple[int, int] = 1,
) -> Float[Array, "N T H2 W2 O"]:
    """Convolves every frame by itself; the result is the float32 accumulator, not yet rounded to the input's
    dtype."""
    n, t = x_NTHWC.shape[:2]
    y = lax.conv_general_dilated(
        x_NTHWC.reshape(n * t, *x_NTHWC.shape[2:]),
        kernel_HWIO,
        window_strides=stride if isinstance(stride, tuple) else (stride, stride),
        padding=padding,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        precision=precision_for(x_NTHWC.dtype),
        preferred_element_type=jnp.float32,
    )
    return y.reshape(n, t, *y.shape[1:])


def repeat_nearest(x: Array, factors: dict[int, int]) -> Array:
    """Repeats each element `factors[axis]` times along `axis`: nearest-neighbour upsampling by whole factors.

    A broadcast and a reshape: an index gather would gather the whole of a sharded axis, and with
    `total_repeat_length` jnp.repeat would compute its indices on the device. Columns first, while the array
    is smallest: where the shards of a width and of its multiple do not line up, columns travel.
    """
    for axis in sorted(factors, reverse=True):
        x = jnp.repeat(x, factors[axis], axis=axis)
    return x


def pixels_first(x_NTHWC: jax.Array) -> jax.Array:
    """The axes as (H, W, N, T, C), the order in which a TPU keeps the frames of a 2-D convolution.

    Frames lie in the sublanes of its tiles and pixels outside, so what repeats pixels is a plain broadcast.
    """
    return x_NTHWC.transpose(2, 3, 0, 1, 4)


def frames_first(x_HWNTC: jax.Array) -> jax.Array:
    """The inverse of `pixels_first`."""
    return x_HWNTC.transpose(2, 3, 0, 1, 4)


def is_large(x_NTHWC: jax.Array) -> bool:
    """Whether a TPU is better told how to keep such frames than left to choose.

    CogVideoX's VAE has frames of 60 x 90 and of 120 x 180 and more on one device, by the v6e compiler's
    estimate for a steady chunk: 178 ms with those above 120 x 180 large, 156 ms with 120 x 180 too. With
    the 192 x 44 of a shard too it compiles for longer than twelve minutes.
    """
    return x_NTHWC.shape[2] * x_NTHWC.shape[3] >= LARGE_FRAME


def kept_pixels_first(x_NTHWC: jax.Array) -> jax.Array:
    """`x`, which a TPU then keeps in memory as `pixels_first` orders it.

    XLA finds that order by itself for most large frames. Where it does not, an activation is written in
    float32, copied, and rounded in passes of their own (v6e, one of 8 x 480 x 720 x 128: 11 ms). Small frames
    are better left to it: told for all, it compiles for longer than ten minutes. Over a mesh it gathers what
    it is told this of, where it is to do the partitioning: say it in `columns.by_shards`.
    """
    # Without the barrier XLA leaves out the rounding, and keeps a shortcut in float32.
    return lax.platform_dependent(
        x_NTHWC,
        tpu=lambda x: lax.optimization_barrier(with_layout_constraint(x, Layout((2, 3, 0, 1, 4)))),
        default=lambda x: x,
    )


def kept_columns_last(x_NTHWC: jax.Array) -> jax.Array:
    """`x`, which a TPU then keeps in memory as N, C, T, H, W: few channels in the lanes of its tiles would
    fill them with nothing. As `kept_pixels_first`, for one device or one shard."""
    return lax.platform_dependent(
        x_NTHWC, tpu=lambda x: with_layout_constraint(x, Layout((0, 4, 1, 2, 3))), default=lambda x: x
    )


def zero_of(x: jax.Array) -> jax.Array:
    """Zeros that are known when `x` is, to add to what is to wait for it; zero for a NaN too.

    XLA does not see that they are. An optimization barrier it drops before it decides what comes first.
    """
    return jnp.where(jnp.isnan(x), 0, jnp.minimum(jnp.abs(x), 0))


def select_frames(x_NTHWC: jax.Array, frames: Sequence[int], *, after: jax.Array | None = None) -> jax.Array:
    """`x[:, frames]`, picked by a matrix of zeros and ones on a TPU, where slicing sublanes is slow.

    A sum of one finite value and zeros is exact in any dtype (v6e, two of 8 x 480 x 720 x 128: 1.7 ms instead
    of 4.7).

    Args:
        x_NTHWC: frames.
        frames: which, in order; the same one may come twice.
        after: N T H W C; a TPU picks when this has been computed.
    """
    index = np.asarray(frames)
    return lax.platform_dependent(
        *((x_NTHWC,) if after is None else (x_NTHWC, after)),
        tpu=functools.partial(_pick_frames, index=index),
        default=lambda x, *_: x[:, index],
    )


def _pick_frames(x_NTHWC: jax.Array, after_NTHWC: jax.Array | None = None, *, index: np.ndarray) -> jax.Array:
    picks = jnp.asarray(index[:, None] == np.arange(x_NTHWC.shape[1])[None], x_NTHWC.dtype)
    if after_NTHWC is not None:
        picks = picks + zero_of(after_NTHWC[0, 0, 0, 0, 0])
    return _mix_frames(picks, x_NTHWC)


def _mix_frames(weights_ST: jax.Array, x_NTHWC: jax.Array) -> jax.Array:
    return jnp.einsum("st,nthwc->nshwc", weights_ST, x_NTHWC, precision=precision_for(x_NTHWC.dtype))


def average_pairs(x_NTHWC: jax.Array) -> jax.Array:
    """The means of pairs of frames, which must be finite; an odd batch keeps its first frame as it is.

    On a TPU a product with halves, which are exact: reducing pairs of sublanes takes 25.6 ms there (v6e,
    8 x 480 x 720 x 128).
    """
    return lax.platform_dependent(x_NTHWC, tpu=_average_by_product, default=_average)


def _average(x_NTHWC: jax.Array) -> jax.Array:
    *first, rest = split_first_frame(x_NTHWC)
    pairs = rest.reshape(rest.shape[0], rest.shape[1] // 2, 2, *rest.shape[2:])
    return jnp.concatenate([*first, jnp.mean(pairs.astype(jnp.float32), axis=2).astype(rest.dtype)], axis=1)


def _average_by_product(x_NTHWC: jax.Array) -> jax.Array:
    length = x_NTHWC.shape[1]
    kept = int(first_frame_stays(length))
    weights = np.zeros((kept + length // 2, length))
    weights[:kept, :kept] = 1
    for pair in range(length // 2):
        weights[kept + pair, kept + 2 * pair : kept + 2 * pair + 2] = 0.5
    return _mix_frames(jnp.asarray(weights, x_NTHWC.dtype), x_NTHWC)


def first_frame_stays(frames: int) -> bool:
    """Whether a batch of `frames` frames keeps its first frame out of temporal resampling.

    CogVideoX compresses 4k + 1 frames to k + 1: a batch of odd length carries the video's first frame, which
    stands for itself alone (diffusers: `CogVideoXUpsample3D`, `CogVideoXDownsample3D`,
    `CogVideoXSpatialNorm3D`).
    """
    return frames > 1 and frames % 2 == 1


def split_first_frame(x_NTHWC: jax.Array) -> list[jax.Array]:
    """The batch as the parts that are resampled in time each for itself."""
    return [x_NTHWC[:, :1], x_NTHWC[:, 1:]] if first_frame_stays(x_NTHWC.shape[1]) else [x_NTHWC]
