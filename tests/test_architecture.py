"""The layers of the two packages: which imports which, and what each may take from outside; the main paths.

An import inside a function counts as one at the top of a file; one for type checkers alone does not count.
The main paths as docs/architecture.md draws them are compared with the stack of a call.
"""

import ast
import functools
import graphlib
import itertools
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cogvideox_torchax import port
from tests import reference, small_pipelines
from tests.processes import ROOT

PACKAGES = ("cogvideox_torchax", "jax_kernels")

LEVELS = (
    ("jax_kernels",),
    ("lazy", "versions"),
    ("cogvideox_torchax", "upstream"),
    ("arrays", "terminal"),
    ("runtime",),
    ("files",),
    ("sharding",),
    ("vae",),
    ("vae/torchax",),
    ("vae/nnx",),
    ("backends", "flax", "pipelines"),
    ("dataset", "porting", "verify"),
    ("benchmarks", "cli"),
    ("__main__",),
)
"""A part imports parts of the levels above its own in this list, and no other: so there is no circle.

Above all of them are the folders of jax_kernels, in the order of their own imports.
"""

OWNERS = {
    "torchax": ("cogvideox_torchax.runtime",),
    "flax": ("cogvideox_torchax.vae.nnx",),
    "av": ("cogvideox_torchax.files.video",),
    "matplotlib": ("benchmarks.measured_tables",),
    "filelock": ("cogvideox_torchax.files.whole",),
    "pyarrow": ("cogvideox_torchax.dataset.packing",),
    "webdataset": ("cogvideox_torchax.dataset.packing",),
    "ray": ("cogvideox_torchax.dataset.ray",),
    "torch_tpu": ("cogvideox_torchax.runtime.torchtpu",),
}
"""The only packages and modules that import these."""

KERNELS_TAKE = {"jax", "jaxtyping", "numpy", *PACKAGES, *sys.stdlib_module_names}
"""Packages that a kernel may import; of the two packages, subject to the levels."""


def sources() -> dict[str, str]:
    """Return the text of every module of the packages and of the laboratory, by its dotted name."""
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path.read_text()
        for package in (*PACKAGES, "benchmarks")
        for path in sorted((ROOT / package).rglob("*.py"))
    }


