"""Requirements of diffusers' own tests of these pipelines that no other test here covers."""

import pytest
import torch

from cogvideox_torchax import port, runtime
from cogvideox_torchax.vae.tolerances import relative_error
from tests import small_pipelines

TOLERANCE = 1e-4
"""Relative error of the results after two steps, in float32."""


def build(**components):
    transformer = small_pipelines.transformer("5b", num_layers=1)
    text_encoder = small_pipelines.text_encoder(num_layers=1)
    return small_pipelines.build(**{"transformer": transformer, "text_encoder": text_encoder, **components})


def result(pipe, **overrides):
    few = {"num_inference_steps": 2, "guidance_scale": 1.0, **overrides}
    return runtime.to_torch(pipe(**small_pipelines.inputs("text", **few)).frames)


def latents(pipe, **overrides):
    return result(pipe, output_type="latent", **overrides)


@pytest.mark.usefixtures("torchax_off")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.slow_cases("no_grad")
def test_prompts_encoded_by_themselves_give_the_same_video_and_leave_torchax_off(mode):
    """A pipeline without VAE and transformer, then one without encoder, as in diffusers' documents."""
    stock = build()
    want, given = latents(stock), {"max_sequence_length": 16, "do_classifier_free_guidance": False}
    with mode():
        encoder = port(build(vae=None, transformer=None))
        prompt_embeds, _ = encoder.encode_prompt("a panda plays a guitar", **given)
        pipe = port(build(text_encoder=None, tokenizer=None))
        assert not runtime.is_enabled()
        for made in (pipe, type(pipe).from_pipe(pipe), pipe.to("jax")):
            got = latents(made, prompt=None, prompt_embeds=prompt_embeds)
            assert relative_error(got, want) < TOLERANCE
            assert not runtime.is_enabled()
        frames = pipe.decode_latents(pipe.prepare_latents(1, 16, 5, 8, 16, torch.float32, "jax", None))
        assert (frames.device.type, runtime.is_enabled()) == ("cpu", False)


@pytest.mark.parametrize("when", ["before", "after"])
def test_fused_projections_change_nothing(when):
    want, pipe = latents(build()), build()
    if when == "before":
        runtime.without_torchax(pipe.fuse_qkv_projections)
    port(pipe)
    if when == "after":
        pipe.fuse_qkv_projections()
    attention = pipe.transformer.transformer_blocks[0].attn1
    assert runtime.on_jax(attention.to_qkv.weight)
    assert "Fused" in type(attention.processor).__name__
    assert relative_error(latents(pipe), want) < TOLERANCE
    pipe.unfuse_qkv_projections()
    assert "Fused" not in type(attention.processor).__name__
    assert relative_error(latents(pipe), want) < TOLERANCE


@pytest.mark.slow
def test_slices_and_tiles_of_the_vae_are_those_of_stock_diffusers():
    stock, ported = build(), port(build())
    prompts = {"prompt": ["a panda", "the moon"]}
    plain = result(stock, **prompts)
    for pipe in (stock, ported):
        pipe.vae.enable_slicing()
    assert relative_error(result(ported, **prompts), plain) < TOLERANCE
    tiles = {"tile_sample_min_height": 8, "tile_sample_min_width": 8}
    overlaps = {"tile_overlap_factor_height": 0.25, "tile_overlap_factor_width": 0.25}
    for pipe in (stock, ported):
        pipe.vae.enable_tiling(**tiles, **overlaps)
    tiled = result(stock, **prompts)
    assert relative_error(tiled, plain) > 1e-3
    assert relative_error(result(ported, **prompts), tiled) < TOLERANCE
    for pipe in (stock, ported):
        pipe.vae.disable_tiling()
        pipe.vae.disable_slicing()
    assert relative_error(result(ported, **prompts), plain) < TOLERANCE


def test_a_cast_after_porting_is_one_before():
    before, after = port(build().to(torch.bfloat16)), port(build())
    latents(after)
    after.to(torch.bfloat16)
    assert {weight.dtype for weight in after.transformer.parameters()} == {torch.bfloat16}
    assert after.text_encoder.shared.weight is after.text_encoder.encoder.embed_tokens.weight
    assert torch.equal(latents(after), latents(before))


@pytest.mark.parametrize(
    "name", ["enable_model_cpu_offload", "enable_sequential_cpu_offload", "enable_group_offload"]
)
def test_every_kind_of_offload_is_refused_in_one_line(name):
    pipe = port(build())
    with pytest.raises(ValueError, match="^a ported pipeline's weights stay on JAX: take the offload out"):
        getattr(pipe, name)(device="cuda")
    assert runtime.on_jax(pipe.transformer.proj_out.weight)


def test_a_callback_of_an_unknown_tensor_is_refused_as_ever():
    with pytest.raises(ValueError, match="callback_on_step_end_tensor_inputs"):
        latents(port(build()), callback_on_step_end_tensor_inputs=["nothing"])
