"""Torch modules compiled by JAX, ported or diffusers' own: one program for the first chunk, one for later."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from cogvideox_torchax import runtime
from cogvideox_torchax.backends.base import Backend, Recorder
from cogvideox_torchax.vae.directions import Direction
from cogvideox_torchax.vae.streaming import frames_of_chunks
from cogvideox_torchax.vae.torchax.autoencoder import AutoencoderKLCogVideoX, port_vae
from cogvideox_torchax.vae.torchax.networks import RecordedLayers, chunk_network, stock_of


class _OnJax(Backend):
    """What both share."""

    def __init__(self, vae: Any):
        super().__init__(vae)
        self._programs = runtime.Programs()

    @classmethod
    def model_class(cls) -> Any:
        return AutoencoderKLCogVideoX

    @classmethod
    def placed(cls, vae: Any) -> Any:
        runtime.put_weights(vae)
        return vae

    def chunks(self, kind: Direction, x: torch.Tensor) -> Iterator[torch.Tensor]:
        return map(
            self._run(kind, chunk_network(self.vae, kind)), frames_of_chunks(self.vae, kind, self.put(x))
        )

    def _run(self, kind: str, network: nn.Module) -> runtime.JaxRun:
        return runtime.JaxRun(self._programs.get(kind, network, runtime.Program), network)

    def recorder(self, kind: Direction, wanted: Callable[[str], Any]) -> Recorder:
        run: Any = self._run(f"{kind}, recorded", RecordedLayers(chunk_network(self.vae, kind), wanted))
        return lambda chunk: {name: runtime.to_torch(output) for name, output in run(chunk).items()}

    def put(self, x: torch.Tensor) -> torch.Tensor:
        return runtime.to_jax(x)

    def wait(self, chunk: torch.Tensor) -> torch.Tensor:
        return runtime.wait(chunk)

    def to_torch(self, chunk: torch.Tensor) -> torch.Tensor:
        return runtime.to_torch(chunk)


class Torchax(_OnJax):
    """The ported modules."""

    @classmethod
    def around(cls, native: Any) -> "Torchax":
        return cls(cls.placed(port_vae(native)))

    @classmethod
    def program(cls, vae: AutoencoderKLCogVideoX, kind: Direction) -> runtime.Program:
        return vae.build_program(kind)

    @property
    def program_counts(self) -> dict[str, int]:
        return {kind: self.vae.program(kind).compilations for kind in Direction}


class TorchaxStock(_OnJax):
    """diffusers' own modules, unchanged: what torchax makes of them by itself."""

    @classmethod
    def around(cls, native: Any) -> "TorchaxStock":
        return cls(cls.placed(stock_of(native)))

    @classmethod
    def program(cls, vae: AutoencoderKLCogVideoX, kind: Direction) -> runtime.Program:
        # Stock modules take the padding of an uneven width for picture: this is for planning alone.
        return vae.build_program(kind, stock=True)
