"""Small clips, two of them bad, and a model that encodes one in a tenth of a second."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cogvideox_torchax import cli
from cogvideox_torchax.dataset import Clip, ClipConfig, EncodeClip
from cogvideox_torchax.files import kinds
from tests import reference, videos

GOOD = ["a.mp4", "b.mp4", "sub/c.mp4", "sub/d.mp4", "z.mp4"]
BAD = ["no_video.mp4", "sub/truncated.mp4"]
OPTIONS = ("--backend", "torch", "--quiet")


def write_clip(path, shift=0, frames=9, height=16, width=24, rate=10):
    path.parent.mkdir(parents=True, exist_ok=True)
    videos.write(path, videos.moving_frames(frames, height, width) + shift, rate)  # bytes, which wrap around
    return path


@pytest.fixture(scope="session")
def small(shallow_directory, tmp_path_factory):
    """Return the clips' and the model's directories, and the latents of each good clip."""
    root = tmp_path_factory.mktemp("clips")
    for number, name in enumerate(GOOD):
        write_clip(root / "in" / name, 9 * number).with_suffix(".txt").write_text(f"{name} — é\n")
    (root / "in/frame_00000.png").touch()  # a picture is no clip
    (root / "in" / BAD[0]).write_bytes(b"x" * 99)
    os.truncate(write_clip(root / "in" / BAD[1]), 1000)
    config = ClipConfig(shallow_directory, backend="torch")
    unit = EncodeClip(config)
    with torch.no_grad():
        wanted = {name: unit(Clip(name, root / "in" / name)) for name in GOOD}
    return SimpleNamespace(
        clips=root / "in", model=shallow_directory, config=config, unit=unit, wanted=wanted
    )


def tree(directory: Path) -> dict[str, bytes]:
    """Return every file of a directory but the list of failures, whose order is by chance."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.suffix != ".jsonl"
    }


def command(small, output, *more, clips=None):
    given = (clips or small.clips, "-o", output, "--model", small.model, *OPTIONS, *more)
    return ["encode", *map(str, given)]


def encode(small, output, *more, clips=None):
    return cli.main(command(small, output, *more, clips=clips))


def pack(latents, output, kind, *more):
    return cli.main(["pack", str(latents), "-o", str(output), "--format", kind, "--shard-size", "3", *more])


@pytest.fixture(scope="session")
def other_weights(tmp_path_factory):
    """Return the directory of a model of the same config, one of whose weights is another."""
    vae, directory = reference.small_vae(**reference.SHALLOW), tmp_path_factory.mktemp("other")
    torch.nn.init.zeros_(vae.decoder.conv_out.conv.bias)
    vae.save_pretrained(directory)
    return str(directory)


@pytest.fixture(scope="session")
def encoded(small, tmp_path_factory):
    """Return a directory with one of latents, "latents", and one of its shards in each format, by name."""
    from tests.fixtures import torchax_disabled  # not before pytest has loaded these as a plugin

    root = tmp_path_factory.mktemp("encoded")
    with torchax_disabled():
        assert encode(small, root / "latents") == 1
        for kind in kinds.SUFFIXES:
            assert pack(root / "latents", root / kind, kind) == 0
    return root
