"""GroupNorm with a one-pass Welford variance, over any channel axis."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jax_kernels.columns import jit_kernel, real_columns, with_clear_padding


class Moments(NamedTuple):
    """What Welford's recurrence carries: count, mean, and M2, the sum of squared deviations from the mean."""

    count: int
    mean: Float[Array, "..."]
    m2: Float[Array, "..."]

    @property
    def variance(self) -> Float[Array, "..."]:
        return self.m2 / self.count


def merge(a: Moments, b: Moments) -> Moments:
    """Two samples' moments together, from those of each (Chan, Golub and LeVeque 1979, eq. 2.1)."""
    count = a.count + b.count
    delta = b.mean - a.mean
    return Moments(
        count,
        a.mean + delta * (b.count / count),
        a.m2 + b.m2 + delta * delta * (a.count * b.count / count),
    )


def _merge_equal(parts: Moments, axes: tuple[int, ...], column_axis: int) -> Moments:
    """Chan's formula for partial results of equal count lying along `axes`: all are merged at once.

    Columns that only pad a width are left out.

    The means are averaged as differences from one of them: a plain float32 sum of many means near 1000
    loses digits.
    """
    columns = parts.mean.shape[column_axis]

    def of_real(values: Array) -> Array:
        return with_clear_padding(values, column_axis) if column_axis in axes else values

    size = 1
    for axis in axes:
        size *= real_columns(columns) if axis == column_axis else parts.mean.shape[axis]
    origin = parts.mean
    for axis in axes:
        origin = lax.slice_in_dim(origin, 0, 1, axis=axis)
    offset = jnp.sum(of_real(parts.mean - origin), axes, keepdims=True) / size
    deviation = of_real(parts.mean - origin - offset)
    m2 = jnp.sum(of_real(parts.m2), axes) + parts.count * jnp.sum(deviation * deviation, axes)
    return Moments(parts.count * size, jnp.squeeze(origin + offset, axes), m2)


def moments(x: Float[Array, "N *rest"], *, num_groups: int, channel_axis: int = 1) -> Moments:
    """The moments of each video's groups, in float32, from a single pass over `x`.

    Each column of pixels is shifted by its own first pixel before it is squared and summed, so the sums stay
    as small as the column's spread; the columns' (count, mean, M2), one row's worth of numbers, are then
    merged by Chan's formula. A column runs along H: W may be sharded and nothing but the merged triples has
    to travel.

    Returns:
        `Moments` of shape (N, G), float32.
    """
    x = jnp.moveaxis(x, channel_axis, -1)
    column_axis = max(1, x.ndim - 3)
    length = x.shape[column_axis]
    first = lax.slice_in_dim(x, 0, 1, axis=column_axis).astype(jnp.float32)
    shifted = x.astype(jnp.float32) - first
    # One reduction with two results: two reductions would make XLA's CPU backend write `shifted` out.
    zero = jnp.zeros((), jnp.float32)
    total, squares = lax.reduce(
        (shifted, shifted * shifted), (zero, zero), lambda a, b: (a[0] + b[0], a[1] + b[1]), (column_axis,)
    )
    columns = Moments(
        length,
        jnp.squeeze(first, column_axis) + total / length,
        jnp.maximum(squares - total * total / length, 0.0),
    )
    columns = Moments(length, *(_split_groups(part, num_groups) for part in columns[1:]))
    axes = (*range(1, columns.mean.ndim - 2), columns.mean.ndim - 1)
    return _merge_equal(columns, axes, column_axis=columns.mean.ndim - 3)


def _split_groups(x: Array, num_groups: int) -> Array:
    return x.reshape(*x.shape[:-1], num_groups, x.shape[-1] // num_groups)


def per_channel(stat_NG: Float[Array, "N G"], channels: int) -> Float[Array, "N C"]:
    """A group's statistic, once for each of its channels."""
    return jnp.repeat(stat_NG, channels // stat_NG.shape[1], axis=1)


def check_groups(channels: int, num_groups: int) -> None:
    if num_groups < 1 or channels % num_groups:
        raise ValueError(
            f"got {channels} channels in {num_groups} groups: num_groups must divide the channel count"
        )


@jit_kernel(static_argnames=("num_groups", "eps", "channel_axis"))
def group_norm(
    x: Float[Array, "N *rest"],
    weight: Float[Array, " C"] | None,
    bias: Float[Array, " C"] | None,
    *,
    num_groups: int,
    eps: float = 1e-6,
    channel_axis: int = 1,
) -> Float[Array, "N *rest"]:
    """Group normalization (Wu and He 2018): `(x - mean) / sqrt(variance + eps) * weight + bias` by groups.

    Args:
        x: any float dtype, rank 3 or more, axis 0 the batch.
        weight, bias: (C,), or None.
        num_groups: divides C.
        eps: added to the variance, as in PyTorch.
        channel_axis: where C lies in `x`.

    Returns:
        The shape and dtype of `x`; statistics and arithmetic are float32 whatever the dtype.

    Raises:
        ValueError: rank below 3, or a group count that does not divide C.
    """
    if x.ndim < 3:
        raise ValueError(
            f"group_norm got rank {x.ndim}, shape {x.shape}: it needs a batch, a channel and a pixel axis"
        )
    channel_axis = channel_axis % x.ndim
    channels = x.shape[channel_axis]
    check_groups(channels, num_groups)
    stats = moments(x, num_groups=num_groups, channel_axis=channel_axis)

    def along_channels(stat_NC: Array) -> Array:
        shape = [1] * x.ndim
        shape[0], shape[channel_axis] = stat_NC.shape[0], channels
        return stat_NC.reshape(shape)

    scale = per_channel(lax.rsqrt(stats.variance + eps), channels)
    if weight is not None:
        scale = scale * weight.astype(jnp.float32)
    y = (x.astype(jnp.float32) - along_channels(per_channel(stats.mean, channels))) * along_channels(scale)
    if bias is not None:
        y = y + along_channels(bias.astype(jnp.float32)[None])
    column_axis = x.ndim - (2 if channel_axis == x.ndim - 1 else 1)
    return with_clear_padding(y.astype(x.dtype), column_axis)
