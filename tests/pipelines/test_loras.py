"""LoRAs on a ported pipeline: loaded before and after the port, fused, scaled, removed, and of few steps."""

import copy
import functools
import itertools

import pytest
import torch
from diffusers import CogVideoXDPMScheduler
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from cogvideox_torchax import make_mesh, port, runtime
from cogvideox_torchax.vae.tolerances import relative_error
from tests import small_pipelines
from tests.pipelines.test_eight_bits import rounded
from tests.pipelines.test_own_classes import loaded
from tests.pipelines.test_pipeline import TOLERANCE, frames, latents, port_to
from tests.pipelines.test_unknown_networks import consisid, faces

pytestmark = pytest.mark.usefixtures("torchax_off")


@pytest.mark.parametrize("placement", ["one device", "1x8", "2x4", "2x4 tensor"])
@pytest.mark.slow_cases(but=["2x4"])
@pytest.mark.product_cases("1x8")
def test_a_lora_loaded_before_porting_scaled_after_it_and_one_unloaded(saved, placement, tmp_path):
    def scaled(pipe):
        """Return the results by the whole LoRA, by half of it, and by half of that half."""
        whole = latents(pipe)
        pipe.set_adapters(["drawn"], [0.5])
        return whole, latents(pipe), latents(pipe, attention_kwargs={"scale": 0.5})

    plain, stock, unloaded, ported = (loaded(saved()) for _ in range(4))
    small_pipelines.save_lora(loaded(saved()), tmp_path)
    for pipe in (stock, unloaded, ported):
        pipe.load_lora_weights(tmp_path, adapter_name="drawn")
    unloaded.unload_lora_weights()
    want = [latents(plain), *scaled(stock)]
    assert min(relative_error(other, want[1]) for other in (want[0], want[2])) > 0.01
    got = [latents(port_to(placement, unloaded)), *scaled(port_to(placement, ported))]
    for ours, theirs in zip(got, want, strict=True):
        assert relative_error(ours, theirs) < 1e-4


@pytest.mark.parametrize(("network", "mesh"), [("known", None), ("known", (2, 4)), ("unknown", None)])
@pytest.mark.slow_cases("known-mesh1", "unknown-*")
def test_a_lora_loaded_merged_and_unloaded_after_porting(saved, network, mesh, tmp_path):
    run = latents if network == "known" else functools.partial(latents, kind="image", **faces())
    stock, ported = (loaded(saved()) if network == "known" else consisid() for _ in range(2))
    small_pipelines.save_lora(copy.deepcopy(stock), tmp_path)
    port(ported, mesh=make_mesh(*mesh) if mesh else None)
    wanted = []
    for change in (
        lambda _: None,
        lambda pipe: pipe.load_lora_weights(tmp_path, adapter_name="drawn"),
        lambda pipe: pipe.fuse_lora(lora_scale=0.5),
        lambda pipe: pipe.unfuse_lora(),
        lambda pipe: pipe.unload_lora_weights(),
    ):
        change(stock)
        change(ported)
        wanted.append(run(stock))
        assert relative_error(run(ported), wanted[-1]) < 1e-4
    assert min(relative_error(wanted[i], wanted[i + 1]) for i in range(2)) > 0.01
    assert all(runtime.on_jax(weight) for weight in ported.transformer.parameters())
    assert ported.transformer.mesh == (make_mesh(*mesh) if mesh else None)


def test_a_lora_that_does_not_fit_is_refused_and_leaves_the_pipeline_as_it_was(saved, tmp_path):
    ported, file = port(loaded(saved())), tmp_path / "pytorch_lora_weights.safetensors"
    want = latents(ported)
    small_pipelines.save_lora(loaded(saved()), tmp_path)
    save_file({name: torch.cat([value, value], dim=1) for name, value in load_file(file).items()}, file)
    with pytest.raises(RuntimeError, match="size mismatch"):
        ported.load_lora_weights(tmp_path)
    assert all(runtime.on_jax(weight) for weight in ported.transformer.parameters())
    ported.unload_lora_weights()
    assert torch.equal(latents(ported), want)


