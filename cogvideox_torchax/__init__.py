"""CogVideoX's video VAE, and the diffusers pipelines around it, on TPU through torchax."""

import contextlib
import importlib.abc
import importlib.util
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cogvideox_torchax.files.saving import save_video
    from cogvideox_torchax.pipelines.loading import load_pipeline
    from cogvideox_torchax.porting import port
    from cogvideox_torchax.sharding import make_mesh
    from cogvideox_torchax.vae.torchax.autoencoder import AutoencoderKLCogVideoX

__version__ = "0.1.0"
__all__ = ["AutoencoderKLCogVideoX", "load_pipeline", "make_mesh", "port", "save_video"]

_HOMES = {
    "AutoencoderKLCogVideoX": "cogvideox_torchax.vae.torchax.autoencoder",
    "load_pipeline": "cogvideox_torchax.pipelines.loading",
    "make_mesh": "cogvideox_torchax.sharding",
    "port": "cogvideox_torchax.porting",
    "save_video": "cogvideox_torchax.files.saving",
}
"""By public name, the module that defines it."""


def _leave_jax() -> None:
    """Turn torchax off in a forked child, such as a DataLoader's worker, in which JAX would hang."""
    # Imported here, so that importing the package is quick.
    importlib.import_module("cogvideox_torchax.runtime.forks").leave_jax()


os.register_at_fork(after_in_child=_leave_jax)


def _add_device() -> None:
    """Make JAX a device of PyTorch's (`runtime.device`); a torchax that does not import raises when used."""
    with contextlib.suppress(ImportError):
        importlib.import_module("cogvideox_torchax.runtime.device")


class _BesideTorch(importlib.abc.MetaPathFinder):
    """Finder that has the device added once torch is imported, which importing this package would slow."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        if spec is not None:
            run = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (run(module), _add_device())
        return spec


if "torch" in sys.modules:
    _add_device()
else:
    sys.meta_path.insert(0, _BesideTorch())


def __getattr__(name: str) -> Any:
    """Import a public name from its module at its first use, so that importing the package is quick."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """Return the module's names, and the public names that are not imported yet."""
    return sorted([*globals(), *__all__])
