"""Nearest 2x upsampling as XLA compiles it, on any platform and on a TPU."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jax_kernels.common.frames import repeat_nearest
from jax_kernels.common.layout import frames_first, pixels_first


def double_pixels(x: Array) -> Array:
    return repeat_nearest(x, {2: 2, 3: 2})


def double_pixels_outside(x: Array) -> Array:
    """`double_pixels` as a product with ones, one pass in the order that a TPU keeps pixels in.

    XLA does not see through the barriers that these are ones, and that two axes become one: a broadcast
    written out takes 9.1 ms where this takes 3.4, two broadcasts of inner axes take more (v6e, 8 x 240 x 360
    x 256 doubled).
    """
    h, w, n, t, c = pixels_first(x).shape
    ones = lax.optimization_barrier(jnp.ones((1, 2, 1, 2, 1, 1, 1), x.dtype))
    doubled = lax.optimization_barrier(pixels_first(x)[:, None, :, None] * ones)
    return frames_first(doubled.reshape(2 * h, 2 * w, n, t, c))
