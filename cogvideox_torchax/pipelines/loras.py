"""LoRAs loaded into a ported network, merged, and taken out again: PEFT's own code, on plain tensors."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

from cogvideox_torchax import runtime

NETWORK_METHODS = (
    "fuse_qkv_projections",
    "unfuse_qkv_projections",
    "load_lora_adapter",
    "save_lora_adapter",
    "add_adapter",
    "delete_adapters",
    "fuse_lora",
    "unfuse_lora",
    "unload_lora",
)
"""diffusers' methods of a transformer that read or make weights; scaling and switching adapters does not."""

PIPELINE_METHODS = (
    "load_lora_weights",
    "delete_adapters",
    "fuse_lora",
    "unfuse_lora",
    "unload_lora_weights",
)
"""diffusers' methods of a pipeline that change its transformer's LoRAs."""


def methods_in_pytorch(kind: Any, names: Iterable[str]) -> dict[str, Callable[..., Any]]:
    """Return a class's methods of these names, wrapped to move the weights to PyTorch while they run."""
    return {name: _in_pytorch(getattr(kind, name)) for name in names if hasattr(kind, name)}


def _in_pytorch(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method: a network that is on JAX is in PyTorch while the method runs.

    Layers that the method adds are ported, and the next call compiles a program with them.
    """

    @functools.wraps(method)
    def call(owner: Any, *args: Any, **options: Any) -> Any:
        network: Any = getattr(owner, "transformer", owner)
        was_on_jax = any(map(runtime.on_jax, network.parameters()))
        runtime.without_torchax(runtime.replace_weights, network, runtime.to_torch)
        try:
            return runtime.without_torchax(method, owner, *args, **options)
        finally:
            if was_on_jax:
                network.place()  # all weights, new ones too

    return call
