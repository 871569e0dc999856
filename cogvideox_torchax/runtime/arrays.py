"""Operations on tensors and arrays, plain or on JAX: fetching, dtypes, non-finite values, slices."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from cogvideox_torchax.runtime.bridge import array_of, as_array, on_jax, tensor_of
from cogvideox_torchax.upstream import is_traced


def fetch_async(tensor: torch.Tensor) -> None:
    """Start copying a tensor on JAX to the host in the background, so that `to_torch` waits less later."""
    if on_jax(tensor):
        array_of(tensor).copy_to_host_async()


def wait(tensor: torch.Tensor) -> torch.Tensor:
    """Wait until a tensor on JAX is computed, and return it; return a plain tensor at once."""
    if on_jax(tensor):
        array_of(tensor).block_until_ready()
    return tensor


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name that torch, JAX and NumPy share, such as "bfloat16" for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


def device_and_dtype(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, torch.dtype | None]:
    """Return the device and the dtype that `.to(*args, **kwargs)` requests, each None if absent."""
    device, dtype = kwargs.get("device"), kwargs.get("dtype")
    for value in args:
        if isinstance(value, torch.dtype):
            dtype = value
        elif isinstance(value, torch.Tensor):
            device, dtype = value.device, value.dtype
        elif isinstance(value, str | torch.device):
            device = value
    return device, dtype


def jax_dtype(dtype: torch.dtype) -> Any:
    """Return the JAX dtype of a torch dtype."""
    import jax.numpy as jnp

    return jnp.dtype(dtype_name(dtype))


def first_nonfinite(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the index of the first NaN or Inf, or None; a tensor that is being traced counts as finite."""
    if not tensor.dtype.is_floating_point:
        return None
    if on_jax(tensor):
        return first_nonfinite_of(array_of(tensor))
    finite = torch.isfinite(tensor)
    return None if bool(finite.all()) else tuple(int(i) for i in (~finite).nonzero()[0])


def first_nonfinite_of(array: Any) -> tuple[int, ...] | None:
    """Return the index of the first NaN or Inf in a JAX or NumPy array; None if there is none.

    None also for integers, and for an array that is being traced and has no values.

    Raises:
        ValueError: only another process's shard of the array has one.
    """
    import jax
    import jax.numpy as jnp

    if not jnp.issubdtype(array.dtype, jnp.floating) or is_traced(array):
        return None
    on_devices = isinstance(array, jax.Array)
    if bool(_jitted_all_finite()(array) if on_devices else np.isfinite(array).all()):
        return None
    # The search is on the host: on the devices it would gather a sharded array on each of them.
    if not on_devices or array.is_fully_addressable:
        return tuple(int(i) for i in np.argwhere(~np.isfinite(np.asarray(array)))[0])
    for shard in array.addressable_shards:
        for index in np.argwhere(~np.isfinite(np.asarray(shard.data))):  # returns at the first, if any
            # `index` counts from the shard's start, the result from the array's.
            return tuple(int(i) + (span.start or 0) for i, span in zip(index, shard.index, strict=True))
    raise ValueError("got NaN or Inf in the input's part of another process: see that process's error")


def all_finite(tensor: torch.Tensor) -> Any:
    """Return whether a tensor holds neither NaN nor Inf: a bool on its device, which `bool()` waits for."""
    return _jitted_all_finite()(array_of(tensor)) if on_jax(tensor) else torch.isfinite(tensor).all()


@functools.cache
def _jitted_all_finite():
    """Return the compiled check for finite values; a function, so that JAX is imported late."""
    import jax
    import jax.numpy as jnp

    return jax.jit(lambda x: jnp.isfinite(x).all())


def concatenate(parts: Sequence[Any], axis: int) -> Any:
    """Return tensors, or arrays, joined along an axis; torchax need not be enabled in this thread."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, torch.Tensor) and not on_jax(first):
        return torch.cat(list(parts), dim=axis)
    if isinstance(first, np.ndarray):
        return np.concatenate(parts, axis)
    import jax.numpy as jnp

    joined = jnp.concatenate(list(map(as_array, parts)), axis)
    return tensor_of(joined) if isinstance(first, torch.Tensor) else joined


def take(x: Any, axis: int, start: int, length: int) -> Any:
    """Return entries `start` to `start + length` of an axis of a tensor or an array.

    torchax need not be enabled. On JAX `start` is an argument of one small program, which serves every start.
    """
    if isinstance(x, torch.Tensor) and on_jax(x):
        return tensor_of(take(array_of(x), axis, start, length))
    if isinstance(x, torch.Tensor | np.ndarray):
        return x[(slice(None),) * axis + (slice(start, start + length),)]
    return _jitted_take()(x, start, length, axis)


@functools.cache
def _jitted_take():
    """Return the compiled slice of `take`; a function, so that JAX is imported late."""
    import jax

    return jax.jit(jax.lax.dynamic_slice_in_dim, static_argnums=(2, 3))  # the slice's size, and its axis
