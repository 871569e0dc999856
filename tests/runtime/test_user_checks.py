"""Checks of JAX that a user has turned on for code of their own: the package's code runs all the same."""

import contextlib

import jax
import pytest
import torch

from cogvideox_torchax import enable, load_pipeline, port, runtime
from cogvideox_torchax.flax import FlaxVAEForPipelines
from tests import reference, small_pipelines


@contextlib.contextmanager
def checks():
    with jax.numpy_rank_promotion("raise"), jax.transfer_guard("disallow"):
        yield


def test_the_checks_are_on():
    """The tests below would see nothing if JAX's contexts did not reach the code that they run."""
    with checks(), pytest.raises(Exception, match="Disallowed host-to-device transfer"):
        jax.numpy.ones(3) + 1


@pytest.mark.parametrize("build", ["torchax", "flax"])
def test_a_vae_encodes_and_decodes_under_them(build):
    vae = reference.small_vae(**reference.TWO_SHALLOW_LEVELS)
    video = torch.rand(2, 3, 9, 8, 16) * 2 - 1
    z = vae.encode(video).latent_dist.mode()
    wanted = vae.decode(z).sample
    with checks():
        made = port(vae).to("jax") if build == "torchax" else FlaxVAEForPipelines.from_diffusers(vae)
        if build == "torchax":
            enable()
            video = video.to("jax")
        posterior = made.encode(video).latent_dist
        posterior.sample()
        decoded = runtime.to_torch(made.decode(posterior.mode()).sample)
        made.enable_slicing()
        streamed = torch.cat(list(made.decode_stream(posterior.mode())), dim=2)
    for frames in (decoded, streamed):
        assert reference.largest_error(frames, wanted) < 1e-5


@pytest.mark.usefixtures("torchax_off")
def test_a_pipeline_runs_under_them(tmp_path):
    pipe = runtime.without_torchax(small_pipelines.one_layer)
    runtime.without_torchax(pipe.save_pretrained, tmp_path)
    inputs = small_pipelines.inputs("text", num_inference_steps=1)
    wanted = pipe(**inputs).frames
    with checks():
        loaded = load_pipeline(tmp_path, dtype=torch.float32)
        loaded.set_progress_bar_config(disable=True)
        frames = loaded(**small_pipelines.inputs("text", num_inference_steps=1)).frames
    assert reference.largest_error(frames, wanted) < 1e-4
