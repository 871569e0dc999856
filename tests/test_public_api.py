"""The names in `__all__` are those that the reference documents, typed, and that users' code imports."""

import ast
import importlib
import inspect
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.docs.blocks import PAGES, blocks
from tests.processes import ROOT, printed_by
from tests.test_architecture import PACKAGES

PUBLIC = [
    f"{package}.{name}"
    for package in (*PACKAGES, "cogvideox_torchax.flax")
    for name in importlib.import_module(package).__all__
]
PAGE_OF = {
    package: (ROOT / f"docs/reference/{package.removeprefix('cogvideox_torchax.')}.md").read_text()
    for package in (*PACKAGES, "cogvideox_torchax.flax")
}


def value_of(name: str) -> Any:
    module, _, own = name.rpartition(".")
    return getattr(importlib.import_module(module), own)


@pytest.mark.parametrize("package", PAGE_OF)
def test_the_reference_documents_the_public_names_and_no_other(package):
    # jax_kernels has folders and functions of the same names: there an entry is where a name is defined.
    entries = re.findall(r"^::: (\S+)$", PAGE_OF[package], re.MULTILINE)
    public = [name for name in PUBLIC if name.rpartition(".")[0] == package]
    assert sorted(entry.rpartition(".")[2] for entry in entries) == sorted(map(own_name, public))
    assert all(value_of(entry) is value_of(f"{package}.{own_name(entry)}") for entry in entries)


def own_name(name: str) -> str:
    return name.rpartition(".")[2]


def callables_of(name: str) -> Iterator[tuple[str, Any]]:
    """Yield a function, or a class's own public methods and properties, with their names."""
    value = value_of(name)
    if not inspect.isclass(value):
        yield name, value
        return
    for own, member in vars(value).items():
        function = inspect.unwrap(getattr(member, "fget", None) or getattr(member, "__func__", member))
        if inspect.isfunction(function) and function.__module__ == value.__module__ and own[0] != "_":
            yield f"{name}.{own}", function


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_is_documented_and_typed(name):
    assert value_of(name).__doc__
    assert own_name(name) in dir(importlib.import_module(name.rpartition(".")[0]))
    for each, function in callables_of(name):
        assert function.__doc__, each
        given = inspect.signature(function)
        annotations = [one.annotation for one in given.parameters.values() if one.name not in ("self", "cls")]
        assert given.empty not in (*annotations, given.return_annotation), each


@pytest.mark.parametrize("name", [name for name in PUBLIC if not name.startswith("jax_kernels")])
def test_a_public_name_is_checked_strictly(name):
    _imports, _, code = (ROOT / "tests/typing/public_names.py").read_text().partition("\ndef ")
    assert re.search(rf"(?<![\w.]){own_name(name)}\b", code)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_type_checker_is_told_to_read_the_annotations(package):
    assert (ROOT / package / "py.typed").read_text() == ""


def test_importing_the_package_imports_neither_torch_nor_jax():
    code = "import cogvideox_torchax, sys; print({'torch', 'jax', 'numpy'} & {*sys.modules})"
    assert printed_by(code) == "set()\n"


def sources() -> Iterator[tuple[str, str]]:
    """Yield the Python code that users read, by its place: programs, nodes, notebooks, pages."""
    for path in (path for folder in ("comfyui", "examples", "space") for path in (ROOT / folder).rglob("*")):
        if path.suffix == ".py":
            yield path.name, path.read_text()
        if path.suffix == ".ipynb":
            cells = json.loads(path.read_text())["cells"]
            yield from ((path.name, "".join(each["source"])) for each in cells if each["cell_type"] == "code")
    for page in PAGES:
        yield from ((page, block.text) for block in blocks(page) if block.language == "python")


def taken(code: str) -> Iterator[str]:
    """Yield what code takes of this project: names of its packages, and modules inside of them."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] in PACKAGES)
        elif isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] in PACKAGES:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in PAGE_OF:
            yield ast.unparse(node)


def test_users_code_takes_public_names_alone():
    allowed = {*PUBLIC, *PAGE_OF, "cogvideox_torchax.__file__"}  # beside which the bundled models are
    assert [
        f"{where}: {name}" for where, code in sources() for name in taken(code) if name not in allowed
    ] == []


@pytest.mark.parametrize(
    "code",
    [
        "from cogvideox_torchax.vae.pixels import from_uint8",
        "from cogvideox_torchax import runtime",
        "import cogvideox_torchax.cli",
        "import cogvideox_torchax\ncogvideox_torchax.runtime.to_torch(x)",
        "def f():\n    import jax_kernels\n    jax_kernels.common",
    ],
)
def test_a_name_from_inside_is_seen(code):
    assert {*taken(code)} - {*PUBLIC, *PAGE_OF}
