"""The public names, each with its module; `__init__.py` reads them here."""

from cogvideox_torchax.vae.nnx.autoencoder import (
    FlaxAutoencoderKLCogVideoX as FlaxAutoencoderKLCogVideoX,
    Posterior as Posterior,
)
from cogvideox_torchax.vae.nnx.config import (
    FlaxAutoencoderKLCogVideoXConfig as FlaxAutoencoderKLCogVideoXConfig,
)
from cogvideox_torchax.vae.nnx.wrapper import FlaxVAEForPipelines as FlaxVAEForPipelines
from cogvideox_torchax.vae.tiling import TileSettings as TileSettings

__all__ = [
    "FlaxAutoencoderKLCogVideoX",
    "FlaxAutoencoderKLCogVideoXConfig",
    "FlaxVAEForPipelines",
    "Posterior",
    "TileSettings",
]
