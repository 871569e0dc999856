"""Every public name is documented and typed; users' code imports no other."""

import ast
import importlib
import inspect
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.docs.blocks import PAGES, blocks
from tests.processes import ROOT
from tests.test_architecture import PACKAGES, public_names

ENTRIES = [
    entry
    for page in sorted((ROOT / "docs" / "reference").glob("*.md"))
    for entry in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
]


def value_of(entry: str) -> Any:
    module, _, name = entry.rpartition(".")
    return getattr(importlib.import_module(module), name)


def callables_of(entry: str) -> Iterator[tuple[str, Any]]:
    """Yield a function, or a class's own public methods and properties, with their names."""
    value = value_of(entry)
    if not inspect.isclass(value):
        yield entry, value
        return
    for name, member in vars(value).items():
        function = inspect.unwrap(getattr(member, "fget", None) or getattr(member, "__func__", member))
        if inspect.isfunction(function) and function.__module__ == value.__module__ and name[0] != "_":
            yield f"{entry}.{name}", function


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_public_name_is_documented_and_typed(entry):
    assert value_of(entry).__doc__
    for name, function in callables_of(entry):
        assert function.__doc__, name
        given = inspect.signature(function)
        assert all(
            each.name in ("self", "cls") or each.annotation is not each.empty
            for each in given.parameters.values()
        ), name
        assert given.return_annotation is not given.empty, name


@pytest.mark.parametrize(("package", "name"), list(public_names()))
def test_every_name_of_a_package_is_in_the_reference(package, name):
    value = getattr(importlib.import_module(package), name)
    assert name in dir(importlib.import_module(package))
    assert any(entry.endswith(f".{name}") and value_of(entry) is value for entry in ENTRIES)


CHECKED = (ROOT / "tests/typing/public_names.py").read_text().partition("\ndef ")[2]
"""The code behind the imports."""


@pytest.mark.parametrize("name", [name for package, name in public_names() if package != "jax_kernels"])
def test_a_public_name_is_checked_strictly(name):
    assert re.search(rf"(?<![\w.]){name}[(.)]", CHECKED)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_type_checker_is_told_to_read_the_annotations(package):
    assert (ROOT / package / "py.typed").read_text() == ""


def sources() -> Iterator[tuple[str, str]]:
    """Yield the Python code that users read, by its place: examples, nodes, notebook, pages."""
    for path in (*(ROOT / "examples").glob("*.py"), *(ROOT / "comfyui").glob("*.py")):
        yield path.name, path.read_text()
    for path in (ROOT / "examples").rglob("*.ipynb"):
        for cell in json.loads(path.read_text())["cells"]:
            if cell["cell_type"] == "code":
                yield path.name, "".join(cell["source"])
    for page in PAGES:
        yield from ((page, block.text) for block in blocks(page) if block.language == "python")


def imports(code: str) -> Iterator[str]:
    """Yield the names of this project that code imports, with their modules."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] in PACKAGES:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_public(name: str) -> bool:
    """Return whether the reference documents a name, or names of the module that it is."""
    if any(entry.startswith(f"{name}.") for entry in ENTRIES):
        return True
    module, _, own = name.rpartition(".")
    value = getattr(importlib.import_module(module), own, None)  # a module that nothing has imported is none
    return any(entry.endswith(f".{own}") and value_of(entry) is value for entry in ENTRIES)


def test_users_code_imports_public_names_alone():
    private = [
        f"{where}: {name}" for where, code in sources() for name in imports(code) if not is_public(name)
    ]
    assert private == []
    assert not is_public("cogvideox_torchax.vae.pixels._cast")
    assert not is_public("cogvideox_torchax.cli.common")
