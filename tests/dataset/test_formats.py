"""Shards as others read and rewrite them, as they come broken, and broken at random."""

import contextlib
import gc
import io
import json
import shutil
import sys
import tarfile
import tempfile
from dataclasses import replace
from pathlib import Path

import hypothesis
import numpy as np
import pyarrow.parquet
import pytest
import torch
from hypothesis import strategies

from cogvideox_torchax import cli
from cogvideox_torchax.dataset import EncodeClip, formats, sources
from cogvideox_torchax.dataset.directory import LatentDirectory, VideoDirectory
from cogvideox_torchax.dataset.loop import READING_ERRORS, attempt
from cogvideox_torchax.files import latents as latent_files
from tests.broken import DEEP, texts
from tests.dataset.conftest import GOOD, OPTIONS, pack, tree

pytestmark = [
    pytest.mark.usefixtures("torchax_off"),
    pytest.mark.filterwarnings("ignore:Generating overly large repr"),  # of what is nested too deep
]


@pytest.fixture
def shard(encoded, tmp_path):
    """Return a function that packs the good clips' latents into one shard of a kind."""

    def packed(kind):
        assert pack(encoded / "latents", tmp_path / "in", kind, "--shard-size", str(len(GOOD))) == 0
        return tmp_path / f"in/latents-00000{formats.SUFFIXES[kind]}"

    return packed


@pytest.mark.parametrize("kind", formats.SUFFIXES)
def test_bfloat16_goes_through_shards_bit_for_bit(small, tmp_path, kind):
    latents, files = small.wanted["a.mp4"], [(0, tmp_path / "a.safetensors")]
    rounded = {name: getattr(latents, name).bfloat16() for name in ("tensor", "logvar")}
    latent_files.save(replace(latents, **rounded), files[0][1])
    formats.write(kind, files, tmp_path / f"shard{formats.SUFFIXES[kind]}")
    ((_, read),) = formats.entries(tmp_path / f"shard{formats.SUFFIXES[kind]}")
    assert all(torch.equal(getattr(read(), name), tensor) for name, tensor in rounded.items())


def test_datasets_and_fastvideo_read_the_columns_of_parquet(small, shard, tmp_path):
    """FastVideo takes a row group for each clip, and the text's tokens of the model's own width."""
    import datasets

    files = str(shard("parquet"))
    rows = datasets.load_dataset("parquet", data_files=files, cache_dir=str(tmp_path), split="train")
    assert [row["id"] for row in rows] == GOOD
    assert pyarrow.parquet.ParquetFile(files).num_row_groups == len(GOOD)
    for row in rows:
        wanted = small.wanted[row["id"]]
        for column, tensor in (("vae_latent", wanted.tensor), ("vae_logvar", wanted.logvar)):
            values = np.frombuffer(row[f"{column}_bytes"], row[f"{column}_dtype"])
            assert np.array_equal(values.reshape(row[f"{column}_shape"]), tensor[0].numpy())
        text = np.frombuffer(row["text_embedding_bytes"], np.float32).reshape(row["text_embedding_shape"])
        assert np.array_equal(text, np.zeros((226, 4096)))
        assert (row["num_frames"], row["height"], row["width"], row["fps"]) == (9, 16, 24, 10.0)
        assert row["caption"] == f"{row['id']} — é"


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # webdataset leaves the tars open
def test_webdataset_reads_the_tars(small, shard):
    import safetensors.torch
    import webdataset as reader

    samples = list(reader.WebDataset(str(shard("webdataset")), shardshuffle=False, empty_check=False))
    assert [json.loads(sample["json"])["id"] for sample in samples] == GOOD
    for sample, name in zip(samples, GOOD, strict=True):
        tensors = safetensors.torch.load(sample["safetensors"])
        assert torch.equal(tensors["latents"], small.wanted[name].tensor)
        assert torch.equal(tensors["logvar"], small.wanted[name].logvar)
        assert sample["txt"].decode() == f"{name} — é"
    gc.collect()


@pytest.mark.parametrize("rows", [1, 2, 3, 9])
def test_a_rewritten_shard_gives_each_clip_its_own_latents(small, shard, rows):
    path = shard("parquet")
    table = pyarrow.parquet.read_table(path)
    pyarrow.parquet.write_table(table, path, row_group_size=rows)
    entries = formats.entries(path)
    assert [name for name, _ in entries] == GOOD
    for name, read in entries:
        assert torch.equal(read().tensor, small.wanted[name].tensor)
    pyarrow.parquet.write_table(table.take([4, 3, 2, 1]), path, row_group_size=1)
    assert torch.equal(entries[1][1]().tensor, small.wanted[GOOD[1]].tensor)
    with pytest.raises(latent_files.LatentsError, match="a.mp4' is truncated or holds no latents"):
        entries[0][1]()


