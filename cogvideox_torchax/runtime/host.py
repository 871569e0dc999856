"""Plain tensors, which are PyTorch's own: told from those on JAX, moved, and shared with NumPy."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.experimental import multihost_utils

from cogvideox_torchax import upstream

TPU = "tpu"
"""The name of TorchTPU's device, and of its compiler for `torch.compile`."""

PLAIN = (torch.Tensor, torch.nn.Parameter)
"""The types of plain tensors; a tensor on JAX has a type of torchax."""
BITS = {
    torch.bfloat16: torch.int16,
    **dict.fromkeys((torch.float8_e4m3fn, torch.float8_e5m2), torch.uint8),
}
"""The dtypes that NumPy has only by ml_dtypes, each with the one as which torch gives NumPy the bits."""


def on_jax(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is on JAX: a torchax tensor or a view of one."""
    # The type is read, not `tensor.device`: while torchax is on, torch sends each read of an attribute
    # through torchax, which is slow.
    return type(tensor) not in PLAIN and _is_of_torchax(type(tensor))


@functools.cache
def _is_of_torchax(kind: type) -> bool:
    return any(base.__module__.partition(".")[0] == "torchax" for base in kind.__mro__)


def is_jax_device(device: Any) -> bool:
    """Return whether `device`, a name or a torch device, is "jax" or one of its devices, such as "jax:0"."""
    return str(device).partition(":")[0] == "jax"


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
    if str(device).partition(":")[0] == TPU and upstream.added_device() != TPU:
        raise ValueError(
            f'got device "{device}", which PyTorch has only where TorchTPU is imported: for a TPU through '
            'torchax, move it .to("jax")'
        )
    return device, dtype


def plain_tensor(host: np.ndarray) -> torch.Tensor:
    """Return a NumPy array as a plain torch tensor, without a copy: the inverse of `host_array`."""
    for dtype, bits in BITS.items():
        if str(dtype) == f"torch.{host.dtype}":  # `from_numpy` refuses it
            return torch.from_numpy(host.view(f"i{bits.itemsize}")).view(dtype)
    return torch.from_numpy(host)


def host_array(tensor: torch.Tensor) -> np.ndarray:
    """Return a plain torch tensor as a NumPy array, without a copy if it is contiguous."""
    tensor = tensor.detach()
    if tensor.dtype in BITS:
        import ml_dtypes

        bits = tensor.contiguous().view(BITS[tensor.dtype]).numpy()
        return bits.view(getattr(ml_dtypes, str(tensor.dtype).removeprefix("torch.")))
    return tensor.numpy()


def on_host(array: Any) -> np.ndarray:
    """Return an array as a new NumPy array; if other processes hold parts of it, all must call this."""
    return np.array(host_view(array))


def host_view(array: Any) -> np.ndarray:
    """Return an array as a NumPy array that is only to be read, as its memory may be JAX's.

    If other processes hold parts of the array, all must call this.
    """
    # A NumPy array may be a weight that waits on the host. For a traced array `asarray` raises JAX's error.
    is_numpy = isinstance(array, np.ndarray)
    if is_numpy or upstream.is_traced(array) or array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


HOST_MEMORY = "pinned_host"
"""JAX's name of the part of the host's memory that a device reads and writes by itself."""


def is_in_host_memory(array: Any) -> bool:
    """Return whether an array is in the host's memory: a NumPy array, or one in `HOST_MEMORY`."""
    return isinstance(array, np.ndarray) or (
        not upstream.is_traced(array) and array.sharding.memory_kind == HOST_MEMORY
    )


def on_default_device(_name: str, array: Any) -> Any:
    """Return a NumPy array as a copy on JAX's default device, and a JAX array unchanged.

    A JAX array in the host's memory is copied to the memory of its devices.
    """
    # This is the `place` of `put_weights` for a single device. A mesh's may look at the weight's name.
    if not isinstance(array, jax.Array):
        return jnp.array(array)
    if not is_in_host_memory(array):
        return array
    device = next(iter(array.sharding.device_set))
    moved = jax.device_put(array, array.sharding.with_memory_kind(device.default_memory().kind))
    return upstream.uncommitted(moved)
