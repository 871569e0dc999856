"""What a program was traced from, so that it is not run for anything else."""

import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from cogvideox_torchax.runtime.models import MADE_OF_IT
from cogvideox_torchax.runtime.skeleton import PROCESSOR

TREE = frozenset({"_modules", "_parameters", "_buffers"})
CONTAINERS = (dict, OrderedDict, list, set)


class Snapshot:
    """What tracing a module tree depends on: its modules, their attributes and hooks, its weights' names.

    The values of the weights are not part of it: they are arguments of a program. It keeps neither module nor
    weight alive, but attributes and hooks are kept, and what these refer to.
    """

    def __init__(self, root: nn.Module):
        self._modules = [_Seen(module) for module in _tree(root)]
        self._weights = _weight_pattern(_tree(root))

    def holds(self, root: nn.Module) -> bool:
        """Whether a tree is still what it was; its root may be another module with the same attributes."""
        modules = list(_tree(root))
        return (
            len(modules) == len(self._modules)
            and all(seen.is_still(module) for seen, module in zip(self._modules, modules, strict=True))
            and all(
                seen.module() is module for seen, module in zip(self._modules[1:], modules[1:], strict=True)
            )
            and self._weights == _weight_pattern(modules)
        )


class _Seen:
    """One module, as it was."""

    def __init__(self, module: nn.Module):
        self.module = weakref.ref(module)
        self._type = type(module)
        self._attributes = {
            name: value
            for name, value in vars(module).copy().items()
            if name not in TREE and name not in MADE_OF_IT
        }
        held = [value for value in self._attributes.values() if type(value) in CONTAINERS]
        if hasattr(self._attributes.get(PROCESSOR), "__dict__"):
            held.append(vars(self._attributes[PROCESSOR]))
        self._contents = [(container, _items(container)) for container in held]

    def is_still(self, module: nn.Module) -> bool:
        attributes = vars(module)
        made = len(attributes.keys() & MADE_OF_IT)
        if type(module) is not self._type or len(attributes) != len(self._attributes) + len(TREE) + made:
            return False
        for name, value in self._attributes.items():
            found = attributes.get(name, self)
            if found is not value and not (type(value) in CONTAINERS and _same(_items(found), _items(value))):
                return False
        # Most are hooks that nobody has registered: this is asked before every call.
        return all(
            not (container or items) or _same(_items(container), items) for container, items in self._contents
        )


def _items(container: Any) -> list[Any]:
    if isinstance(container, dict):
        return [*container.keys(), *container.values()]
    return list(container) if isinstance(container, list | set) else [container]


def _same(found: list[Any], before: list[Any]) -> bool:
    return len(found) == len(before) and all(
        a is b or (isinstance(b, str | int | float) and a == b) for a, b in zip(found, before, strict=True)
    )


def _tree(root: nn.Module) -> Iterator[nn.Module]:
    """The modules of a tree, each once, parents first."""
    done: set[int] = set()
    waiting = [root]
    while waiting:
        module = waiting.pop()
        if id(module) not in done:
            done.add(id(module))
            yield module
            waiting.extend(child for child in module._modules.values() if child is not None)


def _weight_pattern(modules: Iterable[nn.Module]) -> list[Any]:
    """Names and places of the weights: which there are, and which are one tensor under two names."""
    first: dict[int, int] = {}
    pattern: list[Any] = []
    for module in modules:
        pattern.extend(module._modules)
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                pattern.append((name, tensor if tensor is None else first.setdefault(id(tensor), len(first))))
    return pattern
