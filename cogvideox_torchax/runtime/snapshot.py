"""Snapshots of the module trees that programs were traced from; a changed tree gets another program."""

import itertools
import operator
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from cogvideox_torchax.runtime.models import UNTRACED_ATTRIBUTES
from cogvideox_torchax.runtime.skeleton import CONTAINERS, PROCESSOR, has_state

TREE = frozenset({"_modules", "_parameters", "_buffers"})
"""Attributes of a module that hold its children and weights."""


class Snapshot:
    """The properties of a module tree that tracing depends on: modules, attributes, hooks, names of weights.

    Weights' values are excluded: they are arguments of a program. Modules and weights are referenced weakly;
    attributes and hooks, and the objects they refer to, are kept alive. Methods are included, as somebody may
    replace a class's method.
    """

    def __init__(self, root: nn.Module):
        modules = modules_of(root)
        self._modules = [_ModuleSnapshot(module) for module in modules]
        # A pair (container, its present items) for each container in the modules' attributes.
        contents = _contents(recorded.attributes for recorded in self._modules)
        # Most containers are empty dictionaries of hooks. `holds`, which runs before each call, checks empty
        # containers faster than those with items.
        self._empty = [container for container, items in contents if not items]
        self._contents = [(container, items) for container, items in contents if items]
        self._weights = _weight_pattern(modules)  # names of weights, and which are tied
        attributes = [vars(module) for module in modules]
        self._sizes = [*map(len, attributes)]
        self._kinds = [*map(type, modules)]
        self._structure = _structure(attributes)
        self._weight_ids = _weight_ids(attributes)
        # The traced attributes of all modules but the root. Those in `TREE` are left out, as a reference to
        # one of these dictionaries would keep its weights alive.
        left_out = TREE | UNTRACED_ATTRIBUTES
        self._selected = [name not in left_out for table in attributes[1:] for name in table]
        self._values = list(self._values_of(attributes))
        self._classes = [(kind, list(vars(kind).values())) for kind in _classes(self._modules)]
        # Plain tensors that are neither weights nor buffers, with the numbers of writes into them.
        values = (value for recorded in self._modules for value in recorded.attributes.values())
        self._plain = [
            (value, value._version)
            for value in values
            if type(value) is torch.Tensor and not value.is_inference()  # those do not count writes
        ]

    def holds(self, root: nn.Module) -> bool:
        """Return whether a tree is unchanged; its root may be another module with the same attributes."""
        return (
            self._has_modules_of(root)
            # Containers that were empty are empty, and others have the items that they had.
            and not any(self._empty)
            and all(_same_items(_items(container), items) for container, items in self._contents)
            and all(
                len(vars(kind)) == len(members) and all(map(operator.is_, vars(kind).values(), members))
                for kind, members in self._classes
            )
            and all(tensor._version == version for tensor, version in self._plain)
        )

    def _has_modules_of(self, root: nn.Module) -> bool:
        """Return whether a tree has the recorded modules, each with its attributes and names of weights."""
        first, *others = self._modules
        if not first.is_unchanged(root):
            return False
        # In a tree of a thousand modules the whole lists are compared ten times as fast as the modules.
        modules = [root, *(recorded.module() for recorded in others)]
        if None in modules:
            return False
        attributes = [vars(module) for module in modules]
        is_identical = (
            self._kinds == [*map(type, modules)]
            and self._sizes[1:] == [*map(len, attributes[1:])]
            and self._structure == _structure(attributes)
            and all(map(operator.is_, self._values, self._values_of(attributes)))
        )
        weight_ids = _weight_ids(attributes)
        if not is_identical:
            modules = modules_of(root)
            # Modules are the same objects, except for the root.
            if len(modules) != len(self._modules) or not all(
                recorded.module() is module and recorded.is_unchanged(module)
                for recorded, module in zip(others, modules[1:], strict=True)
            ):
                return False
        elif weight_ids == self._weight_ids:
            return True
        if self._weights != _weight_pattern(modules):  # names of weights, and which are tied
            return False
        self._weight_ids = weight_ids
        return True

    def _values_of(self, attributes: Sequence[dict[str, Any]]) -> Iterator[Any]:
        """Yield the values of the modules' selected attributes, of all modules but the first."""
        return itertools.compress(
            itertools.chain.from_iterable(map(dict.values, attributes[1:])), self._selected
        )


def _structure(attributes: Sequence[dict[str, Any]]) -> list[Any]:
    """Return the names of modules' children and weights, and the children's ids, with their numbers."""
    tables = [table[name] for table in attributes for name in ("_modules", "_parameters", "_buffers")]
    children = [table["_modules"] for table in attributes if table["_modules"]]
    names = itertools.chain.from_iterable(filter(None, tables))
    return [*map(len, tables), *names, *map(id, itertools.chain.from_iterable(map(dict.values, children)))]


