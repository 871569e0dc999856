"""Is a module what its library ships? The one question that decides whether its kernel runs.

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
"""

import functools
import sys
from types import FunctionType
from typing import Any

import torch
from torch import nn

from cogvideox_torchax import upstream
from cogvideox_torchax.runtime.bridge import on_accelerator

PACKAGES = frozenset({"accelerate", "cogvideox_torchax", "diffusers", "peft", "torch", "transformers"})
"""Packages that define the classes of pipelines and their parts, and decorate each other's methods."""
IGNORED = ("__init__", "reset_parameters", "extra_repr", "from_", "save_", "load_")
"""Beginnings of the names of methods that no forward calls."""
WEIGHTED = (nn.Linear, nn.Conv2d, nn.Conv3d, nn.GroupNorm, nn.LayerNorm)
"""Classes whose weights and biases kernels read."""


def runs_kernel(module: nn.Module, x: torch.Tensor) -> bool:
    """Return whether a ported module runs its kernel on `x`, and not the forward that it inherits."""
    return on_accelerator(x) and change_in(module) is None


def change_in(root: nn.Module) -> str | None:
    """Return the first thing in a module that is not stock, in words; None if there is nothing.

    The hooks of `root` itself do not count, nor its own `forward`, as the call of `root` runs them.
    """
    for name, module in root.named_modules():
        if upstream.is_compiled(module):  # torch.compile's wrapper, in whose place the module in it is traced
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
