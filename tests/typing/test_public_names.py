"""The strict check of the public names leaves none of them out."""

import importlib
import re
from pathlib import Path

import pytest

from tests.test_architecture import public_names

CHECKED = (Path(__file__).parent / "public_names.py").read_text()


@pytest.mark.parametrize("name", [name for package, name in public_names() if package != "jax_kernels"])
def test_a_public_name_is_checked_strictly(name):
    code = CHECKED.partition("# pyright: strict")[2].partition("\ndef ")[2]  # behind the imports
    assert re.search(rf"(?<![\w.]){name}[(.)]", code)


@pytest.mark.parametrize("package", ["cogvideox_torchax", "jax_kernels"])
def test_a_type_checker_is_told_to_read_the_annotations(package):
    assert (Path(importlib.import_module(package).__file__).parent / "py.typed").read_text() == ""
