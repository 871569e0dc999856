"""CogVideoX's video VAE, and the diffusers pipelines around it, on TPU through torchax."""

import contextlib
import importlib.abc
import importlib.util
import os
import sys
from typing import Any

from cogvideox_torchax.lazy import attach

__version__ = "0.1.0"
__getattr__, __dir__, __all__ = attach(__name__, __file__)


def _leave_jax() -> None:
    """Refuse JAX in a forked child, such as a DataLoader's worker, in which it would hang."""
    # Imported here, so that importing the package is quick.
    importlib.import_module("cogvideox_torchax.arrays.forks").leave_jax()


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
