"""What every layer of the Flax build computes, chunk by chunk: for comparing builds layer by layer."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
from flax import nnx

from cogvideox_torchax.flax.autoencoder import DecoderChunk, EncoderChunk, FlaxAutoencoderKLCogVideoX
from cogvideox_torchax.flax.modules import Cache


class LayerRecorder:
    """One pass over a video that gives, for each chunk, its layers' outputs by diffusers' names.

    `decoder.norm_out` is left out: here it comes with its activation, in diffusers without.

    Args:
        vae: the model.
        kind: "encode" or "decode".
        wanted: whether a layer of that name is to be recorded.
    """

    def __init__(self, vae: FlaxAutoencoderKLCogVideoX, kind: str, wanted: Callable[[str], Any]):
        network = EncoderChunk(vae) if kind == "encode" else DecoderChunk(vae, "decode")
        self._graph, self._state = nnx.split(network)
        self._wanted = wanted
        self._cache: Cache | None = None
        self._run = jax.jit(self._traced)

    def __call__(self, chunk_NTHWC: jax.Array) -> dict[str, jax.Array]:
        outputs, self._cache = self._run(self._state, chunk_NTHWC, self._cache)
        return outputs

    def _traced(
        self, state: nnx.State, chunk: jax.Array, cache: Cache | None
    ) -> tuple[dict[str, jax.Array], Cache]:
        network: Any = nnx.merge(self._graph, state)
        outputs: dict[str, jax.Array] = {}
        with _recorded(network, self._wanted, outputs):
            _, new_cache = network(chunk, cache)
        return outputs, new_cache


@contextlib.contextmanager
def _recorded(
    network: nnx.Module, wanted: Callable[[str], Any], outputs: dict[str, jax.Array]
) -> Iterator[None]:
    """While it is open, what the modules of `network` return goes into `outputs` too."""
    names: dict[int, str] = {}
    kinds: set[type] = set()
    for path, module in nnx.iter_modules(network):
        name = ".".join(map(str, path))
        if wanted(name) and name != "decoder.norm_out":
            names[id(module)] = name
            kinds.add(type(module))

    def recording(kind: type) -> Callable[..., Any]:
        call = kind.__call__

        def recorded_call(module: Any, *args: Any, **kwargs: Any) -> Any:
            result = call(module, *args, **kwargs)
            if id(module) in names:
                outputs[names[id(module)]] = result[0] if isinstance(result, tuple) else result
            return result

        return recorded_call

    with contextlib.ExitStack() as patches:
        for kind in kinds:
            patches.enter_context(mock.patch.object(kind, "__call__", recording(kind)))
        yield
