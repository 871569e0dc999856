"""Plain tensors, which are PyTorch's own: told from those on JAX, and shared with NumPy."""

import functools
from typing import Any

import numpy as np
import torch

from cogvideox_torchax import upstream

PLAIN = (torch.Tensor, torch.nn.Parameter)
"""The types of plain tensors; a tensor on JAX has a type of torchax."""


def on_jax(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is on JAX: a torchax tensor or a view of one."""
    # The type is read, not `tensor.device`: while torchax is on, torch sends each read of an attribute
    # through torchax, which is slow.
    return type(tensor) not in PLAIN and _is_of_torchax(type(tensor))


@functools.cache
def _is_of_torchax(kind: type) -> bool:
    return any(base.__module__.partition(".")[0] == "torchax" for base in kind.__mro__)


def plain_tensor(host: np.ndarray) -> torch.Tensor:
    """Return a NumPy array as a plain torch tensor, without a copy: the inverse of `host_array`."""
    if host.dtype.name == "bfloat16":  # the dtype of ml_dtypes, which `from_numpy` refuses
        return torch.from_numpy(host.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(host)


def host_array(tensor: torch.Tensor) -> np.ndarray:
    """Return a plain torch tensor as a NumPy array, without a copy if it is contiguous."""
    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        import ml_dtypes

        # torch cannot convert bfloat16 to NumPy, which has no such dtype: the bits are taken as int16.
        return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def on_host(array: Any) -> np.ndarray:
    """Return a JAX array as a new NumPy array; if other processes hold parts of it, all must call this."""
    if upstream.is_traced(array) or array.is_fully_addressable or array.is_fully_replicated:
        return np.array(array)  # for a traced array this is JAX's error
    from jax.experimental import multihost_utils

    return np.array(multihost_utils.process_allgather(array, tiled=True))
