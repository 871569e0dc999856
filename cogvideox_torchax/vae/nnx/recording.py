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

        Each recorded layer of `network` is replaced by a `_Recorded`.
        """
        outputs: dict[str, jax.Array] = {}
        # Inner layers first: inside a layer that has been replaced nothing can be replaced any more.
        layers = dict(nnx.iter_modules(self.network))
        for path in sorted(layers, key=len, reverse=True):
            name = ".".join(map(str, path))
            if self._wanted(name) and name != "decoder.norm_out":
                record = functools.partial(outputs.__setitem__, name)
                _replace(self.network, path, _Recorded(layers[path], record))
        _, cache = self.network(chunk_NTHWC, cache)
        return outputs, cache


class _Recorded:
    """A stand-in for a layer: it calls the layer, and `record` with the layer's output."""

    def __init__(self, layer: Any, record: Callable[[jax.Array], None]):
        self._layer = layer
        self._record = record

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the layer and return its result; record the output alone where the result has a cache too."""
        result = self._layer(*args, **kwargs)
        self._record(result[0] if isinstance(result, tuple) else result)
        return result


def _replace(network: Any, path: tuple[Any, ...], layer: Any) -> None:
    """Put `layer` in the place of the module at `path`, names and list indices from `network` down."""
    *parents, last = path
    owner = functools.reduce(_child, parents, network)
    if isinstance(last, int):
        owner[last] = layer
    else:
        object.__setattr__(owner, last, layer)  # past NNX's record of which attributes are modules


def _child(owner: Any, name: Any) -> Any:
    """Return an item of a list, or an attribute of a module."""
    return owner[name] if isinstance(name, int) else getattr(owner, name)
