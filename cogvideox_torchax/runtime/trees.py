"""Module trees: what a program depends on, the first change that no kernel knows, and copies to be traced.

A *module tree* is a network with all modules in it; its *root* is the network.

A kernel computes a module together with the modules inside of it, whose weights it reads without calling
them. So it may stand in for them only if each is *stock*: of the class that its library ships (or this
package's class for it), with that class's own methods, and without hooks. Otherwise the forward that
diffusers ships runs instead, and calls the modules inside, each of which is asked the same question. PEFT's
LoRA layers are modules of a library too. They are stock where no kernel stands in for them: in a transformer
and a text encoder, but not on a convolution of the VAE.

A ported class may declare two attributes, which `change_in` reads:

    parts: by the name of a module or a processor inside, which may have dots, the classes that it may have,
        as a kernel stands in for it. Of a list of modules, each has to be of such a class. What is not there
        counts as None.
    unsupported: what its config asks for that no kernel computes, in words; None if there is nothing.

A diffusers attention module has an *attention processor*, the object that computes the attention. It may
have a *state*: attributes that it writes in a call. *Tied* weights are one tensor under several names.
"""

import copy
import functools
import itertools
import operator
import sys
from collections import OrderedDict
from collections.abc import Callable
from types import FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import torch
from torch import nn

from cogvideox_torchax import upstream
from cogvideox_torchax.runtime.bridge import on_accelerator, to_torch
from cogvideox_torchax.runtime.models import UNTRACED_ATTRIBUTES, PortedModel
from cogvideox_torchax.runtime.weights import replaced

Module = TypeVar("Module", bound=nn.Module)

PROCESSOR = "processor"
"""The attribute in which a diffusers attention module keeps its attention processor."""
CONTAINERS = frozenset((dict, OrderedDict, list, set, tuple))
"""The types of containers whose items are copied and compared; not their subclasses."""
LIBRARIES = frozenset(
    {"accelerate", "cogvideox_torchax", "diffusers", "huggingface_hub", "jax", "jaxlib", "peft", "torch"}
    | {"torchax", "transformers"}
)
"""Packages whose objects in a module's attributes count as constant, unless a processor holds them."""
PACKAGES = frozenset({"accelerate", "cogvideox_torchax", "diffusers", "peft", "torch", "transformers"})
"""Packages that define the classes of pipelines and their parts, and decorate each other's methods."""
IGNORED = ("__init__", "reset_parameters", "extra_repr", "from_", "save_", "load_")
"""Beginnings of the names of methods that no forward calls."""
WEIGHTED = (nn.Linear, nn.Conv2d, nn.Conv3d, nn.GroupNorm, nn.LayerNorm)
"""Classes whose weights and biases kernels read."""
TREE = ("_modules", "_parameters", "_buffers")
"""The attributes of a module that hold its children and weights."""
OF_EACH = frozenset(vars(nn.Module()))
"""The attributes of each module, most of which are empty tables of hooks."""
UNREAD = UNTRACED_ATTRIBUTES | {name for name in OF_EACH if "state_dict" in name or "persistent" in name}
"""Attributes that tracing does not read."""


@functools.cache
def has_state(kind: type, in_processor: bool) -> bool:
    """Return whether objects of a class have attributes that a forward may read and write.

    Modules, tensors, classes, functions and containers never count. All other objects count in an attention
    processor (`in_processor`: the value is one, or is in one). Elsewhere those count whose class is the
    user's: the objects of `LIBRARIES` are taken for constant.
    """
    stateless = (nn.Module, torch.Tensor, type, ModuleType, FunctionType, MethodType)
    if not kind.__dictoffset__ or issubclass(kind, stateless) or kind in CONTAINERS:
        return False
    # A class with its own `__reduce_ex__` may keep more than attributes, which a copy would then lack.
    has_only_attributes = kind.__reduce_ex__ is object.__reduce_ex__
    return in_processor or (has_only_attributes and kind.__module__.partition(".")[0] not in LIBRARIES)


