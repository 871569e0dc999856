"""Functions of JAX arrays as operations on tensors, by the bridge that this process has."""

import functools
from collections.abc import Callable
from typing import Any

from cogvideox_torchax import upstream
from cogvideox_torchax.runtime import bridge, torchtpu
from cogvideox_torchax.runtime.device import import_torchax


def torch_view(jax_function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of tensors that runs a function of JAX arrays, by this process's bridge.

    A process has one bridge. PyTorch has room for one device from another package: the bridge is TorchTPU if
    that is TorchTPU's device, and torchax otherwise. This is looked up when the returned function is called.
    """

    @functools.wraps(jax_function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if upstream.added_device() == bridge.TPU:
            return torchtpu.torch_view(jax_function)(*args, **kwargs)
        return import_torchax().interop.call_jax(jax_function, *args, **kwargs)

    return call
