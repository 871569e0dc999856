"""A disk that is full at the first byte of an output, or later: one line, and nothing half-written."""

import contextlib
import resource
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from cogvideox_torchax import cli
from cogvideox_torchax.cli import generate as generate_command
from cogvideox_torchax.dataset import formats
from cogvideox_torchax.files import latents, reports
from cogvideox_torchax.pipelines import stages
from tests.files.test_latents import MADE
from tests.files.test_video import moving_frames, write

pytestmark = pytest.mark.usefixtures("torchax_off")

REQUEST = stages.Request(prompt="a cat", frames=9, height=16, width=24)
ABOUT = {"id": "a", "caption": "a cat", "width": 40, "height": 24}


@contextlib.contextmanager
def files_of_at_most(size):
    """Make every write of this process beyond `size` bytes of a file fail, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def write_video(path):
    write(path, moving_frames(60 if path.suffix == ".mp4" else 9))


def write_shard(path):
    member = path.parent.parent / "member.safetensors"
    if not member.exists():
        latents.save(latents.Latents(**{**vars(MADE), "about": ABOUT}), member)
    kind = {suffix: kind for kind, suffix in formats.SUFFIXES.items()}[path.suffix]
    formats.write(kind, [(0, member)] * 3, path)


def write_figure(path):
    figure, axes = reports.pyplot().subplots(figsize=(2, 1))
    axes.plot([1, 2, 1])
    reports.save_figure(figure, path)


def write_stage(path):
    stages.save_text(path.parent, {"prompt_embeds": torch.rand(1, 8, 16)}, request=REQUEST, model="abc")


WRITERS = {
    "clip.mp4": write_video,
    "clip.gif": write_video,
    "frames": write_video,
    "z.safetensors": lambda path: latents.save(MADE, path),
    "text.safetensors": write_stage,
    "report.json": lambda path: reports.write_json(path, {"text": "x" * 9999}),
    "figure.png": write_figure,
    "shard.parquet": write_shard,
    "shard.tar": write_shard,
    "shard.safetensors": write_shard,
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path, name):
    for place in ("whole", "full"):
        (tmp_path / place).mkdir()
    path = tmp_path / "whole" / name
    WRITERS[name](path)
    size = max(file.stat().st_size for file in ([path] if path.is_file() else path.iterdir()))
    for room in (0, 1, size // 2, size - 1):
        with files_of_at_most(room), pytest.raises(OSError, match="too large"):
            WRITERS[name](tmp_path / "full" / name)
        assert not list((tmp_path / "full").iterdir())
    if path.is_file():
        before = path.read_bytes()
        with files_of_at_most(size // 2), pytest.raises(OSError, match="too large"):
            WRITERS[name](path)
        assert path.read_bytes() == before


@pytest.mark.parametrize("command", ["encode", "decode", "reconstruct", "generate"])
def test_a_command_that_fills_the_disk_is_one_line_and_exit_code_1(
    tmp_path, monkeypatch, capsys, model_directory, native_vae, command
):
    """Latents of a generation stay if they are whole: they are the computed result."""
    monkeypatch.chdir(tmp_path)
    write_video(Path("clip.mp4"))
    z = latents.Latents(torch.rand(1, 16, 3, 3, 5), dict(native_vae.config), "vae", Fraction(8), 9)
    latents.save(z, "z.safetensors")
    monkeypatch.setattr(generate_command, "_sample_latents", lambda args: (native_vae, z))
    output = {"encode": "new.safetensors"}.get(command, "new.mp4")
    given = {
        "encode": ("clip.mp4", "--frames", "9", "--model", "vae"),
        "decode": ("z.safetensors", "--model", "vae"),
        "reconstruct": ("clip.mp4", "--frames", "9", "--model", "vae"),
        "generate": ("--prompt", "a cat", "--model", "vae"),
    }
    arguments = [command, *given[command], "-o", output, "--quiet"]
    arguments += [] if command == "generate" else ["--backend", "torch"]
    before = {path.name for path in Path().iterdir()}
    assert cli.main(arguments) == 0
    size = Path(output).stat().st_size
    Path(output).unlink()
    kept = Path("new.mp4.latents.safetensors")
    for room in (0, size // 2, size - 1):
        capsys.readouterr()
        with files_of_at_most(room):
            assert cli.main(arguments) == cli.FAILURE
        err = capsys.readouterr().err
        assert (err.count("\n"), "too large" in err) == (1 + kept.exists(), True)
        assert {path.name for path in Path().iterdir()} - {kept.name} == before
        if kept.exists():
            assert f"the latents are kept: cogvideox-torchax decode {kept}" in err
            assert torch.equal(latents.load(kept).tensor, z.tensor)
            kept.unlink()
