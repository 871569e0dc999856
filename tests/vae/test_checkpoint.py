import shutil

import numpy as np
import pytest
import safetensors.torch
import torch
import torchax

from cogvideox_torchax import AutoencoderKLCogVideoX
from cogvideox_torchax.flax import FlaxVAEForPipelines
from cogvideox_torchax.vae.checkpoint import ModelError
from tests.vae.conftest import NAME, WEIGHTS, shallow_stock

pytestmark = pytest.mark.usefixtures("torchax_off")


# A folder, and the options that a model is saved and loaded with.
@pytest.mark.parametrize(
    ("folder", "saving", "loading"),
    [
        pytest.param("", {}, {}, id="one file"),
        pytest.param("", {"max_shard_size": "20KB"}, {}, id="shards"),
        pytest.param("vae", {}, {"subfolder": "vae"}, id="subfolder"),
        pytest.param("", {"variant": "fp16"}, {"variant": "fp16"}, id="variant"),
    ],
)
@pytest.mark.parametrize("torchax_on", [False, True])
@pytest.mark.slow_cases("False-[sv]*")
def test_every_layout_loads_whether_or_not_torchax_is_on(
    stock, tmp_path, folder, saving, loading, torchax_on
):
    stock.save_pretrained(tmp_path / folder, **saving)
    if torchax_on:
        torchax.enable_globally()
    for kind in (AutoencoderKLCogVideoX, FlaxVAEForPipelines, type(stock)):
        vae = kind.from_pretrained(tmp_path, **loading)
        assert not vae.training
        state = vae.state_dict()
        assert all(torch.equal(value, state[name]) for name, value in stock.state_dict().items())


in_each_build = pytest.mark.parametrize("build", [AutoencoderKLCogVideoX, FlaxVAEForPipelines])


@in_each_build
@pytest.mark.parametrize(
    ("asked", "dtype"),
    [
        pytest.param({"dtype": torch.bfloat16}, torch.bfloat16, id="a dtype"),
        pytest.param(
            {"torch_dtype": torch.bfloat16, "use_safetensors": True}, torch.bfloat16, id="by the older name"
        ),
        pytest.param({"dtype": "bfloat16"}, torch.bfloat16, id="a name"),
        pytest.param({"dtype": "torch.bfloat16"}, torch.bfloat16, id="a printed name"),
        pytest.param({"dtype": "auto"}, torch.float16, id="that of the files"),
        pytest.param({"torch_dtype": None}, torch.float32, id="none"),
    ],
)
def test_dtype_is_the_one_asked_for(tmp_path, build, asked, dtype):
    shallow_stock().half().save_pretrained(tmp_path)
    assert build.from_pretrained(tmp_path, **asked).dtype == dtype


@pytest.mark.parametrize(
    ("build", "dtype", "words"),
    [
        *(
            (build, dtype, "give a torch dtype such as torch.bfloat16, its name, .auto.")
            for build in (AutoencoderKLCogVideoX, FlaxVAEForPipelines)
            for dtype in ("bf16", "int8", np.float32, {"vae": torch.bfloat16})
        ),
        (FlaxVAEForPipelines, "float64", "the Flax build takes float32, bfloat16 or float16"),
    ],
)
def test_a_dtype_that_a_build_does_not_take_is_refused_in_words(model_directory, build, dtype, words):
    with pytest.raises(ValueError, match=words):
        build.from_pretrained(model_directory, dtype=dtype)


def _edit_weights(directory, edit):
    tensors = safetensors.torch.load_file(directory / WEIGHTS)
    edit(tensors)
    safetensors.torch.save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})


def _lose_shard(directory):
    index = '{"weight_map": {"a": "diffusion_pytorch_model-00001-of-00002.safetensors"}}'
    (directory / WEIGHTS).rename(directory / f"{WEIGHTS}.index.json").write_text(index)


@in_each_build
@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        pytest.param(shutil.rmtree, "there is no model directory", id="no directory"),
        pytest.param(lambda d: (d / "config.json").unlink(), "has no config.json", id="no config"),
        pytest.param(
            lambda d: (d / "config.json").rename(d / "model_index.json"),
            "whole pipeline: pass subfolder='vae'",
            id="a pipeline",
        ),
        pytest.param(lambda d: (d / "config.json").write_text("{"), "not valid JSON", id="config is no JSON"),
        pytest.param(
            lambda d: (d / "config.json").write_text('{"_class_name": "AutoencoderKL"}'),
            "is for AutoencoderKL, not for",
            id="another class",
        ),
        pytest.param(lambda d: (d / WEIGHTS).unlink(), f"has no {WEIGHTS}", id="no weights"),
        pytest.param(
            lambda d: (d / WEIGHTS).write_bytes((d / WEIGHTS).read_bytes()[:10_000]),
            "truncated",
            id="truncated weights",
        ),
        pytest.param(_lose_shard, "lacks diffusion_pytorch_model-00001", id="no shard"),
        pytest.param(
            lambda d: (d / WEIGHTS).rename(d / "weights.bin"), "A pickle, .* never loaded", id="a pickle"
        ),
        pytest.param(lambda d: _edit_weights(d, lambda t: t.pop(NAME)), NAME, id="a missing tensor"),
        pytest.param(
            lambda d: _edit_weights(d, lambda t: t.update(extra=torch.zeros(1))),
            "unexpected extra",
            id="a tensor too many",
        ),
        pytest.param(
            lambda d: _edit_weights(d, lambda t: t.update({NAME: torch.zeros(2, 2)})),
            NAME,
            id="another shape",
        ),
    ],
)
def test_a_broken_model_is_named(model_directory, break_it, words, build):
    break_it(model_directory)
    with pytest.raises(ModelError, match=words):
        build.from_pretrained(model_directory)