@functools.cache
def _is_opaque(kind: type) -> bool:
    """Return whether attributes of this class are compared by identity alone."""
    return not (kind in CONTAINERS or has_state(kind, False) or issubclass(kind, torch.Tensor))


def items_of(value: Any, in_processor: bool = False) -> list[Any] | None:
    """Return what a container holds, or an object with a state: keys, and then values; None for no such."""
    table = vars(value) if has_state(type(value), in_processor) else value
    if isinstance(table, dict) and type(table) in CONTAINERS:
        return [*table.keys(), *table.values()]
    return list(table) if type(table) in CONTAINERS else None


def state_of(value: Any) -> tuple[Any, int]:
    """Return what a write into a tensor changes: the array of one on JAX, the version of a plain one."""
    array = upstream.array_in(value)
    # Tensors made in inference mode have no version.
    has_version = isinstance(value, torch.Tensor) and array is None and not value.is_inference()
    return array, value._version if has_version else 0


class Tree:
    """What one walk over a module tree finds.

    Attributes:
        modules: the modules, each once.
        objects: the objects with a state, and attention processors.
        tensors: the parameters and buffers, a tied one once for each of its names.
        classes: the classes of modules and of their attention processors, and their bases but `nn.Module`'s.
        key: what a program depends on, with a hash: classes and their methods, attributes, hooks, the names
            of weights, and which are tied. Weights themselves do not count, as they are arguments.
        held: the objects that `key` has by their ids. As long as somebody keeps these, no other object has
            such an id. There are neither modules nor weights among them, but for those in an attribute.
    """

    def __init__(self, root: nn.Module):
        try:
            self._walk(root)
        except RuntimeError:  # another thread has added an attribute to a module meanwhile
            self._walk(root)

    def _walk(self, root: nn.Module) -> None:
        # This runs before each call of a network, which may have a thousand modules.
        self.modules, self.held, self.objects = [], [], []
        self._key, self._numbers = [], {}  # the number of what was met, by its id
        key, held, numbers = self._key, self.held, self._numbers
        weights, pending = [], [root]
        while pending:
            module = pending.pop()
            if module is None or id(module) in numbers:
                key.append(numbers.get(id(module)))
                continue
            numbers[id(module)] = len(numbers)
            self.modules.append(module)
            key.append(type(module))
            for name, value in vars(module).items():
                if (name in OF_EACH and not value) or name in UNREAD:
                    continue
                key.append(name)
                if name in TREE:
                    key.append(len(value))
                    key += value
                    (pending if name == "_modules" else weights).extend(value.values())
                elif name != PROCESSOR and _is_opaque(type(value)):
                    key.append(id(value))
                    held.append(value)
                elif type(value) is tuple and {int, str}.issuperset(map(type, value)):
                    key.append(value)
                else:
                    self._add(value, name == PROCESSOR)
        processors = (vars(module)[PROCESSOR] for module in self.modules if PROCESSOR in vars(module))
        kinds = dict.fromkeys(map(type, (*self.modules, *processors)))
        bases = dict.fromkeys(base for kind in kinds for base in kind.__mro__)
        self.classes = [base for base in bases if base not in nn.Module.__mro__]
        for kind in self.classes:
            members = {**vars(kind)}
            members.pop("__slotnames__", None)  # the first copy of an instance adds it
            key += (kind, *members, *map(id, members.values()))
            held += members.values()
        places = dict(zip(map(id, weights), itertools.count(), strict=False))  # the last one of a tied weight
        key += map(places.get, map(id, weights))
        key += map(operator.is_, weights, itertools.repeat(None))
        self.tensors = [weight for weight in weights if weight is not None]
        self.key = tuple(key)

    def _add(self, value: Any, in_processor: bool) -> None:
        """Add to the key a value, and what it holds at any depth."""
        items = items_of(value, in_processor)
        if items is not None and id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._numbers)
            # An object may hold more than its attributes, so that it counts by its identity as well.
            objects = () if type(value) in CONTAINERS else (value,)
            self._key += (type(value), *map(id, objects), len(items))
            self.held += objects
            self.objects += objects
            for item in items:
                self._add(item, in_processor)
        elif items is not None:
            self._key.append(self._numbers[id(value)])
        elif isinstance(value, str | int | float):
            self._key += (type(value), repr(value))
        else:
            array, version = state_of(value)
            self._key += (id(value), id(array), version)
            self.held += (value, array)


