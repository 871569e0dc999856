"""The main paths as docs/architecture.md draws them, compared with the stack of a call."""

import itertools
import re
import traceback
from pathlib import Path

import pytest
import torch

import jax_kernels
from cogvideox_torchax import port
from cogvideox_torchax.pipelines.blocks import Block
from tests import reference, small_pipelines
from tests.processes import ROOT


class Reached(Exception):
    """The call has reached the end of its path."""


def drawn(heading):
    """Return the (file, function) pairs of the drawing under a heading of the page."""
    page = (ROOT / "docs/architecture.md").read_text()
    section = page.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return [(file, name) for name, file in re.findall(r"^ {4}(\w+) +([\w/]+)", section, re.MULTILINE)]


def decode(monkeypatch):
    monkeypatch.setattr(jax_kernels, "norm_conv3d", reach)
    vae = reference.on_jax(port(reference.small_vae(**reference.TWO_SHALLOW_LEVELS)))
    with torch.no_grad():
        vae.decode(reference.latents(3).to("jax"))


def denoise(monkeypatch):
    monkeypatch.setattr(Block, "forward", reach)
    pipe = port(small_pipelines.build())
    size = {"height": small_pipelines.HEIGHT, "width": small_pipelines.WIDTH, "num_frames": 5}
    pipe("a cat", num_inference_steps=1, **size)


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
        if frame.filename.startswith(package) and not frame.filename.endswith("user_checks.py")  # a decorator
    ] + end
    files = [file for file, _ in itertools.groupby(stack, key=lambda hop: hop[0])]
    assert files == [file for file, _ in itertools.groupby(drawn(heading), key=lambda hop: hop[0])]
    remaining = iter(stack)
    assert all(hop in remaining for hop in drawn(heading)), "a function is drawn that was not called"


def test_a_decode_call_reaches_its_program_in_five_files_and_returns_to_none():
    files = [file for file, _ in itertools.groupby(drawn("A decode call"), key=lambda hop: hop[0])]
    assert len(files[: files.index("runtime/places") + 1]) <= 5
    assert len(set(files)) == len(files)
