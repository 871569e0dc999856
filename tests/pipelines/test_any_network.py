"""Pipelines of other people: networks that this package does not know run as they are, and equal PyTorch."""

import copy
import functools
import logging
import pickle
import types

import diffusers
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
        rising = torch.linspace(-1, 1, 3 * 8 * 16, device=self.device)
        return rising.view(1, 3, 1, 8, 16).repeat(2, 1, 5, 1, 1)


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


def network(make, **options):
    """Return a network that this package does not know, ported beside a VAE."""
    return port(
        types.SimpleNamespace(vae=small_pipelines.vae(), transformer=drawn(make)), **options
    ).transformer


def drawn(make):
    torch.manual_seed(0)
    return reference.randomized(make())


class Scaled(nn.Module):
    """A network whose call has numbers, containers and options; it counts how often it is traced."""

    traces: list[str] = []  # noqa: RUF012 - of all copies, as a trace runs a copy

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4096)

    def forward(self, given, *, scale=1.0, repeats=1, mode=None):
        self.traces.append(mode)
        x = self.linear(given["x"]) * scale
        for _ in range(repeats):
            x = x + given["more"][0]
        return {"mode": mode, "x": x, "half": (x / 2, None)}


@pytest.fixture
def scaled():
    Scaled.traces.clear()
    return network(Scaled)


def scale(model, **options):
    given = {"x": torch.ones(2, 4), "more": [torch.full((2, 1), 2.0)]}
    result = model(given, **options)
    return {"mode": result["mode"], "x": runtime.to_torch(result["x"]), "half": result["half"]}


def test_arguments_and_results_are_trees_of_the_callers_own(scaled):
    result = scale(scaled, mode="dark")
    assert result["mode"] == "dark"
    assert result["half"][1] is None
    expected = scale(copy.deepcopy(scaled).to("cpu"), mode="dark")
    assert torch.allclose(result["x"], expected["x"], atol=1e-5)
    assert torch.equal(runtime.to_torch(result["half"][0]), result["x"] / 2)


def test_a_number_that_varies_becomes_an_argument_and_one_that_is_branched_on_does_not(scaled, caplog):
    for index in range(5):
        scale(scaled, scale=0.5 + index)
    # The first value is a constant; the second an argument, and a constant once more, to compare.
    assert len(Scaled.traces) == 3
    Scaled.traces.clear()
    for repeats in (1, 2, 3, 2):
        result = scale(scaled, repeats=repeats, scale=0.25 * repeats)
        weights = scaled.linear
        base = runtime.to_torch(weights.weight).sum(1) + runtime.to_torch(weights.bias)
        assert torch.allclose(result["x"], base * 0.25 * repeats + 2.0 * repeats, atol=1e-4)
    scale(scaled, repeats=3, scale=9.0)
    assert len(Scaled.traces) <= 8, "a value of a branch is traced once"
    assert not caplog.records, "nothing runs operation by operation"
    for value in (1, True, 1, True):  # they are equal, and no program of one may serve the other
        assert type(scale(scaled, mode=value)["mode"]) is type(value)


def test_a_second_call_compiles_nothing_and_another_mode_is_another_program(scaled):
    for mode in ("a", "b", "a", "b"):
        assert scale(scaled, mode=mode)["mode"] == mode
    assert Scaled.traces == ["a", "b"]


def test_weights_are_arguments_and_modules_select_the_program(scaled):
    first = scale(scaled)["x"]
    with torch.no_grad(), runtime.active():
        scaled.linear.weight.mul_(2)
        scaled.linear.bias.mul_(2)
    assert torch.allclose(scale(scaled)["x"], (first - 2) * 2 + 2, atol=1e-4)
    assert len(Scaled.traces) == 1
    hook = scaled.linear.register_forward_hook(lambda _module, _args, y: y * 0)
    assert torch.equal(scale(scaled)["x"], torch.full((2, 4096), 2.0))
    hook.remove()


def test_weights_are_split_over_the_mesh_where_they_do_not_fit():
    model = network(Scaled, mesh=make_mesh(2, 4))
    whole = scale(model)["x"]
    assert str(model.parallelism) == "batch over dp, weights whole, tokens not split"
    model.place_on(make_mesh(2, 4), memory=1.0)
    split = scale(model)["x"]
    assert str(model.parallelism) == "batch over dp, weights split, tokens not split"
    assert torch.equal(whole, split)
    array = runtime.array_of(model.linear.weight)
    assert array.addressable_shards[0].data.size == array.size // 8


