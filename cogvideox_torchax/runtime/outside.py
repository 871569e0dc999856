"""Variables outside of a network that a user's functions read: a program writes none, but tracing may.

A hook or a method may keep the time of each call in a list, for example. A trace runs it once, and the
compiled program never again.
"""

import copy
import sysconfig
from collections.abc import Callable
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

import torch

from cogvideox_torchax import upstream
from cogvideox_torchax.runtime.trees import LIBRARIES, Tree, has_state, items_of, state_of

AROUND = (MethodType, staticmethod, classmethod, property, partial)
"""What a function may be in."""
INSTALLED = ("<frozen", *{sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
"""Beginnings of the paths of files that are no user's."""


class Variables:
    """The variables that a user's functions in a module tree read, and all that is in them, as they are now.

    The functions are methods and hooks, and functions that these call; neither those of installed packages
    nor their variables count. A variable is a global one, one of an enclosing function, a default argument,
    an object with a hook, or a container of a class.
    """

    def __init__(self, tree: Tree):
        # What may change: its name, a function that lists what is in it, this list, and what puts it back.
        self._found: list[tuple[str, Callable[[], list[Any]], list[Any], Callable[[], Any]]] = []
        self._met: set[int] = set()
        users = [kind for kind in tree.classes if kind.__module__.partition(".")[0] not in LIBRARIES]
        members = [(f"{kind.__name__}.{name}", each) for kind in users for name, each in vars(kind).items()]
        functions = [("", value) for value in tree.held if isinstance(value, (FunctionType, *AROUND))]
        for name, value in members + functions:
            self._add(name, value)

    def _watch(self, name: str, read: Callable[[], list[Any]], restore: Callable[[], Any]) -> None:
        self._found.append((name, read, read(), restore))

    def _add(self, name: str, value: Any) -> None:
        """Add what a value holds, at any depth, and what it reads if it is a function."""
        if id(value) in self._met:
            return
        self._met.add(id(value))
        items = items_of(value)
        if isinstance(value, torch.Tensor):
            array, _version = state_of(value)
            old = value.clone() if array is None else array
            write = value.copy_ if array is None else lambda old: upstream.replace_array(value, lambda _: old)
            self._watch(name, lambda: [*state_of(value)], partial(write, old))
        elif isinstance(value, FunctionType):
            self._add_variables(value)
        elif isinstance(value, AROUND):
            self._add(type(getattr(value, "__self__", None)).__name__, getattr(value, "__self__", None))
            for inner in ("__func__", "fget", "func"):  # the last one is a partial's
                self._add(name, getattr(value, inner, None))
        elif items is not None:
            table = vars(value) if has_state(type(value), False) else value
            self._watch(name, lambda: items_of(value) or [], partial(_fill, table, copy.copy(table)))
            for item in items:
                self._add(name, item)

    def _add_variables(self, function: FunctionType) -> None:
        """Add the variables that a user's function reads."""
        codes, known = [function.__code__], function.__globals__
        module = known.get("__name__", "").partition(".")[0]
        if function.__code__.co_filename.startswith(INSTALLED) or module in LIBRARIES:
            return
        for code in codes:  # which grows meanwhile, by the functions inside
            codes.extend(constant for constant in code.co_consts if isinstance(constant, CodeType))
        names = {name for code in codes for name in code.co_names} & known.keys()
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        # Each with a function that returns its value, and one that sets it.
        variables = [(name, partial(known.get, name), partial(known.__setitem__, name)) for name in names]
        variables += [
            (name, partial(getattr, cell, "cell_contents"), partial(setattr, cell, "cell_contents"))
            for name, cell in cells
            if cell != CellType()  # it is not empty
        ]
        for name, read, write in variables:
            self._watch(name, lambda read=read: [read()], partial(write, read()))
            self._add(name, read())
        for value in function.__defaults__ or ():
            self._add(f"a default of {function.__name__}", value)

    def undo(self) -> str | None:
        """Put back what has changed since; return the name of the first such variable, or None."""
        changed = [(name, restore) for name, read, old, restore in self._found if not _are_same(read(), old)]
        for _name, restore in changed:
            restore()
        return changed[0][0] if changed else None


def _fill(table: Any, items: Any) -> None:
    table.clear()
    (table.extend if isinstance(table, list) else table.update)(items)


def _are_same(items: list[Any], others: list[Any]) -> bool:
    return len(items) == len(others) and all(
        one is other or (type(one) is type(other) and isinstance(one, str | int | float) and one == other)
        for one, other in zip(items, others, strict=True)
    )
