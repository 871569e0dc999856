"""Norm, SiLU and convolution in their plainest form: what the fast form has to equal."""

import jax
import jax.numpy as jnp

from jax_kernels.conv3d.reference import conv3d
from jax_kernels.group_norm.reference import group_norm
from jax_kernels.spatial_norm.reference import spatial_norm


def norm_conv3d(x, norm, kernel, bias, cache=None, *, num_groups, eps=1e-6, residual=None):
    """One after the other in float32; activated frames alone are rounded, as what a cache keeps."""
    wide, (weight, shift, *latents) = jax.tree.map(lambda part: part.astype(jnp.float32), (x, norm))
    if norm.zq is None:
        hidden = group_norm(wide, weight, shift, num_groups=num_groups, eps=eps, channel_axis=-1)
    else:
        zq, *convolutions = latents
        hidden = spatial_norm(wide, zq, weight, shift, *convolutions, num_groups=num_groups, eps=eps)
    hidden = jax.nn.silu(hidden).astype(x.dtype)
    past = None if cache is None else cache.astype(jnp.float32)
    y, latest = conv3d(hidden.astype(jnp.float32), kernel.astype(jnp.float32), bias, past)
    return (y if residual is None else y + residual).astype(x.dtype), latest.astype(x.dtype)
