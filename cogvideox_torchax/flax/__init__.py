"""The Flax NNX build of CogVideoX's VAE; it shares kernels, chunks and tiles with the torchax build."""

from typing import Any

from cogvideox_torchax.lazy import attach

_find, __dir__, __all__ = attach(__name__, __file__)


def __getattr__(name: str) -> Any:
    """Import a public class from its module at first use, so that the package imports without flax."""
    try:
        return _find(name)
    except ModuleNotFoundError as error:
        if error.name != "flax":
            raise
        raise ImportError(f"{name} needs the flax package: pip install 'cogvideox-torchax[flax]'") from error
