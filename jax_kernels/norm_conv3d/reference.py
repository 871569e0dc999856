"""Norm, SiLU and convolution in their plainest form: what the fast form has to equal."""

import jax
import jax.numpy as jnp

from jax_kernels.common.transforms import filtered
from jax_kernels.conv3d.reference import conv3d
from jax_kernels.group_norm.reference import group_norm
from jax_kernels.spatial_norm.reference import spatial_norm


def norm_conv3d(
    x,
    norm,
    kernel,
    bias=None,
    cache=None,
    moments=None,
    *,
    num_groups,
    eps=1e-6,
    first_frame_alone=False,
    residual=None,
    tile=0,
):
    """Apply the norm, SiLU and the causal convolution one after the other, in float32.

    Arguments and results are those of `op.norm_conv3d`. But `moments` is not used, because statistics are
    computed again, and the third result, the next moments, is None. A `tile` of 2 or 4 frames gives the
    rounding of the Pallas kernel, which convolves so many together by Winograd's filtering; 0 is direct
    convolution.
    """
    x_f32, norm_f32 = jax.tree.map(lambda array: array.astype(jnp.float32), (x, norm))
    # `norm` is an `op.NormParams`. For a GroupNorm `zq`, the latents, is None. A spatial norm has `zq`, and
    # then kernel and bias of each of two convolutions of it.
    weight, norm_bias, zq, *zq_convolutions = norm_f32
    options = {"num_groups": num_groups, "eps": eps, "activation": "silu"}
    if zq is None:
        hidden = group_norm(x_f32, weight, norm_bias, channel_axis=-1, **options)
    else:
        hidden = spatial_norm(
            x_f32, zq, weight, norm_bias, *zq_convolutions, first_frame_alone=first_frame_alone, **options
        )
    # What is convolved is rounded to the dtype of `x`, in which a cache keeps activated frames. The
    # convolution itself computes in float32.
    hidden, kernel_f32, cache = jax.tree.map(
        lambda array: array.astype(x.dtype).astype(jnp.float32), (hidden, kernel, cache)
    )
    y, next_cache = conv3d(hidden, kernel_f32, bias, cache, residual=residual)
    if tile:  # the result of Winograd's filtering, with its rounding, in place of `y`
        # Three taps of time see two frames before `x`: the cache, or at a video's start `x`'s first frame.
        past = cache if cache is not None else jnp.concatenate([hidden[:, :1]] * 2, axis=1)
        frames = jnp.concatenate([past, hidden], axis=1).astype(x.dtype)
        # `filtered` transforms frames and kernel along time, and calls the function to convolve in space.
        y = filtered(frames, kernel, tile, _convolved_in_space)
        y = y + sum(term.astype(jnp.float32) for term in (bias, residual) if term is not None)
    return y.astype(x.dtype), None if next_cache is None else next_cache.astype(x.dtype), None


def _convolved_in_space(frames, kernel):
    y, _cache = conv3d(frames.astype(jnp.float32), kernel[None])  # with an axis of time: one tap
    return y
