"""Names of a package whose modules are imported at the first use of each, so that its import is quick."""

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def attach(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return the `__getattr__`, the `__dir__` and the `__all__` of a package, whose `__init__.py` is `file`.

    Its names are those that the stub beside it imports, `__init__.pyi`, which type checkers read as well.
    """
    homes = {
        alias.asname or alias.name: (str(node.module), alias.name)
        for node in ast.parse(Path(file).with_suffix(".pyi").read_text()).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, own = homes[name]
        return getattr(importlib.import_module(module), own)

    return find, lambda: sorted({*vars(sys.modules[package]), *homes}), [*homes]
