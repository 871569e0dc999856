"""GroupNorm's two passes over an activation as XLA compiles them: moments, then scaling.

Moments are a mean and M2, the sum of squared deviations from it. A column is a column of pixels, along H. A
mesh may pad the width of frames with columns of zeros, which stay zeros and are no part of statistics.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_kernels.common.columns import with_clear_padding
from jax_kernels.common.dispatch import Target
from jax_kernels.common.pointwise import Activation, activate

ROWS = 64
"""Most rows of a column that are summed together.

A float32 sum of so many squares loses no digits that matter, wherever outliers lie, and the moments of a
block take little memory beside its pixels.
"""


class Moments(NamedTuple):
    """The state of Welford's recurrence: count, mean, and M2, the sum of squared deviations from the mean."""

    count: int
    mean: Float[Array, "..."]
    m2: Float[Array, "..."]

    @property
    def variance(self) -> Float[Array, "..."]:
        """M2 / count, without Bessel's correction, as norms take it."""
        return self.m2 / float(self.count)  # the count may be more than an int32 holds


def merge(a: Moments, b: Moments) -> Moments:
    """Merge the moments of two samples (Chan, Golub and LeVeque 1979, eq. 2.1)."""
    count = a.count + b.count
    delta = b.mean - a.mean
    return Moments(
        count,
        a.mean + delta * (b.count / count),
        a.m2 + b.m2 + delta * delta * (a.count * b.count / count),
    )


def median_of_three(first: Array, middle: Array, last: Array) -> Array:
    """Return the element-wise median; that of three pixels of a column is close to most of the column."""
    return jnp.maximum(jnp.minimum(first, last), jnp.minimum(jnp.maximum(first, last), middle))


def merge_equal(parts: Moments, axis: int) -> Moments:
    """Merge the moments of parts of equal count, which lie along `axis`, all at once by Chan's formula."""
    # The means are averaged as differences from the first one, so that their sum loses no digits.
    origin = jax.lax.slice_in_dim(parts.mean, 0, 1, axis=axis)
    offset = jnp.mean(parts.mean - origin, axis, keepdims=True)
    deviation = parts.mean - origin - offset
    m2 = jnp.sum(parts.m2, axis) + parts.count * jnp.sum(deviation * deviation, axis)
    return Moments(parts.count * parts.mean.shape[axis], jnp.squeeze(origin + offset, axis), m2)


def column_moments(x: Array) -> tuple[Array, Array]:
    """Return mean and M2 of each column of pixels, in float32; their axis of rows has length 1.

    `x` is (..., rows, columns, channels) or (N, rows, channels). Blocks of at most `ROWS` rows are summed,
    then their moments are merged.
    """
    axis = max(1, x.ndim - 3)  # of rows
    height = x.shape[axis]
    # The fewest blocks of at most `ROWS` rows, as equal as possible; -(-a // b) rounds a / b up.
    blocks = max(1, -(-height // ROWS))
    block_rows = -(-height // blocks)
    full_rows = height // block_rows * block_rows  # rows in full blocks; the remainder is a smaller block
    # Moments are computed of `x - origin` and not of `x`, because sums of large numbers lose digits.
    origin = _typical_row(x, axis)
    moments = _block_moments(jax.lax.slice_in_dim(x, 0, full_rows, axis=axis), origin, axis, block_rows)
    if height > full_rows:
        x = jax.lax.slice_in_dim(x, full_rows, height, axis=axis)
        moments = merge(moments, _block_moments(x, origin, axis, height - full_rows))
    # M2 is the same for `x` and `x - origin`.
    return origin + jnp.expand_dims(moments.mean, axis), jnp.expand_dims(moments.m2, axis)


def _typical_row(x: Array, axis: int) -> Array:
    """Return the median of three pixels of each column, in float32."""
    height = x.shape[axis]
    rows = (jax.lax.slice_in_dim(x, row, row + 1, axis=axis) for row in (0, height // 2, height - 1))
    # It is subtracted before sums and added again, so it changes only rounding, and needs no gradient.
    return jax.lax.stop_gradient(median_of_three(*rows).astype(jnp.float32))


def _block_moments(x: Array, origin: Array, axis: int, block_rows: int) -> Moments:
    """Return the moments of `x - origin` along `axis`, merged from those of blocks of `block_rows` rows."""
    x = x.reshape(*x.shape[:axis], x.shape[axis] // block_rows, block_rows, *x.shape[axis + 1 :])
    row_axis = axis + 1  # `axis` is the axis of blocks now
    # Each block is summed as differences from a value of its own, typical for that block. Sums of large
    # values and of their squares would lose digits.
    block_origin = _typical_row(x, row_axis)
    differences = x.astype(jnp.float32) - block_origin
    # One reduction to the sums of values and of squares (index 0 and 1 of its pairs): two reductions would
    # make XLA's CPU backend write `differences` out.
    zero = jnp.zeros((), jnp.float32)
    total, squares = jax.lax.reduce(
        (differences, differences * differences),
        (zero, zero),
        lambda a, b: (a[0] + b[0], a[1] + b[1]),
        (row_axis,),
    )
    # The block's mean, from which the `origin` that all blocks share is subtracted.
    mean = jnp.squeeze(block_origin, row_axis) - origin + total / block_rows
    # Rounding must not make M2 negative.
    m2 = jnp.maximum(squares - total * total / block_rows, 0.0)
    return merge_equal(Moments(block_rows, mean, m2), axis)


def scaled(
    target: Target,
    x: Array,
    mean_NC: Array,
    scale_NC: Array,
    shift_NC: Array,
    *,
    activation: Activation | None,
    channel_axis: int = -1,
) -> Array:
    """Return `activation((x - mean) * scale + shift)`, GroupNorm's second pass; padding columns get zeros."""
    channel_axis = channel_axis % x.ndim

    def along_channels(coefficient_NC: Array) -> Array:
        """Return a coefficient of each video and channel, to broadcast over the other axes of `x`."""
        shape = [1] * x.ndim
        shape[0], shape[channel_axis] = coefficient_NC.shape
        return coefficient_NC.reshape(shape)

    y = (x.astype(jnp.float32) - along_channels(mean_NC)) * along_channels(scale_NC)
    y = activate(y + along_channels(shift_NC), activation)
    # The columns are the last axis, or the one before it if the last one has the channels.
    column_axis = x.ndim - 2 if channel_axis == x.ndim - 1 else x.ndim - 1
    return with_clear_padding(y.astype(x.dtype), target.split, column_axis)
