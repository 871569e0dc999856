"""Pipelines of other people: networks and methods that this package does not know run, and equal PyTorch."""

import functools
import logging
import types

import diffusers
import pytest
import torch
from diffusers import CogVideoXTransformer3DModel, ConfigMixin, ConsisIDTransformer3DModel, ModelMixin
from diffusers.configuration_utils import register_to_config
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from diffusers.pipelines.consisid.pipeline_consisid import ConsisIDPipeline  # no need of OpenCV
from torch import nn
from torch.nn import functional as F

from cogvideox_torchax import make_mesh, port, runtime
from cogvideox_torchax.pipelines import known, layers, transformer
from cogvideox_torchax.pipelines.port import PortedPipeline
from tests import reference, small_pipelines
from tests.pipelines.test_pipeline import frames, latents
from tests.reference import largest_error

pytestmark = pytest.mark.usefixtures("torchax_off")

TOLERANCE = 1e-4
"""Relative error of the frames in float32."""

CONSISID = {
    **small_pipelines.TRANSFORMER,
    "num_layers": 1,
    "num_attention_heads": 6,
    "in_channels": 32,
    "use_rotary_positional_embeddings": True,
    "is_train_face": True,
    "cross_attn_interval": 1,
    "cross_attn_dim_head": 8,
    "cross_attn_num_heads": 2,
    **{"LFE_id_dim": 24, "LFE_vit_dim": 16, "LFE_depth": 5, "LFE_dim_head": 8, "LFE_num_heads": 2},
    **{"LFE_output_dim": 64, "LFE_num_querie": 4},
}


def consisid():
    torch.manual_seed(1)
    model = reference.randomized(ConsisIDTransformer3DModel(**CONSISID))
    pipe = ConsisIDPipeline(**small_pipelines.one_layer("image", transformer=model).components)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def faces():
    """Return the arguments of ConsisID's call beside those of a pipeline of images."""
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(5))
    return {"id_cond": draw(1, 24), "id_vit_hidden": [draw(1, 5, 16) for _ in range(5)]}


def identified(pipe):
    return frames(pipe, "image", **faces())


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
        rising = torch.linspace(-1, 1, 3 * 8 * 16, device=self.device)
        return rising.view(1, 3, 1, 8, 16).repeat(2, 1, 5, 1, 1)


def sampler(kind):
    torch.manual_seed(0)
    model = Plain()
    if kind == "subclass":
        model = small_pipelines.transformer("2b", num_layers=1, max_text_seq_length=5)
        model.__class__ = WithCamera
    return Sampler(
        small_pipelines.text_encoder(num_layers=1), small_pipelines.vae(), model, small_pipelines.scheduler()
    )


def sampled(pipe, **options):
    torch.manual_seed(3)  # for the posterior's sample, which is drawn without a generator
    return runtime.to_torch(pipe(torch.arange(10).view(2, 5), torch.tensor([[0.5], [-0.5]]), **options))


PROGRAMS = {
    "ConsisID": (consisid, identified),
    "subclass": (functools.partial(sampler, "subclass"), sampled),
    "plain": (functools.partial(sampler, "plain"), sampled),
}


MESHES = {"one device": None, "2x4": (2, 4)}


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


def test_layers_of_a_network_get_their_kernels_and_attention_never_has_all_scores():
    model = consisid().transformer
    known.port_network(model)
    kinds = {type(module) for module in model.modules()}
    assert {layers.Linear, layers.LayerNorm, layers.PatchEmbed} <= kinds
    assert {type(block.attn1.processor) for block in model.transformer_blocks} == {layers.AttnProcessor}
    assert not {nn.Linear, nn.LayerNorm} & kinds


def test_parts_of_a_ported_pipeline_make_another_pipeline_that_runs(tmp_path):
    pipe = port(consisid())
    made = ConsisIDPipeline(**pipe.components)
    made.set_progress_bar_config(disable=True)
    assert isinstance(made, PortedPipeline)
    assert torch.equal(*(latents(each, "image", **faces()) for each in (pipe, made)))
    assert isinstance(ConsisIDPipeline.from_pipe(pipe), PortedPipeline)
    pipe.save_pretrained(tmp_path)
    loaded = ConsisIDTransformer3DModel.from_pretrained(tmp_path / "transformer")
    assert torch.equal(loaded.proj_out.weight, runtime.to_torch(pipe.transformer.proj_out.weight))


