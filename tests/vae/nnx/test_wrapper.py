"""FlaxVAEForPipelines where diffusers expects its own VAE, and the Flax build on the command line."""

import builtins
import importlib
import json
import subprocess
import sys

import pytest
import torch
from diffusers import AutoencoderKLCogVideoX

from cogvideox_torchax import cli, runtime
from cogvideox_torchax.files import video
from cogvideox_torchax.flax import FlaxVAEForPipelines
from cogvideox_torchax.vae.tolerances import FLOAT32_RELATIVE, relative_error
from tests import reference, small_pipelines
from tests.files.test_video import moving_frames


@pytest.mark.usefixtures("torchax_off")
@pytest.mark.parametrize("enabled", [False, True])
def test_tensors_on_jax_give_tensors_on_jax(small_vae, flax_vae, enabled):
    x, z = reference.video(1), reference.latents(1)
    if enabled:
        runtime.enable()
    on_jax = runtime.to_jax(x), runtime.to_jax(z)
    got = flax_vae.encode(on_jax[0]).latent_dist.parameters, flax_vae.decode(on_jax[1]).sample
    assert runtime.is_enabled() is enabled
    assert not runtime.on_jax(flax_vae.decode(z).sample)
    want = reference.encoded(small_vae, x), reference.decoded(small_vae, z)
    for ours, theirs in zip(got, want, strict=True):
        assert runtime.on_jax(ours)
        assert relative_error(runtime.to_torch(ours), theirs) < FLOAT32_RELATIVE


def test_an_unchanged_pipeline_runs_with_it():
    pipe = small_pipelines.build()
    want = pipe(**small_pipelines.inputs("text")).frames
    pipe.vae = FlaxVAEForPipelines.from_diffusers(pipe.vae)
    pipe.to("cpu")
    got = pipe(**small_pipelines.inputs("text")).frames
    assert got.shape == want.shape
    assert relative_error(got, want) < FLOAT32_RELATIVE


def test_it_is_diffusers_vae_by_every_name_that_pipelines_use(small_vae, flax_vae):
    x = reference.video(1)
    assert flax_vae.config.scaling_factor == small_vae.config.scaling_factor
    assert flax_vae.config.invert_scale_latents is False
    assert (flax_vae.dtype, flax_vae.device) == (torch.float32, torch.device("cpu"))
    draws = [
        model.encode(x).latent_dist.sample(torch.Generator().manual_seed(7))
        for model in (flax_vae, small_vae)
    ]
    assert relative_error(*draws) < FLOAT32_RELATIVE
    assert isinstance(flax_vae.encode(x, return_dict=False), tuple)
    assert isinstance(flax_vae.decode(reference.latents(1), return_dict=False), tuple)


def test_every_field_of_the_config_reaches_the_pipeline():
    options = {
        "scaling_factor": 0.7,
        "invert_scale_latents": True,
        "shift_factor": 0.5,
        "latents_mean": (0.1,) * 16,
        "latents_std": (2.0,) * 16,
        "force_upcast": False,
        "sample_height": 32,
        "sample_width": 48,
    }
    stock = reference.small_vae(**options)
    vae = FlaxVAEForPipelines.from_diffusers(stock)
    given, kept = (
        {name: value for name, value in model.config.items() if not name.startswith("_")}
        for model in (stock, vae)
    )
    assert {name: kept[name] for name in options} == options
    assert {name: _plain(value) for name, value in kept.items()} == {
        name: _plain(value) for name, value in given.items()
    }


def _plain(value):
    return list(value) if isinstance(value, tuple | list) else value


def test_from_pretrained_and_save_pretrained(model_directory, tmp_path, flax_vae):
    vae = FlaxVAEForPipelines.from_pretrained(model_directory, torch_dtype=torch.bfloat16)
    assert vae.dtype == torch.bfloat16
    assert {value.dtype for value in vae.state_dict().values()} == {torch.bfloat16}
    vae.save_pretrained(tmp_path / "again")
    again = AutoencoderKLCogVideoX.from_pretrained(tmp_path / "again", torch_dtype=torch.bfloat16)
    stock = AutoencoderKLCogVideoX.from_pretrained(model_directory, torch_dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(value, stock[name]) for name, value in again.state_dict().items())
    assert tuple(again.config.block_out_channels) == tuple(flax_vae.config.block_out_channels)


@pytest.mark.slow
def test_the_command_line_runs_it(model_directory, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with video.writing("clip.mp4", 10) as sink:
        sink.write(moving_frames(9))
    options = ("--backend", "flax", "--quiet", "--json")
    assert cli.main(["encode", "clip.mp4", "-o", "z.safetensors", "--model", "vae", *options]) == 0
    assert json.loads(capsys.readouterr().out)["latents"] == "1 x 16 x 3 x 3 x 5"
    assert cli.main(["decode", "z.safetensors", "-o", "again.mp4", *options]) == 0
    assert video.probe("again.mp4").num_frames == 9
    assert cli.main(["reconstruct", "clip.mp4", "-o", "again2.mp4", "--model", "vae", *options]) == 0
    capsys.readouterr()
    assert cli.main(["demo", "clip.mp4", "--model", "vae", "-o", "out", "--frames", "9", *options]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["backend"] == "flax"
    assert report["largest_difference_to_PyTorch_latents"] < FLOAT32_RELATIVE
    assert report["largest_difference_to_PyTorch_frames"] < FLOAT32_RELATIVE


def test_without_flax_the_extra_is_named(monkeypatch):
    package = importlib.import_module("cogvideox_torchax.flax")
    find = builtins.__import__

    def missing(name, *args, **kwargs):
        if name == "flax" or name.startswith("flax."):
            raise ModuleNotFoundError(f"No module named {name!r}", name="flax")
        return find(name, *args, **kwargs)

    for name in [name for name in sys.modules if name.startswith("cogvideox_torchax.vae.nnx.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ImportError, match=r"pip install 'cogvideox-torchax\[flax\]'"):
        _ = package.FlaxAutoencoderKLCogVideoX


def test_the_package_imports_without_flax():
    names = ("cogvideox_torchax.flax", *(f"cogvideox_torchax.cli.{command}" for command in cli.COMMANDS))
    code = f"import sys, {', '.join(names)}; assert 'flax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
