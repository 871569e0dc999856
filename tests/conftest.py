"""Tests run on the CPU, as eight devices; what one process of a run has compiled, the others take."""

import atexit
import gc
import itertools
import os
import shutil
import tempfile
from collections import Counter
from fnmatch import fnmatchcase
from importlib.metadata import version

import jaxtyping
import pytest
from packaging.version import Version

# Importing and tracing make millions of objects that live on: at Python's own thresholds, looking through
# them for garbage takes a tenth of the time.
gc.set_threshold(100_000, 20, 100)

os.environ["JAX_PLATFORMS"] = "cpu"
# One thread for PyTorch in each test process: two processes with two threads each spin against each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
if "PYTEST_XDIST_WORKER" not in os.environ:
    # A compile cache of this run alone, made by its first process and inherited by all others.
    os.environ["COGVIDEOX_TORCHAX_COMPILE_CACHE"] = tempfile.mkdtemp(prefix="cogvideox-torchax-tests-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"
    atexit.register(shutil.rmtree, os.environ["COGVIDEOX_TORCHAX_COMPILE_CACHE"], ignore_errors=True)
os.environ["HF_HUB_OFFLINE"] = "1"
# A device that waits at a collective holds a thread of XLA's pool, which has as many threads as devices. The
# collectives of a gradient are independent: eight devices that wait at two of them hold all threads for ever.
os.environ.setdefault("NPROC", "64")
# Optimizing is most of what compiling costs on a CPU, and the programs here run for milliseconds: LLVM's
# passes are off, fusions do without MLIR's, and a program is one module of LLVM's, not 32 of them to be
# compiled by as many threads. `test_the_contract_holds_as_users_run_it` does without all of this.
# XLA kills a process whose eight devices do not meet at a collective within 40 s, which a busy machine takes.
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8 "
        "--xla_backend_optimization_level=0 "
        "--xla_cpu_parallel_codegen_split_count=1 --xla_cpu_collective_call_terminate_timeout_seconds=900"
    )
    # XLA of a later jaxlib, or of a later libtpu, refuses the flag: it ends the process.
    if Version(version("jaxlib")).release < (0, 11) and Version(version("libtpu")).release < (0, 0, 43):
        os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"

# Annotated shapes are checked: before another conftest.py imports a kernel.
jaxtyping.install_import_hook("jax_kernels", "beartype.beartype")

SLOW_WEIGHT = 20
"""Work of a slow test, counted in quick ones."""


def pytest_configure(config):
    """Load the fixtures, which import all packages, but in a first process that only waits for others."""
    if hasattr(config, "workerinput") or config.getoption("dist", "no") == "no":
        config.pluginmanager.import_plugin("tests.fixtures")


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config, items):
    mark_cases(config, items)
    yield  # here `-m` chooses
    # The file that starts last may run alone, on one core: files of much work start first.
    work = Counter()
    for item in items:
        work[item.path] += SLOW_WEIGHT if item.get_closest_marker("slow") else 1
    items.sort(key=lambda item: (-work[item.path], item.path))


def mark_cases(config, items):
    """Mark cases as `slow` or `product`.

    They are those that `slow_cases("pattern")` names, or that `slow_cases(but=["pattern"])` does not.
    """
    uses = Counter()
    for item, mark in itertools.product(items, ("slow", "product")):
        for marker in item.iter_markers(f"{mark}_cases"):
            fits = {p: fnmatchcase(item.callspec.id, p) for p in marker.args or marker.kwargs["but"]}
            if any(fits.values()) == bool(marker.args):
                item.add_marker(mark)
            uses.update({f"{item.location[0]}::{item.originalname}[{p}]": fit for p, fit in fits.items()})
    unused = [case for case, count in uses.items() if not count]
    if unused and not any("::" in argument for argument in config.args):
        raise pytest.UsageError(f"a mark names cases that are not there: {', '.join(unused)}")