class Faster(diffusers.CogVideoXPipeline):
    """A subclass that adds arguments to methods which `port` wraps, and whose call is its own."""

    def _prepare_rotary_positional_embeddings(self, height, width, num_frames, device, fps=8):
        table = super()._prepare_rotary_positional_embeddings(height, width, num_frames, device)
        return tuple(each * (fps / 8) for each in table)

    def decode_latents(self, latents, brightness=1.0):
        return super().decode_latents(latents) * brightness

    def __call__(self, latents, *, fps):
        table = self._prepare_rotary_positional_embeddings(8, 16, 3, self.device, fps=fps)
        return *table, self.decode_latents(latents, brightness=2.0)


def test_a_subclass_may_add_arguments_to_a_pipelines_methods():
    stock, pipe = (Faster(**small_pipelines.one_layer().components) for _ in range(2))
    latents = torch.randn(1, 3, 16, 4, 8, generator=torch.Generator().manual_seed(0))
    expected = stock(latents, fps=12)
    for want, got in zip(expected, port(pipe)(runtime.to_jax(latents), fps=12), strict=True):
        assert largest_error(runtime.to_torch(got), want) < TOLERANCE


def test_prompts_on_the_host_are_moved_beside_those_on_jax():
    stock, pipe = small_pipelines.one_layer(), port(small_pipelines.one_layer())
    prompt, negative = stock.encode_prompt("a cat", "", max_sequence_length=16)

    def sampled_from(pipe, prompt, negative):
        embeddings = {"prompt_embeds": prompt, "negative_prompt_embeds": negative}
        return latents(pipe, prompt=None, guidance_scale=6.0, **embeddings)

    expected, to_jax = sampled_from(stock, prompt, negative), runtime.to_jax
    for mixed in ((prompt, negative), (to_jax(prompt), negative), (prompt, to_jax(negative))):
        assert largest_error(sampled_from(pipe, *mixed), expected) < TOLERANCE


def test_compiled_models_are_unwrapped_at_the_port_and_after_it():
    pipe = small_pipelines.one_layer()
    pipe.vae, pipe.transformer = torch.compile(pipe.vae), torch.compile(pipe.transformer)
    port(pipe)
    for _ in range(2):
        pipe(**small_pipelines.inputs("text", num_inference_steps=1))
        assert type(pipe.transformer) is transformer.CogVideoXTransformer3DModel
        assert pipe.transformer.program.compilations == 1
        pipe.transformer = torch.compile(pipe.transformer)


def test_a_vae_of_another_package_is_refused_by_its_module():
    kind = type("AutoencoderKLCogVideoX", (nn.Module,), {"__module__": "videox_fun.models.vae"})
    pipe = small_pipelines.one_layer()
    pipe.vae = kind()
    for given in (kind(), pipe):
        with pytest.raises(ValueError, match="AutoencoderKLCogVideoX of videox_fun.models.vae: port takes"):
            port(given)


def test_modules_of_an_object_are_moved_and_weights_that_jax_lacks_stay_on_the_host_and_are_named(caplog):
    extra = nn.Linear(2, 2).to(torch.float8_e4m3fn)
    holder = types.SimpleNamespace(vae=small_pipelines.vae(), adapter=nn.Linear(2, 2), extra=extra, size=3)
    port(holder)
    assert [runtime.is_on_jax(part) for part in (holder.vae, holder.adapter, extra)] == [True, True, False]
    assert runtime.on_jax(holder.adapter(torch.ones(1, 2)))
    words = "extra: Linear stays on the host, since JAX has no "
    assert sum(record.getMessage().startswith(words) for record in caplog.records) == 1


def test_a_subclass_that_computes_the_same_is_a_known_network():
    model = small_pipelines.transformer("5b", num_layers=1)
    model.__class__ = type("Same", (CogVideoXTransformer3DModel,), {"extra": lambda self: 3})
    ported = known.port_network(model)
    assert isinstance(ported, transformer.CogVideoXTransformer3DModel)
    assert ported.extra() == 3
