"""The ported class of a network: a class for networks that this package knows, or one made for any class.

A ported class is a subclass of the class that it replaces, which is called `kind` here. `KNOWN` has the
ported class of each stock class, a class of diffusers or of transformers.
"""

import functools
from typing import Any

from diffusers.models.transformers.cogvideox_transformer_3d import (
    CogVideoXTransformer3DModel as DiffusersTransformer,
)
from torch import nn
from transformers.models.t5.modeling_t5 import T5EncoderModel as TransformersT5Encoder

from cogvideox_torchax import upstream
from cogvideox_torchax.files.models import saved_from_host
from cogvideox_torchax.pipelines import loras
from cogvideox_torchax.pipelines.blocks import Block
from cogvideox_torchax.pipelines.networks import CompiledNetwork, KnownNetwork, port_layers
from cogvideox_torchax.pipelines.text_encoder import T5EncoderModel
from cogvideox_torchax.pipelines.transformer import CogVideoXTransformer3DModel
from cogvideox_torchax.runtime.models import class_of, save_as_stock
from cogvideox_torchax.runtime.weights import tie_weights

KNOWN: dict[type[nn.Module], type[KnownNetwork]] = {
    DiffusersTransformer: CogVideoXTransformer3DModel,
    TransformersT5Encoder: T5EncoderModel,
}
"""The ported class of each class whose layers this package knows."""

METHODS = ("forward", "encode", "decode")
"""Methods of a network that are compiled, if its class has them."""


@functools.cache
def ported_class(kind: Any) -> type[CompiledNetwork]:
    """Return the class that a network of class `kind` becomes; a ported class is returned unchanged."""
    if issubclass(kind, CompiledNetwork):
        return kind
    if kind in KNOWN:
        return KNOWN[kind]
    # Methods that read or make weights, such as `load_lora_adapter`: they run with weights in PyTorch.
    members = loras.methods_in_pytorch(kind, loras.NETWORK_METHODS)
    if hasattr(kind, "save_pretrained"):  # the method of `kind` cannot save weights that are on JAX
        members["save_pretrained"] = saved_from_host(kind.save_pretrained)
    for stock, known in KNOWN.items():
        # A subclass that computes the same as its stock class also gets the methods of the ported class.
        if issubclass(kind, stock) and kind.forward is stock.forward:
            return class_of(ported_class, kind, (known, kind), **members)
    # This package does not know what the class computes: its methods are compiled as they are.
    members |= {name: _compiled_method(kind, name) for name in METHODS if hasattr(kind, name)}
    return class_of(ported_class, kind, (CompiledNetwork, kind), **members)


def _compiled_method(kind: type, name: str) -> Any:
    """Return a method that runs the method `name` of class `kind`: on JAX as a program, else in PyTorch."""

    @functools.wraps(getattr(kind, name))
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        # The method is looked up in each call: a user may replace it on the class.
        return self.run_as_it_is(getattr(kind, name), *args, **kwargs)

    return call


def port_network(network: Any) -> Any:
    """Give a network and its layers their ported classes, in place; return the network.

    On a ported network this ports the layers that were added since.
    """
    if hasattr(network, "tie_weights") and not isinstance(network, CompiledNetwork):
        tie_weights(network)
    port_layers(network)
    network.__class__ = ported_class(type(network))
    upstream.register_block(Block)  # diffusers' caches take only classes of blocks that are registered
    save_as_stock(network)  # a saved pipeline then names the original class, and loads without this package
    return network
