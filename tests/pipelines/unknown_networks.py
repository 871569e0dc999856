"""Networks that this package does not know: one of diffusers, and one of any function."""

import functools
import types

import torch
from diffusers import ConsisIDTransformer3DModel
from diffusers.pipelines.consisid.pipeline_consisid import ConsisIDPipeline  # no need of OpenCV
from torch import nn

from cogvideox_torchax import port
from tests import reference, small_pipelines

TOLERANCE = 1e-4
"""Relative error of the frames in float32."""


CONSISID = {
    **small_pipelines.TRANSFORMER,
    "num_attention_heads": 6,
    "in_channels": 32,
    "use_rotary_positional_embeddings": True,
    "is_train_face": True,
    "cross_attn_dim_head": 8,
    "cross_attn_num_heads": 2,
    **{"LFE_id_dim": 24, "LFE_vit_dim": 16, "LFE_depth": 5, "LFE_dim_head": 8, "LFE_num_heads": 2},
    **{"LFE_output_dim": 64, "LFE_num_querie": 4},
}


def consisid():
    torch.manual_seed(1)
    model = reference.randomized(ConsisIDTransformer3DModel(**CONSISID))
    parts = small_pipelines.build("image", transformer=model).components
    pipe = ConsisIDPipeline(**parts)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def identified(pipe, **options):
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(5))
    faces = {"id_cond": draw(1, 24), "id_vit_hidden": [draw(1, 5, 16) for _ in range(5)]}
    given = small_pipelines.inputs("image", **faces, **options)
    return pipe(**given).frames


def ported_network(make, **options):
    """Return a network that this package does not know, ported beside a VAE."""
    return port(
        types.SimpleNamespace(vae=small_pipelines.vae(), transformer=stock_network(make)), **options
    ).transformer


def stock_network(make):
    torch.manual_seed(0)
    return reference.randomized(make())


X = torch.linspace(-1, 1, 8).view(2, 4)


class Made(nn.Module):
    """A network whose forward is the function that a test gives."""

    def __init__(self, function):
        super().__init__()
        self.linear, self.function = nn.Linear(4, 4), function
        self.own, self.table = types.SimpleNamespace(factor=1.0), torch.ones(4)

    def forward(self, *args):
        return self.function(self, *args)


def stock_and_ported(function):
    """Return two networks of equal weights whose forward is a function: in PyTorch, and ported."""
    return tuple(make(functools.partial(Made, function)) for make in (stock_network, ported_network))
