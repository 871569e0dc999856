"""The reference backend, which is diffusers' own modules in PyTorch on the CPU."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from cogvideox_torchax.backends.base import Backend, Recorder
from cogvideox_torchax.vae.chunks import run
from cogvideox_torchax.vae.directions import Direction
from cogvideox_torchax.vae.streaming import frames_of_chunks
from cogvideox_torchax.vae.torchax.autoencoder import AutoencoderKLCogVideoX
from cogvideox_torchax.vae.torchax.networks import RecordedLayers, chunk_network, stock_of


class Torch(Backend):
    """Diffusers' own modules in PyTorch."""

    model_class = AutoencoderKLCogVideoX
    runs_on_mesh = False
    compiled_by_jax = False

    @classmethod
    def from_native(cls, native: Any) -> "Torch":
        return cls(stock_of(native))

    @classmethod
    def device(cls) -> str:
        return "cpu"

    def chunks(self, direction: Direction, x: torch.Tensor) -> Iterator[torch.Tensor]:
        return run(chunk_network(self.vae, direction), frames_of_chunks(self.vae, direction, x))

    def recorder(self, direction: Direction, wanted: Callable[[str], Any]) -> Recorder:
        return RecordedLayers(chunk_network(self.vae, direction), wanted)
