"""Programs around a ported VAE: inference mode, subclasses, torch.compile, the flags that users run with."""

import copy
import os
import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
import torch
from diffusers import AutoencoderKLCogVideoX as DiffusersAutoencoder

from cogvideox_torchax import AutoencoderKLCogVideoX, port, runtime
from cogvideox_torchax.runtime.models import PROGRAMS
from cogvideox_torchax.vae.tolerances import FLOAT32_RELATIVE, relative_error
from tests import reference
from tests.processes import ROOT
from tests.vae.torchax.shallow import Z, decoded, shallow_latents


@pytest.mark.usefixtures("torchax_off")
@pytest.mark.parametrize("enabled", [False, True])
def test_all_that_a_model_does_it_does_in_inference_mode_and_trains_afterwards(stock, enabled, tmp_path):
    x, z = reference.video(5, height=8, width=16), Z
    moments, frames = reference.encoded(stock, x), reference.decoded(stock, z)
    stock.save_pretrained(tmp_path)
    with torch.inference_mode():
        if enabled:
            runtime.enable()
        vae = AutoencoderKLCogVideoX.from_pretrained(tmp_path).to("jax", torch.bfloat16).float()
        assert runtime.is_enabled() is enabled
        vae = copy.deepcopy(port(vae.to("cpu").to("jax")))
        posterior = vae.encode(runtime.to_jax(x)).latent_dist
        got = [posterior.parameters, posterior.mode(), vae.decode(runtime.to_jax(z)).sample]
        streamed = next(vae.encode_stream(x)).parameters, next(vae.decode_stream(z))
        mean = moments.chunk(2, dim=1)[0]
        for ours, theirs in zip((*got, *streamed), (moments, mean, frames, moments, frames), strict=True):
            assert relative_error(runtime.to_torch(ours), theirs) < 2e-2  # of weights in bfloat16
        vae.save_pretrained(tmp_path / "saved")
    runtime.enable()
    with torch.enable_grad():
        vae.train().decode(runtime.to_jax(z)).sample.sum().backward()
    assert vae.decoder.conv_out.conv.weight.grad is not None


def test_an_activation_that_a_norm_would_leave_out_is_refused(stock):
    model, x = port(copy.deepcopy(stock)), torch.zeros(1, 16, 1, 2, 2)  # latents, and eight channels
    for norm, given in ((model.encoder.norm_out, (x[:, :8],)), (model.decoder.norm_out, (x[:, :8], x))):
        with pytest.raises(ValueError, match="got activation='silu'"):
            norm(*given, activation="silu")


@pytest.mark.parametrize("kind", ["encode", "decode"])
def test_float32_is_multiplied_in_float32(vae, kind):
    program = vae.program(kind)
    shape = (1, 3, 8, 16, 24) if kind == "encode" else (1, 16, 2, 4, 6)
    for first in (None, shape):
        structs = program.structs((shape, jnp.float32), before=first and (first, jnp.float32))
        lowered = program.lower(*structs)
        assert bool(jax.tree.leaves(lowered.args_info[0][2])) == (first is not None)
        assert reference.multiplies_exactly(lowered.as_text())


def test_a_subclass_is_ported_with_what_it_adds(stock):
    class Louder(DiffusersAutoencoder):
        def decode(self, z, return_dict=True):
            answer = super().decode(z, return_dict=True)
            answer.sample = answer.sample * 2
            return answer

    louder = Louder.from_config(stock.config)
    louder.load_state_dict(stock.state_dict())
    vae = reference.on_jax(louder.eval())
    z = shallow_latents(5)
    want = stock.decode(z).sample
    assert isinstance(vae, Louder)
    assert relative_error(decoded(vae, z), want * 2) < FLOAT32_RELATIVE
    assert relative_error(torch.cat(list(vae.decode_stream(z)), dim=2), want) < FLOAT32_RELATIVE
    assert type(port(vae)) is type(vae)


def test_what_torch_compile_makes_of_it_is_neither_traced_nor_traced_for(vae):
    before = decoded(vae)
    programs = vars(vae)[PROGRAMS]
    vae.compile()
    assert "_compiled_call_impl" in vars(vae)
    assert torch.equal(decoded(vae), before)
    assert vars(vae)[PROGRAMS] is programs
    assert [len(kept) for kept in programs._kept.values()] == [1]
    assert runtime.on_jax(vae(runtime.to_jax(reference.video(1, height=16, width=16))).sample)
    copied, pickled = copy.deepcopy(vae), pickle.loads(pickle.dumps(vae))
    assert copied._compiled_call_impl is pickled._compiled_call_impl is None


AS_USERS = {
    "programs without and with a cache": (
        "tests/vae/torchax/test_real_programs.py::test_a_subclass_is_ported_with_what_it_adds",
    ),
    "encoding, meshes and Flax": (
        "tests/vae/torchax/test_threads.py::test_a_thread_that_enabled_nothing_streams_one_video_at_a_time",
        "tests/vae/torchax/test_copies.py::test_a_copy_stays_on_its_mesh_and_a_pickle_leaves_it",
        "tests/vae/nnx/test_autoencoder.py::test_arrays_in_and_arrays_out_equal_diffusers",
    ),
}


USERS = {
    "XLA_FLAGS": "--xla_force_host_platform_device_count=8 "
    "--xla_cpu_collective_call_terminate_timeout_seconds=900",
    "COGVIDEOX_TORCHAX_COMPILE_CACHE": "off",
}


@pytest.mark.parametrize("tests", AS_USERS.values(), ids=AS_USERS)
@pytest.mark.slow_cases("encoding*")
def test_the_contract_holds_as_users_run_it(tests):
    """In a process of its own: XLA reads its flags once."""
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-p", "no:xdist", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *tests], cwd=ROOT, env=os.environ | USERS, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
