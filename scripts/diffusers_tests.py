"""Runs diffusers' own tests of CogVideoX's VAE and pipelines with this package's classes in its place.

It prints the tests that stock diffusers passes and this package fails.

    git clone --branch v0.42.1 https://github.com/huggingface/diffusers
    python scripts/diffusers_tests.py diffusers           # ours in PyTorch
    python scripts/diffusers_tests.py diffusers --jax     # and on JAX

The installed diffusers is tested, not the checkout's. Some tests take small files from the hub.
"""

import argparse
import functools
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

TESTS = {
    "VAE": ["tests/models/autoencoders/test_models_autoencoder_kl_cogvideox.py"],
    "pipelines": ["tests/pipelines/cogvideo"],
}
PLACE = "COGVIDEOX_TORCHAX_IN_PLACE_OF_DIFFUSERS"
"""The environment variable that says where the swapped classes run, "torch" or "jax"; unset for stock."""


def swap(place: str) -> None:
    """Put this package's classes in the place of diffusers', before its tests import anything."""
    import diffusers

    from cogvideox_torchax import AutoencoderKLCogVideoX
    from cogvideox_torchax.pipelines.call import PIPELINES

    diffusers.__dict__["AutoencoderKLCogVideoX"] = AutoencoderKLCogVideoX
    if place == "torch":
        return
    for kind in PIPELINES:
        _port_when_built(kind)


def _port_when_built(kind: Any) -> None:
    """Replace the `__init__` of a pipeline's class by one that ports each new pipeline."""
    from cogvideox_torchax import port

    inherited = kind.__init__

    @functools.wraps(inherited)
    def build(self: Any, *args: Any, **kwargs: Any) -> None:
        inherited(self, *args, **kwargs)
        port(self)

    kind.__init__ = build


def outcomes(checkout: Path, tests: list[str], place: str | None) -> dict[str, str]:
    """Return "passed", "failed" or "skipped" for each test, by its name.

    Args:
        checkout: of diffusers' repository.
        tests: paths of tests in it.
        place: "torch" or "jax", where this package's classes run; None for diffusers' own classes.
    """
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "DIFFUSERS_TEST_DEVICE": "jax" if place == "jax" else "cpu",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        PLACE: place or "",
    }
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-p", Path(__file__).stem, f"--junitxml={report}"]
        subprocess.run(
            [*command, "-p", "no:cacheprovider", *tests], cwd=checkout, env=environment, check=False
        )
        cases = ElementTree.parse(report).getroot().iter("testcase")
        return {f"{case.get('classname')}::{case.get('name')}": _outcome(case) for case in cases}


def _outcome(case: ElementTree.Element) -> str:
    """Return the outcome of a "testcase" of pytest's JUnit report."""
    found = [part.tag for part in case if part.tag in ("failure", "error", "skipped")]
    return "passed" if not found else "skipped" if found == ["skipped"] else "failed"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path, help="of diffusers' repository")
    parser.add_argument("--jax", action="store_true", help="on JAX too")
    args = parser.parse_args()
    rows, failed = [], []
    for part, tests in TESTS.items():
        stock = outcomes(args.checkout, tests, None)
        passed = {name for name in stock if stock[name] == "passed"}
        for place in ("torch", "jax")[: 1 + args.jax]:
            ours = outcomes(args.checkout, tests, place)
            lost = sorted(name for name in passed if ours.get(name) != "passed")
            rows.append(f"| {part} | {place} | {len(passed) - len(lost)} of {len(passed)} |")
            failed += [f"{part}, {place}: {name} {ours.get(name, 'not collected')}" for name in lost]
    print(
        "| tests | ours run on | of those that stock passes |",
        "| --- | --- | --- |",
        *rows,
        *failed,
        sep="\n",
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
elif os.environ.get(PLACE):  # `outcomes` has pytest load this file as a plugin, before any conftest.py
    swap(os.environ[PLACE])
