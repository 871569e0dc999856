"""The Flax build where torch, torchax and diffusers are not installed."""

import json

import jax.numpy as jnp
import numpy as np
from flax import nnx

from cogvideox_torchax.flax import FlaxAutoencoderKLCogVideoX, FlaxAutoencoderKLCogVideoXConfig
from cogvideox_torchax.vae.nnx.config import DOWN_BLOCK, UP_BLOCK
from tests.processes import printed_by

CONFIG = FlaxAutoencoderKLCogVideoXConfig(
    block_out_channels=(4, 4),
    down_block_types=(DOWN_BLOCK,) * 2,
    up_block_types=(UP_BLOCK,) * 2,
    layers_per_block=0,
    norm_num_groups=2,
    latent_channels=2,
    temporal_compression_ratio=2,
)

ABSENT = """
import importlib.abc, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "torchax", "diffusers"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
directory = sys.argv[1]
from cogvideox_torchax import make_mesh
from cogvideox_torchax.flax import FlaxAutoencoderKLCogVideoX, TileSettings
vae = FlaxAutoencoderKLCogVideoX.from_pretrained(directory)
"""
SAVE = 'vae.save_pretrained(f"{directory}/saved")'
RUN = """
import numpy as np
video = np.load(f"{directory}/video.npy")
latents = vae.encode(video).mode()
frames = vae.decode(latents)
vae.tiles = TileSettings(2, 4)
assert vae.decode(latents).shape == video.shape
vae.tiles = None
vae.place_on(make_mesh(dp=1, tp=4, devices=make_mesh().devices.flat[:4]))
np.savez(f"{directory}/results.npz", latents=latents, frames=frames, on_mesh=vae.decode(latents))
"""


def run_without_torch(vae, directory, code):
    """Save a model, and run code that has loaded it in a process where torch cannot be imported."""
    vae.save_pretrained(directory)
    printed_by(ABSENT + code, directory)  # with the quick compiler of the tests


def test_a_model_is_loaded_and_saved(tmp_path):
    run_without_torch(FlaxAutoencoderKLCogVideoX(CONFIG, rngs=nnx.Rngs(0)), tmp_path, SAVE)
    weights = "diffusion_pytorch_model.safetensors"
    assert (tmp_path / "saved" / weights).read_bytes() == (tmp_path / weights).read_bytes()
    saved, given = (json.loads((path / "config.json").read_text()) for path in (tmp_path / "saved", tmp_path))
    assert saved == given


def test_a_model_encodes_and_decodes_in_tiles_and_on_a_mesh_too(tmp_path):
    vae = FlaxAutoencoderKLCogVideoX(CONFIG, rngs=nnx.Rngs(0))
    video = np.random.default_rng(0).uniform(-1, 1, (1, 1, 4, 16, 3)).astype(np.float32)
    np.save(tmp_path / "video.npy", video)
    run_without_torch(vae, tmp_path, RUN)
    with np.load(tmp_path / "results.npz") as found:
        wanted = vae.decode(jnp.asarray(found["latents"]))
        np.testing.assert_allclose(found["frames"], wanted, atol=2e-5)
        np.testing.assert_allclose(found["on_mesh"], wanted, atol=2e-5)
        np.testing.assert_allclose(found["latents"], vae.encode(jnp.asarray(video)).mode(), atol=2e-5)
