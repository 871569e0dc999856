"""A module tree of its own around a user's parameters, to be traced in its place."""

from collections import OrderedDict
from typing import Any, TypeVar

import torch
from torch import nn

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
    bare = skeleton(module)
    without_torchax(_drop_weights, bare)
    return bare


def _drop_weights(module: nn.Module) -> None:
    put: dict[int, torch.Tensor] = {}
    for part in module.modules():
        held: Any
        for held in (part._parameters, part._buffers):
            for name, tensor in held.items():
                if tensor is None:
                    continue
                if id(tensor) not in put:
                    empty = torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device="meta")
                    is_parameter = isinstance(tensor, nn.Parameter)
                    put[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
                held[name] = put[id(tensor)]
