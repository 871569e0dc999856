"""Diffusers' own modules in PyTorch on the CPU, the reference."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from cogvideox_torchax import runtime
from cogvideox_torchax.backends.base import Backend, Recorder
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
        run = runtime.with_kept_cache(chunk_network(self.vae, direction))
        return map(run, frames_of_chunks(self.vae, direction, x))

    def recorder(self, direction: Direction, wanted: Callable[[str], Any]) -> Recorder:
        """Return a function from a chunk to its layers' outputs, by name; `wanted(name)` selects the layers.

        Call the function with a video's chunks in order.
        """
        # `RecordedLayers` is a network that returns the layers' outputs.
        return runtime.with_kept_cache(RecordedLayers(chunk_network(self.vae, direction), wanted))
