"""Operations on tensors, plain or on JAX: they fetch, find non-finite values, join and slice."""

from collections.abc import Sequence
from typing import Any

import torch

from cogvideox_torchax.runtime import arrays
from cogvideox_torchax.runtime.bridge import array_of, as_array, tensor_of
from cogvideox_torchax.runtime.host import on_jax


def fetch_async(tensor: torch.Tensor) -> None:
    """Start copying a tensor on JAX to the host in the background, so that `to_torch` waits less later."""
    if on_jax(tensor):
        array_of(tensor).copy_to_host_async()


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name that torch, JAX and NumPy share, such as "bfloat16" for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


def jax_dtype(dtype: torch.dtype) -> Any:
    """Return the JAX dtype of a torch dtype."""
    import jax.numpy as jnp

    return jnp.dtype(dtype_name(dtype))


def largest(tensor: torch.Tensor) -> float | None:
    """Return the largest absolute value: not finite if a value is not, and None for integers.

    It is None too for a tensor on JAX that is being traced, and so has no values.
    """
    if on_jax(tensor):
        return arrays.largest_of(array_of(tensor))
    if not tensor.dtype.is_floating_point:
        return None
    # By the least and the greatest value, as `tensor.abs()` would copy the tensor.
    return float(torch.stack(tensor.detach().aminmax()).abs().max())


def first_nonfinite(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the index of the first NaN or Inf; None if there is none, for integers and for a traced tensor.

    For a tensor on JAX with shards in other processes, see `arrays.first_nonfinite_of`.
    """
    if not tensor.dtype.is_floating_point:
        return None
    if on_jax(tensor):
        return arrays.first_nonfinite_of(array_of(tensor))
    is_finite = torch.isfinite(tensor)
    return None if bool(is_finite.all()) else tuple(int(i) for i in (~is_finite).nonzero()[0])


def all_finite(tensor: torch.Tensor) -> Any:
    """Return whether a tensor holds neither NaN nor Inf.

    The result is one bool on the tensor's device, which may still be computing; Python's `bool` waits for it.
    """
    return arrays.all_finite_of(array_of(tensor)) if on_jax(tensor) else torch.isfinite(tensor).all()


def concatenate(parts: Sequence[torch.Tensor], axis: int) -> torch.Tensor:
    """Return tensors joined along an axis."""
    if on_jax(parts[0]):
        return tensor_of(arrays.concatenate(list(map(as_array, parts)), axis))
    return arrays.concatenate(parts, axis)


def take(x: torch.Tensor, axis: int, start: int, length: int) -> torch.Tensor:
    """Return the `length` entries of an axis from `start` on, by one program for all starts."""
    if on_jax(x):
        return tensor_of(arrays.take(array_of(x), axis, start, length))
    return arrays.take(x, axis, start, length)