def _weight_ids(attributes: Sequence[dict[str, Any]]) -> list[int]:
    """Return the ids of modules' weights; equal ids prove that the same ones are tied."""
    tables = [table[name] for table in attributes for name in ("_parameters", "_buffers") if table[name]]
    return [*map(id, itertools.chain.from_iterable(map(dict.values, tables)))]


class _ModuleSnapshot:
    """The snapshot of one module."""

    def __init__(self, module: nn.Module):
        self.module = weakref.ref(module)
        self.kind = type(module)
        self.attributes = {
            name: value
            for name, value in vars(module).copy().items()
            if name not in TREE and name not in UNTRACED_ATTRIBUTES
        }
        # Only ids are kept: the dictionaries of weights would keep the weights alive.
        self._ids = tuple(map(id, vars(module).values()))

    def is_unchanged(self, module: nn.Module) -> bool:
        """Return whether a module has the recorded type and attributes."""
        if type(module) is not self.kind:
            return False
        attributes = vars(module)
        # Equal ids of all attributes prove it quickly; other ids prove nothing, as containers may be equal.
        if tuple(map(id, attributes.values())) == self._ids:
            return True
        # Not recorded: `TREE` (children and weights), and untraced attributes, which may be set or deleted.
        untraced = attributes.keys() & UNTRACED_ATTRIBUTES
        if len(attributes) - len(TREE) - len(untraced) != len(self.attributes):
            return False
        for name, value in self.attributes.items():
            found = attributes.get(name, self)  # `self` is no module's attribute: it stands for a missing one
            if found is value:
                continue
            # Another object is a change, unless it is a container with the same items.
            same_container = type(found) is type(value) and type(value) in CONTAINERS
            if not (same_container and _same_items(_items(found), _items(value))):
                return False
        return True


def _classes(modules: Iterable[_ModuleSnapshot]) -> set[type]:
    """Return the classes of recorded modules and attention processors, and the classes they inherit from."""
    kinds = {type(each.attributes[PROCESSOR]) for each in modules if PROCESSOR in each.attributes}
    kinds |= {each.kind for each in modules}
    return {base for kind in kinds for base in kind.__mro__} - {*nn.Module.__mro__}


def _contents(modules: Iterable[dict[str, Any]]) -> list[tuple[Any, list[Any]]]:
    """Return (container, its items now) of every container in modules' attributes, at any depth.

    The dictionary of attributes of an attention processor, and of each object that it holds, is a container
    too.
    """
    found: dict[int, tuple[Any, list[Any]]] = {}  # by a container's id
    for attributes in modules:
        # Values to visit, each with whether it is an attention processor or in one.
        pending = [(value, name == PROCESSOR) for name, value in attributes.items()]
        while pending:
            value, of_processor = pending.pop()
            container = vars(value) if has_state(value, of_processor) else value
            if type(container) in CONTAINERS and id(container) not in found:
                items = _items(container)
                found[id(container)] = container, items
                pending.extend((item, of_processor) for item in items)
    return list(found.values())


def _items(container: Any) -> list[Any]:
    """Return a list of a container's items (a dictionary's keys and values); [object] for another object."""
    if isinstance(container, dict):
        return [*container.keys(), *container.values()]
    return list(container) if isinstance(container, list | set | tuple) else [container]


def _same_items(items: list[Any], others: list[Any]) -> bool:
    """Return whether two lists hold the same objects, or equal strings, numbers or containers of one type."""

    def is_same(a: Any, b: Any) -> bool:
        """Return whether two items are the same object, or equal."""
        if a is b or type(a) is not type(b):
            return a is b
        if type(b) in CONTAINERS:
            return _same_items(_items(a), _items(b))
        return isinstance(b, str | int | float) and a == b

    return len(items) == len(others) and all(map(is_same, items, others))


def modules_of(root: nn.Module) -> list[nn.Module]:
    """Return the modules of a tree, each once, parents first."""
    found: dict[int, nn.Module] = {}  # by id
    pending: list[nn.Module | None] = [root]
    while pending:
        module = pending.pop()
        if module is None or id(module) in found:
            continue
        found[id(module)] = module
        if module._modules:
            pending.extend(module._modules.values())
    return list(found.values())


def _weight_pattern(modules: Iterable[nn.Module]) -> list[Any]:
    """Return one flat list: for each module its children's names, then (name, number) of each weight.

    Tensors are numbered by first appearance, so that tied weights have one number; the number is None for a
    weight that is None.
    """
    numbers: dict[int, int] = {}  # by a tensor's id
    pattern: list[Any] = []
    for module in modules:
        pattern.extend(module._modules)
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                number = None if tensor is None else numbers.setdefault(id(tensor), len(numbers))
                pattern.append((name, number))
    return pattern
