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
    """Return count, mean and M2 of each video's groups of channels, by one pass over `x`.

    M2 is the sum of squared deviations from the mean. A column of pixels, along H, is reduced to its count,
    mean and M2 a block of rows at a time: a sum of squares over all rows would lose the digits of a column
    whose first pixel is far from the other pixels. The columns' triples are merged by Chan's formula. W may
    be sharded: only the merged triples are communicated.

    Args:
        target: the target.
        x: any rank of three or more; the rows of pixels are the third axis from the end, channels last.
        num_groups: number of groups G.
        channel_axis: axis of the channels in `x`.

    Returns:
        `Moments` of shape (N, G), float32.
    """
    x = jnp.moveaxis(x, channel_axis, -1)
    row_axis = max(1, x.ndim - 3)  # of rank 3, the only axis of pixels
    if x.ndim == 5:
        mean, m2 = column_moments(target, x)
    else:
        mean, m2 = _squeezed(xla.column_moments(x), row_axis)
    return moments_of_columns(target, mean, m2, x.shape[row_axis], num_groups=num_groups)


def column_moments(
    target: Target, x: Float[Array, "N T H W C"]
) -> tuple[Float[Array, "N T W C"], Float[Array, "N T W C"]]:
    """Return mean and M2 (sum of squared deviations) of each column of pixels, along H, in float32."""
    parts = [  # mean and M2 of each run of frames
        _squeezed(map_shards(target, _shard_column_moments, run), row_axis=2)
        for run in split_frames(target, x)
    ]
    return join_frames([mean for mean, _ in parts]), join_frames([m2 for _, m2 in parts])


def _squeezed(mean_and_m2: tuple[Array, Array], row_axis: int) -> tuple[Array, Array]:
    """Return mean and M2 of columns without the axis of rows, which has length one."""
    mean, m2 = mean_and_m2
    return jnp.squeeze(mean, row_axis), jnp.squeeze(m2, row_axis)


def moments_of_columns(
    target: Target,
    mean: Float[Array, "N *rest"],
    m2: Float[Array, "N *rest"],
    length: int,
    *,
    num_groups: int,
) -> Moments:
    """Merge the moments of columns of pixels to those of each video's groups of channels.

    Args:
        target: the target.
        mean, m2: of each column and channel; channels are the last axis, columns the one before.
        length: number of pixels of a column.
        num_groups: number of groups G.

    Returns:
        `Moments` of shape (N, G).
    """
    columns = Moments(length, *(_split_groups(part, num_groups) for part in (mean, m2)))
    # Of (N, ..., W, G, C / G) all axes but videos and groups.
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
    """Merge parts of equal count along `axes` by Chan's formula, without the padding columns.

    It is `merge_equal` for several axes: the means are averaged as differences from one of them (`origin`).

    Args:
        split: the sharding of columns.
        parts: the moments to merge.
        axes: axes that are merged.
        column_axis: the axis of columns, which may have padding; merged if it is one of `axes`.
    """
    columns = parts.mean.shape[column_axis]

    def without_padding(values: Array) -> Array:
        """Return values with zeros in padding columns, if columns are merged."""
        return with_clear_padding(values, split, column_axis) if column_axis in axes else values

    size = 1  # number of parts that are merged to one
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
