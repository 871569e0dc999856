"""The wheel: built, installed into a fresh environment, and used there."""

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.processes import ROOT


def succeeded(*command: object, **options) -> str:
    """Return a command's output; fail with its last lines."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("wheel")
    build = "import hatchling.build, sys; print(hatchling.build.build_wheel(sys.argv[1]))"
    return directory / succeeded(sys.executable, "-c", build, directory, cwd=ROOT).split()[-1]


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory) -> Path:
    """Return the `bin` of an environment with the wheel, and behind it the packages that it depends on."""
    directory = tmp_path_factory.mktemp("environment")
    python = directory / "bin" / "python"
    succeeded(sys.executable, "-m", "venv", directory)
    succeeded(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel)
    site = succeeded(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    # Only a line that is a directory is searched: what this checkout itself has installed is not.
    (Path(site) / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return directory / "bin"


def test_every_file_of_the_packages_is_in_it_and_nothing_else(wheel):
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    tracked = succeeded("git", "ls-files", "cogvideox_torchax", "jax_kernels", cwd=ROOT).split()
    assert held == {name for name in tracked if (ROOT / name).exists()}


def test_it_says_what_it_is(wheel):
    archive = zipfile.ZipFile(wheel)
    (metadata,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
    assert b"License-Expression: Apache-2.0" in archive.read(metadata)
    assert any(name.endswith("/LICENSE") for name in archive.namelist())


@pytest.mark.slow
def test_installed_elsewhere_its_commands_run(environment, tmp_path):
    run = {"cwd": tmp_path, "env": {k: value for k, value in os.environ.items() if k != "PYTHONPATH"}}
    home = succeeded(environment / "python", "-c", "import cogvideox_torchax as c; print(c.__file__)", **run)
    assert Path(home.strip()).is_relative_to(environment.parent)
    command = environment / "cogvideox-torchax"
    assert json.loads(succeeded(command, "doctor", "--json", **run))["torchax works"] == "yes"
    demo = ("demo", "--frames", "1", "--height", "16", "--width", "24", "--json", "-o", "out")
    assert json.loads(succeeded(command, *demo, **run))["largest_difference_to_PyTorch_frames"] < 1e-5
    assert (tmp_path / "out" / "demo.mp4").stat().st_size > 0
