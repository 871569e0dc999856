"""LoRAs loaded into a ported network, merged, and taken out again: PEFT's own code, on plain tensors."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from cogvideox_torchax import runtime

OF_A_PIPELINE = (
    "load_lora_weights",
    "delete_adapters",
    "fuse_lora",
    "unfuse_lora",
    "unload_lora_weights",
)
"""diffusers' methods of a pipeline that do the same to its transformer; some read files first."""


def in_pytorch(method: Callable[..., Any]) -> Callable[..., Any]:
    """A network's method, called while its weights are in PyTorch."""

    @functools.wraps(method)
    def call(network: Any, *args: Any, **options: Any) -> Any:
        with _on_host(network):
            return runtime.without_torchax(method, network, *args, **options)

    return call


def of_pipeline(kind: Any) -> dict[str, Callable[..., Any]]:
    """Those of `OF_A_PIPELINE` that a pipeline's class has, called while the transformer is in PyTorch."""
    return {name: _in_pytorch_of(getattr(kind, name)) for name in OF_A_PIPELINE if hasattr(kind, name)}


def _in_pytorch_of(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(pipeline: Any, *args: Any, **options: Any) -> Any:
        with _on_host(pipeline.transformer):
            return runtime.without_torchax(method, pipeline, *args, **options)

    return call


@contextlib.contextmanager
def _on_host(network: Any) -> Iterator[None]:
    """While it is open, a network's weights are in PyTorch; then they go back, and what was added with them.

    A layer that was added is ported, and the program of the next call is made of it.
    """
    if not any(map(runtime.on_jax, network.parameters())):
        yield
        return
    runtime.without_torchax(runtime.replace_weights, network, runtime.to_torch)
    try:
        yield
    finally:
        network.place()
