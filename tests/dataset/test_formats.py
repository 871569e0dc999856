"""Shards as others read them, and latent files that are broken."""

import gc
import json
import shutil
import sys
from dataclasses import replace

import numpy as np
import pyarrow.parquet
import pytest
import safetensors.torch
import torch

from cogvideox_torchax import cli
from cogvideox_torchax.files import kinds, latents as latent_files
from tests.broken import DEEP
from tests.dataset.conftest import GOOD, OPTIONS, pack, tree

pytestmark = [
    pytest.mark.usefixtures("torchax_off"),
    pytest.mark.filterwarnings("ignore:Generating overly large repr"),  # of what is nested too deep
]


def shards(encoded, kind):
    return sorted(map(str, (encoded / kind).iterdir()))


def test_datasets_and_fastvideo_read_the_columns_of_parquet(small, encoded, tmp_path):
    """FastVideo takes a row group for each clip, and the text's tokens of the model's own width."""
    import datasets

    files = shards(encoded, "parquet")
    rows = datasets.load_dataset("parquet", data_files=files, cache_dir=str(tmp_path), split="train")
    assert [row["id"] for row in rows] == GOOD
    assert [pyarrow.parquet.ParquetFile(file).num_row_groups for file in files] == [3, 2]
    for row in rows:
        wanted = small.wanted[row["id"]]
        for column, tensor in {
            "vae_latent": wanted.tensor[0].numpy(),
            "vae_logvar": wanted.logvar[0].numpy(),
            "text_embedding": np.zeros((226, 4096), np.float32),
        }.items():
            values = np.frombuffer(row[f"{column}_bytes"], row[f"{column}_dtype"])
            assert np.array_equal(values.reshape(row[f"{column}_shape"]), tensor)
        assert row == row | {
            "text_embedding_dtype": "float32",
            **{"num_frames": 9, "height": 16, "width": 24, "fps": 10.0, "caption": f"{row['id']} — é"},
        }


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # webdataset leaves the tars open
def test_webdataset_reads_the_tars(small, encoded):
    import webdataset as reader

    samples = list(reader.WebDataset(shards(encoded, "webdataset"), shardshuffle=False, empty_check=False))
    assert [json.loads(sample["json"])["id"] for sample in samples] == GOOD
    for sample, name in zip(samples, GOOD, strict=True):
        tensors = safetensors.torch.load(sample["safetensors"])
        assert torch.equal(tensors["latents"], small.wanted[name].tensor)
        assert torch.equal(tensors["logvar"], small.wanted[name].logvar)
        assert sample["txt"].decode() == f"{name} — é"
    gc.collect()


# Packing


@pytest.mark.parametrize("kind", kinds.SUFFIXES)
def test_shards_are_of_the_size_asked_for_and_equal_latents_make_equal_shards(encoded, tmp_path, kind):
    assert pack(encoded / "latents", tmp_path / "again", kind) == 0
    assert tree(tmp_path / "again") == tree(encoded / kind)
    assert [*tree(encoded / kind)] == [f"latents-0000{i}{kinds.SUFFIXES[kind]}" for i in range(2)]


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
    for source in (encoded / "parquet", tmp_path / "in/z.mp4.safetensors"):
        command = ("pack", source, "-o", tmp_path / "new", "--format", "parquet")
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


@pytest.mark.parametrize("broken", [b"[]", b"{", DEEP.encode()])
def test_broken_latents_are_named_and_the_others_are_decoded(encoded, tmp_path, capsys, broken):
    shutil.copytree(encoded / "latents", tmp_path / "in")
    tensors, out = {"latents": torch.zeros(1, 16, 1, 2, 3)}, tmp_path / "out"
    safetensors.torch.save_file(
        tensors, tmp_path / "in/a.mp4.safetensors", {latent_files.KEY: broken.decode()}
    )
    for _ in range(2):
        assert cli.main(["decode", str(tmp_path / "in"), "-o", str(out), *OPTIONS]) == 1
        assert "bad clips left out: 1;" in capsys.readouterr().err
    assert {path.relative_to(out).as_posix() for path in out.rglob("*.mp4")} == {*GOOD} - {"a.mp4"}
