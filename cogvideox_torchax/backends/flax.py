"""The Flax NNX build, behind diffusers' interface."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from cogvideox_torchax import runtime
from cogvideox_torchax.backends.base import Backend, Recorder
from cogvideox_torchax.vae.directions import ENCODE, Direction
from cogvideox_torchax.vae.nnx.shapes import ShapesProgram
from cogvideox_torchax.vae.nnx.wrapper import FlaxVAEForPipelines


class Flax(Backend):
    """The Flax build behind torch tensors, which come to the host: a chunk's time includes that copy."""

    @classmethod
    def model_class(cls) -> Any:
        return FlaxVAEForPipelines

    @classmethod
    def around(cls, native: Any) -> "Flax":
        return cls(FlaxVAEForPipelines.from_diffusers(native))

    @classmethod
    def program(cls, vae: Any, kind: Direction) -> ShapesProgram:
        return ShapesProgram(dict(vae.config), kind, runtime.jax_dtype(vae.dtype), vae.mesh)

    def chunks(self, kind: Direction, x: torch.Tensor) -> Iterator[torch.Tensor]:
        if kind == ENCODE:
            return (posterior.parameters for posterior in self.vae.encode_stream(x))
        return self.vae.decode_stream(x)

    def recorder(self, kind: Direction, wanted: Callable[[str], Any]) -> Recorder:
        return self.vae.layer_recorder(kind, wanted)
