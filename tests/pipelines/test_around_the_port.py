"""Pipelines made of ported ones, copied, pickled, saved for others; requirements of diffusers' own tests."""

import copy
import json
import pickle

import pytest
import torch
from diffusers import CogVideoXVideoToVideoPipeline
from safetensors.torch import load_file

from cogvideox_torchax import make_mesh, port, runtime
from cogvideox_torchax.flax import FlaxVAEForPipelines
from cogvideox_torchax.vae.tolerances import relative_error
from tests import small_pipelines
from tests.pipelines.test_pipeline import TOLERANCE, latents
from tests.processes import printed_by
from tests.small_pipelines import one_layer as build

NAMES = {
    "scheduler": ["diffusers", "CogVideoXDDIMScheduler"],
    "text_encoder": ["transformers", "T5EncoderModel"],
    "tokenizer": ["transformers", "T5Tokenizer"],
    "transformer": ["diffusers", "CogVideoXTransformer3DModel"],
    "vae": ["diffusers", "AutoencoderKLCogVideoX"],
}
"""Names of every pipeline's parts, whose classes others have to find."""


@pytest.fixture(scope="module")
def stock():
    return build()


@pytest.fixture(scope="module")
def want(stock):
    return torch.no_grad()(lambda: latents(stock))()


@pytest.fixture(scope="module")
def ported(stock):
    return port(copy.deepcopy(stock))


def named_as_in(pipe):
    return {name: list(pipe.config[name]) for name in NAMES}


def test_a_pipeline_made_from_a_ported_one_is_diffusers_own_and_shares_its_parts(stock, ported):
    clip, stock_clip = (CogVideoXVideoToVideoPipeline.from_pipe(pipe) for pipe in (ported, stock))
    assert type(clip) is CogVideoXVideoToVideoPipeline
    assert all(clip.components[name] is part for name, part in ported.components.items())
    assert relative_error(latents(clip, "video"), latents(stock_clip, "video")) < TOLERANCE
    assert named_as_in(clip) == NAMES
    assert type(clip).from_pipe(clip).transformer is ported.transformer  # by the ported class, too


def test_a_pipeline_made_from_one_on_a_mesh_stays_there_and_compiles_nothing_again(stock):
    pipe = port(copy.deepcopy(stock), mesh=make_mesh(1, 2))
    programs = pipe.transformer.program, pipe.vae.program("decode")
    clip = CogVideoXVideoToVideoPipeline.from_pipe(pipe)
    assert clip.vae.mesh == clip.transformer.mesh == make_mesh(1, 2)
    assert (clip.transformer.program, clip.vae.program("decode")) == programs


def test_a_pipeline_made_from_one_on_the_host_leaves_it_there(stock):
    pipe = port(copy.deepcopy(stock)).to("cpu")
    pipe.transformer = torch.compile(pipe.transformer)  # whose wrapper refuses to be asked for its truth
    CogVideoXVideoToVideoPipeline.from_pipe(pipe)
    assert not any(runtime.on_jax(weight) for weight in pipe.transformer.parameters())


def test_a_pipeline_around_a_ported_vae_alone_is_handed_over_and_named_for_others(stock, tmp_path):
    pipe = build(vae=port(copy.deepcopy(stock.vae)))
    clip = CogVideoXVideoToVideoPipeline.from_pipe(pipe)
    assert clip.vae is pipe.vae
    assert type(clip) is CogVideoXVideoToVideoPipeline
    assert named_as_in(pipe) == named_as_in(clip) == NAMES
    flax = build(vae=FlaxVAEForPipelines.from_diffusers(stock.vae))
    assert CogVideoXVideoToVideoPipeline.from_pipe(flax).vae is flax.vae
    flax.vae.disable_gradient_checkpointing()  # as diffusers' training scripts call it
    flax.save_pretrained(tmp_path)
    assert type(type(flax).from_pretrained(tmp_path).vae) is FlaxVAEForPipelines


def test_a_part_that_the_call_gives_comes_before_the_ported_one(ported):
    other = small_pipelines.transformer("5b", seed=1, num_layers=1)
    clip = CogVideoXVideoToVideoPipeline.from_pipe(ported, transformer=other)
    assert clip.transformer is other
    port(clip)
    assert runtime.on_jax(other.proj_out.weight)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_is_ported_too_and_a_deep_one_has_weights_and_ties_of_its_own(ported, want, copied):
    pipe, is_deep = copied(ported), copied is copy.deepcopy
    assert (type(pipe), type(pipe.scheduler)) == (type(ported), type(ported.scheduler))
    assert pipe.text_encoder.shared.weight is pipe.text_encoder.encoder.embed_tokens.weight
    assert 2 * [not is_deep] == [
        pipe.transformer is ported.transformer,
        pipe.text_encoder.shared.weight is ported.text_encoder.shared.weight,
    ]
    assert relative_error(latents(pipe), want) < TOLERANCE
    if is_deep:
        pipe.transformer.proj_out.bias.apply_jax_(lambda array: array + 1)
        assert relative_error(latents(pipe), want) > 0.01
        assert relative_error(latents(ported), want) < TOLERANCE


