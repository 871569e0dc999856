"""The Flax build where torch, torchax and diffusers are not installed."""

import json
import os
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
from flax import nnx

from cogvideox_torchax.flax import FlaxAutoencoderKLCogVideoX, FlaxAutoencoderKLCogVideoXConfig
from cogvideox_torchax.vae.nnx.config import DOWN_BLOCK, UP_BLOCK

CONFIG = FlaxAutoencoderKLCogVideoXConfig(
    block_out_channels=(8, 8),
    down_block_types=(DOWN_BLOCK,) * 2,
    up_block_types=(UP_BLOCK,) * 2,
    layers_per_block=1,
    norm_num_groups=4,
    latent_channels=4,
    temporal_compression_ratio=2,
)

PROGRAM = """
import importlib.abc, json, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "torchax", "diffusers"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())

import numpy as np
from cogvideox_torchax import make_mesh
from cogvideox_torchax.flax import FlaxAutoencoderKLCogVideoX, TileSettings

directory = sys.argv[1]
video = np.load(f"{directory}/video.npy")
vae = FlaxAutoencoderKLCogVideoX.from_pretrained(directory)
results = []
for mesh in (None, make_mesh(dp=1)):
    if mesh is not None:
        assert mesh.size == 8
        vae.place_on(mesh)
    latents = vae.encode(video).mode()
    results += [latents, vae.decode(latents)]
vae.tiles = TileSettings(2, 8)
assert vae.decode(latents).shape == video.shape
np.savez(f"{directory}/results.npz", *results)
vae.save_pretrained(f"{directory}/saved")
"""


def test_a_model_is_loaded_run_on_a_mesh_and_saved(tmp_path):
    vae = FlaxAutoencoderKLCogVideoX(CONFIG, rngs=nnx.Rngs(0))
    vae.save_pretrained(tmp_path)
    video = np.random.default_rng(0).uniform(-1, 1, (1, 5, 8, 32, 3)).astype(np.float32)
    np.save(tmp_path / "video.npy", video)
    flags = "--xla_force_host_platform_device_count=8"
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    with np.load(tmp_path / "results.npz") as results:
        latents, frames, latents_on_mesh, frames_on_mesh = results.values()
    np.testing.assert_allclose(latents_on_mesh, latents, atol=2e-5)
    np.testing.assert_allclose(frames_on_mesh, frames, atol=2e-5)
    np.testing.assert_allclose(frames, vae.decode(jnp.asarray(latents)), atol=2e-5)
    weights = "diffusion_pytorch_model.safetensors"
    assert (tmp_path / "saved" / weights).read_bytes() == (tmp_path / weights).read_bytes()
    saved, loaded = (
        json.loads((path / "config.json").read_text()) for path in (tmp_path / "saved", tmp_path)
    )
    assert saved == loaded
