"""Layouts of arrays in a TPU's memory, precision of products, order of operations."""

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from jax_kernels.common.dispatch import Target

LARGE_FRAME = 16384
"""Pixels; see `is_large`."""


def precision_for(dtype: jnp.dtype) -> jax.lax.Precision:
    """Return the precision of products: full for float32, the hardware's own for narrower dtypes.

    By default a TPU multiplies float32 operands in bfloat16 and a recent GPU in TF32. The error of either is
    a thousand times the 1e-5 that tests allow float32.
    """
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT


def pixels_first(x_NTHWC: jax.Array) -> jax.Array:
    """Transpose to (H, W, N, T, C), the order in which a TPU keeps the frames of a 2-D convolution.

    Frames lie in the sublanes of its tiles and pixels outside, so repeating pixels is a plain broadcast.
    """
    return x_NTHWC.transpose(2, 3, 0, 1, 4)


def frames_first(x_HWNTC: jax.Array) -> jax.Array:
    """Invert `pixels_first`."""
    return x_HWNTC.transpose(2, 3, 0, 1, 4)


def is_large(x_NTHWC: jax.Array) -> bool:
    """Return whether a layout constraint on such frames helps a TPU; on an image it does not.

    The limit is between 192 x 44 and 120 x 180 pixels. A steady-state chunk of CogVideoX's VAE takes, by the
    v6e compiler's estimate, 178 ms with constraints on frames larger than 120 x 180 alone, and 156 ms with
    constraints on 120 x 180 too. With constraints on a shard's 192 x 44 too it compiles for longer than
    twelve minutes.
    """
    return x_NTHWC.shape[1] > 1 and x_NTHWC.shape[2] * x_NTHWC.shape[3] >= LARGE_FRAME


def kernel_layout(x_NTHWC: jax.Array) -> jax.Array:
    """Return `x` in the memory layout of the Pallas kernels; for a TPU.

    The layout is H W N T C, as `pixels_first` returns it; of an image (T = 1) it is N T H W C. A kernel that
    processes one video after the other would have N first. For one video the order is the same; for several,
    the cost of the constraint is not known.

    Without the constraint XLA copies frames that are sliced from a concatenation, such as the frames after
    the first in a first chunk, into another order and back (v6e, 8 x 480 x 720 x 128: 4.3 ms).
    """
    order = (0, 1, 2, 3, 4) if x_NTHWC.shape[1] == 1 else (2, 3, 0, 1, 4)  # the outermost axis first
    return with_layout_constraint(x_NTHWC, Layout(order))


def store_pixels_first(target: Target, x_NTHWC: jax.Array) -> jax.Array:
    """Return `x`, kept in memory in the order of `pixels_first` on a TPU.

    XLA finds that order by itself for most large frames. If it does not, an activation is written in float32,
    copied, and rounded in separate passes (v6e, one of 8 x 480 x 720 x 128: 11 ms). Small frames are better
    left to XLA: with constraints on all of them it compiles for longer than ten minutes. On a mesh XLA's
    partitioner would gather a constrained array; inside `dispatch.map_shards` there is nothing to gather.
    """
    if not target.on_tpu:
        return x_NTHWC
    # Without the barrier XLA leaves out the rounding of `x`, and keeps a residual in float32.
    return jax.lax.optimization_barrier(with_layout_constraint(x_NTHWC, Layout((2, 3, 0, 1, 4))))


def store_columns_last(target: Target, x_NTHWC: jax.Array) -> jax.Array:
    """Return `x`, kept in memory as N, C, T, H, W on a TPU: columns in the lanes of its tiles.

    For few channels, which would leave most of 128 lanes empty. On a mesh call it inside `map_shards` only,
    for the reason that `store_pixels_first` has.
    """
    return with_layout_constraint(x_NTHWC, Layout((0, 4, 1, 2, 3))) if target.on_tpu else x_NTHWC


def zero_of(x: jax.Array) -> jax.Array:
    """Return zeros that are computed from `x`; adding them makes an operation wait for `x`.

    XLA does not see that the results are zero. An optimization barrier would not do: XLA drops it before it
    orders operations.
    """
    # The minimum of a NaN and 0 is NaN.
    return jnp.where(jnp.isnan(x), 0, jnp.minimum(jnp.abs(x), 0))