# What is stock


def runs_kernel(module: nn.Module, x: torch.Tensor) -> bool:
    """Return whether a ported module runs its kernel on `x`, and not the forward that it inherits."""
    return on_accelerator(x) and change_in(module) is None


def change_in(root: nn.Module) -> str | None:
    """Return the first thing in a module tree that is not stock, in words; None if there is nothing.

    The hooks of the root itself do not count, nor its own `forward`, as the call of the root runs them.
    """
    for name, module in root.named_modules():
        if upstream.is_compiled(module):  # in place of torch.compile's wrapper, what is in it is traced
            continue
        change = (None if module is root else _addition(module)) or _difference(module)
        if change is not None:
            return f"{name or type(root).__name__} {change}"
    return None


def _addition(module: nn.Module) -> str | None:
    """Return what a call of a module runs, or what its class is, beside its forward; None for nothing."""
    if module._forward_hooks or module._forward_pre_hooks:
        return "has a hook"
    if _sets_method(module, "forward"):
        return "has a forward of its own"
    kind = type(module)
    if "parametrizations" not in module._modules and kind.__module__.partition(".")[0] not in PACKAGES:
        return f"is a {kind.__name__} of {kind.__module__}"
    return None


def _sets_method(module: nn.Module, name: str) -> bool:
    """Return whether an attribute of a module hides a method of its class, and is not that method."""
    if name not in vars(module) or not callable(getattr(type(module), name, None)):
        return False
    own = getattr(vars(module)[name], "__func__", vars(module)[name])
    return own is None or not any(vars(base).get(name) is own for base in type(module).__mro__)


def _difference(module: nn.Module) -> str | None:
    """Return in what a module's methods, weights, config or parts differ from what a kernel computes."""
    for name in vars(module):
        if name != "forward" and _sets_method(module, name):
            return f"has a {name} of its own"
    if "parametrizations" in module._modules:
        return "has parametrized weights"
    if isinstance(module, WEIGHTED) and not {"weight", "bias"} <= module._parameters.keys():
        return "has a weight that is no parameter"
    method = replaced_method(type(module))
    if method is not None:
        return f"has another method, {method}"
    for name, kinds in getattr(module, "parts", {}).items():
        part = functools.reduce(lambda part, word: getattr(part, word, None), name.split("."), module)
        for each in part if isinstance(part, nn.ModuleList) else (part,):
            kind = type(upstream.uncompiled(each))
            if kind not in kinds:
                return f"has a {kind.__name__} as its {name}"
            method = replaced_method(kind)
            if method is not None:
                return f"has another method, {method}, in its {name}"
    return getattr(module, "unsupported", None)


def replaced_method(kind: type, *names: str) -> str | None:
    """Return the name of a method that somebody has replaced in, or added to, a class or a base of it.

    Args:
        kind: the class; of its bases `nn.Module` does not count.
        names: the names of the methods that count; without names all count but those of `IGNORED`.
    """
    # A method counts as replaced if the class has another one now than at the first call for `kind`.
    for base, methods in _methods_at_first_call(kind):
        present = _methods_of(base)
        for name in methods.keys() | present.keys():
            counts = name in names if names else not name.startswith(IGNORED)
            if counts and present.get(name) is not methods.get(name, present):
                return name
    return None


