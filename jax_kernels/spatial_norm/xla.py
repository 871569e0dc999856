"""The forms of a spatial norm's modulation that XLA compiles."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jax_kernels.common.columns import with_clear_padding
from jax_kernels.common.dispatch import Target
from jax_kernels.common.layout import frames_first, pixels_first, precision_for, zero_of
from jax_kernels.common.pointwise import Activation, activate
from jax_kernels.spatial_norm.latents import match_frames_and_columns


def modulate_rows(
    target: Target,
    x: Array,
    zq: Array,
    to_y: tuple[Array, Array],
    to_b: tuple[Array, Array],
    scale_NC: Array,
    shift_NC: Array,
    *,
    activation: Activation | None,
    first_frame_alone: bool,
) -> Array:
    """Return `activation((x * scale + shift) * y + b)`, computed as one multiply-add.

    `y` and `b` are 1x1x1 convolutions of the latents `zq`, with (kernel, bias) in `to_y` and `to_b`; they
    have the latents' rows, and are broadcast to the rows of `x`.
    """
    zq = match_frames_and_columns(zq, x.shape, first_frame_alone=first_frame_alone)
    y = pointwise("nthwz,zc->nthwc", zq, *to_y)
    multiplier = y * _over_pixels(scale_NC)
    offset = y * _over_pixels(shift_NC) + pointwise("nthwz,zc->nthwc", zq, *to_b)
    n, t, h, w, c = multiplier.shape
    rows = x.reshape(n, t, h, x.shape[2] // h, w, c)
    result = activate(
        rows.astype(jnp.float32) * multiplier[:, :, :, None] + offset[:, :, :, None], activation
    )
    return with_clear_padding(result.astype(x.dtype).reshape(x.shape), target.split)


def modulate_pixels(
    target: Target,
    x: Array,
    zq: Array,
    to_y: tuple[Array, Array],
    to_b: tuple[Array, Array],
    scale_NC: Array,
    shift_NC: Array,
    *,
    activation: Activation | None,
    first_frame_alone: bool,
) -> Array:
    """Compute `modulate_rows` in the order H W N T C, in which a TPU keeps a convolution's activations.

    There, repeating a row is a broadcast over an outer axis, which costs nothing inside a fusion: two
    multiply-adds a pixel are less than a pass that makes them one. The barriers keep XLA from moving the
    reshape past the multiplication: it would then write the broadcast `y` and `b` out, in float32 and at full
    size (v6e, a block at 8 x 480 x 720 x 128: 61 ms instead of 41). Without an activation nothing keeps the
    next operation from being fused.
    """
    zq = match_frames_and_columns(zq, x.shape, first_frame_alone=first_frame_alone)
    # Not before the statistics: the compiler would compute the `y` and `b` of all norms first, and keep them.
    zero = zero_of(scale_NC[:, :1, None])  # of each video, whose statistics other videos' shards do not have
    y, b = (
        pointwise("hwntz,zc->hwntc", pixels_first(zq), kernel, bias + zero) for kernel, bias in (to_y, to_b)
    )
    h, w, n, t, c = y.shape
    rows = lax.optimization_barrier(pixels_first(x).reshape(h, x.shape[2] // h, w, n, t, c))
    normed = rows.astype(jnp.float32) * scale_NC[:, None] + shift_NC[:, None]
    result = activate(normed * y[:, None] + b[:, None], activation)
    result = with_clear_padding(result.astype(x.dtype), target.split, column_axis=2)
    if activation is not None:
        result = lax.optimization_barrier(result)
    return frames_first(result.reshape(x.shape[2], w, n, t, c))


def pointwise(equation: str, z: Array, kernel_ZC: Array, bias_C: Array) -> Array:
    """Compute a 1x1x1 convolution of `z`, an einsum over its channels Z, in float32."""
    precision = precision_for(jnp.promote_types(z.dtype, kernel_ZC.dtype))
    y = jnp.einsum(equation, z, kernel_ZC, precision=precision, preferred_element_type=jnp.float32)
    return y + bias_C.astype(jnp.float32)


def _over_pixels(coefficient_NC: Array) -> Array:
    """Reshape a coefficient (N, C) to broadcast over frames and pixels of N T H W C."""
    return coefficient_NC[:, None, None, None, :]
