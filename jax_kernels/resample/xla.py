"""Resampling by a factor of two as XLA compiles it, on any platform and on a TPU."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jax_kernels.common.dispatch import Target, on_platform
from jax_kernels.common.frames import (
    MOST_IN_PATCHES,
    conv_frames,
    conv_patches,
    frames_first,
    pixels_first,
    repeat_nearest,
)


def double_pixels(x: jax.Array) -> jax.Array:
    return repeat_nearest(x, {2: 2, 3: 2})


def double_pixels_as_outer_axes(x: jax.Array) -> jax.Array:
    """Double rows and columns by a product with ones, in the order (H, W, N, T, C)."""
    # In this order a TPU's tiles hold T and C, and rows and columns are outer axes, which are easy to repeat.
    # The first barrier hides from XLA that the factors are ones; the second keeps the reshape out of the
    # product. XLA therefore computes one fused product, in 3.4 ms, instead of writing out a broadcast, in 9.1
    # ms (estimates for a v6e and frames of 8 x 240 x 360 x 256, which are doubled).
    h, w, n, t, c = pixels_first(x).shape  # here the axes are in this order; the result is N T H W C again
    ones = jax.lax.optimization_barrier(jnp.ones((1, 2, 1, 2, 1, 1, 1), x.dtype))
    doubled = jax.lax.optimization_barrier(pixels_first(x)[:, None, :, None] * ones)
    return frames_first(doubled.reshape(2 * h, 2 * w, n, t, c))


def convolved_sums(
    target: Target, x: jax.Array, kernel: jax.Array, padding: Sequence[tuple[int, int]], stride: int = 1
) -> jax.Array:
    """Convolve every frame by `conv_frames`; return float32 sums, which a GPU rounds once to `x`'s dtype."""
    plain = functools.partial(conv_frames, padding=padding, stride=stride)
    if target.on_tpu or x.dtype == jnp.float32:
        return plain(x, kernel)

    def rounded(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return plain(x, kernel, dtype=x.dtype).astype(jnp.float32)  # why: see `conv3d.xla.rounded_on_gpu`

    return on_platform(plain, cuda=rounded)(x, kernel)


def downsampled_sums(target: Target, x: jax.Array, kernel: jax.Array, columns: tuple[int, int]) -> jax.Array:
    """Convolve with stride 2, a row of zeros below and `columns` zeros (left, right); return float32 sums."""
    return convolved_sums(target, x, kernel, ((0, 1), columns), stride=2)


def downsampled_sums_by_patches(x: jax.Array, kernel: jax.Array, columns: tuple[int, int]) -> jax.Array:
    """Compute `downsampled_sums` by one matrix product of all windows (patches), for images on a TPU."""
    # XLA compiles the product in 5 s, and a convolution in 14 to 60 s.
    # `conv_patches` takes the frames under each tap of time, in a list: this kernel has no axis of time.
    return conv_patches([jnp.pad(x, [(0, 0), (0, 0), (0, 1), columns, (0, 0)])], kernel, stride=2)


def suits_patches(x: jax.Array) -> bool:
    """Return whether the patches of `x`, 3 x 3 windows at every second row and column, fit into memory."""
    return x.size // 4 * 9 * x.dtype.itemsize <= MOST_IN_PATCHES  # 512 MiB
