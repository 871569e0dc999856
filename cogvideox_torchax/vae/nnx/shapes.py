"""The chunk program of the Flax build for shapes alone: what a plan compiles."""

from typing import Any

import jax
from flax import nnx

from cogvideox_torchax.vae.directions import Direction
from cogvideox_torchax.vae.nnx.autoencoder import FlaxAutoencoderKLCogVideoX, run_chunk
from cogvideox_torchax.vae.nnx.config import FlaxAutoencoderKLCogVideoXConfig


class ShapesProgram:
    """The program of a config and a direction, without weights.

    Args:
        config: diffusers' config of the VAE.
        direction: `ENCODE` or `DECODE`.
        dtype: of the parameters and of the computation.
        mesh: of `make_mesh`; None for one device.
    """

    def __init__(self, config: dict[str, Any], direction: Direction, dtype: Any, mesh: Any = None):
        sizes = FlaxAutoencoderKLCogVideoXConfig.from_dict(config)

        def model() -> FlaxAutoencoderKLCogVideoX:
            return FlaxAutoencoderKLCogVideoX(sizes, dtype=dtype, param_dtype=dtype, rngs=nnx.Rngs(0))

        vae = nnx.eval_shape(model)
        vae.mesh = mesh
        self._placement = vae.placement(direction)
        self._graph, self._weights = nnx.split(vae.network(direction))

    def structs(self, chunk: tuple[int, ...], dtype: Any) -> tuple[Any, Any]:
        """What stands for the weights, and for a chunk that diffusers would have as (N, C, T, H, W)."""
        videos, channels, frames, rows, columns = chunk
        shape = (videos, frames, rows, columns, channels)
        place = self._placement
        if place is None:
            return self._weights, jax.ShapeDtypeStruct(shape, dtype)

        def everywhere(value: Any) -> Any:
            return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=place.replicated)

        return jax.tree.map(everywhere, self._weights), place.struct(shape, dtype)

    def cache_structs(self, weights: Any, chunk: Any) -> Any:
        """What stands for the cache after the first chunk."""
        cache = jax.eval_shape(lambda state, x: run_chunk(self._graph, state, x, None), weights, chunk)[1]
        return cache if self._placement is None else self._placement.cache_structs(cache)

    def lower(self, weights: Any, chunk: Any, cache: Any = None) -> Any:
        """The program lowered for what stands for its arguments."""
        return run_chunk.lower(self._graph, weights, chunk, cache)
