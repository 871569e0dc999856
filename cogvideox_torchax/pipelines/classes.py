"""The classes of layers: which stock class becomes which ported one, and which ones a mesh splits."""

from typing import Any

from diffusers.models.activations import GELU as DiffusersGELU
from diffusers.models.attention import FeedForward
from diffusers.models.attention_processor import (
    Attention,
    CogVideoXAttnProcessor2_0,
    FusedCogVideoXAttnProcessor2_0,
)
from diffusers.models.embeddings import CogVideoXPatchEmbed
from diffusers.models.normalization import CogVideoXLayerNormZero
from diffusers.models.transformers.cogvideox_transformer_3d import CogVideoXBlock
from diffusers.models.transformers.cogvideox_transformer_3d import (
    CogVideoXTransformer3DModel as DiffusersTransformer,
)
from torch import nn
from transformers.models.t5.modeling_t5 import T5LayerFF, T5LayerSelfAttention

from cogvideox_torchax.pipelines.blocks import GELU, Block
from cogvideox_torchax.pipelines.layers import (
    AttnProcessor,
    FusedAttnProcessor,
    LayerNorm,
    Linear,
    PatchEmbed,
)
from cogvideox_torchax.vae.torchax.modules import SiLU

LAYERS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: Linear,
    nn.LayerNorm: LayerNorm,
    nn.SiLU: SiLU,
    DiffusersGELU: GELU,
    CogVideoXBlock: Block,
    CogVideoXPatchEmbed: PatchEmbed,
}
"""The class that each layer of a network becomes."""

PROCESSORS: dict[Any, Any] = {
    CogVideoXAttnProcessor2_0: AttnProcessor,
    FusedCogVideoXAttnProcessor2_0: FusedAttnProcessor,
}
"""The class that each attention processor becomes."""

SPLIT_LAYERS = (PatchEmbed, Block, Attention, FeedForward, T5LayerSelfAttention, T5LayerFF)
"""The layers whose inputs and outputs are sequences split over a mesh."""

STOCK_CLASSES: tuple[type, ...] = (
    DiffusersTransformer,
    Attention,
    CogVideoXLayerNormZero,
    FeedForward,
    *LAYERS,
    CogVideoXAttnProcessor2_0,
    FusedCogVideoXAttnProcessor2_0,
)
"""The classes that a step of the transformer computes for; if a method of one was replaced, it does not."""


def port_layers(network: nn.Module) -> None:
    """Give the layers of a network, and their attention processors, their ported classes, in place."""
    for module in network.modules():
        module.__class__ = LAYERS.get(type(module), type(module))
        processor = getattr(module, "processor", None)
        if type(processor) in PROCESSORS:
            processor.__class__ = PROCESSORS[type(processor)]
