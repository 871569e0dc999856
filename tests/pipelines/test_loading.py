"""A pipeline fed from its files: the one that diffusers loads, and nothing of it whole on the host."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from cogvideox_torchax import load_pipeline, make_mesh, port, runtime
from cogvideox_torchax.vae.checkpoint import ModelError
from tests import small_pipelines
from tests.pipelines.test_pipeline import latents
from tests.reference import largest_error


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Save a pipeline with learned positions, its networks in several files."""
    path = tmp_path_factory.mktemp("saved")
    small_pipelines.build("image", "5b-I2V").save_pretrained(path, max_shard_size="30KB")
    assert min(len([*path.glob(f"{part}/*.safetensors")]) for part in ("transformer", "text_encoder")) > 1
    return path


@pytest.fixture(scope="module")
def wanted(directory):
    return port(small_pipelines.CLASSES["image"].from_pretrained(directory, torch_dtype=torch.float32))


def test_what_is_fed_is_what_diffusers_loads(directory, wanted):
    class Subclass(small_pipelines.CLASSES["image"]):
        pass

    pipe = load_pipeline(directory, pipeline_class=Subclass, dtype=torch.float32)
    assert isinstance(pipe, Subclass)
    for part in ("transformer", "text_encoder"):
        want, got = getattr(wanted, part).state_dict(), getattr(pipe, part).state_dict()
        assert got.keys() == want.keys()
        others = [n for n in want if not torch.equal(runtime.to_torch(got[n]), runtime.to_torch(want[n]))]
        assert (others, getattr(pipe, part).training) == ([], False)
    assert pipe.text_encoder.shared.weight is pipe.text_encoder.encoder.embed_tokens.weight
    assert torch.equal(latents(pipe, "image"), latents(wanted, "image"))


@pytest.mark.parametrize(("size", "warns"), [(8, False), (300, True)])
def test_the_size_of_converted_files_is_warned_of(size, warns, tmp_path, caplog):
    pipe = small_pipelines.build(version="1.5")
    pipe.transformer.register_to_config(sample_height=size, sample_width=size)
    pipe.save_pretrained(tmp_path)
    load_pipeline(tmp_path)
    assert ("2400 x 2400 pixels" in caplog.text) == warns


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
    parts = {"text_encoder": small_pipelines.text_encoder().bfloat16(), "vae": small_pipelines.vae().half()}
    small_pipelines.one_layer(**parts).save_pretrained(path)
    return path


@pytest.mark.filterwarnings("error")  # diffusers warns of a name that it deprecates
@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
@pytest.mark.parametrize(("asked", "wanted_names"), ASKED.values(), ids=ASKED)
def test_dtypes_are_asked_for_as_in_diffusers(in_three_dtypes, asked, wanted_names, name):
    pipe = load_pipeline(in_three_dtypes, **{name: asked})
    dtypes = (part.dtype for part in (pipe.transformer, pipe.text_encoder, pipe.vae))
    assert tuple(map(runtime.dtype_name, dtypes)) == wanted_names


@pytest.mark.parametrize("with_variant", ["transformer", "text_encoder", "vae"])
@pytest.mark.parametrize("max_shard_size", ["10GB", "30KB"])
def test_a_part_without_the_variant_is_loaded_without_it(
    in_three_dtypes, tmp_path, with_variant, max_shard_size
):
    path = tmp_path / "mixed"
    shutil.copytree(in_three_dtypes, path, ignore=shutil.ignore_patterns("*.safetensors"))
    pipe = small_pipelines.CLASSES["text"].from_pretrained(in_three_dtypes)
    others = dict.fromkeys(("transformer", "text_encoder", "vae"), (torch.bfloat16, None))
    wanted = {**others, with_variant: (torch.float16, "fp16")}
    for part, (dtype, variant) in wanted.items():
        options = {"variant": variant, "max_shard_size": max_shard_size}
        getattr(pipe, part).to(dtype).save_pretrained(path / part, **options)
    loaded = load_pipeline(path, variant="fp16", dtype="auto")
    assert {part: getattr(loaded, part).dtype for part in wanted} == {p: d for p, (d, _) in wanted.items()}


