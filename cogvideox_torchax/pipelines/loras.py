"""LoRAs loaded into a ported network, merged, and taken out again: PEFT's own code, on plain tensors."""

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

from cogvideox_torchax import runtime

PIPELINE_METHODS = (
    "load_lora_weights",
    "delete_adapters",
    "fuse_lora",
    "unfuse_lora",
    "unload_lora_weights",
)
"""diffusers' methods of a pipeline that change its transformer's LoRAs."""


def run_in_pytorch(
    method: Callable[..., Any], network_of: Callable[[Any], Any] = lambda network: network
) -> Callable[..., Any]:
    """Return `method`, run while the weights of a network are in PyTorch.

    Args:
        method: a method of the network, or of a pipeline.
        network_of: returns the network for the object that the method is called on: that object itself, or a
            pipeline's transformer.
    """

    @functools.wraps(method)
    def call(owner: Any, *args: Any, **options: Any) -> Any:
        with _weights_on_host(network_of(owner)):
            return runtime.without_torchax(method, owner, *args, **options)

    return call


def pipeline_methods(kind: Any) -> dict[str, Callable[..., Any]]:
    """Return by name the `PIPELINE_METHODS` that a pipeline's class has, made to run in PyTorch."""
    network_of = operator.attrgetter("transformer")
    names = (name for name in PIPELINE_METHODS if hasattr(kind, name))
    return {name: run_in_pytorch(getattr(kind, name), network_of) for name in names}


@contextlib.contextmanager
def _weights_on_host(network: Any) -> Iterator[None]:
    """Move a network's weights to PyTorch for a `with` block; then put all, also added ones, on JAX again.

    Layers that the block adds are ported, and the next call compiles a program with them. A network that is
    in PyTorch before the block stays there.
    """
    if not any(map(runtime.on_jax, network.parameters())):
        yield
        return
    runtime.without_torchax(runtime.replace_weights, network, runtime.to_torch)
    try:
        yield
    finally:
        network.place()
