"""Models without their weights: what `plan` compiles, for shapes alone.

A hollow VAE is the ported class on torch's "meta" device. Each backend's chunk program is built from it, and
takes what stands for weights, chunks and caches in their place.
"""

from pathlib import Path
from typing import Any, Protocol

import torch

from cogvideox_torchax import checkpoint, runtime
from cogvideox_torchax.autoencoder import AutoencoderKLCogVideoX, DecoderChunk, EncoderChunk

BACKENDS = ("torchax", "torchax-stock", "flax")
"""The ported modules, diffusers' own through torchax, and the Flax build."""

CONFIGS = {
    "2b": {"scaling_factor": 1.15258426},
    "5b": {"scaling_factor": 0.7},
    "1.5-5b": {"scaling_factor": 0.7, "invert_scale_latents": True},
}
"""The published VAEs, which differ in nothing that costs time: everything else is diffusers' default."""


class PlanError(ValueError):
    """A plan that cannot be made; the message says what to change."""


class Program(Protocol):
    """A chunk program of any backend, as far as compiling it goes."""

    def structs(self, chunk: tuple[int, ...], dtype: Any) -> tuple[Any, Any]:
        """What stands for the weights and for a chunk (N, C, T, H, W)."""
        ...

    def cache_structs(self, weights: Any, chunk: Any) -> Any:
        """What stands for the cache after the first chunk."""
        ...

    def lower(self, weights: Any, chunk: Any, cache: Any = None) -> Any:
        """The program lowered for what stands for its arguments."""
        ...


def hollow_vae(model: str | None, dtype: torch.dtype) -> AutoencoderKLCogVideoX:
    """The ported VAE of a published config, a directory or a hub id, without its weights: shapes will do.

    Raises:
        PlanError, ModelError: a model whose config cannot be read.
    """
    config = CONFIGS.get(model or "5b")
    if config is None:
        config = _config_of(str(model))
    return _on_meta(AutoencoderKLCogVideoX, config, dtype)


def chunk_program(vae: AutoencoderKLCogVideoX, kind: str, backend: str) -> Program:
    """The chunk program, "encode" or "decode", of a backend for a hollow VAE's config, dtype and mesh.

    Raises:
        PlanError: the Flax build, where Flax is not installed.
    """
    if backend == "torchax":
        return vae.build_program(kind)
    if backend == "flax":
        return _flax_program(vae, kind)
    from diffusers.models.autoencoders.autoencoder_kl_cogvideox import (
        AutoencoderKLCogVideoX as DiffusersAutoencoder,
    )

    stock = _on_meta(DiffusersAutoencoder, dict(vae.config), vae.dtype)
    network = EncoderChunk(stock) if kind == "encode" else DecoderChunk(stock)
    if vae.mesh is None:
        return runtime.ChunkProgram(network)
    from cogvideox_torchax.sharding import ShardedProgram

    # Of a width that does not divide stock modules take the padding for picture: this is for planning alone.
    return ShardedProgram(network, vae.mesh, unit=vae.spatial_scale if kind == "encode" else 1)


def _flax_program(vae: AutoencoderKLCogVideoX, kind: str) -> Program:
    try:
        from cogvideox_torchax.flax.hollow import HollowProgram
    except ImportError as error:
        raise PlanError("planning the Flax build needs it: pip install 'cogvideox-torchax[flax]'") from error
    return HollowProgram(dict(vae.config), kind, runtime.jax_dtype(vae.dtype), vae.mesh)


def _on_meta(kind: type, config: dict[str, Any], dtype: torch.dtype) -> Any:
    def build() -> Any:
        with torch.device("meta"):
            vae: Any = kind.from_config(config)  # pyright: ignore[reportAttributeAccessIssue]
        return torch.nn.Module.to(vae, dtype).eval()

    return runtime.without_torchax(build)


def _config_of(model: str) -> dict[str, Any]:
    directory = Path(model)
    if directory.exists():
        inside = directory / "vae"
        return checkpoint.read_config(inside if inside.is_dir() else directory)
    try:
        return dict(AutoencoderKLCogVideoX.load_config(model, subfolder="vae"))  # pyright: ignore
    except OSError as error:
        raise PlanError(f"cannot read the config of {model}: {' '.join(str(error).split())[:200]}") from error
