"""A later process traces no program of a stock network anew, and takes no other program's file."""

import os
import subprocess
import sys

import jax
import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl_cogvideox import CogVideoXDecoder3D

from cogvideox_torchax import make_mesh, port, runtime
from cogvideox_torchax.arrays import exported
from cogvideox_torchax.pipelines.transformer import TransformerStep
from cogvideox_torchax.runtime.declared import declared
from cogvideox_torchax.runtime.programs import TorchNetwork
from tests import reference, small_pipelines
from tests.processes import ROOT


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """Return a compile cache of a test's own, in which programs for the CPU are kept as those for a TPU."""
    monkeypatch.setattr(exported, "PLATFORMS", ("cpu",))
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)


def files(directory):
    return {path.name for path in directory.glob("*.exported")}


@pytest.fixture
def vae(shallow_vae):
    return reference.built("torchax", shallow_vae)


@pytest.fixture
def decode(vae):
    """Return a function that decodes as another process would, without the programs of this one."""

    def run(latents=None):
        runtime.forget_programs(vae)
        latents = reference.latents(3) if latents is None else latents
        return reference.run_decode(vae, latents.to(vae.dtype))

    return run


@pytest.mark.parametrize("mesh", [None, (2, 2)], ids=str)
def test_a_later_process_traces_no_network_of_a_pipeline(mesh, directory, monkeypatch):
    pipe = port(small_pipelines.one_layer("text"), **({} if mesh is None else {"mesh": make_mesh(*mesh)}))

    def frames():
        for network in (pipe.vae, pipe.transformer, pipe.text_encoder):
            runtime.forget_programs(network)
        return pipe(**small_pipelines.inputs("text", num_inference_steps=2, output_type="pt")).frames

    traced, kept = frames(), files(directory)
    assert {name.partition("-")[0] for name in kept} == {"DecoderChunk", "TextEncoding", "TransformerStep"}
    monkeypatch.setattr(TorchNetwork, "__call__", lambda *_args, **_options: pytest.fail("traced again"))
    assert torch.equal(frames(), traced)
    assert files(directory) == kept


def set_epsilon(vae, _monkeypatch):
    vae.decoder.norm_out.eps = 1e-3


def set_dtype(vae, _monkeypatch):
    vae.to(torch.bfloat16)


def change_code(_vae, monkeypatch):
    monkeypatch.setattr(exported, "_code", lambda: "another version")


def change_chip(_vae, monkeypatch):
    monkeypatch.setattr(exported, "_chip", lambda: "another chip")


def turn_kernels_off(_vae, monkeypatch):
    monkeypatch.setenv("JAX_KERNELS_PALLAS", "off")


def place_on_mesh(vae, _monkeypatch):
    port(vae, mesh=make_mesh(1, 2))


CHANGES = [set_epsilon, set_dtype, change_code, change_chip, turn_kernels_off, place_on_mesh]


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_program_depends_on_changes_the_name_of_its_file(change, directory, vae, decode, monkeypatch):
    decode()
    before = files(directory)
    change(vae, monkeypatch)
    decode()
    assert len(files(directory)) == 2 * len(before) > 0


def test_of_a_config_all_counts_but_where_it_comes_from_and_nothing_is_kept_in_a_profile(monkeypatch):
    model = port(small_pipelines.one_layer("text")).transformer
    text = declared(TransformerStep(model), None)
    model.register_to_config(_name_or_path="elsewhere", _use_default_values=["sample_width", "patch_bias"])
    assert text is not None
    assert declared(TransformerStep(model), None) == text
    model.register_to_config(sample_width=99)
    assert declared(TransformerStep(model), None) not in (None, text)
    monkeypatch.setattr("cogvideox_torchax.runtime.declared.is_profiling", lambda: True)
    assert declared(TransformerStep(model), None) is None


def test_a_method_that_somebody_has_replaced_is_traced(directory, decode, monkeypatch):
    plain, before, forward = decode(), files(directory), CogVideoXDecoder3D.forward

    def doubled(self, *args, **kwargs):
        frames, cache = forward(self, *args, **kwargs)
        return frames * 2, cache

    monkeypatch.setattr(CogVideoXDecoder3D, "forward", doubled)
    assert reference.largest_error(decode(), plain * 2) < 1e-5
    assert files(directory) == before


def test_another_size_has_files_of_its_own(directory, decode):
    decode()
    before = files(directory)
    decode(reference.latents(3, height=8))
    assert len(files(directory)) == 2 * len(before) > 0


CHILD = """
from cogvideox_torchax import port
from cogvideox_torchax.arrays import exported
from tests import small_pipelines
exported.PLATFORMS = ("cpu",)
pipe = port(small_pipelines.one_layer("text"))
pipe(**small_pipelines.inputs("text", num_inference_steps=1, output_type="pt"))
"""


@pytest.mark.slow
def test_processes_whose_sets_have_another_order_share_the_files(tmp_path):
    for seed in "12":
        variables = {"PYTHONHASHSEED": seed, "JAX_COMPILATION_CACHE_DIR": str(tmp_path)}
        subprocess.run([sys.executable, "-c", CHILD], cwd=ROOT, env=os.environ | variables, check=True)
    assert len(files(tmp_path)) == 3, "of the prompt, of a step, and of the one chunk"


def test_a_broken_file_is_made_again(directory, decode):
    wanted = decode()
    whole = {path: path.read_bytes() for path in directory.glob("*.exported")}
    for path, content in whole.items():
        path.write_bytes(content[: len(content) // 2])
    assert torch.equal(decode(), wanted)
    assert {path: len(path.read_bytes()) for path in whole} == {path: len(whole[path]) for path in whole}


def test_a_program_that_cannot_be_exported_is_traced(directory, decode, monkeypatch):
    wanted = decode()

    def refuse(*_args, **_options):
        raise ValueError("a call that promises no compatibility")

    for path in directory.glob("*.exported"):
        path.unlink()
    monkeypatch.setattr(exported.export, "export", refuse)
    assert torch.equal(decode(), wanted)
    assert not files(directory)


class Unknown:
    """An attribute of a class that no library defines."""


def test_a_network_with_something_of_a_users_own_is_kept_in_no_file(directory, vae, decode):
    vae.decoder.note = Unknown()
    decode()
    del vae.decoder.note
    hook = vae.decoder.register_forward_hook(lambda _module, _args, result: result)
    decode()
    assert not files(directory)
    hook.remove()
    decode()
    assert files(directory)


def test_a_gradient_is_that_of_a_traced_network(directory, vae, decode):
    decode()
    z = reference.latents(1).to("jax").requires_grad_()
    with torch.enable_grad():
        vae.decode(z).sample.sum().backward()
    assert z.grad is not None
