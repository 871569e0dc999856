"""The build of PyTorch's modules, diffusers' own or the ported ones, in PyTorch or compiled by JAX."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from cogvideox_torchax import runtime
from cogvideox_torchax.backends import Recorder
from cogvideox_torchax.vae.chunks import Step, run
from cogvideox_torchax.vae.directions import Direction
from cogvideox_torchax.vae.torchax.autoencoder import AutoencoderKLCogVideoX as VAE, port_vae
from cogvideox_torchax.vae.torchax.networks import RecordedLayers, chunk_network, stock_of

__all__ = ["VAE", "from_native", "recorder", "stock_results"]


def from_native(native: Any, stock: bool) -> Any:
    return stock_of(native) if stock else port_vae(native)


def stock_results(vae: Any, direction: Direction, chunks: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    return map(_as_tensor, run(_step(vae, direction, chunk_network(vae, direction)), chunks))


def recorder(vae: Any, direction: Direction, wanted: Callable[[str], Any]) -> Recorder:
    # The key differs from that of the direction's program that records nothing.
    step = _step(vae, f"{direction}, recorded", RecordedLayers(chunk_network(vae, direction), wanted))

    def record(chunk: torch.Tensor, cache: Any) -> tuple[dict[str, torch.Tensor], Any]:
        outputs, cache = step(chunk, cache)
        return {name: runtime.to_torch(_as_tensor(output)) for name, output in outputs.items()}, cache

    return record


def _step(vae: Any, key: str, network: nn.Module) -> Step:
    """Return a network as a function (chunk, cache) -> (result, next cache).

    For weights on JAX it is compiled. The model keeps the program under `key`, so that a later call compiles
    nothing.
    """
    if not runtime.is_on_jax(vae):
        return network
    compiled = runtime.programs_of(vae).get(key, network, runtime.Program)
    return compiled.step(compiled.weights(network))


def _as_tensor(result: Any) -> torch.Tensor:
    return result if isinstance(result, torch.Tensor) else runtime.tensor_of(result)
