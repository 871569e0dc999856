"""Runs a part of the tests with the lowest and the newest versions of what a result depends on.

    python scripts/version_matrix.py lowest newest    # writes benchmarks/results/versions-*.json
    python scripts/version_matrix.py newest --python python3.13    # JAX 0.11 and later need Python 3.12

Each set takes minutes, and gets a virtual environment of its own, some gigabytes large and deleted
afterwards. What was installed is what is kept, and drawn in docs/install.md.
"""

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import time
import tomllib
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from benchmarks.pages import ROOT, keep
from cogvideox_torchax.versions import TESTED

PACKAGES = (*TESTED, "flax")
TESTS = (
    "tests/test_upstream.py",
    "tests/test_porting.py",
    "tests/files",
    "tests/arrays/test_exported.py",
    "tests/runtime/test_device.py",
    "tests/jax_kernels/conv3d/test_conv3d.py",
    "tests/jax_kernels/test_contract.py::test_a_tpu_runs_its_pallas_kernels_until_they_are_switched_off",
    "tests/jax_kernels/dense",
    "tests/jax_kernels/attention/test_qk_norm_rope.py",
    "tests/pipelines/test_around_the_port.py",
    "tests/vae/test_checkpoint.py",
    "tests/vae/nnx/test_autoencoder.py",
    "tests/vae/torchax/test_streams.py",
)
"""About four minutes: what touches other packages' names, the device, the kernels, both builds, pipelines."""


def declared() -> dict[str, str]:
    """Return the lowest version that pyproject.toml admits, for each package of `PACKAGES`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    # An extra may admit fewer versions than the package itself, whose own come last here.
    lines = itertools.chain(*project["optional-dependencies"].values(), project["dependencies"])
    return {
        requirement.name: bound.version
        for requirement in map(Requirement, lines)
        for bound in requirement.specifier
        if requirement.name in PACKAGES and bound.operator == ">="
    }


def wanted(name: str) -> list[str]:
    """Return pip's requirements for the set "lowest" or "newest"; pip chooses all other packages itself."""
    if name == "newest":
        return sorted({*PACKAGES} - {"torchax"} | {f"torchax>={declared()['torchax']}"})
    # 0.8 stands for its newest patch, which is what somebody who is held to 0.8 has.
    return sorted(
        f"{package}=={version}" + (".*" if version.count(".") == 1 else "")
        for package, version in declared().items()
    )


def run(name: str, interpreter: str, asked: list[str], directory: Path) -> dict[str, Any]:
    """Install a set, run `TESTS` with it, and return a report of the outcome.

    Args:
        name: of the set.
        interpreter: the Python that the virtual environment is made from.
        asked: pip's requirements.
        directory: for the virtual environment.

    Returns:
        The report, with a "reason" where the set could not be installed or tested.
    """
    python = directory / "bin" / "python"
    subprocess.run([interpreter, "-m", "venv", directory], check=True)
    install = [python, "-m", "pip", "install", "--quiet", f"{ROOT}[cpu,test,text]", *asked]
    installed = subprocess.run(install, capture_output=True, text=True)
    found = json.loads(subprocess.check_output([python, "-m", "pip", "inspect"]))
    about = {
        "set": name,
        "python": found["environment"]["python_full_version"],
        "asked": asked,
        "date": time.strftime("%Y-%m-%d"),
    }
    if installed.returncode:
        return about | {"reason": " ".join(installed.stderr.split())[-600:]}
    packages = (package["metadata"] for package in found["installed"])
    versions = {package["name"].lower(): package["version"] for package in packages}
    return about | {
        "versions": {package: versions.get(package, "none") for package in PACKAGES},
        "tests": list(TESTS),
        **_tested(python, directory / "junit.xml"),
    }


def _tested(python: Path, junit: Path) -> dict[str, Any]:
    """Run `TESTS`; return the numbers of outcomes, and the first failures with their messages.

    Args:
        python: the interpreter of the set.
        junit: path for pytest's JUnit report.
    """
    subprocess.run(
        [
            *(python, "-m", "pytest", "-q", "-n", "0", "--tb=line", "--continue-on-collection-errors"),
            *(f"--junitxml={junit}", *TESTS),
        ],
        cwd=ROOT,
    )
    if not junit.exists():
        return {"reason": "pytest did not run"}
    cases = list(ElementTree.parse(junit).iter("testcase"))
    bad = {
        f"{case.get('classname')}::{case.get('name')}": " ".join((found.get("message") or "").split())[:300]
        for case in cases
        for found in case
        if found.tag in ("failure", "error")
    }
    skipped = sum(case.find("skipped") is not None for case in cases)
    return {
        "passed": len(cases) - len(bad) - skipped,
        "skipped": skipped,
        "failed": len(bad),
        "failures": dict(list(bad.items())[:40]),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs tests with the lowest and the newest versions.")
    parser.add_argument("sets", nargs="+", choices=("lowest", "newest"), help="of versions")
    parser.add_argument(
        "--python", default=sys.executable, help="interpreter of the sets (default: this one)"
    )
    args = parser.parse_args()
    failed = []
    for name in args.sets:
        with tempfile.TemporaryDirectory(prefix="versions-") as directory:
            found = run(name, args.python, wanted(name), Path(directory))
        keep(f"versions-{name}-{found['python'].rpartition('.')[0]}", found)
        print(json.dumps(found, indent=1))
        failed.append(found.get("failed"))  # None where no test ran
    subprocess.run([sys.executable, "-m", "benchmarks", "draw", "install.md"], cwd=ROOT, check=True)
    return int(any(number != 0 for number in failed))


if __name__ == "__main__":
    sys.exit(main())
