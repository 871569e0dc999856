"""A pipeline fed from its files: the one that diffusers loads, and nothing of it whole on the host."""

import json
import shutil
import warnings

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from cogvideox_torchax import load_pipeline, make_mesh, port, runtime
from cogvideox_torchax.vae.checkpoint import ModelError
from tests import small_pipelines


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Save a pipeline with learned positions, its networks in several files."""
    path = tmp_path_factory.mktemp("saved")
    pipe = runtime.without_torchax(small_pipelines.build, "image", "5b-I2V")
    runtime.without_torchax(pipe.save_pretrained, path, max_shard_size="30KB")
    for part in ("transformer", "text_encoder"):
        assert len(list((path / part).glob("*.safetensors"))) > 1
    return path


def latents(pipe):
    pipe.set_progress_bar_config(disable=True)
    return runtime.to_torch(pipe(**small_pipelines.inputs("image", output_type="latent")).frames)


@pytest.fixture(scope="module")
def wanted(directory):
    kind = small_pipelines.CLASSES["image"]
    return port(runtime.without_torchax(kind.from_pretrained, directory, torch_dtype=torch.float32))


def test_what_is_fed_is_what_diffusers_loads(directory, wanted):
    class Subclass(small_pipelines.CLASSES["image"]):
        pass

    pipe = load_pipeline(directory, pipeline_class=Subclass, dtype=torch.float32)
    assert isinstance(pipe, Subclass)
    for part in ("transformer", "text_encoder"):
        want, got = getattr(wanted, part).state_dict(), getattr(pipe, part).state_dict()
        assert got.keys() == want.keys()
        for name, tensor in want.items():
            assert torch.equal(runtime.to_torch(got[name]), runtime.to_torch(tensor)), name
        assert not getattr(pipe, part).training
    assert pipe.text_encoder.shared.weight is pipe.text_encoder.encoder.embed_tokens.weight
    assert torch.equal(latents(pipe), latents(wanted))


def test_over_a_mesh_each_device_gets_its_part_and_the_dtype_is_the_one_asked_for(directory, wanted):
    pipe = load_pipeline(directory, mesh=make_mesh(2, 4), parallel="tensor", torch_dtype=torch.bfloat16)
    weight, want = (made.transformer.transformer_blocks[0].attn1.to_q.weight for made in (pipe, wanted))
    assert torch.equal(runtime.to_torch(weight), runtime.to_torch(want).bfloat16())
    assert {shard.data.shape for shard in runtime.array_of(weight).addressable_shards} == {(128 // 4, 128)}


ASKED = {
    "a dictionary": ({"vae": torch.float16, "default": "bfloat16"}, ("bfloat16", "bfloat16", "float16")),
    "a dictionary without a default": ({"vae": torch.bfloat16}, ("float32", "float32", "bfloat16")),
    "a name": ("bfloat16", ("bfloat16", "bfloat16", "bfloat16")),
    "that of the files": ("auto", ("float32", "bfloat16", "float16")),
    "none": (None, ("float32", "float32", "float32")),
}
"""A dtype as `from_pretrained` takes it, and those of transformer, text encoder and VAE that it means."""


@pytest.fixture(scope="module")
def in_three_dtypes(tmp_path_factory):
    """Save a pipeline, each of whose networks has a dtype of its own."""
    path = tmp_path_factory.mktemp("in three dtypes")
    pipe = runtime.without_torchax(small_pipelines.one_layer)
    pipe.text_encoder.bfloat16()
    pipe.vae.half()
    runtime.without_torchax(pipe.save_pretrained, path)
    return path


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
@pytest.mark.parametrize(("asked", "wanted_names"), ASKED.values(), ids=ASKED)
def test_dtypes_are_asked_for_as_in_diffusers(in_three_dtypes, asked, wanted_names, name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # diffusers warns of a name that it deprecates
        pipe = load_pipeline(in_three_dtypes, **{name: asked})
    parts = (pipe.transformer, pipe.text_encoder, pipe.vae)
    assert tuple(runtime.dtype_name(part.dtype) for part in parts) == wanted_names


def test_a_dtype_for_a_part_that_is_not_there_is_refused(directory):
    with pytest.raises(ValueError, match="for transfomer: its keys are text_encoder, transformer, vae"):
        load_pipeline(directory, dtype={"transfomer": torch.float16})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_names_of_a_dtype_are_refused(directory, dtype):
    with pytest.raises(ValueError, match="both dtype and torch_dtype"):
        load_pipeline(directory, dtype=dtype, torch_dtype=torch.float16)


@pytest.mark.parametrize("wrong", [{"mesh": (1, 2)}, {"pipeline_class": "CogVideoXPipeline"}])
def test_a_tuple_is_no_mesh_and_a_name_no_class(directory, wrong):
    with pytest.raises(ValueError, match=r"type tuple: make one with make_mesh|give the class, not its name"):
        load_pipeline(directory, **wrong)


def test_a_split_without_a_mesh_is_refused(directory):
    with pytest.raises(ValueError, match="parallel='context': it is for a mesh"):
        load_pipeline(directory, parallel="context")


@pytest.fixture
def broken(directory, tmp_path):
    """Return a copy whose first file of the transformer a test may change."""
    path = tmp_path / "broken"
    shutil.copytree(directory, path)
    index = path / "transformer" / "diffusion_pytorch_model.safetensors.index.json"
    name = "proj_out.weight"
    return path, path / "transformer" / json.loads(index.read_text())["weight_map"][name], name


@pytest.mark.parametrize("fault", ["missing", "unexpected", "of another shape"])
def test_weights_that_do_not_fit_their_config_are_named(broken, fault):
    path, file, name = broken
    tensors = load_file(file)
    if fault == "missing":
        del tensors[name]
    elif fault == "unexpected":
        tensors["surplus.weight"] = np.zeros(3, np.float32)
    else:
        tensors[name] = np.ascontiguousarray(tensors[name][:, :-1])
    save_file(tensors, file)
    with pytest.raises(ValueError, match="surplus" if fault == "unexpected" else name.replace(".", r"\.")):
        load_pipeline(path, torch_dtype=torch.float32)


def test_a_directory_without_a_pipeline_is_refused_in_words(directory, tmp_path):
    with pytest.raises(ModelError, match="model_index.json: give the directory of a whole pipeline"):
        load_pipeline(tmp_path)
    with pytest.raises(ModelError, match="has no"):
        load_pipeline(directory, variant="fp16")