@pytest.mark.parametrize("network", ["known", "unknown"])
def test_an_adapter_of_the_transformer_alone_is_added_and_saved_after_porting(saved, network, tmp_path):
    pipe, other = (loaded(saved()) if network == "known" else consisid() for _ in range(2))
    transformer, name = port(pipe).transformer, "pytorch_lora_weights.safetensors"
    transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q"]), "added")
    assert all(runtime.on_jax(weight) for weight in transformer.parameters())
    transformer.save_lora_adapter(tmp_path, adapter_name="added")
    other.transformer.load_lora_adapter(tmp_path, prefix=None, weight_name=name)
    layers = {name: weight for name, weight in transformer.state_dict().items() if "lora_" in name}
    pipe.save_lora_weights(tmp_path / "whole", transformer_lora_layers=layers)
    assert len(load_file(tmp_path / "whole" / name)) == len(layers)
    added, read = (
        [runtime.to_torch(value) for name, value in model.named_parameters() if "lora_" in name]
        for model in (transformer, other.transformer)
    )
    assert [*map(torch.equal, added, read)] == len(layers) * [True]


# Few steps, as the files of distilled models are made and used: by `load_lora_weights`, without guidance

RANKS = {"to_q": 2, "to_k": 4, "to_v": 2, "to_out.0": 3, "ff.net.0.proj": 4, "ff.net.2": 2}
ALPHAS = {
    "target_modules": [*RANKS],
    "r": 2,
    "rank_pattern": RANKS,
    "lora_alpha": 3,
    "alpha_pattern": {"to_k": 8, "ff.net.2": 1},
}
"""What newer files have beside their matrices; in older ones each alpha is the rank."""


def few_step_lora(form, path):
    """Save a LoRA of several ranks on all projections of the blocks, with the keys of one of the `FORMS`."""
    generator, layers = torch.Generator().manual_seed(5), {}
    down, up = ("lora.down", "lora.up") if form == "older names" else ("lora_A", "lora_B")
    modules = small_pipelines.transformer("5b", num_layers=1).named_modules()
    for (name, module), (ending, rank) in itertools.product(modules, RANKS.items()):
        if name.endswith(ending):
            for part, size in ((down, (rank, module.in_features)), (up, (module.out_features, rank))):
                layers[f"{name}.{part}.weight"] = torch.randn(size, generator=generator) * 0.2
    if form == "alphas":
        metadata = {"transformer_lora_adapter_metadata": ALPHAS}
        small_pipelines.CLASSES["text"].save_lora_weights(path, transformer_lora_layers=layers, **metadata)
    else:
        layers = {f"transformer.{name}": matrix for name, matrix in layers.items()}
        save_file(layers, path / "pytorch_lora_weights.safetensors")


def in_few_steps(pipe):
    pipe.scheduler = CogVideoXDPMScheduler.from_config(pipe.scheduler.config, timestep_spacing="trailing")
    return frames(pipe, num_inference_steps=4, guidance_scale=1.0)


@pytest.mark.parametrize("mesh", [None, (2, 2), (1, 4)])
@pytest.mark.parametrize("form", ["diffusers' names", "older names", "alphas"])
@pytest.mark.slow_cases("older names-*", "diffusers' names-mesh*", "alphas-mesh2")
def test_a_lora_of_few_steps_makes_what_it_makes_in_pytorch_whether_fused_or_not(saved, form, mesh, tmp_path):
    few_step_lora(form, tmp_path)
    stock, ported = loaded(saved()), loaded(saved())
    plain = in_few_steps(stock)
    for pipe in (stock, ported):
        pipe.load_lora_weights(tmp_path)
    port(ported, mesh=make_mesh(*mesh) if mesh else None)
    want = in_few_steps(stock)
    assert relative_error(plain, want) > 0.01
    assert relative_error(in_few_steps(ported), want) < TOLERANCE
    ported.fuse_lora()
    assert relative_error(in_few_steps(ported), want) < TOLERANCE


@pytest.mark.parametrize("weights", ["int8", "int8-dynamic"])
def test_a_lora_is_fused_before_the_weights_are_rounded(saved, weights, tmp_path):
    few_step_lora("diffusers' names", tmp_path)
    stock, ported = loaded(saved()), loaded(saved())
    for pipe in (stock, ported):
        pipe.load_lora_weights(tmp_path)
        pipe.fuse_lora()
        pipe.unload_lora_weights()
    port(ported, weights=weights)
    assert "int8" in {runtime.dtype_name(weight.dtype) for weight in ported.transformer.parameters()}
    exact = in_few_steps(stock)
    for network in (stock.transformer, stock.text_encoder):
        rounded(network, weights)
    want = in_few_steps(stock)
    assert relative_error(want, exact) > 10 * TOLERANCE
    # A token that is rounded to another integer than in PyTorch differs by up to 1e-3 (`test_eight_bits`).
    assert relative_error(in_few_steps(ported), want) < (TOLERANCE if weights == "int8" else 5e-3)
