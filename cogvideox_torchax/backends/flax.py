"""The backend of the Flax NNX build."""

from collections.abc import Callable
from typing import Any

import torch

from cogvideox_torchax import runtime
from cogvideox_torchax.backends.base import Backend, Recorder
from cogvideox_torchax.vae.axes import NTHWC
from cogvideox_torchax.vae.directions import Direction
from cogvideox_torchax.vae.nnx.autoencoder import FlaxAutoencoderKLCogVideoX
from cogvideox_torchax.vae.nnx.config import FlaxAutoencoderKLCogVideoXConfig
from cogvideox_torchax.vae.nnx.wrapper import FlaxVAEForPipelines, to_array, to_tensor


class Flax(Backend):
    """The Flax build, behind diffusers' interface."""

    model_class = FlaxVAEForPipelines
    axes = NTHWC

    @classmethod
    def from_native(cls, native: Any) -> "Flax":
        return cls(FlaxVAEForPipelines.from_diffusers(native))

    @classmethod
    def program(cls, vae: Any, direction: Direction) -> runtime.ArrayProgram:
        # `vae` is a ported PyTorch model. A Flax model of the same config, without weights, has the program.
        config = FlaxAutoencoderKLCogVideoXConfig.from_dict(dict(vae.config))
        dtype = runtime.jax_dtype(vae.dtype)
        weightless = FlaxAutoencoderKLCogVideoX.weightless(config, dtype=dtype, param_dtype=dtype)
        weightless.mesh = vae.mesh  # which `build_program` reads
        return weightless.build_program(direction)

    def recorder(self, direction: Direction, wanted: Callable[[str], Any]) -> Recorder:
        # For `verify`, which compares the results of layers: those for whose name `wanted` is true.
        step = self.vae.flax_vae.step(direction, records=True)

        def record(chunk: torch.Tensor, cache: Any) -> tuple[dict[str, torch.Tensor], Any]:
            outputs, cache = step(to_array(chunk), cache)
            tensors = {
                name: runtime.to_torch(to_tensor(output)) for name, output in outputs.items() if wanted(name)
            }
            return tensors, cache

        return record
