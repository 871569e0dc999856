"""Read, move and replace a module's parameters and buffers on JAX."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from cogvideox_torchax.runtime.bridge import tensor_of
from cogvideox_torchax.runtime.host import PLAIN, host_array, on_default_device, on_jax
from cogvideox_torchax.upstream import replace_array


def named_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return a module's parameters and buffers, each once, by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def is_movable(tensor: torch.Tensor) -> bool:
    """Return whether a weight is on JAX or can be put there; a quantized one, of its own class, cannot."""
    return tensor.dtype in MOVABLE_DTYPES if type(tensor) in PLAIN else on_jax(tensor)


MOVABLE_DTYPES = frozenset(
    (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
)
"""The dtypes of weights that NumPy and JAX have."""


def byte_dtype(module: nn.Module) -> str | None:
    """Return the name of the dtype of a module's parameters that have eight bits, or None if none has."""
    dtypes = (weight.dtype for weight in module.parameters())
    return next((str(dtype).removeprefix("torch.") for dtype in dtypes if dtype.itemsize == 1), None)


def weight_slots(module: nn.Module) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield (name, dictionary, key) for each parameter and buffer, which is `dictionary[key]`.

    The name is the whole one, such as "block.weight". The dictionary is a submodule's own, so that writing to
    `dictionary[key]` replaces the weight. A tied weight is yielded under each of its names.
    """
    for prefix, submodule in module.named_modules():
        for tensors in (submodule._parameters, submodule._buffers):
            # A list of the keys first, as the caller may write to the dictionary between two of them.
            for key in [key for key, tensor in tensors.items() if tensor is not None]:
                yield f"{prefix}.{key}".lstrip("."), tensors, key  # the root's prefix is ""


def replace_weights(module: nn.Module, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace a module's parameters and buffers by `make(tensor)`, once for each tensor.

    `make` returns a new plain tensor, and leaves the old one as it is. Tied weights stay tied. torchax must
    be off.
    """
    _replace(module, lambda _name, tensor: make(tensor))


def put_weights(module: nn.Module, place: Callable[[str, Any], Any] = on_default_device) -> None:
    """Put a module's parameters and buffers on JAX, each once and under its name; tied weights stay tied.

    Args:
        module: the module; any of its tensors may be on JAX already.
        place: function of a name and a NumPy or JAX array to the JAX array that replaces it.
    """

    def put(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if on_jax(tensor):
            return replace_array(tensor, functools.partial(place, name))
        return tensor_of(place(name, host_array(tensor)))

    _replace(module, put)


# In inference mode torch would make parameters that nobody can train, and that take no in-place change.
@torch.inference_mode(False)
def _replace(module: nn.Module, make: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
    """Replace a module's parameters and buffers by `make(name, tensor)`, once for each tensor."""
    replacements: dict[int, torch.Tensor] = {}  # by the id of the old tensor, so that tied weights stay tied
    for name, owner, key in weight_slots(module):
        tensor = owner[key]
        if id(tensor) not in replacements:
            replacements[id(tensor)] = replaced(tensor, functools.partial(make, name))
        owner[key] = replacements[id(tensor)]


def replaced(tensor: torch.Tensor, make: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return what replaces a tensor: `make(tensor)`, as a parameter if the tensor is one.

    The parameter's gradient is `make` of the old gradient. A tensor that `make` has changed in place, and
    returns, is returned as it is.
    """
    replacement = make(tensor)
    if replacement is tensor or not isinstance(tensor, nn.Parameter):
        return replacement
    parameter = nn.Parameter(replacement, tensor.requires_grad)
    parameter.grad = None if tensor.grad is None else make(tensor.grad)
    return parameter
