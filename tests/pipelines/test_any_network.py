"""Pipelines of other people: networks that this package does not know run as they are, and equal PyTorch."""

import copy
import functools
import logging
import pickle
import types

import diffusers
import jax
import pytest
import torch
from diffusers import CogVideoXTransformer3DModel, ConsisIDTransformer3DModel
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from diffusers.models.modeling_utils import ModelMixin
from diffusers.pipelines.consisid.pipeline_consisid import ConsisIDPipeline  # no need of OpenCV
from torch import nn
from torch.nn import functional as F

from cogvideox_torchax import make_mesh, port, runtime
from cogvideox_torchax.pipelines import layers, networks
from cogvideox_torchax.pipelines.port import PortedPipeline
from tests import reference, small_pipelines
from tests.reference import largest_error

TOLERANCE = 1e-4
"""Relative error of the frames in float32."""


class WithCamera(CogVideoXTransformer3DModel):
    """A subclass of diffusers' transformer with an input more, and a number that differs between steps."""

    def forward(self, hidden_states, encoder_hidden_states, timestep, camera=None, strength=1.0, **options):
        hidden_states = hidden_states + strength * camera[:, :, None, None, None].to(hidden_states.device)
        return super().forward(hidden_states, encoder_hidden_states, timestep, **options)


class Plain(ModelMixin, ConfigMixin):
    """A transformer that has nothing of diffusers' layers; one write goes through a view."""

    @register_to_config
    def __init__(self, in_channels=16, channels=64, text_embed_dim=32, patch_size=2):
        super().__init__()
        self.embed, self.text = nn.Conv2d(in_channels, channels, 2, 2), nn.Linear(text_embed_dim, channels)
        self.qkv, self.out = nn.Linear(channels, 3 * channels), nn.Linear(channels, 4 * in_channels)
        self.scales = torch.linspace(0.5, 1.5, channels)  # a plain tensor, neither weight nor buffer

    def forward(self, hidden_states, encoder_hidden_states, timestep, return_dict=True, **_options):
        videos, frames = hidden_states.shape[:2]
        x = self.embed(hidden_states.flatten(0, 1)).flatten(2).transpose(1, 2)
        x = x.reshape(videos, -1, x.shape[-1]) * self.scales
        x.view(videos, frames, -1, x.shape[-1])[:, ::2] *= 0.5
        text = self.text(encoder_hidden_states)
        q, k, v = self.qkv(torch.cat([text, x], 1)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        keys = torch.arange(k.shape[2], device=k.device) != 3
        y = F.scaled_dot_product_attention(q, k, v, keys[None, None, None])
        x = x + y.transpose(1, 2).flatten(2)[:, text.shape[1] :] * (timestep[:, None, None] / 1000)
        height, width = hidden_states.shape[-2] // 2, hidden_states.shape[-1] // 2
        x = self.out(x).view(videos, frames, height, width, 2, 2, -1).permute(0, 1, 6, 2, 4, 3, 5)
        sample = x.reshape(hidden_states.shape)
        return Transformer2DModelOutput(sample=sample) if return_dict else (sample,)


class Sampler(diffusers.DiffusionPipeline):
    """A pipeline that is none of CogVideoX's classes, with a loop of its own."""

    def __init__(self, text_encoder, vae, transformer, scheduler):
        super().__init__()
        self.register_modules(
            text_encoder=text_encoder, vae=vae, transformer=transformer, scheduler=scheduler
        )

    @torch.no_grad()
    def __call__(self, ids, camera, steps=3):
        text = self.text_encoder(ids.to(self.device))[0]
        latents = self.vae.encode(self.picture()).latent_dist.sample() * self.vae.config.scaling_factor
        latents = latents.permute(0, 2, 1, 3, 4)
        self.scheduler.set_timesteps(steps, device=self.device)
        for index, t in enumerate(self.scheduler.timesteps):
            moment = t.expand(latents.shape[0]).to(latents.device)
            options = {"camera": camera, "strength": 0.1 * index}
            noise = self.transformer(latents, text, moment, return_dict=False, **options)[0]
            latents = self.scheduler.step(noise, t, latents, return_dict=False)[0]
        return self.vae.decode(latents.permute(0, 2, 1, 3, 4) / self.vae.config.scaling_factor).sample

    def picture(self):
        return torch.linspace(-1, 1, 3 * 8 * 16, device=self.device).view(1, 3, 1, 8, 16).repeat(2, 1, 5, 1, 1)


def sampler(kind):
    torch.manual_seed(0)
    model = Plain() if kind == "plain" else small_pipelines.transformer("2b", max_text_seq_length=5)
    if kind == "subclass":
        model.__class__ = WithCamera
    return Sampler(
        small_pipelines.text_encoder(num_layers=1), small_pipelines.vae(), model, small_pipelines.scheduler()
    )


def sampled(pipe, **options):
    torch.manual_seed(3)  # for the posterior's sample, which is drawn without a generator
    return runtime.to_torch(pipe(torch.arange(10).view(2, 5), torch.tensor([[0.5], [-0.5]]), **options))


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


PROGRAMS = {
    "ConsisID": (consisid, identified),
    "subclass": (functools.partial(sampler, "subclass"), sampled),
    "plain": (functools.partial(sampler, "plain"), sampled),
}
MESHES = {"one device": None, "2x4": (2, 4)}


@pytest.mark.usefixtures("torchax_off")
@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
@pytest.mark.parametrize(("make", "run"), PROGRAMS.values(), ids=PROGRAMS)
def test_a_program_of_others_equals_pytorch(make, run, mesh, caplog):
    expected = run(make())
    with caplog.at_level(logging.WARNING, "cogvideox_torchax"):
        pipe = port(make(), mesh=None if mesh is None else make_mesh(*mesh))
        frames = run(pipe)
    assert largest_error(frames, expected) < TOLERANCE
    name = type(pipe.transformer).__name__
    words = "; batch over dp, weights whole, tokens not split" if mesh else ""
    assert [record.getMessage() for record in caplog.records] == [
        f"transformer: {name}, compiled as it is{words}"
    ], "a network is named once, and none runs operation by operation"
    for part in (pipe.transformer, pipe.text_encoder, pipe.vae):
        assert all(map(runtime.on_jax, runtime.named_tensors(part).values()))
        assert {len(runtime.array_of(w).devices()) for w in part.parameters()} == {8 if mesh else 1}