def test_a_copy_a_pickle_and_a_move_stay_the_network(scaled):
    expected = scale(scaled)["x"]
    for other in (copy.deepcopy(scaled), copy.copy(scaled), pickle.loads(pickle.dumps(scaled))):
        assert type(other) is type(scaled)
        assert torch.allclose(scale(other)["x"], expected, atol=1e-5)
    scaled.to("cpu")
    assert torch.allclose(scale(scaled)["x"], expected, atol=1e-5)
    assert not runtime.is_on_jax(scaled)
    scaled.to("jax")
    assert torch.equal(scale(scaled)["x"], expected)


class Writing(nn.Module):
    """A network that writes into its argument, and keeps a sum in a buffer."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x, keep=False):
        x[:, :2] *= 2
        if keep:
            self.total += x.sum()
        return self.linear(x)


@pytest.mark.usefixtures("torchax_off")
def test_what_a_network_writes_is_written_as_in_pytorch(caplog):
    stock, model = drawn(Writing).requires_grad_(False), network(Writing)
    for keep in (False, True):
        own, host, on_jax = torch.ones(2, 4), torch.ones(2, 4), runtime.to_jax(torch.ones(2, 4))
        expected = stock(own, keep)
        for x in (host, on_jax):
            assert largest_error(model(x, keep), expected) < 1e-6
            assert torch.equal(runtime.to_torch(x), own)
    assert runtime.to_torch(model.total) == 2 * stock.total
    assert {record.getMessage().partition("since ")[2] for record in caplog.records[1:]} == {
        "it writes into its weights or its arguments"
    }


def test_forms_of_calls_do_not_pile_up(scaled):
    for index in range(70):
        scale(scaled, mode=f"mode {index}")
    assert len(runtime.programs_of(scaled)._kept) <= runtime.Programs.KINDS


class Made(nn.Module):
    """A network whose forward is the function that a test gives."""

    def __init__(self, function):
        super().__init__()
        self.linear, self.function = nn.Linear(4, 4), function
        self.own, self.table = types.SimpleNamespace(factor=1.0), torch.ones(4)

    def forward(self, *args):
        return self.function(self, *args)


def collects(self, x, found):
    found["y"] = self.linear(x)
    return x


def adds_twice(self, x, y):
    x.mul_(2)
    return self.linear(x) + y


def state(self, x):
    self.own.factor += 1
    return self.linear(x) * self.own.factor


X = torch.linspace(-1, 1, 8).view(2, 4)
CALLS = {
    "a type test": (lambda m, x, v: m.linear(x) * (v if isinstance(v, float) else 100), [0.1, 0.2, 0.3]),
    "a tensor test": (lambda m, x, v: m.linear(x) * (7 if torch.is_tensor(v) else v), [0.1, 0.2, 0.3]),
    "a key": (lambda m, x, v: m.linear(x) * {1: 3.0, 2: 5.0, 3: 6.0}[v], [1, 2, 3]),
    "a method of floats": (lambda m, x, v: m.linear(x) * (2 if v.is_integer() else 3), [1.0, 1.5, 2.0]),
    "a size": (lambda m, x, v: m.linear(x).sum() + torch.zeros(2, v, device=x.device), [1, 2, 3]),
    "a sign of zero": (lambda m, x, v: 1 + torch.atan2(0 * x.abs(), torch.full_like(x, v)), [0.0, -0.0]),
}


@pytest.mark.usefixtures("torchax_off")
@pytest.mark.parametrize(("function", "values"), CALLS.values(), ids=CALLS)
def test_a_number_means_what_it_means_in_pytorch(function, values):
    stock, model = (each(functools.partial(Made, function)) for each in (drawn, network))
    for value in (*values, *values):
        expected = stock(X, value).detach()
        assert largest_error(model(X, value), expected) < 1e-6, value


@pytest.mark.usefixtures("torchax_off")
def test_objects_and_containers_of_the_users_own_are_changed_as_in_pytorch():
    stock, model = (each(functools.partial(Made, collects)) for each in (drawn, network))
    expected, found = {}, {}
    stock(X, expected)
    model(runtime.to_jax(X), found)
    assert largest_error(found["y"], expected["y"].detach()) < 1e-6
    with pytest.raises(ValueError, match="Made changes a container among its arguments: pass tensors on JAX"):
        model(X, {})
    stock, model = (each(functools.partial(Made, adds_twice)) for each in (drawn, network))
    own, other = X.clone(), X.clone()
    assert largest_error(model(other, other), stock(own, own).detach()) < 1e-6
    assert torch.equal(own, other)
    stock, model = (each(functools.partial(Made, state)) for each in (drawn, network))
    for _ in range(3):
        assert largest_error(model(X), stock(X).detach()) < 1e-6


@pytest.mark.usefixtures("torchax_off")
def test_attributes_that_change_in_place_are_seen():
    def function(self, x):
        return self.linear(x) * self.own.factor * self.table

    stock, model = (each(functools.partial(Made, function)) for each in (drawn, network))
    changes = (
        lambda each: None,
        lambda each: setattr(each.own, "factor", 2.0),
        lambda each: each.table.fill_(3.0),
    )
    for change in changes:
        for each in (stock, model):
            change(each)
        assert largest_error(model(X), stock(X).detach()) < 1e-6


def test_random_numbers_of_a_network_differ_between_calls_and_follow_the_seed(caplog):
    model = network(functools.partial(Made, lambda m, x: F.dropout(m.linear(x), 0.5, training=True)))
    draws = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        draws.append([runtime.to_torch(model(torch.ones(8, 4))) for _ in range(2)])
    assert torch.equal(draws[0][0], draws[1][0])
    assert not torch.equal(draws[0][0], draws[0][1])
    assert not torch.equal(draws[0][0], draws[2][0])
    words = caplog.records[-1].getMessage()
    assert words.endswith("since it draws random numbers, which no program on JAX does")


@pytest.mark.parametrize("trained", [True, False])
def test_gradients_of_weights_and_through_frozen_ones_are_refused_in_words(trained):
    model = network(functools.partial(Made, lambda m, x: m.linear(x))).requires_grad_(trained)
    with torch.enable_grad(), runtime.active():
        x = runtime.to_jax(X).requires_grad_()
        with pytest.raises(ValueError, match="on JAX the transformer has no gradients"):
            (model(x).sum() + x.sum()).backward()


class Returning(nn.Module):
    """A network with a method that returns an object, as a VAE's `encode` does."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x)

    def encode(self, x):
        return types.SimpleNamespace(latents=self.linear(x))

    def decode(self, x):
        return self.linear(x) if isinstance(x, torch.Tensor) else self.linear(x.latents)


