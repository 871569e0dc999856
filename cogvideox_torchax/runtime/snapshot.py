"""Snapshots of the module trees that programs were traced from; a changed tree gets another program.

A module tree is a network with all modules in it; its root is the network. A snapshot is compared before each
call of a network, which may have a thousand modules. So whole lists are compared first, which is fast, and
single modules only if the lists differ.

*Tied* weights are one tensor under several names. The terms *attention processor*, *state* and *untraced
attributes* are those of `runtime.skeleton`: a processor is the object that computes a module's attention, and
untraced attributes, such as compiled programs, are not read by tracing.
"""

import inspect
import itertools
import operator
import weakref
from collections.abc import Iterable, Iterator, Sequence
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from cogvideox_torchax import upstream
from cogvideox_torchax.runtime.models import UNTRACED_ATTRIBUTES
from cogvideox_torchax.runtime.skeleton import CONTAINERS, LIBRARIES, PROCESSOR, has_state

TREE = frozenset({"_modules", "_parameters", "_buffers"})
"""Attributes of a module that hold its children and weights."""


class Snapshot:
    """The properties of a module tree that tracing depends on: modules, attributes, hooks, names of weights.

    The values of weights are excluded, as weights are arguments of a program. The methods of classes are
    included, as somebody may replace one, and so are the global variables that a user's functions read. A
    snapshot keeps attributes, hooks, and the objects they refer to alive, but neither modules nor weights.
    """

    def __init__(self, root: nn.Module):
        modules = modules_of(root)
        # What the slow way of `_has_modules_of` compares, module by module.
        self._modules = [_ModuleSnapshot(module) for module in modules]
        # A pair (container, its present items) for each container in the modules' attributes.
        contents = _contents(recorded.attributes for recorded in self._modules)
        # Most containers are empty dictionaries of hooks. `holds`, which runs before each call, checks empty
        # containers faster than those with items.
        self._empty = [container for container, items in contents if not items]
        self._contents = [(container, items) for container, items in contents if items]
        self._weights = weight_pattern(modules)  # names of weights, and which are tied
        # What the fast way of `_has_modules_of` compares: flat lists of all modules' attributes.
        attributes = [vars(module) for module in modules]
        self._attribute_counts = [*map(len, attributes[1:])]  # of all modules but the root
        self._module_classes = [*map(type, modules)]
        self._structure = _structure(attributes)
        self._weight_ids = _weight_ids(attributes)
        # For each attribute of all modules but the root, whether tracing reads it, and then the values of
        # those that it reads. The dictionaries in `TREE` are left out, as a reference to one would keep its
        # weights alive. The root is left out, as `holds` accepts another root with the same attributes.
        left_out = TREE | UNTRACED_ATTRIBUTES
        self._is_traced = [name not in left_out for table in attributes[1:] for name in table]
        self._traced_values = list(self._select_traced(attributes))
        # What `holds` compares beside modules and containers: each class with its members (methods and class
        # attributes) in their order.
        self._classes = [(kind, list(vars(kind).values())) for kind in _classes(self._modules)]
        # Also compared: tensors among the attributes that are neither weights nor buffers, each with torch's
        # count of the writes into it. Tensors made in inference mode have no count.
        values = (value for recorded in self._modules for value in recorded.attributes.values())
        self._tensor_versions = [
            (value, value._version)
            for value in values
            if type(value) is torch.Tensor and not value.is_inference()
        ]
        # Also compared: what a user's functions read outside of themselves.
        self._functions = _users_functions(
            itertools.chain(
                *(each.attributes.values() for each in self._modules),
                *(items for _container, items in contents),
                *(members for _kind, members in self._classes),
            )
        )
        self._read = [*map(comparable, read_by(self._functions))]

    def holds(self, root: nn.Module) -> bool:
        """Return whether a tree is unchanged; its root may be another module with the same attributes."""
        return (
            self._has_modules_of(root)
            # Containers that were empty are still empty, and all others have the items that they had.
            and not any(self._empty)
            and all(_same_items(_items(container), items) for container, items in self._contents)
            and all(
                len(vars(kind)) == len(members) and all(map(operator.is_, vars(kind).values(), members))
                for kind, members in self._classes
            )
            and all(tensor._version == version for tensor, version in self._tensor_versions)
            and _same_items([*map(comparable, read_by(self._functions))], self._read)
        )

    def _has_modules_of(self, root: nn.Module) -> bool:
        """Return whether a tree has the recorded modules, each with its attributes and names of weights."""
        # The root is compared alone, as it may be another module. All others must be the recorded ones.
        recorded_root, *recorded_others = self._modules
        if not recorded_root.is_unchanged(root):
            return False
        # The fast way: compare whole lists, in a thousand modules ten times as fast as module by module. The
        # lists are of the recorded modules; an equal structure proves that the tree has these very modules.
        modules = [root, *(recorded.module() for recorded in recorded_others)]
        if None in modules:  # a recorded module was freed
            return False
        attributes = [vars(module) for module in modules]
        is_identical = (
            self._module_classes == [*map(type, modules)]
            and self._attribute_counts == [*map(len, attributes[1:])]
            and self._structure == _structure(attributes)
            and all(map(operator.is_, self._traced_values, self._select_traced(attributes)))
        )
        weight_ids = _weight_ids(attributes)
        if is_identical and weight_ids == self._weight_ids:
            return True
        if not is_identical:
            # The slow way, module by module. It lets changes pass that do not count: a container that an
            # equal one has replaced, or attributes in another order.
            modules = modules_of(root)
            if len(modules) != len(self._modules) or not all(
                recorded.module() is module and recorded.is_unchanged(module)
                for recorded, module in zip(recorded_others, modules[1:], strict=True)
            ):
                return False
        # Weights may be other objects: only their names count, and which of them are tied.
        if self._weights != weight_pattern(modules):
            return False
        self._weight_ids = weight_ids  # the next call with these weights need not look at their names
        return True

    def _select_traced(self, attributes: Sequence[dict[str, Any]]) -> Iterator[Any]:
        """Yield the values of the traced attributes of all modules but the root, which is the first."""
        return itertools.compress(
            itertools.chain.from_iterable(map(dict.values, attributes[1:])), self._is_traced
        )


