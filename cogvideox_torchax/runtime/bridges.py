"""The seam between ported modules and the two bridges to JAX: torchax and TorchTPU.

Ported modules know only the two functions of this module.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from cogvideox_torchax import upstream
from cogvideox_torchax.runtime import bridge


def on_accelerator(tensor: torch.Tensor) -> bool:
    """Return whether kernels compute with a tensor: it is on JAX by torchax, or on a TPU by TorchTPU."""
    return bridge.on_jax(tensor) or bridge.on_tpu(tensor)


def torch_view(jax_function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of JAX arrays as one of tensors, by the bridge that this process has.

    It has one at most: torchax and TorchTPU both take the one device that a package may add to PyTorch.
    """

    @functools.wraps(jax_function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if upstream.added_device() != bridge.TPU:
            return bridge.torch_view(jax_function)(*args, **kwargs)
        from cogvideox_torchax.runtime import torchtpu  # imports JAX, which a command's parser does without

        return torchtpu.torch_view(jax_function)(*args, **kwargs)

    return call
