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
        network_of: returns the network of the object that the method is called on: itself, or a pipeline's.
    """

    @functools.wraps(method)
    def call(owner: Any, *args: Any, **options: Any) -> Any:
        with _on_host(network_of(owner)):
            return runtime.without_torchax(method, owner, *args, **options)

    return call


def pipeline_methods(kind: Any) -> dict[str, Callable[..., Any]]:
    """Return the methods of `PIPELINE_METHODS` of a pipeline's class, run with the transformer in PyTorch."""
    network_of = operator.attrgetter("transformer")
    names = (name for name in PIPELINE_METHODS if hasattr(kind, name))
    return {name: run_in_pytorch(getattr(kind, name), network_of) for name in names}


@contextlib.contextmanager
def _on_host(network: Any) -> Iterator[None]:
    """Have a network's weights in PyTorch during a `with` block; then put all, also added ones, on JAX again.

    Added layers are ported, and the next call compiles a program with them. A network in PyTorch stays there.
    """
    if not any(map(runtime.on_jax, network.parameters())):
        yield
        return
    runtime.without_torchax(runtime.replace_weights, network, runtime.to_torch)
    try:
        yield
    finally:
        network.place()
