"""Weights in eight bits: symmetric int8, with a scale for each output channel.

A layer's weight (O, I) in int8, times its buffer `weight_scale` (O) in float32, is the matrix that the layer
multiplies by. The layers are the linear ones of a network's blocks, by the table of `sharding`. Embeddings,
norms and the projections before and after the blocks, which are few, keep their dtype.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from cogvideox_torchax import runtime
from cogvideox_torchax.pipelines.layers import Linear
from cogvideox_torchax.pipelines.sharding import WEIGHTS, weight_spec

Weights = Literal["int8"]
"""The form of a network's weights that `port` makes; None in its place keeps their dtype."""


def check_weights(weights: Any) -> None:
    if weights not in (None, "int8"):
        raise ValueError(f"got weights={weights!r}: it takes 'int8', or None for the dtype that they have")


def to_int8(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return a matrix (O, I) of any float dtype as int8 (O, I) and the scale (O) of its rows in float32."""
    weight = np.asarray(weight, np.float32)
    scale = np.abs(weight).max(-1) / np.float32(127)
    scale = np.where(scale == 0, np.float32(1), scale)  # a row of zeros
    return np.rint(weight / scale[..., None]).astype(np.int8), scale


def quantize(network: nn.Module) -> None:
    """Give a ported network's blocks weights in int8, on the host; layers that have them stay as they are.

    Weights on "meta" are replaced by such of the new shapes and dtypes, for `as_int8` to feed.
    """
    for _name, layer in _layers(network):
        if layer.scale is not None:
            continue
        if layer.weight.is_meta:
            int8, scale = layer.weight.to(torch.int8), layer.weight.new_empty(len(layer.weight)).float()
        else:
            int8, scale = map(runtime.plain_tensor, to_int8(np.asarray(runtime.as_array(layer.weight))))
        layer.hold(int8, scale)
    runtime.forget_programs(network)


def as_int8(
    network: nn.Module, tensors: Iterable[tuple[str, np.ndarray]]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield each (name, array), a weight that a network has in int8 as such and then its scale."""
    names = {f"{name}.weight" for name, layer in _layers(network) if layer.scale is not None}
    for name, array in tensors:
        if name in names:
            array, scale = to_int8(array)
            yield f"{name}_scale", scale
        yield name, array


def _layers(network: nn.Module) -> Iterator[tuple[str, Linear]]:
    for name, module in network.named_modules():
        if type(module) is Linear and weight_spec(f"{name}.weight") in WEIGHTS.values():
            yield name, module
