"""Operations on NumPy and JAX arrays: they find non-finite values, join and slice.

`concatenate` and `take` also take plain tensors of torch, which is imported only for those.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from cogvideox_torchax.arrays.forks import check_not_forked
from cogvideox_torchax.upstream import is_traced


def largest_of(array: Any) -> float | None:
    """Return the largest absolute value in a JAX or NumPy array.

    The result is not finite if a value of the array is not. It is None for integers, and for an array that is
    being traced and so has no values.
    """
    if not jnp.issubdtype(array.dtype, jnp.floating) or is_traced(array):
        return None
    if isinstance(array, jax.Array):
        check_not_forked()  # raises in a forked child, where JAX would hang
        return float(_largest_on_device(array))
    # `abs(array)` would copy the array. Python's `max(x, y)` may drop a NaN; NumPy's `maximum` keeps it.
    return float(np.maximum(abs(array.max()), abs(array.min())))


@jax.jit
def _largest_on_device(array: Any) -> jax.Array:
    # On a CPU XLA's maximum may skip a NaN, so NaN is returned for any value that is not finite.
    return jnp.where(all_finite_of(array), jnp.abs(array).max(), jnp.nan)


def first_nonfinite_of(array: Any) -> tuple[int, ...] | None:
    """Return the index of the first NaN or Inf in a JAX or NumPy array; None if there is none.

    The result is None also for integers, and for an array that is being traced. If other processes have
    shards of the array, all must call this.
    """
    largest = largest_of(array)
    if largest is None or math.isfinite(largest):  # None: integers, or a traced array
        return None
    # The search is on the host: on the devices it would gather a sharded array on each of them.
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        array = multihost_utils.process_allgather(array, tiled=True)
    return tuple(int(i) for i in np.argwhere(~np.isfinite(np.asarray(array)))[0])


@jax.jit
def all_finite_of(array: Any) -> jax.Array:
    """Return whether an array holds neither NaN nor Inf, as an array on its device."""
    return jnp.isfinite(array).all()


def concatenate(parts: Sequence[Any], axis: int) -> Any:
    """Return arrays, or plain tensors, joined along an axis."""
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts, axis)
    if isinstance(parts[0], jax.Array):
        return jnp.concatenate(parts, axis)
    import torch  # here, as it may not be installed

    return torch.cat(list(parts), dim=axis)


def take(x: Any, axis: int, start: int, length: int) -> Any:
    """Return the `length` entries of an axis from `start` on, of an array or a plain tensor.

    On JAX one small program serves every `start`.
    """
    if isinstance(x, jax.Array):
        return _jitted_take(x, start, length, axis)
    return x[(slice(None),) * axis + (slice(start, start + length),)]  # all of the axes before `axis`


# The arguments are (array, start, length, axis), of which JAX compiles the last two in.
_jitted_take = jax.jit(jax.lax.dynamic_slice_in_dim, static_argnums=(2, 3))
