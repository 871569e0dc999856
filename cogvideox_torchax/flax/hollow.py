"""The chunk program of the Flax build for shapes alone: what a plan compiles."""

from typing import Any

import jax
from flax import nnx

from cogvideox_torchax.flax.autoencoder import (
    DecoderChunk,
    EncoderChunk,
    FlaxAutoencoderKLCogVideoX,
    run_chunk,
)
from cogvideox_torchax.flax.config import FlaxAutoencoderKLCogVideoXConfig


class HollowProgram:
    """The program of a config, "encode" or "decode", without weights.

    Args:
        config: diffusers' config of the VAE.
        kind: "encode" or "decode".
        dtype: of the parameters and of the computation.
    """

    def __init__(self, config: dict[str, Any], kind: str, dtype: Any):
        sizes = FlaxAutoencoderKLCogVideoXConfig.from_dict(config)

        def network() -> nnx.Module:
            vae = FlaxAutoencoderKLCogVideoX(sizes, dtype=dtype, param_dtype=dtype, rngs=nnx.Rngs(0))
            return EncoderChunk(vae) if kind == "encode" else DecoderChunk(vae, "decode")

        self._graph, self._weights = nnx.split(nnx.eval_shape(network))

    def structs(self, chunk: tuple[int, ...], dtype: Any) -> tuple[Any, Any]:
        """What stands for the weights, and for a chunk that diffusers would have as (N, C, T, H, W)."""
        videos, channels, frames, rows, columns = chunk
        return self._weights, jax.ShapeDtypeStruct((videos, frames, rows, columns, channels), dtype)

    def cache_structs(self, weights: Any, chunk: Any) -> Any:
        """What stands for the cache after the first chunk."""
        return jax.eval_shape(lambda state, x: run_chunk(self._graph, state, x, None), weights, chunk)[1]

    def lower(self, weights: Any, chunk: Any, cache: Any = None) -> Any:
        """The program lowered for what stands for its arguments."""
        return run_chunk.lower(self._graph, weights, chunk, cache)