def _structure(attributes: Sequence[dict[str, Any]]) -> list[Any]:
    """Return one flat list that tells how modules, with these attributes, hang together.

    It has for each module how many children, parameters and buffers it has, then the names of all of these,
    and then the ids of the children.
    """
    tables = [table[name] for table in attributes for name in ("_modules", "_parameters", "_buffers")]
    children = [table["_modules"] for table in attributes if table["_modules"]]
    names = itertools.chain.from_iterable(filter(None, tables))
    return [*map(len, tables), *names, *map(id, itertools.chain.from_iterable(map(dict.values, children)))]


def _weight_ids(attributes: Sequence[dict[str, Any]]) -> list[int]:
    """Return the ids of modules' weights; equal lists of ids prove that the same weights are tied."""
    tables = [table[name] for table in attributes for name in ("_parameters", "_buffers") if table[name]]
    return [*map(id, itertools.chain.from_iterable(map(dict.values, tables)))]


class _ModuleSnapshot:
    """The snapshot of one module: a weak reference, its class, and its traced attributes but for `TREE`."""

    def __init__(self, module: nn.Module):
        self.module = weakref.ref(module)
        self.kind = type(module)
        # Without `TREE`, the dictionaries of the module's children, parameters and buffers.
        self.attributes = {
            name: value
            for name, value in vars(module).copy().items()
            if name not in TREE and name not in UNTRACED_ATTRIBUTES
        }
        # Of all attributes the ids alone: references to the dictionaries of weights would keep these alive.
        self._ids = tuple(map(id, vars(module).values()))

    def is_unchanged(self, module: nn.Module) -> bool:
        """Return whether a module has the recorded type and attributes."""
        if type(module) is not self.kind:
            return False
        attributes = vars(module)
        # Equal ids prove quickly that nothing has changed; other ids do not prove a change, as an equal
        # container is none.
        if tuple(map(id, attributes.values())) == self._ids:
            return True
        # Not recorded: `TREE` (children and weights), and untraced attributes, which may be set or deleted.
        untraced = attributes.keys() & UNTRACED_ATTRIBUTES
        if len(attributes) - len(TREE) - len(untraced) != len(self.attributes):
            return False
        for name, value in self.attributes.items():
            value_now = attributes.get(name, self)  # `self`, which no attribute is, stands for a missing one
            if value_now is value:
                continue
            # Another object is a change, unless it is a container with the same items.
            same_container = type(value_now) is type(value) and type(value) in CONTAINERS
            if not (same_container and _same_items(_items(value_now), _items(value))):
                return False
        return True