HOMES = {
    package: {
        alias.asname or alias.name: node.module
        for node in ast.walk(ast.parse((ROOT / file).read_text()))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    for package, file in (
        ("cogvideox_torchax", "cogvideox_torchax/__init__.pyi"),
        ("cogvideox_torchax.flax", "cogvideox_torchax/flax/__init__.pyi"),
    )
}
"""By a name that a package imports lazily, its module."""


def part_of(module: str) -> str:
    package, *rest = module.split(".")
    if package == "jax_kernels":
        return "/".join((package, *rest[:1]))
    if rest[:1] == ["vae"] and rest[1:2] in (["torchax"], ["nnx"]):
        return "/".join(rest[:2])
    return rest[0] if rest and package != "benchmarks" else package


def level_of(part: str) -> int:
    return next((i for i, parts in enumerate(LEVELS) if part in parts), -1)  # -1: a folder of jax_kernels


def nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield every node but those for type checkers."""
    for child in ast.iter_child_nodes(tree):
        if not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)):
            yield child
            yield from nodes(child)


@functools.cache
def parsed(source: str) -> tuple[ast.Module, list[ast.AST]]:
    """Return a module's tree and its `nodes`."""
    tree = ast.parse(source)
    return tree, [*nodes(tree)]


def imported(node: ast.AST, modules: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield for each imported name its module, and its name there, or ""."""
    if isinstance(node, ast.Import):
        yield from ((alias.name, "") for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        for alias in node.names:
            assert node.module is not None, "imports are absolute"
            home = HOMES.get(node.module, {}).get(alias.name, node.module)
            inner = f"{node.module}.{alias.name}"
            yield (inner if inner in modules else home, alias.name)


def complaints(modules: dict[str, str]) -> list[str]:
    """Return a line for each broken rule."""
    known = {part for parts in LEVELS for part in parts}
    lines = [
        f"{module}: no level for its part"
        for module in modules
        if part_of(module) not in known and not module.startswith("jax_kernels.")
    ]
    return lines or [line for module in modules for line in _complaints_of(module, modules)]


def in_order(package: str, modules: dict[str, str], name_of: Callable[[str], str]) -> list[str]:
    """Return the rooms of a package, each behind those that it imports; raise `CycleError` for a circle.

    `name_of` returns the name of a module's room: its part, or the module itself.
    """
    rooms = {module: name_of(module) for module in modules if module.startswith(f"{package}.")}
    arrows: dict[str, set[str]] = {room: set() for room in rooms.values()}
    for module, room in rooms.items():
        found = (
            name_of(source) for node in parsed(modules[module])[1] for source, _ in imported(node, modules)
        )
        arrows[room] |= arrows.keys() & {*found} - {room}
    return [*graphlib.TopologicalSorter(arrows).static_order()]


def _complaints_of(module: str, modules: dict[str, str]) -> Iterator[str]:
    (tree, found), part = parsed(modules[module]), part_of(module)
    if not (ast.get_docstring(tree) or "").partition("\n")[0].strip():
        yield f"{module}: its first line does not say what it is"
    for source, name in itertools.chain.from_iterable(imported(node, modules) for node in found):
        package = source.partition(".")[0]
        if package in PACKAGES and part_of(source) != part:
            yield from _complaints_of_arrow(module, part, source, name)
        if part.startswith("jax_kernels") and package not in KERNELS_TAKE:
            yield f"{module}: a kernel imports {package}"
        if part != "benchmarks" and package in ("benchmarks", "tests"):
            yield f"{module}: {package} is not in the wheel"
        owners = OWNERS.get(package, (module,))
        if part != "benchmarks" and not any(f"{module}.".startswith(f"{owner}.") for owner in owners):
            yield f"{module}: {package} is imported by {' and '.join(owners)} alone"


def _complaints_of_arrow(module: str, part: str, source: str, name: str) -> Iterator[str]:
    between_kernels = level_of(part_of(source)) == level_of(part) == -1
    if level_of(part_of(source)) >= level_of(part) and not between_kernels:
        yield f"{module}: {part} imports {source}, of a level that is not above its own"
    if any(re.match("_(?!_)", part) for part in (*source.split("."), name)):
        yield f"{module}: {source}.{name} is private"


def test_every_part_keeps_to_its_imports():
    assert complaints(sources()) == []


@pytest.mark.parametrize(
    ("package", "name_of", "first", "closing"),
    [
        ("jax_kernels", part_of, "common", ("jax_kernels.group_norm.op", "jax_kernels.spatial_norm", "xla")),
        (
            "cogvideox_torchax.runtime",
            str,
            "",
            ("cogvideox_torchax.runtime.bridge", "cogvideox_torchax.runtime", "torchtpu"),
        ),
    ],
)
def test_kernels_and_runtime_have_no_circle(package, name_of, first, closing):
    modules = sources()
    assert in_order(package, modules, name_of)[0].endswith(first)
    module, source, name = closing
    modules[module] += f"\nfrom {source} import {name}\n"
    with pytest.raises(graphlib.CycleError):
        in_order(package, modules, name_of)


@pytest.mark.parametrize(
    ("module", "added", "words"),
    [
        pytest.param(
            "jax_kernels.conv3d.op",
            "import torch",
            "a kernel imports torch",
            id="a kernel that imports torch",
        ),
        pytest.param(
            "jax_kernels.common.tiles",
            "from cogvideox_torchax.vae import chunks",
            "jax_kernels/common imports cogvideox_torchax.vae.chunks, of a level",
            id="a kernel that knows the model",
        ),
        pytest.param(
            "cogvideox_torchax.vae.chunks",
            "from cogvideox_torchax.cli import common",
            "vae imports cogvideox_torchax.cli.common, of a level that is not above its own",
            id="a climb",
        ),
        pytest.param(
            "cogvideox_torchax.arrays.values",
            "def f():\n    from cogvideox_torchax.sharding import spread",
            "arrays imports cogvideox_torchax.sharding, of a level",
            id="a climb inside a function",
        ),
        pytest.param(
            "cogvideox_torchax.files.video",
            "from cogvideox_torchax import make_mesh",
            "files imports cogvideox_torchax.sharding, of a level",
            id="a climb through a public name",
        ),
        pytest.param(
            "cogvideox_torchax.verify.compare",
            "import cogvideox_torchax.dataset.clip",
            "verify imports cogvideox_torchax.dataset.clip, of a level",
            id="two parts of one level, which could close a circle",
        ),
        pytest.param(
            "benchmarks.plan.command",
            "def f():\n    from cogvideox_torchax import cli",
            "benchmarks imports cogvideox_torchax.cli, of a level",
            id="the command line in the laboratory",
        ),
        pytest.param(
            "cogvideox_torchax.cli.common",
            "from cogvideox_torchax.runtime.weights import _put",
            "cogvideox_torchax.runtime.weights._put is private",
            id="a private name of another part",
        ),
        pytest.param(
            "cogvideox_torchax.vae.checks",
            "def f():\n    import torchax.interop",
            "torchax is imported by cogvideox_torchax.runtime alone",
            id="torchax outside of its part",
        ),
        pytest.param(
            "cogvideox_torchax.sharding.mesh",
            "from flax import nnx",
            "flax is imported by cogvideox_torchax.vae.nnx alone",
            id="Flax outside of its parts",
        ),
        pytest.param(
            "cogvideox_torchax.files.reports",
            "import av",
            "av is imported by cogvideox_torchax.files.video alone",
            id="PyAV outside of its module",
        ),
        pytest.param(
            "cogvideox_torchax.cli.verify",
            "def f():\n    from benchmarks import runs",
            "benchmarks is not in the wheel",
            id="the laboratory in the wheel",
        ),
        pytest.param(
            "cogvideox_torchax.batch.clips", None, "no level for its part", id="a part that nobody has placed"
        ),
        pytest.param(
            "cogvideox_torchax.vae.new",
            None,
            "its first line does not say what it is",
            id="a file without its first line",
        ),
    ],
)
def test_what_breaks_a_rule_is_named(module, added, words):
    modules = sources()
    modules[module] = "x = 1" if added is None else f"{modules[module]}\n{added}\n"
    (line,) = complaints(modules)
    assert re.match(f"{module}: .*{re.escape(words)}", line)


def test_no_kernel_asks_for_the_size_of_its_grid():
    """JAX 0.11 takes one trace for equal kernels and blocks: the size would be another grid's."""
    assert [
        path for path in (ROOT / "jax_kernels").rglob("*.py") if "pl.num_programs(" in path.read_text()
    ] == []


SEAM = {"on_accelerator", "torch_view"}
"""The two functions of a bridge from torch to JAX."""


@pytest.mark.parametrize("module", ["vae.torchax.modules", "pipelines.layers"])
def test_ported_modules_know_two_functions_of_a_bridge(module):
    modules = sources()
    _, found = parsed(modules[f"cogvideox_torchax.{module}"])
    taken = {name for node in found for source, name in imported(node, modules) if "runtime" in source}
    of_tensors = SEAM | {"runs_kernel", "replaced_method"}  # of runtime/trees, which asks the seam
    # `pipelines.layers` moves a table to JAX: `runtime.to_jax`.
    others = {"runtime", ""} if module == "pipelines.layers" else {"on_accelerator"}
    assert SEAM - others <= taken <= of_tensors | others


PAGE = (ROOT / "docs/architecture.md").read_text()
CONTRACTS = {
    text.split("**")[1]: text
    for text in PAGE.split("\n## Contracts\n")[1].split("\n## ")[0].strip().split("\n\n")[1:]
}
"""By its name, the text of each contract."""


@pytest.mark.parametrize("contract", CONTRACTS)
def test_a_contract_names_tests_that_are_there(contract):
    _text, _, named = CONTRACTS[contract].partition("\nTest")
    tests = re.findall(r"`(tests/[\w/]*test_\w+\.py)::(test_\w+)`", named)
    assert tests
    for path, name in tests:
        tree = ast.parse((ROOT / path).read_text())
        assert name in [each.name for each in tree.body if isinstance(each, ast.FunctionDef)], path


def test_every_path_of_the_page_is_there():
    paths = re.findall(r"`([\w./]+/|[\w./]*/?\w+\.py)`", PAGE)
    places = (ROOT, ROOT / "cogvideox_torchax", ROOT / "jax_kernels/conv3d", ROOT / "jax_kernels/dense")
    assert len(paths) > 40
    assert [path for path in paths if not any((place / path).exists() for place in places)] == []


class Reached(Exception):
    """The call has reached the end of its path."""


def drawn(heading):
    """Return the (file, function) pairs of the drawing under a heading of the page."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return [(file, name) for name, file in re.findall(r"^ {4}(\w+) +([\w/]+)", section, re.MULTILINE)]


def decode(monkeypatch):
    monkeypatch.setattr("jax_kernels.norm_conv3d", reach)
    reference.on_jax(port(reference.small_vae(**reference.TWO_SHALLOW_LEVELS))).decode(
        reference.latents(3).to("jax")
    )


def denoise(monkeypatch):
    monkeypatch.setattr("cogvideox_torchax.pipelines.sequence.Sequence.from_placement", reach)
    size = {"height": small_pipelines.HEIGHT, "width": small_pipelines.WIDTH, "num_frames": 5}
    port(small_pipelines.build())("a cat", num_inference_steps=1, **size)


def reach(*_args, **_options):
    raise Reached


@pytest.mark.parametrize(
    ("heading", "call", "end"),
    [("A decode call", decode, [("norm_conv3d/op", "norm_conv3d")]), ("A denoising step", denoise, [])],
)
def test_the_drawing_has_every_file_of_a_call_in_order(monkeypatch, heading, call, end):
    with pytest.raises(Reached) as reached:
        call(monkeypatch)
    package = str(ROOT / "cogvideox_torchax")
    stack = [
        (str(Path(frame.filename).relative_to(package).with_suffix("")), frame.name)
        for frame in traceback.extract_tb(reached.tb)
        if frame.filename.startswith(package)
    ] + end
    files = [file for file, _ in itertools.groupby(stack, key=lambda hop: hop[0])]
    assert files == [file for file, _ in itertools.groupby(drawn(heading), key=lambda hop: hop[0])]
    remaining = iter(stack)
    assert all(hop in remaining for hop in drawn(heading)), "a function is drawn that was not called"
