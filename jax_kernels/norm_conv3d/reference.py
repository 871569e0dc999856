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
    x_f32, norm_f32 = jax.tree.map(lambda part: part.astype(jnp.float32), (x, norm))
    # `zq`, the latents, is None for a GroupNorm; a spatial norm has also kernel and bias of two convolutions.
    weight, norm_bias, zq, *convolutions = norm_f32
    options = {"num_groups": num_groups, "eps": eps, "activation": "silu"}
    if zq is None:
        hidden = group_norm(x_f32, weight, norm_bias, channel_axis=-1, **options)
    else:
        hidden = spatial_norm(
            x_f32, zq, weight, norm_bias, *convolutions, first_frame_alone=first_frame_alone, **options
        )
    hidden, kernel_f32, cache = jax.tree.map(
        lambda part: part.astype(x.dtype).astype(jnp.float32), (hidden, kernel, cache)
    )
    y, latest = conv3d(hidden, kernel_f32, bias, cache, residual=residual)
    if tile:  # the result of Winograd's filtering, with its rounding, in place of `y`
        # Three taps of time see two frames before `x`: the cache, or at a video's start `x`'s first frame.
        past = cache if cache is not None else jnp.concatenate([hidden[:, :1]] * 2, axis=1)
        frames = jnp.concatenate([past, hidden], axis=1).astype(x.dtype)
        y = filtered(frames, kernel, tile, _convolved_component)
        y = y + sum(part.astype(jnp.float32) for part in (bias, residual) if part is not None)
    return y.astype(x.dtype), None if latest is None else latest.astype(x.dtype), None


def _convolved_component(frames, kernel):
    y, _cache = conv3d(frames.astype(jnp.float32), kernel[None])
    return y
