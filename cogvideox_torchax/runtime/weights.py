"""Read, move and replace a module's parameters and buffers on JAX."""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from cogvideox_torchax.runtime.bridge import array_of, tensor_of
from cogvideox_torchax.runtime.host import PLAIN, host_array, on_jax
from cogvideox_torchax.runtime.user_checks import without_jax_checks
from cogvideox_torchax.upstream import is_traced, replace_array, uncommitted


def named_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return a module's parameters and buffers, each once, by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def is_movable(tensor: torch.Tensor) -> bool:
    """Return whether a weight is on JAX or can be put there; a quantized one, of its own class, cannot."""
    return tensor.dtype in MOVABLE_DTYPES if type(tensor) in PLAIN else on_jax(tensor)


MOVABLE_DTYPES = frozenset(
    (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
)
"""The dtypes of weights that NumPy and JAX have."""


def byte_dtype(module: nn.Module) -> str | None:
    """Return the name of the dtype of a module's parameters that have eight bits, or None if none has."""
    dtypes = (weight.dtype for weight in module.parameters())
    return next((str(dtype).removeprefix("torch.") for dtype in dtypes if dtype.itemsize == 1), None)


def _weight_slots(module: nn.Module) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield (name, dictionary, key) for each parameter and buffer, which is `dictionary[key]`.

    The name is the whole one, such as "block.weight". The dictionary is a submodule's own, so that writing to
    `dictionary[key]` replaces the weight. A tied weight is yielded under each of its names.
    """
    for prefix, submodule in module.named_modules():
        for tensors in (submodule._parameters, submodule._buffers):
            # A list of the keys first, as the caller may write to the dictionary between two of them.
            for key in [key for key, tensor in tensors.items() if tensor is not None]:
                yield f"{prefix}.{key}".lstrip("."), tensors, key  # the root's prefix is ""


def assign(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Replace the array in the torchax tensor `tensor` by the array of `value`, without a copy."""
    replace_array(tensor, lambda _: array_of(value))


HOST_MEMORY = "pinned_host"
"""JAX's name of the part of the host's memory that a device reads and writes by itself."""


def is_in_host_memory(array: Any) -> bool:
    """Return whether an array is in the host's memory: a NumPy array, or one in `HOST_MEMORY`."""
    return isinstance(array, np.ndarray) or (
        not is_traced(array) and array.sharding.memory_kind == HOST_MEMORY
    )


@without_jax_checks
def on_default_device(_name: str, array: Any) -> Any:
    """Return a NumPy array as a copy on JAX's default device, and a JAX array unchanged.

    A JAX array in the host's memory is copied to the memory of its devices.
    """
    # This is the `place` of `put_weights` for a single device. A mesh's may look at the weight's name.
    import jax
    import jax.numpy as jnp

    if not isinstance(array, jax.Array):
        return jnp.array(array)
    if not is_in_host_memory(array):
        return array
    device = next(iter(array.sharding.device_set))
    moved = jax.device_put(array, array.sharding.with_memory_kind(device.default_memory().kind))
    return uncommitted(moved)


def replace_weights(module: nn.Module, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace a module's parameters and buffers by `make(tensor)`, once for each tensor.

    `make` returns a new plain tensor, and leaves the old one as it is. Tied weights stay tied. torchax must
    be off.
    """
    _replace(module, lambda _name, tensor: make(tensor))


def put_weights(module: nn.Module, place: Callable[[str, Any], Any] = on_default_device) -> None:
    """Put a module's parameters and buffers on JAX, each once and under its name; tied weights stay tied.

    Args:
        module: the module; any of its tensors may be on JAX already.
        place: function of a name and a NumPy or JAX array to the JAX array that replaces it.
    """

    def put(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if on_jax(tensor):
            return replace_array(tensor, functools.partial(place, name))
        return tensor_of(place(name, host_array(tensor)))

    _replace(module, put)


# In inference mode torch would make parameters that nobody can train, and that take no in-place change.
@torch.inference_mode(False)
def _replace(module: nn.Module, make: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
    """Replace a module's parameters and buffers by `make(name, tensor)`, once for each tensor."""
    replacements: dict[int, torch.Tensor] = {}  # by the id of the old tensor, so that tied weights stay tied
    for name, owner, key in _weight_slots(module):
        tensor = owner[key]
        if id(tensor) not in replacements:
            replacements[id(tensor)] = replaced(tensor, functools.partial(make, name))
        owner[key] = replacements[id(tensor)]


def replaced(tensor: torch.Tensor, make: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return what replaces a tensor: `make(tensor)`, as a parameter if the tensor is one.

    The parameter's gradient is `make` of the old gradient. A tensor that `make` has changed in place, and
    returns, is returned as it is.
    """
    replacement = make(tensor)
    if replacement is tensor or not isinstance(tensor, nn.Parameter):
        return replacement
    parameter = nn.Parameter(replacement, tensor.requires_grad)
    parameter.grad = None if tensor.grad is None else make(tensor.grad)
    return parameter


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
    slots = {name: (owner, key) for name, owner, key in _weight_slots(module)}
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
        placed = tensor_of(place(name, array).block_until_ready())
        if isinstance(old, nn.Parameter):
            placed = nn.Parameter(placed, requires_grad=old.requires_grad)
        owner[key] = placed
        missing.discard(name)
    return missing, unexpected
