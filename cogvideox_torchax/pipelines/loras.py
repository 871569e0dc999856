"""LoRAs on a ported network: diffusers and PEFT load, merge and remove them while its weights are in PyTorch.

Afterwards the weights go back to JAX. diffusers' methods of a pipeline call those of its networks.
"""

import functools
from collections.abc import Callable
from typing import Any

from cogvideox_torchax import runtime

METHODS = (
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
"""diffusers' methods of a network that read or make weights.

Methods that scale or switch adapters are not listed: they leave the weights as they are.
"""

WRITING_METHODS = "fuse_qkv_projections", "fuse_lora", "unfuse_lora"
"""Those that compute with the weights themselves, which have to be floats."""


def in_pytorch(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of a network that runs `method` while the network's weights are in PyTorch.

    Weights that were on JAX go back afterwards, and layers that the method has added are ported. The
    network's next call compiles a program with these layers.
    """

    @functools.wraps(method)
    def call(network: Any, *args: Any, **options: Any) -> Any:
        if method.__name__ in WRITING_METHODS and (dtype := runtime.byte_dtype(network)):
            raise ValueError(
                f"{method.__name__} got weights in {dtype}, which it cannot compute with: call it on floats, "
                'before port(weights="int8"); a LoRA that is loaded, and not fused, works'
            )
        was_on_jax = any(map(runtime.on_jax, network.parameters()))
        runtime.replace_weights(network, runtime.to_torch)
        try:
            return method(network, *args, **options)
        finally:
            if was_on_jax:
                network.place()  # ports the layers that the method has added, and puts all weights on JAX

    return call
