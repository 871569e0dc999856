"""GroupNorm with a one-pass Welford variance, over any channel axis."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_kernels.common.columns import WHOLE, Split
from jax_kernels.common.dispatch import Target, dispatch, map_shards
from jax_kernels.common.frames import join_frames, split_frames
from jax_kernels.common.pointwise import Activation, check_choice
from jax_kernels.group_norm import xla
from jax_kernels.group_norm.moments import check_groups, moments, per_channel


def group_norm(
    x: Float[Array, "N *rest"],
    weight: Float[Array, " C"] | None,
    bias: Float[Array, " C"] | None,
    *,
    num_groups: int,
    eps: float = 1e-6,
    channel_axis: int = 1,
    activation: Activation | None = None,
    split: Split = WHOLE,
) -> Float[Array, "N *rest"]:
    """Return `(x - mean) / sqrt(variance + eps) * weight + bias` by groups of channels (Wu and He 2018).

    Args:
        x: any float dtype, rank 3 or more, axis 0 the batch.
        weight, bias: (C,), or None.
        num_groups: divides C.
        eps: added to the variance, as in PyTorch.
        channel_axis: axis of the channels C.
        activation: applied to the result before it is rounded ("silu"), or None.
        split: the sharding of columns, for an `x` of rank 5.

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
    check_groups("group_norm", x.shape[channel_axis], num_groups, weight=weight, bias=bias)
    check_choice("activation", activation, None, "silu")
    return dispatch(
        group_norm_on,
        x,
        weight,
        bias,
        num_groups=num_groups,
        eps=eps,
        channel_axis=channel_axis,
        activation=activation,
        split=split,
    )


def group_norm_on(
    target: Target,
    x: Array,
    weight: Array | None,
    bias: Array | None,
    *,
    num_groups: int,
    eps: float,
    channel_axis: int,
    activation: Activation | None,
) -> Array:
    channels = x.shape[channel_axis]
    stats = moments(target, x, num_groups=num_groups, channel_axis=channel_axis)
    mean = per_channel(stats.mean, channels)
    scale = per_channel(jax.lax.rsqrt(stats.variance + eps), channels)
    if weight is not None:
        scale = scale * weight.astype(jnp.float32)
    shift = jnp.zeros_like(mean) if bias is None else jnp.broadcast_to(bias.astype(jnp.float32), mean.shape)
    if x.ndim != 5:  # no video: neither runs of frames nor a split over devices
        return xla.scaled(target, x, mean, scale, shift, activation=activation, channel_axis=channel_axis)
    x = jnp.moveaxis(x, channel_axis, -1)
    scaled = functools.partial(xla.scaled, activation=activation)
    # Each device scales its columns of each run.
    results = [
        map_shards(target, scaled, (frames,), statistics=(mean, scale, shift))
        for (frames,) in split_frames(target, x)
    ]
    return jnp.moveaxis(join_frames(results), -1, channel_axis)
