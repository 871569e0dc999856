"""Skeletons: copies of a user's module tree with the same parameters, which are traced in its place.

A diffusers attention module has an *attention processor*, the object that computes the attention. It may
have a *state*: attributes that it writes in a call. The *untraced attributes* of a module are those that
tracing does not read: compiled programs, torch.compile's call, and the state of diffusers' caches.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable
from types import FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import torch
from torch import nn

from cogvideox_torchax import upstream
from cogvideox_torchax.runtime.bridge import to_torch
from cogvideox_torchax.runtime.models import UNTRACED_ATTRIBUTES, PortedModel
from cogvideox_torchax.runtime.weights import replace_weights

Module = TypeVar("Module", bound=nn.Module)

PROCESSOR = "processor"
"""The attribute in which a diffusers attention module keeps its attention processor."""

CONTAINERS = (dict, OrderedDict, list, set, tuple)
"""The types of containers whose items are copied and compared; not their subclasses."""


def skeleton(module: Module) -> Module:
    """Copy a module tree's modules, containers and attention processors; share its weights and other objects.

    Tracing replaces parameters and adds hooks. It does so in the copy, as other threads may be running the
    user's modules. Calls compiled by torch.compile are left out, as they would run the user's modules.
    """
    return _copy_module(module, {})


class _Uncompiled(nn.Module):
    """A stand-in for torch.compile's wrapper that runs the wrapped module, for XLA to compile.

    It has the wrapper's name for the module, `_orig_mod`, so that the names of weights stay the same. Like
    the wrapper, it passes other attributes on to the module.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._orig_mod(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # `self._orig_mod` would call this method again, without end, as long as it is not set.
            return getattr(super().__getattr__("_orig_mod"), name)


def _copy_module(module: Module, copies: dict[int, Any]) -> Module:
    """Copy a module and its children, around the same weights; `copies` has the copies made so far, by id."""
    if id(module) in copies:
        return copies[id(module)]
    if upstream.is_compiled(module):
        # In place of torch.compile's wrapper: a module that runs the copy of the module in the wrapper.
        copies[id(module)] = wrapper = _Uncompiled()
        wrapper.add_module("_orig_mod", _copy_module(module.get_submodule("_orig_mod"), copies))
        return copies[id(module)]
    # `copies` gets a copy before the children are copied, as a child may refer to its parent.
    copied = copies[id(module)] = object.__new__(type(module))
    attributes = {
        name: _copy_value(value, copies, in_processor=name == PROCESSOR)
        for name, value in vars(module).copy().items()  # a copy: another thread may add an attribute
        if name not in UNTRACED_ATTRIBUTES
    }
    # A forward that is set on the instance is bound to the original, and must run the copy.
    forward = attributes.get("forward")
    if isinstance(forward, MethodType) and forward.__self__ is module:
        attributes["forward"] = MethodType(forward.__func__, copied)
    attributes["_modules"] = {
        name: None if child is None else _copy_module(child, copies)
        for name, child in module._modules.items()
    }
    vars(copied).update(attributes)
    return copied


LIBRARIES = frozenset(
    {"accelerate", "cogvideox_torchax", "diffusers", "huggingface_hub", "jax", "jaxlib", "peft", "torch"}
    | {"torchax", "transformers"}
)
"""Packages whose objects in a module's attributes count as constant, unless a processor holds them."""


def has_state(value: Any, in_processor: bool) -> bool:
    """Return whether a value is an object with attributes that a forward may read and write.

    Modules, tensors, classes, functions and containers never count. All other objects count in an attention
    processor (`in_processor`: the value is one, or is in one). Elsewhere those count whose class is the
    user's: the objects of `LIBRARIES` are taken for constant.
    """
    stateless = nn.Module | torch.Tensor | type | ModuleType | FunctionType | MethodType
    if not hasattr(value, "__dict__") or isinstance(value, stateless) or type(value) in CONTAINERS:
        return False
    package = type(value).__module__.partition(".")[0]
    # A class with its own `__reduce_ex__` may keep more than attributes, which a copy would then lack.
    has_only_attributes = type(value).__reduce_ex__ is object.__reduce_ex__
    return in_processor or (has_only_attributes and package not in LIBRARIES)


def _copy_value(value: Any, copies: dict[int, Any], in_processor: bool) -> Any:
    """Copy a container, at any depth, or an object that has a state, with each object that it holds.

    Any other value is returned as it is. `copies` has the copies made so far, by the ids of their originals;
    `in_processor` is whether `value` is an attention processor or in one.
    """
    if id(value) in copies:
        return copies[id(value)]

    def copy_item(item: Any) -> Any:
        return _copy_value(item, copies, in_processor)

    if has_state(value, in_processor):
        # Here, and for dictionaries and lists, `copies` gets the copy before its items are copied: an item
        # may refer to the object that holds it. Tuples can be made only after their items.
        copies[id(value)] = copied = copy.copy(value)
        vars(copied).update({name: copy_item(item) for name, item in vars(value).items()})
    elif type(value) in (dict, OrderedDict):
        copies[id(value)] = copied = type(value)()
        copied.update((name, copy_item(item)) for name, item in value.items())
    elif type(value) is list:
        copies[id(value)] = copied = []
        copied.extend(map(copy_item, value))
    elif type(value) in CONTAINERS:
        copies[id(value)] = copied = type(value)(map(copy_item, value))
    else:
        return value
    return copied


class ForeignForwardError(ValueError):
    """A function that was set as a module's `forward`, and is no method bound to that module."""


def weightless(module: Module) -> Module:
    """Return a skeleton whose weights have a shape and a dtype, but no memory.

    Raises:
        ForeignForwardError: somebody has set a module's `forward` to a function that is not bound to the
            module. It may hold weights of its own, which a program would have as constants.
    """

    def empty(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device="meta")

    copied = _with_weights(module, empty)
    for name, submodule in copied.named_modules():
        if isinstance(submodule, PortedModel):  # programs call its class's `forward`, not one that is set
            continue
        forward = vars(submodule).get("forward")
        if forward is not None and getattr(forward, "__self__", None) is not submodule:
            raise ForeignForwardError(
                f"{name}.forward is a function of its own, and the weights that it holds would be "
                f"compiled in as they are: set types.MethodType(function, {name}), or register a hook"
            )
    return copied


def host_skeleton(module: Module) -> Module:
    """Return a skeleton of a module tree whose weights are plain tensors."""
    return _with_weights(module, to_torch)


def _with_weights(module: Module, make: Callable[[torch.Tensor], torch.Tensor]) -> Module:
    """Return a skeleton of a module tree, in which `make(weight)` replaces each weight."""
    copied = skeleton(module)
    replace_weights(copied, make)
    return copied