# Packing


@pytest.mark.parametrize("kind", formats.SUFFIXES)
def test_a_shard_has_the_next_clips_in_order_bit_for_bit_and_equal_latents_make_equal_shards(
    small, encoded, tmp_path, kind
):
    shards = sorted((encoded / kind).iterdir())
    assert [path.name for path in shards] == [f"latents-0000{i}{formats.SUFFIXES[kind]}" for i in range(2)]
    assert [[name for name, _ in formats.entries(path)] for path in shards] == [GOOD[:3], GOOD[3:]]
    for name, read in (entry for path in shards for entry in formats.entries(path)):
        assert torch.equal(read().tensor, small.wanted[name].tensor)
        assert torch.equal(read().logvar, small.wanted[name].logvar)
        assert {**read().about, "caption": ""} == small.wanted[name].about
    assert pack(encoded / "latents", tmp_path / "again", kind) == 0
    assert tree(tmp_path / "again") == tree(encoded / kind)


def test_latents_that_do_not_belong_together_and_an_output_in_use_are_refused(
    small, encoded, tmp_path, refused
):
    shutil.copytree(encoded / "latents", tmp_path / "in")
    command = ("pack", tmp_path / "in", "-o", tmp_path / "out", "--format", "webdataset")
    about = {
        **small.wanted["z.mp4"].about,
        "settings": {**small.wanted["z.mp4"].about["settings"], "seed": 3},
    }
    latent_files.save(replace(small.wanted["z.mp4"], about=about), tmp_path / "in/z.mp4.safetensors")
    assert "z.mp4.safetensors was made with other settings (seed is 3 there and 0 here)" in refused(*command)
    (tmp_path / "in/z.mp4.safetensors").write_bytes(b"half")
    assert "is truncated or no safetensors file" in refused(*command)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/a").touch()
    assert "it is not empty; give a new directory" in refused(*command)
    command = ("pack", encoded / "parquet", "-o", tmp_path / "new", "--format", "parquet")
    assert "holds no latent files" in refused(*command)
    command = ("pack", tmp_path / "in/z.mp4.safetensors", "-o", tmp_path / "new", "--format", "parquet")
    assert "holds no latent files" in refused(*command)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


@pytest.mark.parametrize(("package", "kind"), [("pyarrow", "parquet"), ("webdataset", "webdataset")])
def test_without_its_library_a_format_is_refused_in_a_line_before_any_work(
    encoded, tmp_path, monkeypatch, refused, package, kind
):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(latent_files, "about", lambda _: pytest.fail("a file is read"))
    assert "pip install 'cogvideox-torchax[data]'" in refused(
        *("pack", encoded / "latents", "-o", tmp_path / "out", "--format", kind)
    )


# Broken


def test_an_entry_of_two_videos_is_refused(small, tmp_path):
    """One of them would be left out, and nobody would know."""
    tensor = small.wanted["a.mp4"].tensor.repeat(2, 1, 1, 1, 1)
    latent_files.save(replace(small.wanted["a.mp4"], tensor=tensor), tmp_path / "a.safetensors")
    ((_, read),) = formats.entries(tmp_path / "a.safetensors")
    with pytest.raises(latent_files.LatentsError, match="holds 2 videos: one is wanted"):
        read()


def parquet(path, **columns):
    """Change columns of the second row; a function gets what was there. Texts are left out: megabytes."""
    table = pyarrow.parquet.read_table(path)
    table = table.drop_columns([name for name in table.column_names if name.startswith("text_")])
    rows = table.to_pylist()
    for name, value in columns.items():
        rows[0][name] = value(rows[0][name]) if callable(value) else value
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema=table.schema), path)


def webdataset(path, change):
    """Change the JSON of the first clip."""
    with tarfile.open(path) as tar:
        members = [(entry.name, tar.extractfile(entry).read()) for entry in tar]
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            data = change(data) if name == "00000000.json" else data
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))


def about(**fields):
    return lambda text: json.dumps({**json.loads(text), **fields})


