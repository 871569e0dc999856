"""Is a module what its library ships? The one question that decides whether its kernel runs.

A kernel computes a module together with the modules inside of it, whose weights it reads without calling
them. So it may stand in for them only if each is *stock*: of the class that its library ships (or this
package's class for it), with that class's own methods, and without hooks. Otherwise the forward that
diffusers ships runs instead, and calls the modules inside, each of which is asked the same question. PEFT's
LoRA layers are modules of a library too, and where a kernel reads no weight of them they are stock.

A ported class may declare two attributes, which `change_in` reads:

    parts: by the name of a module or a processor inside, which may have dots, the classes that it may have,
        as a kernel stands in for it. Of a list of modules, each has to be of such a class.
    unsupported: what its config asks for that no kernel computes, in words; None if there is nothing.
"""

import functools
import operator
import sys
from types import FunctionType
from typing import Any

import torch
from torch import nn

from cogvideox_torchax import upstream
from cogvideox_torchax.runtime.bridge import on_accelerator

LIBRARIES = frozenset({"accelerate", "diffusers", "peft", "torch", "transformers"})
"""Packages that define the classes of pipelines and their parts, and decorate each other's methods."""


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
    """Return what somebody has set on a module or made of its class; None for nothing."""
    if module._forward_hooks or module._forward_pre_hooks:
        return "has a hook"
    if "forward" in vars(module):
        return "has a forward of its own"
    if "parametrizations" in module._modules:
        return "has parametrized weights"
    kind = type(module)
    if kind.__module__.partition(".")[0] not in LIBRARIES | {__name__.partition(".")[0]}:
        return f"is a {kind.__name__} of {kind.__module__}"
    return None


def _difference(module: nn.Module) -> str | None:
    """Return in what a module's class, config or parts differ from those that a kernel computes."""
    method = replaced_method(type(module))
    if method is not None:
        return f"has another method, {method}"
    for name, kinds in getattr(module, "parts", {}).items():
        part = operator.attrgetter(name)(module)
        for each in part if isinstance(part, nn.ModuleList) else (part,):
            if type(each) not in kinds:
                return f"has a {type(each).__name__} as its {name}"
            method = replaced_method(type(each))
            if method is not None:
                return f"has another method, {method}, in its {name}"
    return getattr(module, "unsupported", None)


def replaced_method(kind: type, *names: str) -> str | None:
    """Return the name of a method that somebody has replaced in a library's class or in a base of it.

    Args:
        kind: the class, or this package's subclass of it; methods that the subclass defines do not count.
        names: the names of the methods that count; without names all methods count.
    """
    # A method counts as replaced if the class has another one now than at the first call for `kind`.
    for base, methods in _methods_at_first_call(kind):
        present = vars(base)
        for name, method in methods.items():
            if present.get(name) is not method and (not names or name in names):
                return name
    return None


@functools.cache
def _methods_at_first_call(kind: type) -> list[tuple[type, dict[str, Any]]]:
    """Return `kind` and its bases but `nn.Module`, if `LIBRARIES` define them, each with its methods by name.

    None stands for a method that somebody had replaced before; as no later method is None, it counts as
    replaced.
    """
    return [
        (
            base,
            {
                name: method if _is_original(method) else None
                for name, method in vars(base).items()
                if isinstance(method, FunctionType)
            },
        )
        for base in kind.__mro__
        if base is not nn.Module and base.__module__.partition(".")[0] in LIBRARIES
    ]


def _is_original(method: FunctionType) -> bool:
    # A decorator of the standard library, such as `contextlib.contextmanager`, puts a function of its own in
    # the method's place. It counts as the library's, too.
    package = upstream.module_of(method).partition(".")[0]
    return package in LIBRARIES or package in sys.stdlib_module_names
