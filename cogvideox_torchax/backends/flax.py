"""The Flax NNX build."""

from collections.abc import Callable
from typing import Any

import torch

from cogvideox_torchax import runtime
from cogvideox_torchax.backends import Recorder
from cogvideox_torchax.vae.directions import Direction
from cogvideox_torchax.vae.nnx.autoencoder import FlaxAutoencoderKLCogVideoX
from cogvideox_torchax.vae.nnx.config import FlaxAutoencoderKLCogVideoXConfig
from cogvideox_torchax.vae.nnx.wrapper import FlaxVAEForPipelines as VAE, to_array, to_tensor

__all__ = ["VAE", "from_native", "program", "recorder"]


def from_native(native: Any, stock: bool) -> VAE:
    return VAE.from_diffusers(native)


def program(vae: Any, direction: Direction, stock: bool) -> runtime.ArrayProgram:
    # `vae` is a ported PyTorch model. A Flax model of the same config, without weights, has the program.
    config = FlaxAutoencoderKLCogVideoXConfig.from_dict(dict(vae.config))
    dtype = runtime.jax_dtype(vae.dtype)
    weightless = FlaxAutoencoderKLCogVideoX.weightless(config, dtype=dtype, param_dtype=dtype)
    weightless.mesh = vae.mesh  # which `build_program` reads
    return weightless.build_program(direction)


def recorder(vae: VAE, direction: Direction, wanted: Callable[[str], Any]) -> Recorder:
    step = vae.flax_vae.step(direction, records=True)

    def record(chunk: torch.Tensor, cache: Any) -> tuple[dict[str, torch.Tensor], Any]:
        outputs, cache = step(to_array(chunk), cache)
        return {
            name: runtime.to_torch(to_tensor(output)) for name, output in outputs.items() if wanted(name)
        }, cache

    return record
