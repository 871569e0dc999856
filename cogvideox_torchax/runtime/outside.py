"""Variables outside of a network that a user's functions read: a program writes none, but tracing may.

A hook or a method may keep the time of each call in a list, for example. A trace runs it once, and the
compiled program never again.
"""

import copy
import sysconfig
from collections.abc import Callable, Iterator
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from cogvideox_torchax import upstream
from cogvideox_torchax.runtime.trees import CONTAINERS, LIBRARIES, Tree, has_state, items_of, state_of

FUNCTIONS = (FunctionType, MethodType, staticmethod, classmethod, property, partial)
INSTALLED = ("<frozen", *{sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
"""Beginnings of the paths of files that are no user's."""


class Variables:
    """The variables that a user's functions in a module tree read, and all that is in them, as they are now.

    The functions are methods and hooks, and functions that these call; neither those of installed packages
    nor their variables count. A variable is one of a Python module, of an enclosing function, a default
    argument, an object with a hook, or a container of a class.
    """

    def __init__(self, tree: Tree):
        # A variable's name, a function that returns its value, one that sets it, and the value.
        self._found: list[tuple[str, Callable[[], Any], Callable[[Any], Any], Any]] = []
        self._met: set[int] = set()
        for kind in tree.classes:
            if kind.__module__.partition(".")[0] not in LIBRARIES:
                for name, member in vars(kind).items():
                    self._add(f"{kind.__name__}.{name}", member)
        for value in tree.held:
            if isinstance(value, FUNCTIONS):
                self._add("", value)

    def _add(self, name: str, value: Any) -> None:
        """Add what a value holds, at any depth, and what it reads if it is a function."""
        if id(value) in self._met or value is None:
            return
        self._met.add(id(value))
        if isinstance(value, torch.Tensor):
            array, _version = state = state_of(value)
            write: Any = partial(upstream.replace_array, value) if array is not None else value.copy_
            old = torch.clone(value) if array is None else lambda _: array
            self._found.append((name, partial(state_of, value), lambda _: write(old), state))
        elif isinstance(value, FUNCTIONS):
            self._add(type(getattr(value, "__self__", None)).__name__, getattr(value, "__self__", None))
            for inner in ("__func__", "__wrapped__", "fget", "func"):  # the last one is a partial's
                self._add(name, getattr(value, inner, None))
            for variable, owner, key in _read_by(value) if isinstance(value, FunctionType) else ():
                is_table = isinstance(owner, dict)
                read = partial(owner.get, key) if is_table else partial(getattr, owner, key, None)
                write = owner.__setitem__ if is_table else partial(setattr, owner)
                self._found.append((variable, read, partial(write, key), read()))
                self._add(variable, read())
        elif (items := items_of(value)) is not None:
            table = vars(value) if has_state(type(value), False) else value
            self._found.append((name, partial(copy.copy, table), partial(_fill, table), copy.copy(table)))
            for item in items:
                self._add(name, item)

    def undo(self) -> str | None:
        """Give each variable that has changed since its value back; return the name of the first, or None."""
        changed = [
            (name, write, value) for name, read, write, value in self._found if not _is_same(read(), value)
        ]
        for _name, write, value in changed:
            write(value)
        return changed[0][0] if changed else None


def _is_users(path: str, module: str) -> bool:
    return not path.startswith(INSTALLED) and module.partition(".")[0] not in LIBRARIES


def _read_by(function: FunctionType) -> Iterator[tuple[str, Any, str]]:
    """Yield (name, owner, name there) of the variables that a user's function reads."""
    codes, known = [function.__code__], function.__globals__
    if not _is_users(function.__code__.co_filename, known.get("__name__", "")):
        return
    for code in codes:  # which grows meanwhile, by the functions inside
        codes.extend(constant for constant in code.co_consts if isinstance(constant, CodeType))
    names = {name for code in codes for name in code.co_names}
    modules = (known[name] for name in names if isinstance(known.get(name), ModuleType))
    users = (each for each in modules if _is_users(getattr(each, "__file__", None) or "", each.__name__))
    for table in (known, *map(vars, users)):
        yield from ((name, table, name) for name in names if name in table)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if cell != CellType():  # it is not empty
            yield name, cell, "cell_contents"
    yield f"a default of {function.__name__}", function, "__defaults__"


def _fill(table: Any, items: Any) -> None:
    table.clear()
    (table.extend if isinstance(table, list) else table.update)(items)


def _is_same(now: Any, value: Any) -> bool:
    if now is value or type(now) is not type(value):
        return now is value
    if type(value) in CONTAINERS:
        pairs = items_of(now) or [], items_of(value) or []
        return len(pairs[0]) == len(pairs[1]) and all(map(_is_same, *pairs))
    return isinstance(value, str | int | float) and now == value