def _methods_of(kind: type) -> dict[str, Any]:
    methods = FunctionType | classmethod | staticmethod | property
    return {
        name: member
        for name, member in vars(kind).items()
        if isinstance(member, methods) or (callable(member) and not isinstance(member, type))
    }


@functools.cache
def _methods_at_first_call(kind: type) -> list[tuple[type, dict[str, Any]]]:
    """Return `kind` and its bases but `nn.Module`, if `PACKAGES` define them, each with its methods by name.

    None stands for a method that somebody had replaced before; as no later method is None, it counts as
    replaced.
    """
    return [
        (
            base,
            {
                name: method if _is_original(name, method) else None
                for name, method in _methods_of(base).items()
            },
        )
        for base in kind.__mro__
        if base is not nn.Module and base.__module__.partition(".")[0] in PACKAGES
    ]


def _is_original(name: str, method: Any) -> bool:
    if not isinstance(method, FunctionType):
        return name not in ("forward", "__call__") or isinstance(method, property)
    # A decorator of the standard library, such as `contextlib.contextmanager`, puts a function of its own in
    # the method's place. It counts as the library's, too.
    package = upstream.module_of(method).partition(".")[0]
    return package in PACKAGES or package in sys.stdlib_module_names


# Copies


class UntraceableError(ValueError):
    """A method that no program can run; the message says why."""


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


# In inference mode torch would make parameters that nobody can train.
@torch.inference_mode(False)
def skeleton(root: Module, weight: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Module:
    """Copy a module tree's modules, containers and attention processors; share its other objects.

    Tracing replaces parameters and adds hooks. It does so in the copy, as other threads may be running the
    user's modules. Calls compiled by torch.compile are left out, as they would run the user's modules.

    Args:
        root: the network.
        weight: called with each weight, returns a plain tensor in its place, while torchax is off; None to
            share weights.
    """
    tree = Tree(root)
    copied = {*map(id, tree.modules), *map(id, tree.objects)}
    # By the id of an object, what stands for it in the copy. `deepcopy` copies what is not here: containers,
    # objects with a state, and methods of what is copied.
    copies: dict[int, Any] = {
        id(value): value
        for value in tree.held
        if id(value) not in copied and id(getattr(value, "__self__", None)) not in copied
    }
    weights = {id(tensor): tensor for tensor in tree.tensors}
    copies |= {key: replaced(tensor, weight) for key, tensor in weights.items()} if weight else weights
    for module in tree.modules:
        is_wrapper = upstream.is_compiled(module)
        copies[id(module)] = _Uncompiled() if is_wrapper else object.__new__(type(module))
    for module in tree.modules:
        attributes = {"_modules": module._modules} if upstream.is_compiled(module) else vars(module).copy()
        for name in attributes.keys() - UNTRACED_ATTRIBUTES:
            value = attributes[name]
            vars(copies[id(module)])[name] = value if name in UNREAD else copy.deepcopy(value, copies)
    return copies[id(root)]


def weightless(module: Module) -> Module:
    """Return a skeleton whose weights have a shape and a dtype, but no memory.

    Raises:
        UntraceableError: somebody has set a module's `forward` to a function that is not bound to the
            module. It may hold weights of its own, which a program would have as constants.
    """

    def empty(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device="meta")

    copied = skeleton(module, empty)
    for name, submodule in copied.named_modules():
        if isinstance(submodule, PortedModel):  # programs call its class's `forward`, not one that is set
            continue
        forward = vars(submodule).get("forward")
        if forward is not None and getattr(forward, "__self__", None) is not submodule:
            raise UntraceableError(
                f"{name}.forward is a function of its own, and the weights that it holds would be "
                f"compiled in as they are: set types.MethodType(function, {name}), or register a hook"
            )
    return copied


def host_skeleton(module: Module) -> Module:
    """Return a skeleton of a module tree whose weights are plain tensors."""
    return skeleton(module, to_torch)
