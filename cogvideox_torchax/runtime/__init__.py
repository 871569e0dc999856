"""torch on JAX: tensors and arrays, compiled programs, weights, and the compile cache.

A name's module is imported at the name's first use, since some modules import torch and others, such as
`arrays`, do without it. The list of names is `__init__.pyi`, which type checkers read as well.
"""

import ast
import importlib
from pathlib import Path
from typing import Any

_HOMES = {
    alias.name: node.module
    for node in ast.parse(Path(__file__).with_suffix(".pyi").read_text()).body
    if isinstance(node, ast.ImportFrom) and node.module
    for alias in node.names
}
"""By a name, the full name of its module."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
