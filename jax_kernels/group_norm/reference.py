"""GroupNorm in its plainest form, which the fast forms have to equal."""

import jax
import jax.numpy as jnp


def group_norm(x, weight, bias, *, num_groups, eps=1e-6, channel_axis=1, activation=None):
    """Return GroupNorm of `x`, then the activation, computed in float32 and rounded to the dtype of `x`."""
    y = jnp.moveaxis(x, channel_axis, 1).astype(jnp.float32)
    grouped = y.reshape(y.shape[0], num_groups, -1)
    mean = grouped.mean(-1, keepdims=True)
    variance = jnp.square(grouped - mean).mean(-1, keepdims=True)
    y = ((grouped - mean) / jnp.sqrt(variance + eps)).reshape(y.shape)
    shape = (1, -1) + (1,) * (y.ndim - 2)  # of weight and bias, to broadcast over all axes but the channels
    y = y if weight is None else y * weight.astype(jnp.float32).reshape(shape)
    y = y if bias is None else y + bias.astype(jnp.float32).reshape(shape)
    y = jax.nn.silu(y) if activation == "silu" else y
    return jnp.moveaxis(y, 1, channel_axis).astype(x.dtype)
