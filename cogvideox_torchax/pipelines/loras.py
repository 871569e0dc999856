"""LoRAs on a ported network: diffusers and PEFT load, merge and remove them while its weights are in PyTorch.

Afterwards the weights go back to JAX.
"""

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
"""diffusers' methods of a transformer that read or make weights.

Methods that scale or switch adapters are not listed: they leave the weights as they are.
"""

PIPELINE_METHODS = (
    "load_lora_weights",
    "delete_adapters",
    "fuse_lora",
    "unfuse_lora",
    "unload_lora_weights",
)
"""diffusers' methods of a pipeline that change its transformer's LoRAs."""


WRITING_METHODS = "fuse_qkv_projections", "fuse_lora", "unfuse_lora"
"""Those that compute with the weights themselves, which have to be floats."""


def methods_in_pytorch(kind: Any, names: Iterable[str]) -> dict[str, Callable[..., Any]]:
    """Return a class's methods of these names, wrapped by `_in_pytorch`; names that it lacks are left out."""
    return {name: _in_pytorch(getattr(kind, name)) for name in names if hasattr(kind, name)}


def _in_pytorch(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that runs `method` while the weights of its network are in PyTorch.

    The method is one of a network, or of a pipeline, whose transformer is the network. Weights that were on
    JAX go back afterwards, and layers that the method has added are ported. The network's next call compiles
    a program with these layers.
    """

    @functools.wraps(method)
    def call(owner: Any, *args: Any, **options: Any) -> Any:
        network: Any = getattr(owner, "transformer", owner)
        if method.__name__ in WRITING_METHODS and (dtype := runtime.byte_dtype(network)):
            raise ValueError(
                f"{method.__name__} got weights in {dtype}, which it cannot compute with: call it on floats, "
                'before port(weights="int8"); a LoRA that is loaded, and not fused, works'
            )
        was_on_jax = any(map(runtime.on_jax, network.parameters()))
        runtime.replace_weights(network, runtime.to_torch)
        try:
            return method(owner, *args, **options)
        finally:
            if was_on_jax:
                network.place()  # ports the layers that the method has added, and puts all weights on JAX

    return call
