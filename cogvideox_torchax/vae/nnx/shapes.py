"""The chunk program of the Flax build for shapes alone: what a plan compiles."""

from typing import Any

import jax
from flax import nnx

from cogvideox_torchax.sharding import HWNTC, NTHWC, Placement
from cogvideox_torchax.vae.nnx.autoencoder import (
    DecoderChunk,
    EncoderChunk,
    FlaxAutoencoderKLCogVideoX,
    OnMesh,
    run_chunk,
)
from cogvideox_torchax.vae.nnx.config import FlaxAutoencoderKLCogVideoXConfig


class ShapesProgram:
    """The program of a config, "encode" or "decode", without weights.

    Args:
        config: diffusers' config of the VAE.
        kind: "encode" or "decode".
        dtype: of the parameters and of the computation.
        mesh: of `make_mesh`; None for one device.
    """

    def __init__(self, config: dict[str, Any], kind: str, dtype: Any, mesh: Any = None):
        sizes = FlaxAutoencoderKLCogVideoXConfig.from_dict(config)
        unit = sizes.spatial_scale if kind == "encode" else 1
        self._placement = None if mesh is None else Placement(mesh, NTHWC, cache_layout=HWNTC, unit=unit)

        def network() -> nnx.Module:
            vae = FlaxAutoencoderKLCogVideoX(sizes, dtype=dtype, param_dtype=dtype, rngs=nnx.Rngs(0))
            chunk = EncoderChunk(vae) if kind == "encode" else DecoderChunk(vae, "decode")
            return chunk if self._placement is None else OnMesh(chunk, self._placement)

        self._graph, self._weights = nnx.split(nnx.eval_shape(network))

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
