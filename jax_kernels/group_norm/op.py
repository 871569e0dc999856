"""GroupNorm with a one-pass Welford variance, over any channel axis."""

import functools

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jax_kernels.common.activation import Activation, check_activation
from jax_kernels.common.checks import check_channels
from jax_kernels.common.columns import by_shards, jit_kernel
from jax_kernels.common.first_frame import in_parts, joined
from jax_kernels.group_norm import xla
from jax_kernels.group_norm.moments import check_groups, moments, per_channel


@jit_kernel(static_argnames=("num_groups", "eps", "channel_axis", "activation"))
def group_norm(
    x: Float[Array, "N *rest"],
    weight: Float[Array, " C"] | None,
    bias: Float[Array, " C"] | None,
    *,
    num_groups: int,
    eps: float = 1e-6,
    channel_axis: int = 1,
    activation: Activation | None = None,
) -> Float[Array, "N *rest"]:
    """Group normalization (Wu and He 2018): `(x - mean) / sqrt(variance + eps) * weight + bias` by groups.

    Args:
        x: any float dtype, rank 3 or more, axis 0 the batch.
        weight, bias: (C,), or None.
        num_groups: divides C.
        eps: added to the variance, as in PyTorch.
        channel_axis: where C lies in `x`.
        activation: applied to the result before it is rounded ("silu"), or None.

    Returns:
        The shape and dtype of `x`; statistics and arithmetic are float32 whatever the dtype.

    Raises:
        ValueError: rank below 3, a group count that does not divide C, a weight or bias of another length, or
            another activation.
    """
    if x.ndim < 3:
        raise ValueError(
            f"group_norm got rank {x.ndim}, shape {x.shape}: it needs a batch, a channel and a pixel axis"
        )
    channel_axis = channel_axis % x.ndim
    channels = x.shape[channel_axis]
    check_groups(channels, num_groups)
    check_activation(activation)
    check_channels("group_norm", channels, weight=weight, bias=bias)
    stats = moments(x, num_groups=num_groups, channel_axis=channel_axis)
    mean = per_channel(stats.mean, channels)
    scale = per_channel(lax.rsqrt(stats.variance + eps), channels)
    if weight is not None:
        scale = scale * weight.astype(jnp.float32)
    shift = jnp.zeros_like(mean) if bias is None else jnp.broadcast_to(bias.astype(jnp.float32), mean.shape)
    if x.ndim != 5:
        return xla.scaled(activation, x, mean, scale, shift, channel_axis=channel_axis)
    x = jnp.moveaxis(x, channel_axis, -1)
    scaled = functools.partial(xla.scaled, activation)
    y = joined([by_shards(scaled, part, (), (mean, scale, shift)) for part in in_parts(x)])
    return jnp.moveaxis(y, -1, channel_axis)