def test_a_method_with_other_objects_runs_operation_by_operation(caplog):
    model, x = network(Returning), torch.ones(1, 4)
    encoded = model.encode(x)
    assert torch.equal(runtime.to_torch(encoded.latents), runtime.to_torch(model(x)))
    assert runtime.to_torch(model.decode(encoded)).shape == (1, 4)
    words = [record.getMessage().partition("since ")[2] for record in caplog.records]
    assert words[-2:] == ["it returns a SimpleNamespace", "it takes a SimpleNamespace"]


def test_layers_of_a_network_get_their_kernels_and_attention_never_has_all_scores():
    model = consisid().transformer
    networks.port_network(model)
    kinds = {type(module) for module in model.modules()}
    assert {layers.Linear, layers.LayerNorm, layers.PatchEmbed} <= kinds
    assert {type(block.attn1.processor) for block in model.transformer_blocks} == {layers.AttnProcessor}
    assert not {nn.Linear, nn.LayerNorm} & kinds


@pytest.mark.usefixtures("torchax_off")
def test_parts_of_a_ported_pipeline_make_another_pipeline_that_runs(tmp_path):
    pipe = port(consisid())
    expected = identified(pipe)
    made = ConsisIDPipeline(**pipe.components)
    made.set_progress_bar_config(disable=True)
    assert isinstance(made, PortedPipeline)
    assert torch.equal(identified(made), expected)
    assert isinstance(ConsisIDPipeline.from_pipe(pipe), PortedPipeline)
    pipe.save_pretrained(tmp_path)
    loaded = ConsisIDTransformer3DModel.from_pretrained(tmp_path / "transformer")
    assert torch.equal(loaded.proj_out.weight, runtime.to_torch(pipe.transformer.proj_out.weight))


@pytest.mark.usefixtures("torchax_off")
def test_a_lora_of_an_unknown_network_is_loaded_merged_and_taken_out(tmp_path):
    small_pipelines.save_lora(consisid(), tmp_path)
    stock, pipe = consisid(), port(consisid())
    before = identified(pipe)
    for each in (stock, pipe):
        each.load_lora_weights(tmp_path)
    expected = identified(stock)
    assert largest_error(expected, before) > 1e-3
    assert largest_error(identified(pipe), expected) < TOLERANCE
    pipe.fuse_lora()
    assert largest_error(identified(pipe), expected) < TOLERANCE
    pipe.unfuse_lora()
    pipe.unload_lora_weights()
    assert largest_error(identified(pipe), before) < TOLERANCE


