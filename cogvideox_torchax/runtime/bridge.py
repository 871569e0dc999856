"""The bridge between torch and JAX by torchax: where a tensor is, and its conversion.

A *torchax* tensor holds a JAX array. Ported modules know only
`on_accelerator` and `operations.torch_view`, which serve the bridge of TorchTPU (`torchtpu`) too.
"""

import itertools
from typing import Any

import torch

from cogvideox_torchax.runtime.device import fetched, import_torchax, to_jax as to_jax
from cogvideox_torchax.runtime.host import TPU, host_array, on_jax
from cogvideox_torchax.upstream import array_in


def on_tpu(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is on TorchTPU's device."""
    return tensor.device.type == TPU


def on_accelerator(tensor: torch.Tensor) -> bool:
    """Return whether kernels compute with a tensor: it is on JAX by torchax, or on a TPU by TorchTPU."""
    return on_jax(tensor) or on_tpu(tensor)


def is_on_jax(module: torch.nn.Module) -> bool:
    """Return whether a module's first weight or buffer, and so all of them, is on JAX."""
    first = next(itertools.chain(module.parameters(), module.buffers()), None)
    return first is not None and on_jax(first)


def array_of(tensor: torch.Tensor) -> Any:
    """Return the array inside a torchax tensor, which may wait in the host's memory, or be a NumPy array."""
    array = array_in(tensor)  # None for a slice, which has only its parent's
    return import_torchax().interop.jax_view(tensor) if array is None else array


def tensor_of(array: Any) -> torch.Tensor:
    """Return a `jax.Array` as a torchax tensor, without a copy."""
    return import_torchax().interop.torch_view(array)


def to_torch(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor of torchax or TorchTPU to the CPU; return any other tensor unchanged.

    The copy waits until the tensor is computed. If other processes hold parts of it, all must call this, and
    each gets the whole.
    """
    return fetched(tensor) if on_jax(tensor) or not on_tpu(tensor) else tensor.cpu()


def as_array(value: Any) -> Any:
    """Return a plain tensor as a NumPy array, and a tensor on JAX as its JAX array, without a copy.

    An array is returned unchanged.
    """
    if not isinstance(value, torch.Tensor):
        return value
    return array_of(value) if on_jax(value) else host_array(value)
