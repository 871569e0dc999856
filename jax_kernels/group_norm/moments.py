"""The mean and variance of groups of channels, by Welford's moments and Chan's formula."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jax_kernels.common.columns import Split, with_clear_padding
from jax_kernels.common.dispatch import Target, map_shards
from jax_kernels.common.first_frame import is_image_for_tpu, join_frames, split_frames
from jax_kernels.common.layout import is_large
from jax_kernels.group_norm import tpu, xla
from jax_kernels.group_norm.welford import Moments


def moments(target: Target, x: Float[Array, "N *rest"], *, num_groups: int, channel_axis: int = 1) -> Moments:
    """Return count, mean and M2 of each video's groups of channels, in float32, by one pass over `x`.

    Columns of pixels are reduced to their (count, mean, M2), a block of rows at a time: a sum of squares over
    all rows would lose the digits of a column whose first pixel lies far from the rest. All are merged by
    Chan's formula. A column runs along H: W may be sharded, and only the merged triples are communicated.

    Returns:
        `Moments` of shape (N, G), float32.
    """
    x = jnp.moveaxis(x, channel_axis, -1)
    axis = max(1, x.ndim - 3)
    columns = column_moments(target, x) if x.ndim == 5 else _squeezed(xla.column_moments(x), axis)
    return moments_of_columns(target, *columns, x.shape[axis], num_groups=num_groups)


def column_moments(
    target: Target, x: Float[Array, "N T H W C"]
) -> tuple[Float[Array, "N T W C"], Float[Array, "N T W C"]]:
    """Return mean and M2 (sum of squared deviations) of each column of pixels, along H, in float32."""
    parts = [
        _squeezed(map_shards(target, _shard_column_moments, part), axis=2) for part in split_frames(target, x)
    ]
    return join_frames([mean for mean, _ in parts]), join_frames([m2 for _, m2 in parts])


def _squeezed(parts: tuple[Array, Array], axis: int) -> tuple[Array, Array]:
    """Return mean and M2 without the axis of rows, `axis`, which has length one."""
    mean, m2 = parts
    return jnp.squeeze(mean, axis), jnp.squeeze(m2, axis)


def moments_of_columns(
    target: Target,
    mean: Float[Array, "N *rest"],
    m2: Float[Array, "N *rest"],
    length: int,
    *,
    num_groups: int,
) -> Moments:
    """Merge mean and M2 of columns, of `length` pixels each, to the moments of each video's groups, (N, G).

    Channels are the last axis.
    """
    columns = Moments(length, *(_split_groups(part, num_groups) for part in (mean, m2)))
    axes = (*range(1, columns.mean.ndim - 2), columns.mean.ndim - 1)
    return _merge_columns(target.split, columns, axes, column_axis=columns.mean.ndim - 3)


def _shard_column_moments(target: Target, x_NTHWC: Array) -> tuple[Array, Array]:
    """Return mean and M2 of a shard's columns, (N, T, 1, W, C), by a Pallas kernel if it supports them."""
    if target.uses_pallas and is_large(x_NTHWC) and tpu.is_supported(x_NTHWC):
        return tpu.column_moments(x_NTHWC)
    if target.uses_pallas and is_image_for_tpu(target, x_NTHWC) and tpu.supports_image(x_NTHWC):
        return tpu.image_moments(x_NTHWC)
    return xla.column_moments(x_NTHWC)


def _merge_columns(split: Split, parts: Moments, axes: tuple[int, ...], column_axis: int) -> Moments:
    """Merge the moments of equal counts along `axes`, of which `column_axis` may hold padding, left out.

    As `merge_equal` along one axis, by differences from one of the means.
    """
    columns = parts.mean.shape[column_axis]

    def without_padding(values: Array) -> Array:
        """Return values with zeros in padding columns, if columns are merged."""
        return with_clear_padding(values, split, column_axis) if column_axis in axes else values

    size = 1
    for axis in axes:
        size *= split.real_columns(columns) if axis == column_axis else parts.mean.shape[axis]
    origin = parts.mean
    for axis in axes:
        origin = lax.slice_in_dim(origin, 0, 1, axis=axis)
    offset = jnp.sum(without_padding(parts.mean - origin), axes, keepdims=True) / size
    deviation = without_padding(parts.mean - origin - offset)
    m2 = jnp.sum(without_padding(parts.m2), axes) + parts.count * jnp.sum(deviation * deviation, axes)
    return Moments(parts.count * size, jnp.squeeze(origin + offset, axes), m2)


def _split_groups(x: Array, num_groups: int) -> Array:
    """Split the channels, the last axis, into groups: (..., G, C / G)."""
    return x.reshape(*x.shape[:-1], num_groups, x.shape[-1] // num_groups)


def per_channel(stat_NG: Float[Array, "N G"], channels: int) -> Float[Array, "N C"]:
    """Repeat a group's statistic for each of its channels."""
    return jnp.repeat(stat_NG, channels // stat_NG.shape[1], axis=1)


def check_groups(channels: int, num_groups: int) -> None:
    """Raise `ValueError` unless the number of groups divides the channels."""
    if num_groups < 1 or channels % num_groups:
        raise ValueError(
            f"got {channels} channels in {num_groups} groups: num_groups must divide the channel count"
        )