class Faster(diffusers.CogVideoXPipeline):
    """A subclass that adds arguments to methods which `port` wraps."""

    def _prepare_rotary_positional_embeddings(self, height, width, num_frames, device, fps=8):
        table = super()._prepare_rotary_positional_embeddings(height, width, num_frames, device)
        return tuple(each * (fps / 8) for each in table)

    def decode_latents(self, latents, brightness=1.0):
        return super().decode_latents(latents) * brightness

    def __call__(self, *args, fps, **kwargs):
        made = self._prepare_rotary_positional_embeddings
        self._prepare_rotary_positional_embeddings = functools.partial(made, fps=fps)
        try:
            return super().__call__(*args, **kwargs)
        finally:
            del self._prepare_rotary_positional_embeddings


@pytest.mark.usefixtures("torchax_off")
def test_a_subclass_may_add_arguments_to_a_pipelines_methods():
    stock, pipe = (Faster(**small_pipelines.one_layer().components) for _ in range(2))
    port(pipe)
    results = [each(**small_pipelines.inputs("text"), fps=12).frames for each in (stock, pipe)]
    assert largest_error(*reversed(results)) < TOLERANCE
    latents = torch.randn(1, 3, 16, 4, 8, generator=torch.Generator().manual_seed(0))
    expected = stock.decode_latents(latents, brightness=2.0)
    result = pipe.decode_latents(runtime.to_jax(latents), brightness=2.0)
    assert largest_error(result, expected) < TOLERANCE


@pytest.mark.usefixtures("torchax_off")
def test_prompts_on_the_host_are_moved_beside_those_on_jax():
    stock, pipe = small_pipelines.one_layer(), port(small_pipelines.one_layer())
    prompt, negative = stock.encode_prompt("a cat", "", max_sequence_length=16)
    given = small_pipelines.inputs("text", prompt=None)
    expected = stock(**given, prompt_embeds=prompt, negative_prompt_embeds=negative).frames
    for mixed in ((prompt, negative), (runtime.to_jax(prompt), negative), (prompt, runtime.to_jax(negative))):
        given = small_pipelines.inputs("text", prompt=None)
        frames = pipe(**given, prompt_embeds=mixed[0], negative_prompt_embeds=mixed[1]).frames
        assert largest_error(frames, expected) < TOLERANCE


def test_compiled_models_are_unwrapped_at_the_port_and_after_it():
    pipe = small_pipelines.one_layer()
    pipe.vae, pipe.transformer = torch.compile(pipe.vae), torch.compile(pipe.transformer)
    port(pipe)
    expected = pipe(**small_pipelines.inputs("text")).frames
    assert type(pipe.transformer) is networks.CogVideoXTransformer3DModel
    pipe.transformer = torch.compile(pipe.transformer)
    assert torch.equal(pipe(**small_pipelines.inputs("text")).frames, expected)
    assert type(pipe.transformer) is networks.CogVideoXTransformer3DModel


def test_a_scheduler_is_ported_alone():
    scheduler = small_pipelines.scheduler()
    assert port(scheduler) is scheduler
    scheduler.set_timesteps(4, device="jax")
    assert not runtime.on_jax(scheduler.alphas_cumprod)


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
    assert caplog.records[-1].getMessage().startswith("extra: Linear stays on the host, since JAX has no ")


@pytest.mark.parametrize("parallel", ["context", "tensor"])
def test_a_split_of_tokens_or_channels_is_refused_for_an_unknown_network(parallel):
    with pytest.raises(ValueError, match=f"parallel='{parallel}' for a Scaled, whose tokens and channels"):
        network(Scaled, mesh=make_mesh(2, 4), parallel=parallel)


def test_a_subclass_that_computes_the_same_is_a_known_network():
    model = small_pipelines.transformer("5b", num_layers=1)
    model.__class__ = type("Same", (CogVideoXTransformer3DModel,), {"extra": lambda self: 3})
    ported = port(small_pipelines.build(transformer=model)).transformer
    assert isinstance(ported, networks.CogVideoXTransformer3DModel)
    assert ported.extra() == 3
