"""The text of all that a stock network's program depends on, but for its arguments, the code and settings.

Unlike the key of a `Tree`, which has objects by their ids, the text is the same in each process.
"""

import inspect
import logging
from collections.abc import Mapping
from typing import Any

import jax
import torch
from diffusers.configuration_utils import FrozenDict
from jax.sharding import Mesh, PartitionSpec
from torch import nn

from cogvideox_torchax.runtime.layers import is_profiling
from cogvideox_torchax.runtime.trees import LIBRARIES, OF_EACH, UNREAD, change_in

VALUES = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size, PartitionSpec)
"""Types whose `repr` says all of a value."""

logger = logging.getLogger("cogvideox_torchax")


def declared(network: nn.Module, place: Any) -> str | None:
    """Return the text of a network and its devices; None if it is not stock, or has an object of a user's.

    In a profile it is None too, as a file's instructions do not have the names of layers.
    """
    try:
        return None if is_profiling() or change_in(network) else _text((network, place), {})
    except TypeError as error:  # of `_text`
        logger.debug("%s: each process traces it anew: %s", type(network).__name__, error)
        return None


def _text(value: Any, met: dict[int, tuple[int, Any]]) -> str:
    """Return a text that two values share only if no program can tell them apart.

    `met` has by its id what was met before, so that it stays alive: the second time its number stands for it.

    Raises:
        TypeError: an object of another package than `LIBRARIES`, or a tensor that is no weight.
    """
    if isinstance(value, VALUES):
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, Mesh):
        return f"{value.shape_tuple} {value.devices.flat[0].device_kind}"
    if isinstance(value, jax.Device):
        return value.device_kind
    if id(value) in met:
        return f"#{met[id(value)][0]}"
    met[id(value)] = len(met), value
    named = value if isinstance(value, type) or inspect.isroutine(value) else type(value)
    name = f"{named.__module__}.{named.__qualname__}"
    if isinstance(value, Mapping):
        # In a config of diffusers, names with an underscore say where the config comes from.
        keys = [key for key in value if not (isinstance(value, FrozenDict) and key.startswith("_"))]
        return f"{name}({', '.join(f'{_text(key, met)}: {_text(value[key], met)}' for key in keys)})"
    if isinstance(value, list | tuple | set | frozenset):
        texts = [_text(item, met) for item in value]
        return f"{name}({', '.join(texts if isinstance(value, list | tuple) else sorted(texts))})"
    if name.partition(".")[0] not in LIBRARIES or isinstance(value, torch.Tensor):
        raise TypeError(f"{name} has no text that says all of it")
    return name if named is value else name + _text(_attributes_of(value), met)


def _attributes_of(value: Any) -> dict[str, Any]:
    """Return the attributes that a program may read; a module's weights, its arguments, have no values."""
    attributes = dict(sorted(vars(value).items()))
    if not isinstance(value, nn.Module):
        return attributes
    read = {
        name: attribute
        for name, attribute in attributes.items()
        if name not in UNREAD and (attribute or name not in OF_EACH)
    }
    for table in ("_parameters", "_buffers"):
        read[table] = {name: getattr(weight, "dtype", None) for name, weight in attributes[table].items()}
    return read
