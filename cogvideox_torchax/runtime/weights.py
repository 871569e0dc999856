"""Read, move and replace a module's parameters and buffers on JAX."""

import functools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

from cogvideox_torchax.runtime.bridge import array_of, as_array, tensor_of
from cogvideox_torchax.runtime.host import PLAIN, host_array, on_default_device, on_jax, plain_tensor
from cogvideox_torchax.runtime.user_checks import without_jax_checks
from cogvideox_torchax.upstream import replace_array


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


@without_jax_checks
def tie_weights(network: Any) -> None:
    """Tie a network's weights as its class does, as far as they were tied: if they are equal on JAX.

    Torch's own `to` unties those that it moves there. A weight on "meta", for which no file had a tensor,
    becomes the one that it is to be tied to.
    """
    slots = [(owner, key, owner[key]) for _name, owner, key in _weight_slots(network)]
    network.tie_weights()
    for owner, key, old in slots:
        new = owner[key]
        if new.is_meta and not old.is_meta:  # a file has it under this name alone
            for other, other_key, _old in slots:
                if other[other_key] is new:
                    other[other_key] = old
        elif not (new is old or old.is_meta or _are_equal_on_jax(new, old)):
            owner[key] = old


def _are_equal_on_jax(*tensors: torch.Tensor) -> bool:
    return all(map(on_jax, tensors)) and bool(jnp.array_equal(*map(array_of, tensors)))


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
        return plain_tensor(np.array(as_array(values))).__reduce_ex__(protocol)

    members = dict.fromkeys(filter(WRITES.fullmatch, dir(kind)), refuse)
    data = property(lambda values: read_only(values.detach()), refuse)
    disabled = torch._C._disabled_torch_function_impl  # so that results are tensors of torch's own class
    others = {"data": data, "__reduce_ex__": reduce, "__torch_function__": disabled}
    return type(kind.__name__, (kind,), members | others)


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
