"""The recording of a Flax network's layers, to compare the builds layer by layer."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from cogvideox_torchax.vae.nnx.autoencoder import DecoderChunk, EncoderChunk
from cogvideox_torchax.vae.nnx.modules import Cache


class RecordedLayers(nnx.Module):
    """A network that runs another one, and returns the outputs of the other's layers, by diffusers' names.

    Args:
        network: the other network. A call swaps the classes of its layers, so it can be called once.
        wanted: returns whether a layer of this name is recorded.
    """

    def __init__(self, network: EncoderChunk | DecoderChunk, wanted: Callable[[str], Any]):
        self.network = network
        self._wanted = wanted

    def __call__(self, chunk_NTHWC: jax.Array, cache: Cache | None) -> tuple[dict[str, jax.Array], Cache]:
        outputs: dict[str, jax.Array] = {}
        for path, layer in list(nnx.iter_modules(self.network)):
            name = ".".join(map(str, path))
            # The output of the decoder's `norm_out` has the activation in it, and that of diffusers has not.
            if self._wanted(name) and name != "decoder.norm_out":
                # NNX's own `__setattr__` would make the attributes a part of the module's state.
                object.__setattr__(layer, "__class__", _recording_class(type(layer)))
                object.__setattr__(layer, "_record", functools.partial(outputs.__setitem__, name))
        _, cache = self.network(chunk_NTHWC, cache)
        return outputs, cache


@functools.cache
def _recording_class(kind: type[nnx.Module]) -> type[nnx.Module]:
    """Return a subclass of a layer's class that passes each output, without a cache, to `_record`."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = kind.__call__(self, *args, **kwargs)
        self._record(result[0] if isinstance(result, tuple) else result)
        return result

    return type(kind.__name__, (kind,), {"__call__": call})