def _classes(modules: Iterable[_ModuleSnapshot]) -> set[type]:
    """Return the classes of recorded modules and attention processors, and their bases but `nn.Module`'s."""
    kinds = {type(each.attributes[PROCESSOR]) for each in modules if PROCESSOR in each.attributes}
    kinds |= {each.kind for each in modules}
    classes = {base for kind in kinds for base in kind.__mro__} - {*nn.Module.__mro__}
    # The first copy of an instance adds a name to its class. If it is there already, a copy is no change.
    for kind in classes:
        upstream.add_slot_names(kind)
    return classes


def _contents(attributes_of_modules: Iterable[dict[str, Any]]) -> list[tuple[Any, list[Any]]]:
    """Return (container, its items now) of every container in modules' attributes, at any depth.

    The attributes of an object that has a state (`has_state`), such as an attention processor, are a
    container too.
    """
    contents: dict[int, tuple[Any, list[Any]]] = {}  # by a container's id
    for attributes in attributes_of_modules:
        # Values to visit, each with whether it is an attention processor or in one.
        pending = [(value, name == PROCESSOR) for name, value in attributes.items()]
        while pending:
            value, in_processor = pending.pop()
            container = vars(value) if has_state(value, in_processor) else value
            if type(container) in CONTAINERS and id(container) not in contents:
                items = _items(container)
                contents[id(container)] = container, items
                pending.extend((item, in_processor) for item in items)
    return list(contents.values())


def _items(container: Any) -> list[Any]:
    """Return a container's items, of a dictionary its keys and then its values; [value] for another value."""
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


def _users_functions(members: Iterable[Any]) -> list[Any]:
    """Return the functions of a user among members of classes and modules, and those that they read."""
    found: Iterator[Any] = (
        inspect.unwrap(getattr(each, "__func__", each))  # pyright: ignore[reportArgumentType]
        for each in members
        if isinstance(each, FunctionType | MethodType | staticmethod | classmethod)
    )
    functions = [*dict.fromkeys(filter(_is_users, found))]
    for function in functions:  # which grows meanwhile
        functions.extend(each for each in read_by([function]) if _is_users(each) and each not in functions)
    return functions


def _is_users(value: Any) -> bool:
    """Return whether a value is a function that none of `LIBRARIES` defines."""
    return (
        type(value) is FunctionType
        and value.__globals__.get("__name__", "").partition(".")[0] not in LIBRARIES
    )


def read_by(functions: Iterable[FunctionType]) -> list[Any]:
    """Return the values of the global variables that functions read, and of attributes of modules there."""
    return [
        table[name]
        for function in functions
        for code in (function.__code__, *function.__code__.co_consts)  # the constants have inner functions
        if isinstance(code, CodeType)
        for read in [[*map(function.__globals__.get, code.co_names)]]
        for table in (function.__globals__, *(vars(each) for each in read if isinstance(each, ModuleType)))
        for name in code.co_names
        if name in table
    ]


def comparable(value: Any) -> list[Any]:
    """Return what `_same_items` compares of a global variable: numbers, strings, flags, and tensors' state.

    The list is empty for another value, and for a container of others: a forward may keep tensors there from
    one call for the next.
    """
    is_tensor = isinstance(value, torch.Tensor) and not upstream.is_traced(upstream.array_in(value))
    # Tensors made in inference mode have no count of writes (`_version`).
    items = (
        [value, upstream.array_in(value), value.is_inference() or value._version]
        if is_tensor
        else _items(value)
    )
    return items if is_tensor or all(isinstance(item, str | int | float | complex) for item in items) else []


def modules_of(root: nn.Module) -> list[nn.Module]:
    """Return the modules of a tree, each once, the root first.

    This is faster than torch's `modules()`, and yields siblings in another order.
    """
    modules: dict[int, nn.Module] = {}  # by id
    pending: list[nn.Module | None] = [root]
    while pending:
        module = pending.pop()
        if module is None or id(module) in modules:
            continue
        modules[id(module)] = module
        if module._modules:
            pending.extend(module._modules.values())
    return list(modules.values())


def weight_pattern(modules: Iterable[nn.Module]) -> list[Any]:
    """Return one flat list: for each module its children's names, then (name, number) of each weight.

    Tensors are numbered by first appearance, so that tied weights have one number; the number is None for a
    weight that is None.
    """
    numbers: dict[int, int] = {}  # by a tensor's id
    pattern: list[Any] = []
    for module in modules:
        pattern.extend(module._modules)
        for tensors in (module._parameters, module._buffers):
            pattern.append(len(tensors))  # which tells a parameter from a buffer
            for name, tensor in tensors.items():
                number = None if tensor is None else numbers.setdefault(id(tensor), len(numbers))
                pattern.append((name, number))
    return pattern
