"""Welford's moments, and Chan's formula that merges the moments of parts."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


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
    """Return the element-wise median of three values.

    It is close to most of the values it is taken from, so sums of their differences from it are small.
    """
    return jnp.maximum(jnp.minimum(first, last), jnp.minimum(jnp.maximum(first, last), middle))


def merge_equal(parts: Moments, axis: int) -> Moments:
    """Merge parts of equal count along `axis` by Chan's formula, all at once.

    The means are averaged as differences from the first of them (`origin`): a plain float32 sum of many means
    near 1000 loses digits.
    """
    origin = lax.slice_in_dim(parts.mean, 0, 1, axis=axis)
    offset = jnp.mean(parts.mean - origin, axis, keepdims=True)
    deviation = parts.mean - origin - offset
    m2 = jnp.sum(parts.m2, axis) + parts.count * jnp.sum(deviation * deviation, axis)
    return Moments(parts.count * parts.mean.shape[axis], jnp.squeeze(origin + offset, axis), m2)
