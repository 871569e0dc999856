"""Executables kept for the next process: found by a key of all that tracing reads, never if that changed.

Each test is a process of its own: the test suite's checks of annotations wrap the functions of `jax_kernels`,
and functions that are not a library's have no key.
"""

import json
import os
import shutil
import subprocess
import sys

import pytest

from cogvideox_torchax.runtime import executables

DECODE = """
import functools, hashlib, importlib.resources, json, os, threading
import jax, torch
from cogvideox_torchax import AutoencoderKLCogVideoX, runtime

path = importlib.resources.files("cogvideox_torchax") / "assets/tiny-pipeline/vae"
latents = torch.randn(1, 16, 5, 4, 6, generator=torch.Generator().manual_seed(0))

def decoded():
    vae = AutoencoderKLCogVideoX.from_pretrained(str(path)).to("jax")
    with torch.no_grad():
        frames = b"".join(chunk.cpu().numpy().tobytes() for chunk in vae.decode_stream(latents))
    return vae, hashlib.sha256(frames).hexdigest()

"""

TWICE = """
vae, first = decoded()
again, second = decoded()
print(json.dumps([vae.program("decode").compilations, again.program("decode").compilations, first, second]))
"""

KEYS = """
from diffusers.models.autoencoders import autoencoder_kl_cogvideox as diffusers_vae
from cogvideox_torchax.runtime import executables
from cogvideox_torchax.runtime.places import Place
from cogvideox_torchax.runtime.snapshot import modules_of
from cogvideox_torchax.vae import blocks
from cogvideox_torchax.vae.torchax.networks import DecoderChunk, EncoderChunk
from jax_kernels.norm_conv3d import direct
from unittest import mock

vae = AutoencoderKLCogVideoX.from_pretrained(str(path))
network, place, struct = DecoderChunk(vae), Place(), jax.ShapeDtypeStruct((2, 3), "float32")

def key(argument=struct):
    try:
        return executables.key_of(network, place, (argument,))
    except (executables.NoKeyError, TypeError) as error:
        return str(error)

def other_version():
    executables._sources.cache_clear()
    return mock.patch.object(executables, "versions", lambda *names: {name: "9" for name in names})

def user_function(self, *args):
    return self

norm = next(m for m in network.modules() if isinstance(m, torch.nn.GroupNorm))
keys = {"as it is": key(), "again": key()}
with other_version():
    keys["another version"] = key()
executables._sources.cache_clear()
keys["another shape"] = key(jax.ShapeDtypeStruct((2, 4), "float32"))
keys["another dtype"] = key(jax.ShapeDtypeStruct((2, 3), "bfloat16"))
with mock.patch.object(DecoderChunk, "forward", EncoderChunk.forward):
    keys["another method"] = key()
with mock.patch.object(diffusers_vae.CogVideoXDecoder3D, "forward", user_function):
    keys["a method of a user"] = key()
with mock.patch.object(blocks, "residual_block", blocks.normed_conv):
    keys["another function"] = key()
with mock.patch.object(blocks, "residual_block", user_function):
    keys["a function of a user"] = key()
class Scaled:
    def __call__(self, *args):
        return args

with mock.patch.object(blocks, "residual_block", Scaled()):
    keys["an object of a user in a function's place"] = key()
with mock.patch.object(blocks, "residual_block", functools.partial(blocks.residual_block, split=3)):
    keys["a partial function"] = key()
    partial = keys["a partial function"]
with mock.patch.object(blocks, "residual_block", functools.partial(blocks.residual_block, split=4)):
    keys["a partial function with another argument"] = key() if key() != partial else keys["as it is"]
with mock.patch.object(direct.DirectStep, "_move", direct.DirectStep._finish):
    keys["another kernel"] = key()
with mock.patch.object(executables, "STARTED", 0):
    executables._sources.cache_clear()
    keys["sources that were written later"] = key()
executables._sources.cache_clear()
with mock.patch.object(norm, "eps", 0.5):
    keys["another attribute"] = key()
with mock.patch.object(norm, "note", threading.Lock(), create=True):
    keys["an attribute of no value"] = key()
with jax.default_matmul_precision("highest"):
    keys["another setting of JAX"] = key()
with mock.patch.dict(os.environ, {"JAX_KERNELS_PALLAS": "off"}):
    keys["another variable"] = key()
with torch.inference_mode():
    keys["without gradients"] = key()
hook = norm.register_forward_hook(lambda module, args, result: result)
keys["a hook"] = key()
hook.remove()
keys["afterwards"] = key()
print(json.dumps(keys))
"""


def result_of(script, cache, asked="1"):
    """Return what a script prints as JSON, in a process with a compile cache."""
    environment = {"JAX_COMPILATION_CACHE_DIR": str(cache), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    environment[executables.ASKED] = asked
    run = subprocess.run(
        [sys.executable, "-c", DECODE + script], env=os.environ | environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def test_each_change_of_what_tracing_reads_changes_the_key_or_leaves_none(cache):
    keys = result_of(KEYS, cache)
    unchanged = keys.pop("as it is")
    assert len(unchanged) == 64  # a hash, and not a reason for none
    assert [name for name, key in keys.items() if key == unchanged] == ["again", "afterwards"]
    # What a user wrote, or what cannot be compared, has no key.
    reasons = {name for name, key in keys.items() if len(key) != 64}
    assert reasons == {
        "a method of a user",
        "a function of a user",
        "an object of a user in a function's place",
        "an attribute of no value",
        "a hook",
        "sources that were written later",
    }


@pytest.mark.slow
def test_the_next_process_traces_nothing_and_decodes_the_same_bits(cache):
    first = result_of(TWICE, cache)
    second = result_of(TWICE, cache)
    assert first[:2] == [2, 0]  # a program for the first chunk and one for the later chunks
    assert second[:2] == [0, 0]
    assert len({*first[2:], *second[2:]}) == 1
    traced = [2, 2, first[2], first[2]]
    assert result_of(TWICE, cache, asked="") == traced, "unless the variable asks for it"
    for file in (cache / "executables").iterdir():
        file.write_bytes(file.read_bytes()[:100])  # a copy that was cut off
    assert result_of(TWICE, cache)[::2] == [2, first[2]]
    shutil.rmtree(cache / "executables")
    (cache / "executables").write_text("no directory can be made here")
    assert result_of(TWICE, cache) == traced
