"""Networks on JAX run in diffusers' own pipelines with their own schedulers, torchax enabled or not."""

import contextlib
import copy
import itertools

import jax
import numpy as np
import pytest
import torch
import torchax
from diffusers import CogVideoXDDIMScheduler, CogVideoXDPMScheduler

from cogvideox_torchax import make_mesh, port, runtime
from cogvideox_torchax.vae.tolerances import FLOAT32_RELATIVE, relative_error
from tests import small_pipelines

pytestmark = pytest.mark.usefixtures("torchax_off")

KINDS = {
    "text, 5b": ("text", "5b", None),
    "text, 2b": ("text", "2b", None),
    "image, 5b": ("image", "5b-I2V", None),
    "image, 1.5": ("image", "1.5", None),
    "video": ("video", "5b", None),
    "control": ("control", "5b", None),
    "text on a mesh": ("text", "2b", (2, 2)),
    "image on a mesh": ("image", "5b-I2V", (2, 2)),
    "video on a mesh": ("video", "5b", (2, 2)),
}
SCHEDULERS = (CogVideoXDDIMScheduler, CogVideoXDPMScheduler)
QUICK = {("image, 1.5", CogVideoXDPMScheduler), ("video on a mesh", CogVideoXDDIMScheduler)}
CASES = [
    case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow)
    for case in itertools.product(KINDS, SCHEDULERS)
    if case != ("control", CogVideoXDPMScheduler)  # a TypeError in PyTorch too
]


def frames(pipe, kind, **options):
    pipe.set_progress_bar_config(disable=True)
    return torch.as_tensor(
        np.asarray(pipe(**small_pipelines.inputs(kind, output_type="np", **options)).frames)
    )


def half(_pipe, _step, _timestep, values):
    """Change the latents of a step, as a user's callback does."""
    return {"latents": values["latents"] * 0.5}


@pytest.mark.parametrize(("name", "scheduler"), CASES)
def test_a_pipeline_of_diffusers_makes_what_it_makes_in_pytorch(name, scheduler):
    kind, version, shape = KINDS[name]
    stock = small_pipelines.build(kind, version)
    stock.scheduler = scheduler.from_config(stock.scheduler.config)
    mesh = None if shape is None else make_mesh(*shape, devices=jax.devices()[:4])
    ported = port(copy.deepcopy(stock), mesh=mesh)
    own = type(stock)(**{**ported.components, "scheduler": copy.deepcopy(stock.scheduler)})
    want, changed = frames(stock, kind), frames(stock, kind, callback_on_step_end=half)
    for enabled in (False, True):
        with torchax.default_env() if enabled else contextlib.nullcontext():
            for pipe in (ported, own):
                assert relative_error(frames(pipe, kind), want) < FLOAT32_RELATIVE
                assert (
                    relative_error(frames(pipe, kind, callback_on_step_end=half), changed) < FLOAT32_RELATIVE
                )
    assert type(own) is type(stock)
    assert type(ported.scheduler) is type(own.scheduler) is scheduler


def test_latents_of_a_pipeline_are_tensors_of_a_device_in_any_thread_and_in_none_of_torchaxs_modes():
    pipe = port(small_pipelines.one_layer())
    pipe.set_progress_bar_config(disable=True)
    latents = pipe(**small_pipelines.inputs("text", output_type="latent")).frames
    assert runtime.on_jax(latents)
    assert torch.equal((latents * 2).permute(0, 2, 1, 3, 4).cpu(), latents.cpu().permute(0, 2, 1, 3, 4) * 2)


def test_an_adapter_that_was_added_on_jax_is_saved(tmp_path):
    from peft import LoraConfig

    pipe = port(small_pipelines.one_layer())
    pipe.transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False))
    layers = {n: w for n, w in pipe.transformer.state_dict().items() if "lora" in n}
    pipe.save_lora_weights(tmp_path, transformer_lora_layers=layers)
    assert (tmp_path / "pytorch_lora_weights.safetensors").stat().st_size > 500


def test_a_scheduler_with_tensors_on_jax_inverts_a_video_outside_of_a_pipeline():
    def inverted(device):
        scheduler = small_pipelines.scheduler()
        scheduler.set_timesteps(4, device=device)
        latents = torch.linspace(-1, 1, 64).reshape(1, 2, 4, 8).to(device)
        for timestep in reversed(scheduler.timesteps):
            latents = scheduler.add_noise(latents, latents * 0.1, timestep.reshape(1))
            latents = scheduler.step(latents * 0.5, timestep, latents, return_dict=False)[0]
        return latents.cpu()

    assert relative_error(inverted("jax"), inverted("cpu")) < FLOAT32_RELATIVE
