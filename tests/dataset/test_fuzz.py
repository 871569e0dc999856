"""Lists, states and entries of a data set, broken at random: a result or a one-line error, nothing else."""

import contextlib
import json
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import hypothesis
import pyarrow.parquet
import pytest
from hypothesis import strategies

from cogvideox_torchax.dataset import EncodeClip, sources
from cogvideox_torchax.dataset.directory import LatentDirectory, VideoDirectory
from cogvideox_torchax.dataset.loop import IN_READING, attempt
from tests.broken import texts
from tests.dataset.test_formats import parquet, shard, webdataset  # noqa: F401

pytestmark = [
    pytest.mark.usefixtures("torchax_off"),
    pytest.mark.filterwarnings("ignore:Generating overly large repr"),  # of what is nested too deep
]


@pytest.fixture(params=[40, pytest.param(400, marks=pytest.mark.slow)])
def holds(request):
    """Return a function that runs a check on many examples, each with an empty directory."""

    def run(check, strategy):
        @hypothesis.settings(max_examples=request.param, deadline=None, database=None)
        @hypothesis.given(strategy)
        def each(example):
            with tempfile.TemporaryDirectory() as name, contextlib.suppress(ValueError):
                check(Path(name), example)

        each()

    return run


def test_a_list_is_encoded_or_refused(small, holds):
    good = {"path": "a.mp4", "id": "one", "caption": "A.", "frames": 5, "height": 16, "width": 24}

    def check(directory, lines):
        shutil.copy(small.clips / "a.mp4", directory / "a.mp4")
        (directory / "clips.jsonl").write_bytes(b"\n".join(lines))
        clips = sources.clips(directory / "clips.jsonl")
        for windows in (False, True):
            unit = EncodeClip(replace(small.config, windows=windows, frames=5), vae=small.unit.vae)
            unit.encode = lambda decoded: small.wanted["a.mp4"]
            list(LatentDirectory(directory / str(windows), unit, clips).work())

    holds(check, strategies.lists(texts(good) | texts({"path": "a.mp4"}), min_size=1, max_size=3))


@pytest.mark.parametrize("name", ["videos.json", "failed-videos.jsonl"])
def test_a_state_is_taken_or_refused(holds, shard, name):  # noqa: F811
    documents = {
        "videos.json": {"format": VideoDirectory.FORMAT, "settings": {"fps": None}},
        "failed-videos.jsonl": {"id": "a", "error": "e"},
    }
    path = shard("webdataset")

    def check(directory, found):
        (directory / name).write_bytes(b"\n".join([*found, b""]) if name.endswith("l") else found[0])
        VideoDirectory(directory, [path]).fix_settings({})

    holds(check, strategies.lists(texts(documents[name]), min_size=1, max_size=3))


@pytest.mark.parametrize("kind", ["parquet", "webdataset"])
def test_an_entry_is_read_or_refused(small, holds, shard, kind):  # noqa: F811
    path, row = shard(kind), {"about": '{"id": "b.mp4"}', "vae_latent_shape": None}
    if kind == "parquet":
        parquet(path)
        row = pyarrow.parquet.read_table(path).to_pylist()[1]

    def check(directory, found):
        copied, (text, shape, data) = Path(shutil.copy(path, directory)), found
        if kind == "webdataset":
            webdataset(copied, lambda _: text)
        else:
            about = text.decode(errors="replace")
            parquet(copied, about=about, vae_latent_shape=shape, vae_logvar_bytes=data)
        output = VideoDirectory(directory / "out", [copied])
        read = [attempt(lambda read: read(), read, IN_READING) for read in output.missing.values()]
        assert len([latents for latents, _ in read if latents is not None]) >= 4

    shapes = strategies.lists(strategies.integers(-2, 2**40)) | strategies.none()
    shapes |= strategies.just(row["vae_latent_shape"])
    about = texts(json.loads(row["about"]))
    holds(check, strategies.tuples(about, shapes, strategies.none() | strategies.binary()))
