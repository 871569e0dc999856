"""GroupNorm with a one-pass Welford variance, over any channel axis."""

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jax_kernels.columns import by_platform, by_shards, jit_kernel, real_columns, with_clear_padding
from jax_kernels.layout import is_large
from jax_kernels.tpu.group_norm_passes import column_sums, scaled, takes

Activation = Literal["silu"]


class Moments(NamedTuple):
    """What Welford's recurrence carries: count, mean, and M2, the sum of squared deviations from the mean."""

    count: int
    mean: Float[Array, "..."]
    m2: Float[Array, "..."]

    @property
    def variance(self) -> Float[Array, "..."]:
        return self.m2 / float(self.count)  # which may be more than an int32 holds


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
    total, squares = by_shards(_sum_columns, (x,)) if x.ndim == 5 else _sum_by_xla(x)
    total, squares = (jnp.squeeze(part, column_axis) for part in (total, squares))
    first = lax.index_in_dim(x, 0, axis=column_axis, keepdims=False).astype(jnp.float32)
    columns = Moments(length, first + total / length, jnp.maximum(squares - total * total / length, 0.0))
    columns = Moments(length, *(_split_groups(part, num_groups) for part in columns[1:]))
    axes = (*range(1, columns.mean.ndim - 2), columns.mean.ndim - 1)
    return _merge_equal(columns, axes, column_axis=columns.mean.ndim - 3)


def _sum_columns(x_NTHWC: Array) -> tuple[Array, Array]:
    by_kernel = is_large(x_NTHWC) and takes(x_NTHWC)
    return by_platform(x_NTHWC, tpu=_sum_by_kernel if by_kernel else _sum_by_xla, default=_sum_by_xla)


def _sum_by_xla(x: Array) -> tuple[Array, Array]:
    """`column_sums` for any rank of three or more, the channels last."""
    axis = max(1, x.ndim - 3)
    shifted = x.astype(jnp.float32) - lax.slice_in_dim(x, 0, 1, axis=axis).astype(jnp.float32)
    # One reduction with two results: two reductions would make XLA's CPU backend write `shifted` out.
    zero = jnp.zeros((), jnp.float32)
    sums = lax.reduce(
        (shifted, shifted * shifted), (zero, zero), lambda a, b: (a[0] + b[0], a[1] + b[1]), (axis,)
    )
    total, squares = (jnp.expand_dims(part, axis) for part in sums)
    return total, squares


@jax.custom_jvp
def _sum_by_kernel(x_NTHWC: Array) -> tuple[Array, Array]:
    return column_sums(x_NTHWC)


@_sum_by_kernel.defjvp
def _(primals: tuple[Array], tangents: tuple[Array]) -> Any:
    return _sum_by_kernel(*primals), jax.jvp(_sum_by_xla, primals, tangents)[1]


def _split_groups(x: Array, num_groups: int) -> Array:
    return x.reshape(*x.shape[:-1], num_groups, x.shape[-1] // num_groups)


def per_channel(stat_NG: Float[Array, "N G"], channels: int) -> Float[Array, "N C"]:
    """A group's statistic, once for each of its channels."""
    return jnp.repeat(stat_NG, channels // stat_NG.shape[1], axis=1)


def check_activation(activation: str | None) -> None:
    if activation not in (None, "silu"):
        raise ValueError(f"got the activation {activation!r}: 'silu' or None can be fused with a norm")


def check_groups(channels: int, num_groups: int) -> None:
    if num_groups < 1 or channels % num_groups:
        raise ValueError(
            f"got {channels} channels in {num_groups} groups: num_groups must divide the channel count"
        )


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
        ValueError: rank below 3, a group count that does not divide C, or another activation.
    """
    if x.ndim < 3:
        raise ValueError(
            f"group_norm got rank {x.ndim}, shape {x.shape}: it needs a batch, a channel and a pixel axis"
        )
    channel_axis = channel_axis % x.ndim
    channels = x.shape[channel_axis]
    check_groups(channels, num_groups)
    check_activation(activation)
    stats = moments(x, num_groups=num_groups, channel_axis=channel_axis)
    mean = per_channel(stats.mean, channels)
    scale = per_channel(lax.rsqrt(stats.variance + eps), channels)
    if weight is not None:
        scale = scale * weight.astype(jnp.float32)
    shift = jnp.zeros_like(mean) if bias is None else jnp.broadcast_to(bias.astype(jnp.float32), mean.shape)
    if x.ndim != 5:
        return _scale_by_xla(activation, x, mean, scale, shift, channel_axis=channel_axis)
    x = jnp.moveaxis(x, channel_axis, -1)
    y = by_shards(functools.partial(_scale, activation), (x,), (), (mean, scale, shift))
    return jnp.moveaxis(y, -1, channel_axis)


def _scale(activation: Activation | None, x_NTHWC: Array, *coefficients_NC: Array) -> Array:
    # Without an activation what comes next is better fused with the norm than kept from it.
    by_kernel = activation is not None and is_large(x_NTHWC) and takes(x_NTHWC)
    by_xla = functools.partial(_scale_by_xla, activation)
    return by_platform(
        x_NTHWC, *coefficients_NC, tpu=_scale_by_kernel if by_kernel else by_xla, default=by_xla
    )


def _scale_by_xla(
    activation: Activation | None,
    x: Array,
    mean_NC: Array,
    scale_NC: Array,
    shift_NC: Array,
    *,
    channel_axis: int = -1,
) -> Array:
    """`activation((x - mean) * scale + shift)`."""
    channel_axis = channel_axis % x.ndim

    def along_channels(part_NC: Array) -> Array:
        shape = [1] * x.ndim
        shape[0], shape[channel_axis] = part_NC.shape
        return part_NC.reshape(shape)

    y = (x.astype(jnp.float32) - along_channels(mean_NC)) * along_channels(scale_NC)
    y = y + along_channels(shift_NC)
    if activation == "silu":
        y = jax.nn.silu(y)
    return with_clear_padding(y.astype(x.dtype), x.ndim - (2 if channel_axis == x.ndim - 1 else 1))


@jax.custom_jvp
def _scale_by_kernel(x_NTHWC: Array, *coefficients_NC: Array) -> Array:
    def by_column(part_NC: Array) -> Array:
        return jnp.broadcast_to(part_NC[:, None], (part_NC.shape[0], x_NTHWC.shape[3], part_NC.shape[1]))

    mean, scale, shift = (by_column(part_NC) for part_NC in coefficients_NC)
    # Where columns only pad the width, so does the result: factors and offsets of zero clear it.
    return scaled(x_NTHWC, mean, with_clear_padding(scale, 1), with_clear_padding(shift, 1))


@_scale_by_kernel.defjvp
def _(primals: tuple[Array, ...], tangents: tuple[Array, ...]) -> Any:
    tangent = jax.jvp(functools.partial(_scale_by_xla, "silu"), primals, tangents)[1]
    return _scale_by_kernel(*primals), tangent
