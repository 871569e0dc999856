"""CogVideoX's video VAE, and the diffusers pipelines around it, on TPU through torchax."""

import contextlib
import importlib.abc
import importlib.util
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cogvideox_torchax.cli.preview import preview_writer
    from cogvideox_torchax.dataset.clip import Bucket, Clip, ClipConfig, DecodeClip, EncodeClip
    from cogvideox_torchax.files.latents import Latents, load as load_latents, save as save_latents
    from cogvideox_torchax.files.saving import save_video
    from cogvideox_torchax.pipelines.description import check_size, describe
    from cogvideox_torchax.pipelines.loading import load_pipeline
    from cogvideox_torchax.porting import port
    from cogvideox_torchax.sharding import make_mesh
    from cogvideox_torchax.vae.torchax.autoencoder import AutoencoderKLCogVideoX

__version__ = "0.1.0"
__all__ = [
    "AutoencoderKLCogVideoX",
    "Bucket",
    "Clip",
    "ClipConfig",
    "DecodeClip",
    "EncodeClip",
    "Latents",
    "check_size",
    "describe",
    "load_latents",
    "load_pipeline",
    "make_mesh",
    "port",
    "preview_writer",
    "save_latents",
    "save_video",
]

_HOMES = {
    "AutoencoderKLCogVideoX": "vae.torchax.autoencoder.AutoencoderKLCogVideoX",
    "Bucket": "dataset.clip.Bucket",
    "Clip": "dataset.clip.Clip",
    "ClipConfig": "dataset.clip.ClipConfig",
    "DecodeClip": "dataset.clip.DecodeClip",
    "EncodeClip": "dataset.clip.EncodeClip",
    "Latents": "files.latents.Latents",
    "check_size": "pipelines.description.check_size",
    "describe": "pipelines.description.describe",
    "load_latents": "files.latents.load",
    "load_pipeline": "pipelines.loading.load_pipeline",
    "make_mesh": "sharding.make_mesh",
    "port": "porting.port",
    "preview_writer": "cli.preview.preview_writer",
    "save_latents": "files.latents.save",
    "save_video": "files.saving.save_video",
}
"""By public name, the module of this package that defines it, and its name there."""


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
    module, _, own = _HOMES[name].rpartition(".")
    return getattr(importlib.import_module(f"{__name__}.{module}"), own)


def __dir__() -> list[str]:
    """Return the module's names, and the public names that are not imported yet."""
    return sorted([*globals(), *__all__])
