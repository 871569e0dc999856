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
    repeat_nearest,
)


def double_pixels(x: jax.Array) -> jax.Array:
    return repeat_nearest(x, {2: 2, 3: 2})


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
