"""The weights of a pipeline's networks: read one at a time, and written out of fewer bits."""

import functools
import re
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import nn

from cogvideox_torchax import runtime
from cogvideox_torchax.runtime.weights import weight_slots


@torch.inference_mode(False)  # a parameter that is made in a caller's inference mode could not be trained
def feed_weights(
    module: nn.Module, tensors: Iterable[tuple[str, np.ndarray]], place: Callable[[str, Any], Any]
) -> tuple[set[str], list[str]]:
    """Assign a module's weights one at a time; its parameters may be on torch's "meta" device.

    Args:
        module: gets the weights; all of its buffers must be in its state dict.
        tensors: (name, array) pairs. The next pair is asked for once the previous array is on its devices, so
            that the host holds one array at a time.
        place: function of a name and a NumPy array that returns the placed JAX array.

    Returns:
        The names of weights for which no array came, and the names of arrays that the module has no weight
        for.

    Raises:
        ValueError: a tensor of another shape than the module's.
    """
    # By a weight's name, the dictionary that holds the weight, and its key there.
    slots = {name: (owner, key) for name, owner, key in weight_slots(module)}
    missing, unexpected = {*module.state_dict()}, []
    for name, array in tensors:
        if name not in missing:
            unexpected.append(name)
            continue
        owner, key = slots[name]
        old = owner[key]
        if tuple(old.shape) != array.shape:
            raise ValueError(f"got {name} of shape {array.shape}: the model's is {tuple(old.shape)}")
        # `block_until_ready`: JAX copies in the background, which would keep many host arrays alive at once.
        placed = runtime.tensor_of(place(name, array).block_until_ready())
        if isinstance(old, nn.Parameter):
            placed = nn.Parameter(placed, requires_grad=old.requires_grad)
        owner[key] = placed
        missing.discard(name)
    return missing, unexpected


def read_only(values: torch.Tensor) -> torch.Tensor:
    """Return values that were written out, as a tensor that refuses writes, which would be lost."""
    values.__class__ = _read_only_class(type(values))
    return values


WRITES = re.compile(r".*[^_]_|__setitem__|__i(add|sub|mul|truediv|floordiv|mod|pow)__")
"""The names of a tensor's methods that write into it, such as `add_`, `__setitem__` or `__iadd__`."""


@functools.cache
def _read_only_class(kind: Any) -> type[torch.Tensor]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise ValueError(
            "got a write into values that are written out of bits (weights in eight bits, GGUF), which it "
            "would not reach: set the layer's weight to another parameter, or merge before port"
        )

    def reduce(values: torch.Tensor, protocol: Any) -> Any:
        return runtime.plain_tensor(np.array(runtime.as_array(values))).__reduce_ex__(protocol)

    members = {
        **dict.fromkeys(filter(WRITES.fullmatch, dir(kind)), refuse),
        "data": property(lambda values: read_only(values.detach()), refuse),
        "__reduce_ex__": reduce,
        # Results are tensors of torch's own class.
        "__torch_function__": torch._C._disabled_torch_function_impl,
    }
    return type(kind.__name__, (kind,), members)
