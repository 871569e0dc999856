"""The decoder of Wan's VAE on eight v6e, as maxdiffusion runs it: a published clock of a convolutional VAE.

    pip install chex    # which maxdiffusion imports
    python -m benchmarks calibrate --maxdiffusion CHECKOUT    # half an hour of one core, 6 GB

CHECKOUT is https://github.com/AI-Hypercomputer/maxdiffusion at a838e53b, the head of its pull request 464,
which publishes 0.8 s, with this one decimal, for 81 frames of 720 x 1280. The thread does not say the dtype.
It is taken for bfloat16, that of the repository's launch script.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.linen import partitioning, spmd
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.plan import chips, programs

TOPOLOGY = "v6e:2x4"
MESH = {"redundant": 1, "vae_spatial": 8}
"""The sizes of the mesh's axes: the width of pictures is split over all chips."""
RULES = [
    *((name, "redundant") for name in ("activation_batch", "conv_batch")),
    *((name, "vae_spatial") for name in ("activation_length", "out_channels", "conv_out", "conv_in")),
]
"""The mesh's axis by maxdiffusion's name of an array's: `vae_logical_axis_rules` of its configurations."""
LATENTS = (1, 16, 21, 90, 160)
"""The shape (N, C, T, H, W) of the latents of 81 frames of 720 x 1280."""
CHUNK = 5
"""Latent frames that are decoded at once, after two alone."""


def estimate(checkout: Path) -> programs.TimedPlan:
    """Compile the decode of a video from latents to bytes, which all chips get; return its figures.

    Raises:
        ImportError: the checkout has no maxdiffusion, or a package that it imports is missing.
    """
    sys.path.insert(0, str(checkout / "src"))
    theirs = importlib.import_module("maxdiffusion.models.wan.autoencoder_kl_wan")
    places = chips.topology_devices(TOPOLOGY, schedules=True)
    mesh = Mesh(mesh_utils.create_device_mesh(tuple(MESH.values()), places), tuple(MESH))
    everywhere = NamedSharding(mesh, PartitionSpec())

    def model() -> Any:
        dtypes = {"dtype": jnp.bfloat16, "weights_dtype": jnp.bfloat16}
        return theirs.AutoencoderKLWan(nnx.Rngs(0), mesh=mesh, vae_decode_chunk=CHUNK, **dtypes)

    def struct(leaf: Any, sharding: Any = everywhere) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    # Outside of the rules, as they load it, so that the weights of convolutions in time are everywhere.
    definition, weights, rest = nnx.split(nnx.eval_shape(model), nnx.Param, ...)
    shardings = spmd.logical_to_mesh_sharding(nnx.get_partition_spec(weights), mesh, RULES)
    latents = jax.ShapeDtypeStruct(LATENTS, jnp.bfloat16, sharding=everywhere)

    @jax.jit
    def decode(weights: Any, rest: Any, latents: jax.Array) -> jax.Array:
        vae = nnx.merge(definition, weights, rest)
        video = vae.decode(latents, theirs.AutoencoderKLWanCache(vae), return_dict=False)[0]
        frames = (jnp.clip(video / 2 + 0.5, 0, 1) * 255).astype(jnp.uint8)
        return jax.lax.with_sharding_constraint(frames, everywhere)

    def lower(*structs: Any) -> Any:
        with partitioning.axis_rules(RULES):  # pyright: ignore[reportPrivateImportUsage]
            return decode.lower(*structs)

    structs = jax.tree.map(struct, weights, shardings), jax.tree.map(struct, rest), latents
    work = programs.Work("decode", 81, lower, lambda: structs)
    return programs.compile_program(work, mesh, chips.chip_of(TOPOLOGY))
