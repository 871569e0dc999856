"""The Flax NNX build of CogVideoX's VAE; it shares kernels, chunks and tiles with the torchax build."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cogvideox_torchax.vae.nnx.autoencoder import FlaxAutoencoderKLCogVideoX, Posterior
    from cogvideox_torchax.vae.nnx.config import FlaxAutoencoderKLCogVideoXConfig
    from cogvideox_torchax.vae.nnx.wrapper import FlaxVAEForPipelines
    from cogvideox_torchax.vae.tiling import TileSettings

__all__ = [
    "FlaxAutoencoderKLCogVideoX",
    "FlaxAutoencoderKLCogVideoXConfig",
    "FlaxVAEForPipelines",
    "Posterior",
    "TileSettings",
]

_HOMES = {
    "FlaxAutoencoderKLCogVideoX": "cogvideox_torchax.vae.nnx.autoencoder",
    "FlaxAutoencoderKLCogVideoXConfig": "cogvideox_torchax.vae.nnx.config",
    "FlaxVAEForPipelines": "cogvideox_torchax.vae.nnx.wrapper",
    "Posterior": "cogvideox_torchax.vae.nnx.autoencoder",
    "TileSettings": "cogvideox_torchax.vae.tiling",
}
"""By public name, the module that defines it."""


def __getattr__(name: str) -> Any:
    """Import a public class from its module at first use, so that the package imports without flax."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(_HOMES[name])
    except ModuleNotFoundError as error:
        if error.name != "flax":
            raise
        raise ImportError(f"{name} needs the flax package: pip install 'cogvideox-torchax[flax]'") from error
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
