"""A module tree of its own around a user's parameters, to be traced in its place."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from cogvideox_torchax.runtime.arrays import to_torch
from cogvideox_torchax.runtime.bridge import without_torchax

Module = TypeVar("Module", bound=nn.Module)


def skeleton(module: Module) -> Module:
    """The module tree with the same parameters and attributes, but modules and dictionaries of its own.

    What tracing swaps in for parameters, and hooks that it adds, never reach the user's modules, which other
    threads may be running.
    """
    return _copied(module, {})


def _copied(module: Module, done: dict[int, nn.Module]) -> Module:
    if id(module) not in done:
        copied = done[id(module)] = object.__new__(type(module))
        attributes = {
            name: value.copy() if type(value) in (dict, OrderedDict) else value
            for name, value in vars(module).items()
        }
        attributes["_modules"] = {
            name: None if child is None else _copied(child, done) for name, child in module._modules.items()
        }
        vars(copied).update(attributes)
    return done[id(module)]  # pyright: ignore[reportReturnType]


def weightless(module: Module) -> Module:
    """A `skeleton` whose weights have a shape and a dtype, and take no memory."""
    return _with_weights(module, lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))


def on_host(module: Module) -> Module:
    """A `skeleton` whose weights are plain tensors: the module as it would be in PyTorch."""
    return _with_weights(module, to_torch)


def _with_weights(module: Module, make: Callable[[torch.Tensor], torch.Tensor]) -> Module:
    """A skeleton around weights of its own; what is tied stays tied."""
    bare = skeleton(module)
    without_torchax(_replace_weights, bare, make)
    return bare


def _replace_weights(module: nn.Module, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    put: dict[int, torch.Tensor] = {}
    for part in module.modules():
        held: Any
        for held in (part._parameters, part._buffers):
            for name, tensor in held.items():
                if tensor is None:
                    continue
                if id(tensor) not in put:
                    made = make(tensor)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    put[id(tensor)] = nn.Parameter(made, tensor.requires_grad) if is_parameter else made
                held[name] = put[id(tensor)]
