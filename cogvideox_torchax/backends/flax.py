"""The Flax NNX build."""

from collections.abc import Callable
from typing import Any

import torch

from cogvideox_torchax import runtime
from cogvideox_torchax.backends import Recorder
from cogvideox_torchax.vae.directions import Direction
from cogvideox_torchax.vae.nnx.wrapper import FlaxVAEForPipelines as VAE, to_array, to_tensor

__all__ = ["VAE", "from_native", "recorder"]


def from_native(native: Any, stock: bool) -> VAE:
    return VAE.from_diffusers(native)


def recorder(vae: VAE, direction: Direction, wanted: Callable[[str], Any]) -> Recorder:
    step = vae.flax_vae.step(direction, records=True)

    def record(chunk: torch.Tensor, cache: Any) -> tuple[dict[str, torch.Tensor], Any]:
        outputs, cache = step(to_array(chunk), cache)
        return {
            name: runtime.to_torch(to_tensor(output)) for name, output in outputs.items() if wanted(name)
        }, cache

    return record
