"""Weights in eight bits, and those in fewer that other libraries have made.

`quantize` makes them int8, symmetric, with a scale for each output channel: a layer's weight (O, I) in int8,
times its buffer `weight_scale` (O) in float32, is the matrix that the layer multiplies by. The layers are the
linear ones of a network's blocks, by the table of `sharding`. Embeddings, norms and the projections before
and after the blocks, which are few, keep their dtype. With "int8-dynamic" the layers of `DYNAMIC` round their
inputs too.

`take_bits` has ported layers keep what torchao, GGUF and diffusers' layerwise casting have made of linear
layers.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import nn

from cogvideox_torchax import runtime, upstream
from cogvideox_torchax.pipelines.layers import Linear
from cogvideox_torchax.pipelines.sharding import WEIGHTS, weight_spec

Weights = Literal["int8", "int8-dynamic"]
"""The form of a network's weights that `port` makes; None in its place keeps their dtype."""

DYNAMIC = r"\.(attn1\.to_[qkv]|ff\.)"
"""Names of the layers whose inputs "int8-dynamic" rounds; of the others it would save no time.

A prompt is encoded once a video, and the embedded timestep, for the norms' shifts, scales and gates, is one
row. The tokens of attention's last projection come with their channels first: on a v6e it takes as long to
round them as the product then gains.
"""


def check_weights(weights: Any) -> None:
    if weights not in (None, *get_args(Weights)):
        raise ValueError(
            f"got weights={weights!r}: it takes 'int8', 'int8-dynamic', or None for the dtype that they have"
        )


def to_int8(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return a matrix (O, I) of any float dtype as int8 (O, I) and the scale (O) of its rows in float32."""
    weight = np.asarray(weight, np.float32)
    scale = np.abs(weight).max(-1) / np.float32(127)
    scale = np.where(scale == 0, np.float32(1), scale)  # a row of zeros
    return np.rint(weight / scale[..., None]).astype(np.int8), scale


FORMS = (
    "torchao's Int8WeightOnlyConfig() and Float8WeightOnlyConfig(), with a scale for each output channel or "
    "each matrix, GGUFQuantizationConfig, enable_layerwise_casting before port, and weights='int8' or "
    "'int8-dynamic' of port"
)
"""The forms of weights in fewer bits that a ported network takes."""


def check_bits(name: str, network: nn.Module) -> None:
    """Raise `ValueError` if a weight of a network, called `name`, has another form than `FORMS`."""
    list(_foreign_weights(name, network))


def take_bits(network: nn.Module) -> None:
    """Have the linear layers of a network keep their weights of `FORMS`, on the host and without a copy.

    Other weights that a hook casts in a call are written out: biases, and embeddings, which are few.
    """
    held = [*_foreign_weights("", network)]
    for layer, key, weight, bits in held:
        cast_dtype = upstream.cast_dtype(layer)
        if not _is_matrix(layer, key):
            layer._parameters[key] = nn.Parameter(weight.detach().to(cast_dtype), weight.requires_grad)
            continue
        data, scale, quant_type = bits
        compute_dtype = vars(layer).get("compute_dtype") or cast_dtype or weight.dtype  # GGUF's layer has one
        vars(layer).pop("extra_repr", None)  # torchao's, which would count as a change
        layer.__class__ = Linear
        as_linear: Any = layer
        as_linear.hold(data, scale, compute_dtype, quant_type)
    if held:
        upstream.take_casting(network)
        runtime.forget_programs(network)


def _foreign_weights(name: str, network: nn.Module) -> Iterator[tuple[nn.Module, str, Any, Any]]:
    """Yield (layer, key, weight, bits) for each weight that a program cannot take as it is.

    The bits are what `upstream.bits_of` returns.
    """
    for path, layer in network.named_modules():
        for key, weight in layer._parameters.items():
            is_matrix = _is_matrix(layer, key)
            is_held = key == "weight" and isinstance(layer, Linear) and layer.compute_dtype is not None
            if weight is None or is_held or runtime.on_jax(weight):
                continue
            if upstream.cast_dtype(layer) is not None:
                yield layer, key, weight, (weight.detach(), None, None)
            elif not runtime.is_movable(weight):
                bits = upstream.bits_of(weight) if is_matrix else None
                if bits is None:
                    kind = f"{type(weight).__name__} of {runtime.dtype_name(weight.dtype)}"
                    raise ValueError(
                        f"{name}.{path}.{key}, a {kind}, has no form on JAX: those that have one are {FORMS}"
                    )
                yield layer, key, weight, bits


def _is_matrix(layer: nn.Module, key: str) -> bool:
    """Return whether a parameter is the matrix of a layer that computes what `Linear` does."""
    is_linear = type(layer) in (nn.Linear, Linear) or type(layer).__name__ == "GGUFLinear"  # diffusers'
    return is_linear and key == "weight"


def quantize(network: nn.Module, weights: Weights) -> None:
    """Give a ported network's blocks weights in int8, on the host; layers with fewer bits keep theirs.

    Weights on "meta" are replaced by such of the new shapes and dtypes, for `as_int8` to feed.
    """
    for name, layer in _layers(network):
        if layer.compute_dtype is None:
            if layer.weight.is_meta:
                int8, scale = layer.weight.to(torch.int8), layer.weight.new_empty(len(layer.weight)).float()
            else:
                int8, scale = map(runtime.plain_tensor, to_int8(np.asarray(runtime.as_array(layer.weight))))
            layer.hold(int8, scale, layer.weight.dtype)
        is_int8 = layer.bits.dtype == torch.int8
        layer.dynamic = weights == "int8-dynamic" and is_int8 and re.search(DYNAMIC, name) is not None
    runtime.forget_programs(network)


def as_int8(
    network: nn.Module, tensors: Iterable[tuple[str, np.ndarray]]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield each (name, array), a weight that a network has in int8 as such and then its scale."""
    layers = {f"{name}.weight": layer for name, layer in _layers(network) if layer.scale is not None}
    for name, array in tensors:
        if name in layers:
            # T5's `wo`, which overflows in float16, is in float32 then.
            layers[name].compute_dtype = getattr(torch, array.dtype.name)
            array, scale = to_int8(array)
            yield f"{name}_scale", scale
        yield name, array


def _layers(network: nn.Module) -> Iterator[tuple[str, Linear]]:
    for name, module in network.named_modules():
        if type(module) is Linear and weight_spec(f"{name}.weight") in WEIGHTS.values():
            yield name, module
