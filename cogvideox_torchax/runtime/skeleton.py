"""Skeletons: copies of a user's module tree with the same parameters, to be traced in its place."""

import copy
from collections import OrderedDict
from collections.abc import Callable
from types import FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import torch
from torch import nn

from cogvideox_torchax import upstream
from cogvideox_torchax.runtime.bridge import to_torch, without_torchax
from cogvideox_torchax.runtime.models import UNTRACED_ATTRIBUTES, PortedModel
from cogvideox_torchax.runtime.weights import replace_weights

Module = TypeVar("Module", bound=nn.Module)

PROCESSOR = "processor"
"""The attribute in which diffusers' attention keeps the object that computes it, which may have a state."""

CONTAINERS = (dict, OrderedDict, list, set, tuple)


def skeleton(module: Module) -> Module:
    """Copy a module tree's modules, containers and attention processors; share parameters and attributes.

    Tracing replaces parameters and adds hooks: it does so in the copy, while other threads may be running the
    user's modules. Calls compiled by torch.compile are left out: they would run the user's modules.
    """
    return _copied(module, {})  # {}: by a module's id, its copy


class _Uncompiled(nn.Module):
    """A stand-in for torch.compile's wrapper that runs the wrapped module, for XLA to compile."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._orig_mod(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # `self._orig_mod` would recurse as long as it is not set.
            return getattr(super().__getattr__("_orig_mod"), name)


def _copied(module: Module, done: dict[int, Any]) -> Module:
    """Copy a module and its children, around the same weights.

    `done` maps ids of originals to copies. It gets a copy before the children are copied, as a child may
    refer to its parent.
    """
    if id(module) in done:
        return done[id(module)]
    if upstream.is_compiled(module):
        # The copy of torch.compile's wrapper runs the wrapped module itself, for XLA to compile.
        done[id(module)] = wrapper = _Uncompiled()
        wrapper.add_module("_orig_mod", _copied(module.get_submodule("_orig_mod"), done))
        return done[id(module)]
    copied = done[id(module)] = object.__new__(type(module))
    attributes = {  # an attention's processor, which may have a state, is copied too
        name: _copy_value(value, done, of_processor=name == PROCESSOR)
        for name, value in vars(module).copy().items()  # a copy: another thread may add an attribute
        if name not in UNTRACED_ATTRIBUTES
    }
    # A forward that is set on the instance must run the copy.
    forward = attributes.get("forward")
    if isinstance(forward, MethodType) and forward.__self__ is module:
        attributes["forward"] = MethodType(forward.__func__, copied)
    attributes["_modules"] = {
        name: None if child is None else _copied(child, done) for name, child in module._modules.items()
    }
    vars(copied).update(attributes)
    return copied


LIBRARIES = frozenset(
    {"accelerate", "cogvideox_torchax", "diffusers", "huggingface_hub", "jax", "jaxlib", "peft", "torch"}
    | {"torchax", "transformers"}
)
"""Packages whose objects in a module's attributes count as constant, but for those of a processor."""


def has_state(value: Any, of_processor: bool) -> bool:
    """Return whether a value is an object with attributes that a forward may read and write.

    An attention processor counts, and any object in one (`of_processor`) but modules, tensors, classes and
    functions. Elsewhere only an object whose class is the user's counts.
    """
    others = nn.Module | torch.Tensor | type | ModuleType | FunctionType | MethodType
    if not hasattr(value, "__dict__") or isinstance(value, others) or type(value) in CONTAINERS:
        return False
    kind, package = type(value), type(value).__module__.partition(".")[0]
    return of_processor or (kind.__reduce_ex__ is object.__reduce_ex__ and package not in LIBRARIES)


def _copy_value(value: Any, done: dict[int, Any], of_processor: bool) -> Any:
    """Copy a container, at any depth, or an attention processor and each object that it holds.

    Another value is returned itself. `done` maps ids of originals to copies; `of_processor` is whether
    `value` is an attention processor or in one.
    """
    if id(value) in done:
        return done[id(value)]

    def copy_item(item: Any) -> Any:
        return _copy_value(item, done, of_processor)

    if has_state(value, of_processor):
        # Here, and for dictionaries and lists, `done` gets the copy before its items are copied: an item may
        # refer to the object that holds it.
        done[id(value)] = copied = copy.copy(value)
        vars(copied).update({name: copy_item(item) for name, item in vars(value).items()})
    elif type(value) in (dict, OrderedDict):
        done[id(value)] = copied = type(value)()
        copied.update((name, copy_item(item)) for name, item in value.items())
    elif type(value) is list:
        done[id(value)] = copied = []
        copied.extend(map(copy_item, value))
    elif type(value) in CONTAINERS:
        done[id(value)] = copied = type(value)(map(copy_item, value))
    else:
        return value
    return copied


class ForeignForwardError(ValueError):
    """A `forward` that was set on a module, and is no method of that module."""


def weightless(module: Module) -> Module:
    """Return a skeleton whose weights have a shape and a dtype, but no memory.

    Raises:
        ForeignForwardError: a module has one.
    """

    def empty(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device="meta")

    copied = _with_weights(module, empty)
    for name, each in copied.named_modules():
        if isinstance(each, PortedModel):  # a `forward` that a user sets on it: no program calls it
            continue
        forward = vars(each).get("forward")
        if forward is not None and getattr(forward, "__self__", None) is not each:
            raise ForeignForwardError(
                f"{name}.forward is a function of its own, and the weights that it holds would be "
                f"compiled in as they are: set types.MethodType(function, {name}), or register a hook"
            )
    return copied


def host_skeleton(module: Module) -> Module:
    """Return a skeleton of a module tree whose weights are plain tensors."""
    return _with_weights(module, to_torch)


def _with_weights(module: Module, make: Callable[[torch.Tensor], torch.Tensor]) -> Module:
    copied = skeleton(module)
    without_torchax(replace_weights, copied, make)
    return copied
