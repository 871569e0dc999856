"""The bridge between torch and JAX by torchax: places of tensors, conversions, tests of values, no gradients.

A *torchax* tensor holds a JAX array. Ported modules know only `on_accelerator` and `operations.torch_view`,
which serve the bridge of TorchTPU (`torchtpu`) too.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import torch

from cogvideox_torchax.arrays import values
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
    """Return the array inside a torchax tensor, which may wait in the host's memory, or be a NumPy array.

    A tree of such tensors becomes one of arrays.
    """
    array = array_in(tensor)  # None for a tree
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


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name that torch, JAX and NumPy share, such as "bfloat16" for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


def jax_dtype(dtype: torch.dtype) -> Any:
    """Return the JAX dtype of a torch dtype."""
    return jnp.dtype(dtype_name(dtype))


def largest(tensor: torch.Tensor) -> float | None:
    """Return the largest absolute value: not finite if a value is not, and None for integers.

    It is None too for a tensor on JAX that is being traced, and so has no values.
    """
    if on_jax(tensor) or not tensor.dtype.is_floating_point:
        return values.largest_of(as_array(tensor))
    # By the least and the greatest value, as `tensor.abs()` would copy the tensor.
    return float(torch.stack(tensor.detach().aminmax()).abs().max())


def first_nonfinite(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the index of the first NaN or Inf; None if there is none, for integers and for a traced tensor.

    For a tensor on JAX with shards in other processes, see `values.first_nonfinite_of`.
    """
    return values.first_nonfinite_of(as_array(tensor))


def all_finite(tensor: torch.Tensor) -> Any:
    """Return whether a tensor holds neither NaN nor Inf.

    The result is one bool on the tensor's device, which may still be computing; Python's `bool` waits for it.
    """
    return values.all_finite_of(array_of(tensor)) if on_jax(tensor) else torch.isfinite(tensor).all()


# Results of programs without gradients: a backward pass through one is an error in words


class _Refused(torch.autograd.Function):
    """A result whose backward pass is an error.

    `forward(ctx, why, run, *tensors)` reads no tensors. torch calls `backward` for those that require a
    gradient.
    """

    @staticmethod
    def forward(ctx: Any, why: str, run: Callable[[], torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
        ctx.why = why
        return run()

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        raise ValueError(ctx.why)


def without_gradient(
    network: torch.nn.Module, inputs: Sequence[torch.Tensor], result: torch.Tensor, why: str
) -> torch.Tensor:
    """Return `result`, which `network` has computed from `inputs`, so that no backward pass goes through it.

    A backward pass raises `ValueError` with the message `why`. If none can come, as neither an input nor the
    network requires a gradient, `result` is returned unchanged.
    """
    if not wants_gradient(network, *inputs):
        return result
    # `result` is passed inside a function. If it were an argument, torch would return a view of it, and
    # forbid writes into this view.
    return _Refused.apply(why, lambda: result, *inputs, *network.parameters())  # pyright: ignore[reportReturnType]


def wants_gradient(network: torch.nn.Module, *inputs: torch.Tensor) -> bool:
    """Return whether a call of the network on `inputs` needs gradients.

    It does if torch records operations, an input is on an accelerator, and one or a weight requires a
    gradient.
    """
    return (
        torch.is_grad_enabled()
        and any(map(on_accelerator, inputs))
        and any(tensor.requires_grad for tensor in (*inputs, *network.parameters()))
    )