@pytest.mark.usefixtures("torchax_off")
def test_what_is_unpickled_is_in_pytorch_until_it_is_ported_again(stock, want):
    pipe = pickle.loads(pickle.dumps(port(copy.deepcopy(stock))))
    assert (type(pipe), type(pipe.scheduler)) == (type(stock), type(stock.scheduler))
    assert {type(weight) for weight in pipe.transformer.parameters()} == {torch.nn.Parameter}
    assert torch.equal(latents(pipe), want)  # PyTorch's own, from the same weights
    assert relative_error(latents(port(pipe)), want) < TOLERANCE


ELSEWHERE = """
import sys
sys.modules["torchax"] = sys.modules["jax"] = sys.modules["cogvideox_torchax"] = None
import torch
from diffusers import DiffusionPipeline
from safetensors.torch import save_file
pipe = DiffusionPipeline.from_pretrained(sys.argv[1])
encoder = pipe.text_encoder
assert encoder.shared.weight is encoder.encoder.embed_tokens.weight
parts = pipe.transformer, pipe.text_encoder, pipe.vae
save_file({f"{i}.{n}": w.clone() for i, part in enumerate(parts) for n, w in part.state_dict().items()},
          sys.argv[2])
"""


@pytest.mark.slow
def test_what_is_saved_loads_where_this_package_is_not(ported, stock, tmp_path):
    ported.save_pretrained(tmp_path / "saved")
    index = json.loads((tmp_path / "saved" / "model_index.json").read_text())
    assert {name: index[name] for name in ("_class_name", *NAMES)} == {
        "_class_name": "CogVideoXPipeline",
        **NAMES,
    }
    printed_by(ELSEWHERE, tmp_path / "saved", tmp_path / "weights")
    loaded = load_file(tmp_path / "weights")
    for i, part in enumerate((stock.transformer, stock.text_encoder, stock.vae)):
        assert all(torch.equal(loaded[f"{i}.{n}"], weight) for n, weight in part.state_dict().items())


def test_saved_files_have_their_variants_name_and_may_be_read_by_whom_the_umask_lets(ported, stock, tmp_path):
    (tmp_path / "ordinary").touch()
    ported.save_pretrained(tmp_path / "saved", variant="fp16")
    port(copy.deepcopy(stock.vae)).save_pretrained(tmp_path / "saved/native")
    files = sorted((tmp_path / "saved").rglob("*.safetensors"))
    network = "diffusion_pytorch_model.fp16.safetensors"
    assert [file.relative_to(tmp_path / "saved").as_posix() for file in files] == [
        "native/diffusion_pytorch_model.safetensors",
        *("text_encoder/model.fp16.safetensors", f"transformer/{network}", f"vae/{network}"),
    ]
    assert len({path.stat().st_mode for path in tmp_path.rglob("*") if path.is_file()}) == 1


def test_a_pipeline_goes_to_the_host_and_back(ported, want):
    ties = ported.text_encoder
    for device in ("cpu", "jax", "cpu", "cuda"):
        assert ported.to(device) is ported
        assert runtime.on_jax(ported.transformer.proj_out.weight) == (device != "cpu")
        assert ties.shared.weight is ties.encoder.embed_tokens.weight
        assert relative_error(latents(ported), want) < TOLERANCE


# Requirements of diffusers' own tests of these pipelines


@pytest.mark.usefixtures("torchax_off")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.slow_cases("no_grad")
def test_prompts_encoded_by_themselves_give_the_same_video(mode, want):
    """A pipeline without VAE and transformer, then one without encoder, as in diffusers' documents."""
    with mode():
        prompt_embeds, _ = port(build(vae=None, transformer=None)).encode_prompt(
            "a panda plays a guitar", do_classifier_free_guidance=False, max_sequence_length=16
        )
        pipe = port(build(text_encoder=None, tokenizer=None))
        for made in (pipe, type(pipe).from_pipe(pipe), pipe.to("jax")):
            assert relative_error(latents(made, prompt=None, prompt_embeds=prompt_embeds), want) < TOLERANCE
        frames = pipe.decode_latents(pipe.prepare_latents(1, 16, 5, 8, 16, torch.float32, "jax", None))
        assert frames.device.type == "cpu"


def test_a_cast_after_porting_is_one_before():
    before, after = port(build().to(torch.bfloat16)), port(build())
    latents(after)
    after.to(torch.bfloat16)
    assert {weight.dtype for weight in after.transformer.parameters()} == {torch.bfloat16}
    assert after.text_encoder.shared.weight is after.text_encoder.encoder.embed_tokens.weight
    assert torch.equal(latents(after), latents(before))
