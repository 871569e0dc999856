"""Recordings of every layer of the Flax build, chunk by chunk, to compare builds layer by layer."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from cogvideox_torchax.vae.nnx.autoencoder import DecoderChunk, EncoderChunk
from cogvideox_torchax.vae.nnx.modules import Cache


class RecordedLayers(nnx.Module):
    """A chunk's network whose result is its layers' outputs, by diffusers' names.

    `decoder.norm_out` is left out: its output here has the activation in it, diffusers' has not.

    Args:
        network: the network of the layers. A call changes it: give a copy, and trace it once.
        wanted: returns whether a layer of this name is recorded.
    """

    def __init__(self, network: EncoderChunk | DecoderChunk, wanted: Callable[[str], Any]):
        self.network = network
        self._wanted = wanted

    def __call__(self, chunk_NTHWC: jax.Array, cache: Cache | None) -> tuple[dict[str, jax.Array], Cache]:
        """Run a chunk; return the recorded layers' outputs, by name, and the next cache.

        The class of each recorded layer of `network` is swapped for one that records the output.
        """
        outputs: dict[str, jax.Array] = {}
        for path, layer in list(nnx.iter_modules(self.network)):
            name = ".".join(map(str, path))
            # The output of the decoder's `norm_out` has the activation in it here, but not in diffusers.
            if self._wanted(name) and name != "decoder.norm_out":
                # `__setattr__` of NNX would make the attributes a part of the module's state.
                object.__setattr__(layer, "__class__", _recording_class(type(layer)))
                object.__setattr__(layer, "_record", functools.partial(outputs.__setitem__, name))
        _, cache = self.network(chunk_NTHWC, cache)
        return outputs, cache


@functools.cache
def _recording_class(kind: type[nnx.Module]) -> type[nnx.Module]:
    """Return a subclass of a layer's class, whose call passes its output to the layer's `_record` too.

    Of a call that returns (output, cache) only the output is recorded.
    """

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = kind.__call__(self, *args, **kwargs)
        self._record(result[0] if isinstance(result, tuple) else result)
        return result

    return type(kind.__name__, (kind,), {"__call__": call})
