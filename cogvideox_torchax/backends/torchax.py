"""The backends of PyTorch modules that JAX compiles, which are the ported ones or diffusers' own."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from cogvideox_torchax import runtime
from cogvideox_torchax.backends.base import Backend, Recorder
from cogvideox_torchax.vae.chunks import Step, run
from cogvideox_torchax.vae.directions import Direction
from cogvideox_torchax.vae.streaming import frames_of_chunks
from cogvideox_torchax.vae.torchax.autoencoder import AutoencoderKLCogVideoX, port_vae
from cogvideox_torchax.vae.torchax.networks import RecordedLayers, chunk_network, stock_of


class Torchax(Backend):
    """The ported modules."""

    model_class = AutoencoderKLCogVideoX

    def __init__(self, vae: Any):
        runtime.put_weights(vae)
        super().__init__(vae)

    @classmethod
    def from_native(cls, native: Any) -> "Torchax":
        return cls(port_vae(native))

    @classmethod
    def program(cls, vae: AutoencoderKLCogVideoX, direction: Direction) -> runtime.Program:
        return vae.build_program(direction)

    @property
    def program_counts(self) -> dict[str, int]:
        return {direction: self.vae.program(direction).compilations for direction in Direction}

    def put(self, x: torch.Tensor) -> torch.Tensor:
        return runtime.to_jax(x)

    def _step(self, key: str, network: nn.Module) -> Step:
        """Return a network as a compiled function of JAX arrays: (chunk, cache) -> (result, next cache).

        The model keeps the network's program under `key`, so that a later call compiles nothing.
        """
        program = runtime.programs_of(self.vae).get(key, network, runtime.Program)
        return program.step(program.weights(network))

    def recorder(self, direction: Direction, wanted: Callable[[str], Any]) -> Recorder:
        network = RecordedLayers(chunk_network(self.vae, direction), wanted)
        # The key differs from that of the direction's program that records nothing.
        step = self._step(f"{direction}, recorded", network)

        def record(chunk: torch.Tensor, cache: Any) -> tuple[dict[str, torch.Tensor], Any]:
            outputs, cache = step(chunk, cache)
            return {
                name: runtime.to_torch(runtime.tensor_of(output)) for name, output in outputs.items()
            }, cache

        return record


class TorchaxStock(Torchax):
    """Diffusers' own modules, unchanged, through torchax."""

    program_counts = Backend.program_counts  # none: `Torchax` counts the programs of ported modules

    @classmethod
    def from_native(cls, native: Any) -> "TorchaxStock":
        return cls(stock_of(native))

    @classmethod
    def program(cls, vae: AutoencoderKLCogVideoX, direction: Direction) -> runtime.Program:
        # Only `plan` uses this program; `chunks` makes another one. On a mesh its results would be wrong,
        # because diffusers' modules do not leave out the padding of a width that the devices do not divide.
        return vae.build_program(direction, stock=True)

    def chunks(self, direction: Direction, x: torch.Tensor) -> Iterator[torch.Tensor]:
        step = self._step(direction, chunk_network(self.vae, direction))
        chunks = frames_of_chunks(self.vae, direction, self.put(x))
        return map(runtime.tensor_of, run(step, chunks))
