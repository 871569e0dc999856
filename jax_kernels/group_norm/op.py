"""GroupNorm with a one-pass Welford variance, over any channel axis.

*Moments* are a mean and M2, the sum of squared deviations from it. A *column* is a column of pixels in a
frame, along H. A *run* is a number of frames that a TPU computes together. A mesh may split the columns into
*shards*, one for each device, and may pad the width with columns of zeros. A *target* is the platform that
the code is traced for, with the split into shards; `dispatch` passes one to the body of an op, named `OP_on`.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_kernels.common.columns import WHOLE, Split, with_clear_padding
from jax_kernels.common.dispatch import Target, dispatch, map_shards
from jax_kernels.common.frames import is_image_for_tpu, is_large, join_frames, split_frames
from jax_kernels.common.pointwise import Activation, check_channels, check_choice
from jax_kernels.group_norm import tpu, xla
from jax_kernels.group_norm.xla import Moments


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
    """Compute `group_norm` for a target: the statistics of all frames, then the result of each run."""
    channels = x.shape[channel_axis]
    stats = moments(target, x, num_groups=num_groups, channel_axis=channel_axis)
    mean = per_channel(stats.mean, channels)
    scale = per_channel(jax.lax.rsqrt(stats.variance + eps), channels)
    if weight is not None:
        scale = scale * weight.astype(jnp.float32)
    # All three statistics are (N, C), because `map_shards` splits them by video.
    shift = jnp.zeros_like(mean) if bias is None else jnp.broadcast_to(bias.astype(jnp.float32), mean.shape)
    if x.ndim != 5:  # not a video, so it has neither runs nor shards
        return xla.scaled(target, x, mean, scale, shift, activation=activation, channel_axis=channel_axis)
    x = jnp.moveaxis(x, channel_axis, -1)
    # Each device scales its shard of a run, by the statistics of its videos.
    results = [
        map_shards(
            target,
            functools.partial(xla.scaled, activation=activation),
            (frames,),
            statistics=(mean, scale, shift),
        )
        for (frames,) in split_frames(target, x)
    ]
    return jnp.moveaxis(join_frames(results), -1, channel_axis)


def moments(target: Target, x: Float[Array, "N *rest"], *, num_groups: int, channel_axis: int = 1) -> Moments:
    """Return the moments (N, G) of each video's groups of channels, in float32, by one pass over `x`.

    Each column is reduced a block of rows at a time, because a sum of squares over all rows would lose
    digits. Then the columns' moments are merged. W may be sharded: devices exchange only merged moments.
    """
    x = jnp.moveaxis(x, channel_axis, -1)
    row_axis = max(1, x.ndim - 3)  # before columns and channels; in rank 3 the only axis of pixels
    if x.ndim == 5:
        mean, m2 = column_moments(target, x)
    else:  # not a video, so it has neither runs nor shards
        mean, m2 = (jnp.squeeze(moment, row_axis) for moment in xla.column_moments(x))
    return moments_of_columns(target, mean, m2, x.shape[row_axis], num_groups=num_groups)


def column_moments(
    target: Target, x: Float[Array, "N T H W C"]
) -> tuple[Float[Array, "N T W C"], Float[Array, "N T W C"]]:
    """Return mean and M2 of each column of pixels, along H, in float32."""
    moments_of_runs = [  # (mean, M2) of each run of frames, without the axis of rows, whose length is one
        [jnp.squeeze(moment, 2) for moment in map_shards(target, _shard_column_moments, (run,))]
        for (run,) in split_frames(target, x)
    ]
    means, m2s = zip(*moments_of_runs, strict=True)
    return join_frames(means), join_frames(m2s)


def moments_of_columns(
    target: Target,
    mean: Float[Array, "N *rest"],
    m2: Float[Array, "N *rest"],
    length: int,
    *,
    num_groups: int,
) -> Moments:
    """Merge the moments of columns of `length` pixels to moments (N, G) of each video's groups of channels.

    `mean` and `m2` have the channels on the last axis, and the columns on the axis before it. Padding columns
    are left out.
    """
    mean, m2 = (
        moment.reshape(*moment.shape[:-1], num_groups, moment.shape[-1] // num_groups)
        for moment in (mean, m2)
    )
    # The moments are now (N, ..., W, G, C / G), and all axes but N and G are merged. Those of an `x` of rank
    # 3 are (N, G, C / G), without an axis of columns W.
    axes = (*range(1, mean.ndim - 2), mean.ndim - 1)
    column_axis = mean.ndim - 3
    split = target.split if column_axis in axes else WHOLE  # without columns there is no padding
    # A function that sets the numbers of padding columns to zero, so that sums leave them out.
    without_padding = functools.partial(with_clear_padding, split=split, column_axis=column_axis)
    width = split.real_columns(mean.shape[column_axis])  # without padding
    # Number of samples that are merged for each group: columns, times frames and channels.
    count = math.prod(width if axis == column_axis else mean.shape[axis] for axis in axes)
    # The means are averaged as differences from the first one, because a float32 sum of many means that are
    # far from zero would lose digits.
    origin = mean
    for axis in axes:
        origin = jax.lax.slice_in_dim(origin, 0, 1, axis=axis)
    # The merged mean is `origin + offset`.
    offset = jnp.sum(without_padding(mean - origin), axes, keepdims=True) / count
    deviation = without_padding(mean - origin - offset)
    # M2 of a group is M2 within its columns plus M2 of their means, each of which stands for `length` pixels.
    m2 = jnp.sum(without_padding(m2), axes) + length * jnp.sum(deviation * deviation, axes)
    return Moments(length * count, jnp.squeeze(origin + offset, axes), m2)


def _shard_column_moments(target: Target, x_NTHWC: Array) -> tuple[Array, Array]:
    """Return mean and M2 of a shard's columns of pixels, both (N, T, 1, W, C), by the fastest form."""
    # A TPU has a kernel for several large frames, and one for a single frame, an image. XLA does the rest.
    if target.uses_pallas and is_large(x_NTHWC) and tpu.is_supported(x_NTHWC):
        return tpu.column_moments(x_NTHWC)
    if target.uses_pallas and is_image_for_tpu(target, x_NTHWC) and tpu.supports_image(x_NTHWC):
        return tpu.image_moments(x_NTHWC)
    return xla.column_moments(x_NTHWC)


def scale_and_shift(
    stats: Moments, weight: Float[Array, " C"], bias: Float[Array, " C"], eps: float
) -> tuple[Float[Array, "N C"], Float[Array, "N C"]]:
    """Return the scale and the shift of each channel, in float32: GroupNorm is `x * scale + shift`."""
    channels = weight.shape[0]
    scale = per_channel(jax.lax.rsqrt(stats.variance + eps), channels) * weight.astype(jnp.float32)
    return scale, bias.astype(jnp.float32) - per_channel(stats.mean, channels) * scale


def per_channel(stat_NG: Float[Array, "N G"], channels: int) -> Float[Array, "N C"]:
    return jnp.repeat(stat_NG, channels // stat_NG.shape[1], axis=1)


def check_groups(op_name: str, channels: int, num_groups: int, **vectors: Any) -> None:
    """Raise `ValueError` unless `num_groups` divides the channels, and the vectors fit them."""
    # A vector has a number for each channel, or is None. The message names it by its keyword, as "weight".
    if num_groups < 1 or channels % num_groups:
        raise ValueError(
            f"got {channels} channels in {num_groups} groups: num_groups must divide the channel count"
        )
    check_channels(op_name, channels, **vectors)
