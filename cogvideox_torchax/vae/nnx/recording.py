"""Recordings of every layer of the Flax build, chunk by chunk, to compare builds layer by layer."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from cogvideox_torchax.vae.nnx.autoencoder import DecoderChunk, EncoderChunk
from cogvideox_torchax.vae.nnx.modules import Cache


class RecordedLayers(nnx.Module):
    """A chunk's network that gives its layers' outputs, by diffusers' names, for its result.

    `decoder.norm_out` is left out: here it comes with its activation, in diffusers without.

    Args:
        network: whose layers; of one trace alone when it is called.
        wanted: whether a layer of that name is to be recorded.
    """

    def __init__(self, network: EncoderChunk | DecoderChunk, wanted: Callable[[str], Any]):
        self.network = network
        self._wanted = wanted

    def __call__(self, chunk_NTHWC: jax.Array, cache: Cache | None) -> tuple[dict[str, jax.Array], Cache]:
        """Run a chunk; return the recorded layers' outputs, by name, and the next cache.

        The network is changed, so it must be a copy that is traced once.
        """
        outputs: dict[str, jax.Array] = {}
        # Inner layers first: inside a layer that has been replaced nothing can be replaced any more.
        for path, module in sorted(nnx.iter_modules(self.network), key=lambda found: -len(found[0])):
            name = ".".join(map(str, path))
            if self._wanted(name) and name != "decoder.norm_out":
                _replace(self.network, path, _Recorded(module, functools.partial(outputs.__setitem__, name)))
        return outputs, self.network(chunk_NTHWC, cache)[1]


class _Recorded:
    """A layer in its own place that also hands on what it gives."""

    def __init__(self, layer: Any, record: Callable[[jax.Array], None]):
        self._layer = layer
        self._record = record

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the layer, and record its result without its cache."""
        result = self._layer(*args, **kwargs)
        self._record(result[0] if isinstance(result, tuple) else result)
        return result


def _replace(network: Any, path: tuple[Any, ...], layer: Any) -> None:
    """Put `layer` in the place of the module at `path`, outside of the NNX graph."""
    *parents, last = path
    owner = functools.reduce(_child, parents, network)
    if isinstance(last, int):
        owner[last] = layer
    else:
        object.__setattr__(owner, last, layer)


def _child(owner: Any, name: Any) -> Any:
    """Return an item of a list, or an attribute of a module."""
    return owner[name] if isinstance(name, int) else getattr(owner, name)
