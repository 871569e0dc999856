"""Checks of JAX that a user has turned on for code of their own: the package's code runs all the same."""

import contextlib

import jax
import pytest
import torch

from cogvideox_torchax import enable, load_pipeline, runtime
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
    vae, video = reference.small_vae(**reference.TWO_SHALLOW_LEVELS), torch.rand(2, 3, 9, 8, 16) * 2 - 1
    wanted = vae.decode(vae.encode(video).latent_dist.mode()).sample
    enable()
    with checks():
        made = reference.built(build, vae)
        made.enable_slicing()  # one video at a time, by programs that a stream of one takes too
        posterior = made.encode(video.to("jax") if build == "torchax" else video).latent_dist
        posterior.sample()
        decoded = runtime.to_torch(made.decode(posterior.mode()).sample)
        streamed = torch.cat(list(made.decode_stream(posterior.mode())), dim=2)
    assert reference.largest_error(decoded, wanted) < 1e-5
    assert reference.largest_error(streamed, wanted) < 1e-5


@pytest.mark.usefixtures("torchax_off")
def test_a_pipeline_runs_under_them(tmp_path):
    pipe = runtime.without_torchax(small_pipelines.one_layer)
    runtime.without_torchax(pipe.save_pretrained, tmp_path)
    wanted = pipe(**small_pipelines.inputs("text", num_inference_steps=1)).frames
    with checks():
        loaded = load_pipeline(tmp_path, dtype=torch.float32)
        loaded.set_progress_bar_config(disable=True)
        frames = loaded(**small_pipelines.inputs("text", num_inference_steps=1)).frames
    assert reference.largest_error(frames, wanted) < 1e-4
