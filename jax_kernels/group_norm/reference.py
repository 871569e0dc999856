"""GroupNorm in its plainest form: what the fast forms have to equal."""

import jax.numpy as jnp
from jaxtyping import Array


def group_norm(
    x: Array, weight: Array, bias: Array, *, num_groups: int, eps: float = 1e-6, channel_axis: int = 1
):
    """Two passes in float32: the mean, then the mean of the squared deviations."""
    y = jnp.moveaxis(x, channel_axis, 1).astype(jnp.float32)
    grouped = y.reshape(y.shape[0], num_groups, -1)
    mean = grouped.mean(-1, keepdims=True)
    variance = jnp.square(grouped - mean).mean(-1, keepdims=True)
    y = ((grouped - mean) / jnp.sqrt(variance + eps)).reshape(y.shape)
    shape = (1, -1) + (1,) * (y.ndim - 2)
    y = y * weight.astype(jnp.float32).reshape(shape) + bias.astype(jnp.float32).reshape(shape)
    return jnp.moveaxis(y, 1, channel_axis).astype(x.dtype)
