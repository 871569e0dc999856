"""Diffusers' own modules in PyTorch on the CPU, the reference."""

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
    """diffusers' modules as they are."""

    model_class = AutoencoderKLCogVideoX
    runs_on_mesh = False
    compiled_by_jax = False

    @classmethod
    def from_native(cls, native: Any) -> "Torch":
        """Return the backend of a loaded VAE, ported or not: stock modules that share its weights."""
        return cls(stock_of(native))

    @classmethod
    def device(cls) -> str:
        return "cpu"

    def chunks(self, direction: Direction, x: torch.Tensor) -> Iterator[torch.Tensor]:
        """Return an iterator of the results of a video's chunks, each run with the previous chunk's cache."""
        return run(chunk_network(self.vae, direction), frames_of_chunks(self.vae, direction, x))

    def recorder(self, direction: Direction, wanted: Callable[[str], Any]) -> Recorder:
        return RecordedLayers(chunk_network(self.vae, direction), wanted)
