"""Lists, states and entries of a data set, broken at random: a result or a one-line error, nothing else."""

import contextlib
import json
import shutil
import tempfile
from pathlib import Path

import hypothesis
import pyarrow.parquet
import pytest
from hypothesis import strategies

from cogvideox_torchax.dataset import Clip, sources
from cogvideox_torchax.dataset.decoding import VideoDirectory
from cogvideox_torchax.dataset.loop import IN_READING, attempt
from cogvideox_torchax.dataset.manifest import DatasetDirectory
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
        for kind in ("safetensors", "webdataset"):
            with DatasetDirectory(directory / kind, {}, clips, kind=kind) as output:
                for index in output.missing:
                    decoded, reason = attempt(small.unit.read, output.clip(index), IN_READING)
                    if reason is None:
                        decoded, reason = attempt(lambda given: next(given.stream()), decoded, IN_READING)
                    if reason is None:
                        output.keep(index, small.wanted["a.mp4"])

    holds(check, strategies.lists(texts(good) | texts({"path": "a.mp4"}), min_size=1, max_size=3))


@pytest.mark.parametrize(
    "name", ["clips.json", "manifest-0.jsonl", "manifest-1.jsonl", "videos.json", "videos-0.jsonl"]
)
def test_a_state_is_taken_or_refused(small, holds, shard, name):  # noqa: F811
    lines = [{"kind": "bad", "index": 0, "id": "a", "error": "e"}, {"kind": "done", "index": 1, "id": "b"}]
    config = {"format": "safetensors", "shard_size": 1}
    documents = {
        "clips.json": {"format": DatasetDirectory.FORMAT, "config": config, "clips": ["a", None, "b"]},
        "videos.json": {"format": VideoDirectory.FORMAT, "config": {"fps": None}},
    }
    path = shard("webdataset")

    def check(directory, found):
        (directory / name).write_bytes(b"\n".join([*found, b""]) if name.endswith("l") else found[0])
        if name.startswith("videos"):
            with VideoDirectory(directory, [path]) as output:
                output.begin({})
        else:
            clips = [Clip(clip, small.clips / "a.mp4") for clip in ("a", "b", "c")]
            with DatasetDirectory(directory, {}, clips, retry=True) as output:
                for index in output.missing:
                    output.refuse(index, "bad")
        output.bad_clips()

    near_one = strategies.sampled_from([documents[name]] if name in documents else lines).flatmap(texts)
    holds(check, strategies.lists(near_one, min_size=1, max_size=3))


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
        with VideoDirectory(directory / "out", [copied]) as output:
            read = [attempt(lambda name: output._readers[name](), n, IN_READING) for n in output.missing]
            assert len([latents for latents, _ in read if latents is not None]) >= 4
            output.bad_clips()

    shapes = strategies.lists(strategies.integers(-2, 2**40)) | strategies.none()
    shapes |= strategies.just(row["vae_latent_shape"])
    about = texts(json.loads(row["about"]))
    holds(check, strategies.tuples(about, shapes, strategies.none() | strategies.binary()))
