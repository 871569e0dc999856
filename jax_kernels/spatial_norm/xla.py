"""The forms of a spatial norm's modulation that XLA compiles, and the latents that they modulate by.

A mesh may pad the width of activations with columns of zeros, which must be zeros in the result too.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jax_kernels.common.columns import with_clear_padding
from jax_kernels.common.dispatch import Target
from jax_kernels.common.frames import frames_first, join_frames, pixels_first, repeat_nearest, zero_of
from jax_kernels.common.pointwise import Activation, activate, precision_for


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
) -> Array:
    """Return `activation((x * scale + shift) * y + b)`, computed as `x * (scale * y) + (shift * y + b)`.

    `x * scale + shift` is GroupNorm. `y` and `b` are 1x1x1 convolutions of the latents `zq` (N T h W Z),
    which have fewer rows than `x`; `to_y` and `to_b` are the kernel and the bias of each. Both are computed
    for the latents' rows, and broadcast to the rows of `x`.
    """
    y = pointwise("nthwz,zc->nthwc", zq, *to_y)
    multiplier = y * scale_NC[:, None, None, None]
    offset = y * shift_NC[:, None, None, None] + pointwise("nthwz,zc->nthwc", zq, *to_b)
    n, t, h, w, c = multiplier.shape
    rows = x.reshape(n, t, h, x.shape[2] // h, w, c)  # an axis for the rows that one latent row covers
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
) -> Array:
    """Compute `modulate_rows` in the order H W N T C, in which a TPU keeps a convolution's activations."""
    # The result is `activation((x * scale + shift) * y + b)`. `y` and `b` are convolutions of the latents
    # `zq` (N T h W Z), which have the frames and columns of `x` (`match_frames_and_columns`), but fewer rows.
    # In the order H W N T C, repeating a row of latents costs nothing: without Pallas kernels a steady chunk
    # of decoding 8 x 480 x 720 takes 71 ms less than by `modulate_rows` (an estimate for a v6e).
    # Zeros that are computed from `scale` are added to the biases, so that `y` and `b` wait for the
    # statistics. Otherwise the compiler would compute the `y` and `b` of all norms of a program first, and
    # keep them in memory. There is a zero for each video, because each has its own statistics.
    zero = zero_of(scale_NC[:, :1, None])
    y, b = (
        pointwise("hwntz,zc->hwntc", pixels_first(zq), kernel, bias + zero) for kernel, bias in (to_y, to_b)
    )
    h, w, n, t, c = y.shape  # h rows of latents, each of which covers `x.shape[2] // h` rows of pixels
    # The barriers keep XLA from moving the reshapes past the multiplication: it would then write out the
    # broadcast `y` and `b`, in float32 at full size. For a residual block of 8 x 480 x 720 x 128, a v6e would
    # take 61 ms instead of 41 ms (estimates).
    rows = jax.lax.optimization_barrier(pixels_first(x).reshape(h, x.shape[2] // h, w, n, t, c))
    # `y` multiplies the normed frames. The products `scale * y` and `shift * y` would save a multiply-add,
    # but to compute them first would take longer than that.
    normed = rows.astype(jnp.float32) * scale_NC[:, None] + shift_NC[:, None]
    result = activate(normed * y[:, None] + b[:, None], activation)
    result = with_clear_padding(result.astype(x.dtype), target.split, column_axis=2)
    if activation is not None:  # without an activation XLA may fuse the next operation
        result = jax.lax.optimization_barrier(result)
    return frames_first(result.reshape(x.shape[2], w, n, t, c))


def match_frames_and_columns(z_NTHWC: Array, x_shape: tuple[int, ...], *, first_frame_alone: bool) -> Array:
    """Upsample latents (nearest) to the frames and columns of activations of `x_shape`; rows stay."""
    # Each part of the latents is repeated along axis 1, frames, and axis 3, columns.
    return join_frames(
        [
            repeat_nearest(part, {1: frames // part.shape[1], 3: x_shape[3] // part.shape[3]})
            for part, frames in frame_parts(z_NTHWC, x_shape, first_frame_alone)
        ]
    )


def frame_parts(z_NTHWC: Array, x_shape: tuple[int, ...], first_frame_alone: bool) -> list[tuple[Array, int]]:
    """Return parts of the latents along time, each with the number of frames of `x_shape` that it covers."""
    frames = x_shape[1]
    if first_frame_alone and frames > 1:
        return [(z_NTHWC[:, :1], 1), (z_NTHWC[:, 1:], frames - 1)]
    return [(z_NTHWC, frames)]


def pointwise(equation: str, z: Array, kernel_ZC: Array, bias_C: Array) -> Array:
    """Convolve `z` by 1x1x1: the einsum `equation` over its channels Z, plus the bias, in float32."""
    precision = precision_for(jnp.promote_types(z.dtype, kernel_ZC.dtype))
    y = jnp.einsum(equation, z, kernel_ZC, precision=precision, preferred_element_type=jnp.float32)
    return y + bias_C.astype(jnp.float32)