BROKEN = {
    "a shape of other sides": lambda path: parquet(path, vae_latent_shape=[4, 3, 3, 6]),
    "a shape with a side below 1": lambda path: parquet(path, vae_latent_shape=[0, 3, 4, 6]),
    "no shape": lambda path: parquet(path, vae_latent_shape=None),
    "a shape beyond 64 bits": lambda path: parquet(path, vae_latent_shape=[2**62] * 4),
    "half a number": lambda path: parquet(path, vae_latent_bytes=b"abc"),
    "an unknown dtype": lambda path: parquet(path, about=about(dtype="torch.float3")),
    "a dtype that is a class": lambda path: parquet(path, about=about(dtype="torch.Tensor")),
    "a dtype that is a number": lambda path: parquet(path, about=about(dtype=3)),
    "metadata that is a list": lambda path: parquet(path, about=about(latents=[1])),
    "about that is a list": lambda path: parquet(path, about="[1]"),
    "about nested too deep": lambda path: parquet(path, about=DEEP),
    "JSON that is a list": lambda path: webdataset(path, lambda data: b"[]"),
    "JSON nested too deep": lambda path: webdataset(path, lambda data: DEEP.encode()),
    "JSON that is none": lambda path: webdataset(path, lambda data: b"{"),
    "half an emoji in its id": lambda path: webdataset(path, lambda data: rb'{"id": "\ud83d"}'),
    "an id below another's video": lambda path: webdataset(path, lambda data: b'{"id": "b.mp4/c"}'),
    "an id below the list of videos": lambda path: webdataset(path, lambda data: b'{"id": "videos.json/c"}'),
    "an id longer than any path": lambda path: webdataset(
        path, lambda data: json.dumps({"id": "/".join(["x" * 200] * 21)}).encode()
    ),
    "an id of very many parts": lambda path: webdataset(
        path, lambda data: json.dumps({"id": "x/" * 1500 + "x"}).encode()
    ),
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_a_broken_entry_is_named_and_the_others_are_decoded(shard, tmp_path, capsys, broken):
    broken(shard(broken.__code__.co_names[0]))
    out = tmp_path / "out"
    for _ in range(2):
        assert cli.main(["decode", str(tmp_path / "in"), "-o", str(out), *OPTIONS]) == 1
        said = capsys.readouterr().err
        assert "bad clips left out: 1 (" in said
        assert "Traceback" not in said
    assert {path.relative_to(out).as_posix() for path in out.rglob("*.mp4")} == {*GOOD} - {"a.mp4"}


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
            unit.encode = lambda part: small.wanted["a.mp4"]
            list(LatentDirectory(directory / str(windows), unit, clips).work())

    holds(check, strategies.lists(texts(good) | texts({"path": "a.mp4"}), min_size=1, max_size=3))


@pytest.mark.parametrize("name", ["videos.json", "failed-videos.jsonl"])
def test_a_state_is_taken_or_refused(holds, shard, name):
    documents = {
        "videos.json": {"format": VideoDirectory.FORMAT, "settings": {"fps": None}},
        "failed-videos.jsonl": {"id": "a", "error": "e"},
    }
    path = shard("webdataset")

    def check(directory, found):
        (directory / name).write_bytes(b"\n".join([*found, b""]) if name.endswith("l") else found[0])
        VideoDirectory(directory, [path]).save_or_check_settings({})

    holds(check, strategies.lists(texts(documents[name]), min_size=1, max_size=3))


@pytest.mark.parametrize("kind", ["parquet", "webdataset"])
def test_an_entry_is_read_or_refused(small, holds, shard, kind):
    path, row = shard(kind), {"about": '{"id": "a.mp4"}', "vae_latent_shape": None}
    if kind == "parquet":
        parquet(path)
        row = pyarrow.parquet.read_table(path).to_pylist()[0]

    def check(directory, found):
        copied, (text, shape, data) = Path(shutil.copy(path, directory)), found
        if kind == "webdataset":
            webdataset(copied, lambda _: text)
        else:
            about = text.decode(errors="replace")
            parquet(copied, about=about, vae_latent_shape=shape, vae_logvar_bytes=data)
        output = VideoDirectory(directory / "out", [copied])
        read = [attempt(lambda read: read(), read, READING_ERRORS) for read in output.missing.values()]
        assert len([latents for latents, _ in read if latents is not None]) >= 4

    shapes = strategies.lists(strategies.integers(-2, 2**40)) | strategies.sampled_from(
        [None, row["vae_latent_shape"]]
    )
    about = texts(json.loads(row["about"]))
    holds(check, strategies.tuples(about, shapes, strategies.none() | strategies.binary()))
