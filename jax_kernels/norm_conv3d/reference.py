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
    """Apply the norm, SiLU and the convolution one after the other, in float32.

    Activated frames are rounded to the dtype of `x`, in which a cache keeps them. `tile` is the number of
    frames that Winograd's filtering, with rounded factors, computes together; 0 is direct convolution.
    `moments` is not used: statistics are computed again, and the third result is None.
    """
    x_f32, norm_f32 = jax.tree.map(lambda array: array.astype(jnp.float32), (x, norm))
    # For a GroupNorm `zq`, the latents, is None. A spatial norm has `zq`, and kernel and bias of two
    # convolutions of it.
    weight, norm_bias, zq, *zq_convolutions = norm_f32
    options = {"num_groups": num_groups, "eps": eps, "activation": "silu"}
    if zq is None:
        hidden = group_norm(x_f32, weight, norm_bias, channel_axis=-1, **options)
    else:
        hidden = spatial_norm(
            x_f32, zq, weight, norm_bias, *zq_convolutions, first_frame_alone=first_frame_alone, **options
        )
    # Rounded to the dtype of `x`, then computed with in float32.
    hidden, kernel_f32, cache = jax.tree.map(
        lambda array: array.astype(x.dtype).astype(jnp.float32), (hidden, kernel, cache)
    )
    y, next_cache = conv3d(hidden, kernel_f32, bias, cache, residual=residual)
    if tile:  # the result of Winograd's filtering, with its rounding, in place of `y`
        # Three taps of time see two frames before `x`: the cache, or at a video's start `x`'s first frame.
        past = cache if cache is not None else jnp.concatenate([hidden[:, :1]] * 2, axis=1)
        frames = jnp.concatenate([past, hidden], axis=1).astype(x.dtype)
        y = filtered(frames, kernel, tile, _convolved_component)
        y = y + sum(term.astype(jnp.float32) for term in (bias, residual) if term is not None)
    return y.astype(x.dtype), None if next_cache is None else next_cache.astype(x.dtype), None


def _convolved_component(frames, kernel):
    y, _cache = conv3d(frames.astype(jnp.float32), kernel[None])
    return y