EMBEDDINGS = "shared.weight", "encoder.embed_tokens.weight"
KEPT = {
    "the second name alone": lambda weight: {EMBEDDINGS[1]: weight},
    "two that are equal": lambda weight: {name: weight.copy() for name in EMBEDDINGS},
    "two that differ": lambda weight: {EMBEDDINGS[0]: weight, EMBEDDINGS[1]: 1 - weight},
}


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("kept", KEPT)
def test_embeddings_are_tied_as_transformers_ties_those_of_a_file(saved, tmp_path, kept, offload):
    path = shutil.copytree(saved(), tmp_path / "kept")
    file = path / "text_encoder/model.safetensors"
    weights = load_file(file)
    save_file(weights | KEPT[kept](weights.pop(EMBEDDINGS[0])), file, {"format": "pt"})
    stock, ids = small_pipelines.CLASSES["text"].from_pretrained(path), torch.tensor([[3, 4, 5, 1]])
    want = stock.text_encoder(ids)[0]
    for pipe in (load_pipeline(path, dtype=None, offload=offload), port(stock)):
        encoder = pipe.text_encoder
        assert largest_error(runtime.to_torch(encoder(runtime.to_jax(ids))[0]), want) < 1e-5
        assert (encoder.shared.weight is encoder.encoder.embed_tokens.weight) == (kept != "two that differ")


@pytest.mark.parametrize("difference", [0, 1])
def test_embeddings_that_a_user_has_untied_stay_so(difference):
    encoder, ids = small_pipelines.text_encoder(), torch.tensor([[3, 4, 5, 1]])
    encoder.encoder.embed_tokens.weight = torch.nn.Parameter(encoder.shared.weight.detach() + difference)
    want = encoder(ids)[0]
    pipe = port(small_pipelines.build(text_encoder=encoder, transformer=None))
    for _ in range(2):
        assert largest_error(runtime.to_torch(encoder(runtime.to_jax(ids))[0]), want) < 1e-5
        assert encoder.shared.weight is not encoder.encoder.embed_tokens.weight
        pipe.to("cpu").to("jax")


REFUSED = {
    "a dtype of no part": ({"dtype": {"transfomer": "float16"}}, "transfomer: its keys are text_encoder, tr"),
    "two names of a dtype": (
        {"dtype": torch.float32, "torch_dtype": torch.float16},
        "both dtype and torch_",
    ),
    "and one the default": (
        {"dtype": torch.bfloat16, "torch_dtype": torch.float16},
        "both dtype and torch_",
    ),
    "a tuple for a mesh": ({"mesh": (1, 2)}, "type tuple: make one with make_mesh"),
    "a name for a class": ({"pipeline_class": "CogVideoXPipeline"}, "give the class, not its name"),
    "a split without a mesh": ({"parallel": "context"}, "parallel='context': it is for a mesh"),
    "a variant that is not there": ({"variant": "fp16"}, "has no weights of variant='fp16'"),
}


@pytest.mark.parametrize(("options", "words"), REFUSED.values(), ids=REFUSED)
def test_an_option_that_means_nothing_is_refused(directory, options, words):
    with pytest.raises(ValueError, match=words):
        load_pipeline(directory, **options)


NAME = "proj_out.weight"
FAULTS = {
    "missing": ({NAME: None}, r"proj_out\.weight"),
    "unexpected": ({"surplus.weight": np.zeros(3, np.float32)}, "surplus"),
    "of another shape": ({NAME: np.zeros((64, 127), np.float32)}, r"proj_out\.weight"),
}


@pytest.mark.parametrize(("changes", "words"), FAULTS.values(), ids=FAULTS)
def test_weights_that_do_not_fit_their_config_are_named(directory, tmp_path, changes, words):
    path = shutil.copytree(directory, tmp_path / "broken") / "transformer"
    index = json.loads((path / "diffusion_pytorch_model.safetensors.index.json").read_text())
    file = path / index["weight_map"][NAME]
    save_file({name: each for name, each in (load_file(file) | changes).items() if each is not None}, file)
    with pytest.raises(ValueError, match=words):
        load_pipeline(path.parent, torch_dtype=torch.float32)


def test_a_directory_without_a_pipeline_is_refused_in_words(tmp_path):
    with pytest.raises(ModelError, match="model_index.json: give the directory of a whole pipeline"):
        load_pipeline(tmp_path)
