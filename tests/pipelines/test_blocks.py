"""A step of the transformer on one sequence, however it is split, is the step of stock diffusers."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import PartitionSpec as P

from benchmarks.plan import hlo, networks
from cogvideox_torchax import make_mesh, port, runtime
from cogvideox_torchax.pipelines import layers, port as porting, transformer
from cogvideox_torchax.pipelines.sequence import Sequence, SequencePlacement
from cogvideox_torchax.pipelines.sharding import (
    CONTEXT,
    TENSOR,
    Parallelism,
    choose_parallelism,
    weight_spec,
)
from cogvideox_torchax.runtime import programs
from cogvideox_torchax.vae.tolerances import BFLOAT16_RMS_RATIO, relative_error, rms_error
from tests import small_pipelines
from tests.reference import beside, compiled_plan

TOLERANCE = 1e-5
TEXT, FRAMES, HEIGHT, WIDTH = 7, 4, 4, 8
"""Sizes of a step; the text has fewer tokens than a device, and ends inside its shard."""


SPLITS = {
    "one device": (None, None, None),
    "1x8 context": ((1, 8), CONTEXT, None),
    "2x4 context": ((2, 4), CONTEXT, None),
    "2x4 context, weights gathered": ((2, 4), CONTEXT, 1.0),
    "1x8 tensor": ((1, 8), TENSOR, None),
    "2x4 tensor": ((2, 4), TENSOR, None),
}


def given(model, videos=2):
    """Return a step's inputs."""
    draw, config = torch.Generator().manual_seed(1), model.config
    latents = torch.randn(videos, FRAMES, config.in_channels, HEIGHT, WIDTH, generator=draw)
    angles = torch.rand(FRAMES // (config.patch_size_t or 1) * HEIGHT * WIDTH // 4, 8, generator=draw) * 6
    tables = tuple(function(angles).repeat_interleave(2, 1) for function in (torch.cos, torch.sin))
    return {
        "hidden_states": latents.to(model.dtype),
        "encoder_hidden_states": torch.randn(videos, TEXT, 32, generator=draw).to(model.dtype),
        "timestep": torch.full((videos,), 499),
        "image_rotary_emb": tables if config.use_rotary_positional_embeddings else None,
    }


def step(model, videos=2, **changed):
    """Run a step of a model, stock or ported, where its weights are; return a plain tensor."""
    tensors = jax.tree.map(functools.partial(beside, model), given(model, videos))
    return runtime.to_torch(model(**tensors | changed, return_dict=False)[0])


def stock(version="5b", **overrides):
    return small_pipelines.transformer(
        version,
        **{"num_layers": 2, "max_text_seq_length": TEXT, "sample_frames": 2 * FRAMES - 1, **overrides},
    )


def ported(version="5b", split="one device", dtype=torch.float32, *, fused=False, **overrides):
    model = stock(version, **overrides).to(dtype)
    if fused:
        model.fuse_qkv_projections()
    porting.port_network(model)
    mesh, *how = SPLITS[split]
    if mesh is not None:
        model.place_on(make_mesh(*mesh), *how)
    model.place()
    return model


shared = functools.cache(ported)
"""A model that a test does not change."""


@functools.cache
def reference(version="5b", videos=2, **overrides):
    return step(stock(version, **overrides), videos)


@pytest.mark.parametrize(
    ("version", "split"),
    [
        *(("5b", split) for split in SPLITS),
        *(
            (version, split)
            for version in ("2b", "1.5")
            for split in ("one device", "2x4 context", "2x4 tensor")
        ),
    ],
)
@pytest.mark.slow_cases("1.5-*", "2b-2x4*")
def test_a_step_is_that_of_stock_diffusers(version, split):
    model = shared(version, split)
    assert transformer.TransformerStep(model).joined
    assert relative_error(step(model), reference(version)) < TOLERANCE


@pytest.mark.parametrize(("split", "axes"), [("2x4 context", ("dp", "tp")), ("2x4 tensor", ())])
def test_one_video_is_split_over_dp_too_or_a_line_says_once_what_to_do(split, axes, caplog):
    model = ported("5b", split, num_layers=1)
    assert model.placement.token_axes(1) == axes
    for _ in range(2):
        assert relative_error(step(model, 1), reference(videos=1, num_layers=1)) < TOLERANCE
    words = "do the same work, as they share a batch of 1; without guidance pass mesh=make_mesh(dp=1, tp=8)"
    assert caplog.text.count(words) == (0 if axes else 1)


@pytest.mark.parametrize("split", ["one device", "2x4 context", "2x4 tensor"])
@pytest.mark.slow_cases("2x4 tensor")
def test_sixteen_bits_are_as_close_as_pytorchs_own(split):
    models = ported(split=split, dtype=torch.bfloat16), stock().to(torch.bfloat16)
    error, of_pytorch = (rms_error(step(model), reference()) for model in models)
    assert error < BFLOAT16_RMS_RATIO * of_pytorch


@pytest.mark.parametrize("fused_before", [True, False])
@pytest.mark.parametrize("split", ["one device", "2x4 context", "2x4 tensor"])
@pytest.mark.slow_cases(but=["one device-True", "2x4 tensor-False"])
def test_fused_projections_change_nothing(split, fused_before):
    model = ported(split=split, fused=fused_before)
    if not fused_before:
        model.fuse_qkv_projections()
    attention = model.transformer_blocks[0].attn1
    assert runtime.on_jax(attention.to_qkv.weight)
    assert "Fused" in type(attention.processor).__name__
    assert transformer.TransformerStep(model).joined
    assert relative_error(step(model), reference()) < TOLERANCE


def test_what_was_fused_and_is_no_more_runs_on_its_own_weights():
    models = ported(), stock()
    for model in models:
        model.fuse_qkv_projections()
        model.unfuse_qkv_projections()
        assert "Fused" not in type(model.transformer_blocks[0].attn1.processor).__name__
        model.transformer_blocks[0].attn1.to_q.weight.mul_(2.0)
    got, want = map(step, models)
    assert relative_error(want, reference()) > 1e-3
    assert relative_error(got, want) < TOLERANCE


@pytest.mark.parametrize("split", ["one device", "2x4 context"])
def test_one_timestep_is_that_of_all_videos(split):
    got = step(shared("5b", split), timestep=runtime.to_jax(torch.tensor([499])))
    assert relative_error(got, reference()) < TOLERANCE


@pytest.mark.parametrize("split", ["2x4 context, weights gathered", "1x8 tensor"])
def test_weights_moved_or_loaded_lie_where_the_mesh_has_them(split):
    def places():
        return {name: runtime.array_of(weight).sharding for name, weight in model.named_parameters()}

    model = ported(split=split)
    wanted, program, before = places(), model.program, step(model)
    model.to("cpu").proj_out.bias.mul_(2)
    model.to("jax")
    assert places() == wanted
    assert relative_error(step(model), before) > 1e-3
    model.load_state_dict({name: runtime.to_jax(value) for name, value in stock().state_dict().items()})
    assert places() != wanted
    assert relative_error(step(model), reference()) < TOLERANCE
    assert (places(), model.program, program.compilations) == (wanted, program, 1)


def test_weights_that_are_traced_stay_where_they_are():
    encoder = port(small_pipelines.one_layer(), mesh=make_mesh(1, 2)).text_encoder
    ids = runtime.to_jax(torch.zeros(1, 4, dtype=torch.int32))

    def hidden(weights):
        traced = {name: runtime.tensor_of(weight) for name, weight in weights.items()}
        return runtime.array_of(torch.func.functional_call(encoder, traced, (ids,)).last_hidden_state)

    weights = {name: runtime.array_of(weight) for name, weight in encoder.named_parameters()}
    assert jax.eval_shape(hidden, weights).shape == (1, 4, 32)


@pytest.mark.parametrize(("joined", "positions"), [(True, -2), (False, 2)])
def test_rotary_tables_of_another_size_are_refused(joined, positions):
    model, patches = ported(), FRAMES * HEIGHT * WIDTH // 4
    if not joined:
        model.set_attn_processor(layers.AttnProcessor())
        model.transformer_blocks[0].register_forward_hook(lambda *_: None)
    table = runtime.to_jax(torch.ones(patches + positions, 16))
    with pytest.raises(ValueError, match=f"tables of {patches + positions} positions for {patches} patches"):
        step(model, image_rotary_emb=(table, table))


@pytest.fixture(scope="module")
def tensors():
    return networks.step_tensors(
        shared("5b", "one device"), batch=2, frames=FRAMES, height=HEIGHT, width=WIDTH, text=TEXT
    )


def test_by_tokens_four_exchanges_a_layer_are_all_that_travels(tensors, tmp_path):
    with runtime.profiling(tmp_path):  # which names each instruction after its layer
        found = compiled_plan(shared("5b", "2x4 context").program, tensors)
    own = -(-(TEXT + FRAMES * HEIGHT * WIDTH // 4) // 4) * 128 * 4
    in_blocks = [each for each in hlo.instructions(found.text) if "transformer_blocks" in each.scope]
    ((kind, exchanged),) = hlo.collectives(in_blocks).items()
    assert (kind, exchanged.count, exchanged.bytes) == ("all-to-all", 2 * 4, 2 * 4 * own)  # of two blocks
    assert "all-reduce" not in found.collectives


def test_by_channels_halves_of_guidance_go_over_dp_and_sums_and_a_few_vectors_travel(tensors):
    found = compiled_plan(shared("5b", "2x4 tensor").program, tensors)
    tokens, channels, blocks = TEXT + FRAMES * HEIGHT * WIDTH // 4, 128, 2
    # Of one of the two videos: after attention and the feed-forward its tokens, six vectors before each.
    summed = blocks * 2 * 4 * (tokens * channels + 6 * channels)
    assert set(found.collectives) == {"all-reduce", "all-gather"}
    assert found.collectives["all-reduce"].bytes == summed
    assert found.collectives["all-gather"].largest == 2 * FRAMES * 16 * HEIGHT * WIDTH * 4


def test_weights_that_do_not_fit_are_gathered_in_their_layer(tensors):
    models = shared("5b", "2x4 context, weights gathered"), shared("5b", "2x4 context")
    weight = runtime.array_of(models[0].transformer_blocks[0].ff.net[0].proj.weight)
    assert weight.sharding.shard_shape(weight.shape) == (128, 128)
    found, whole = (compiled_plan(model.program, tensors) for model in models)
    assert found.argument_bytes < 0.5 * whole.argument_bytes
    matrices = sum(p.numel() * 4 for p in stock().transformer_blocks.parameters() if p.ndim == 2)
    assert found.collectives["all-gather"].bytes >= matrices


CHOICES = {
    "tp divides the heads": ({}, "context over tp, weights whole (tp=4 divides 48 heads)"),
    "it does not": ({"heads": 30}, "tensor over tp (tp=4 does not divide 30 heads)"),
    "weights fit": ({"memory": 23e9}, "context over tp, weights whole (tp=4 divides 48 heads)"),
    "weights do not": ({"memory": 16e9}, "context over tp, weights gathered (tp=4 divides 48 heads)"),
    "requested": ({"requested": TENSOR}, "tensor over tp (requested)"),
}


@pytest.mark.parametrize(("facts", "words"), CHOICES.values(), ids=CHOICES)
def test_one_declaration_says_what_is_split(facts, words):
    facts = {"heads": 48, "weight_bytes": 11_100_000_000, "memory": None, **facts}
    assert str(choose_parallelism(make_mesh(2, 4), **facts)) == words


def test_a_split_that_cannot_be_is_refused():
    model, mesh = ported(), make_mesh(2, 4)
    with pytest.raises(ValueError, match=r"parallel='rows': it takes 'context', 'tensor' or None"):
        model.place_on(mesh, "rows")
    assert model.mesh is None
    with pytest.raises(
        ValueError, match=r"tp=4: it does not divide the 30 heads; choose tp among \[1, 2, 3, 5"
    ):
        choose_parallelism(mesh, heads=30, weight_bytes=0, memory=None, requested=CONTEXT)


# What a mesh splits, and what it cannot


@pytest.mark.parametrize(("heads", "own"), [(8, (2, 16, 24 // 4, 2)), (6, (2, 16 // 4, 24, 6))])
def test_by_channels_queries_are_prepared_by_heads_or_where_tp_does_not_divide_them_by_tokens(heads, own):
    seen = []

    def qk_norm_rope(x_NSC, *, heads):
        seen.append((*x_NSC.shape, heads))
        return jnp.zeros((x_NSC.shape[0], heads, 1, x_NSC.shape[1]))

    placement = SequencePlacement(make_mesh(1, 4, devices=jax.devices()[:4]), Parallelism(TENSOR), heads)
    sequence = Sequence.from_placement(placement, videos=2, text=4, tokens=15)  # padded to 16
    result = sequence.shard_heads(qk_norm_rope, heads)(jnp.zeros((2, sequence.length, 24)))
    assert (result.shape, seen) == ((2, heads, 1, 16), [own])


@pytest.mark.parametrize(("tokens", "length"), [(136, 136), (226 + 17_550, 17_792)])
def test_a_sequence_is_padded_to_whole_tiles_unless_that_would_make_it_half_longer(tokens, length):
    assert Sequence.from_placement(None, videos=2, text=64, tokens=tokens).length == length


def test_on_tpus_a_program_is_compiled_to_compute_while_it_exchanges(monkeypatch):
    for platform, wanted in (("tpu", "true"), ("cpu", None)):
        mesh = SimpleNamespace(devices=np.array([[SimpleNamespace(platform=platform)]]))
        assert SequencePlacement(mesh).compiler_options().get("xla_tpu_enable_async_all_to_all") == wanted

    class Unchanged(torch.nn.Module):
        def forward(self, inputs, cache):
            return inputs, cache

    monkeypatch.setattr(programs.Place, "compiler_options", lambda self: {"no_such_option": "true"})
    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_option"):
        programs.Program(Unchanged(), programs.Place()).run({}, jnp.zeros(1))


WEIGHTS = {
    "transformer_blocks.3.attn1.to_q.weight": P("tp"),
    "transformer_blocks.3.attn1.to_k.base_layer.bias": P("tp"),
    "transformer_blocks.3.ff.net.0.proj.weight": P("tp"),
    "transformer_blocks.3.attn1.to_out.0.weight": P(None, "tp"),
    "transformer_blocks.3.attn1.to_out.0.bias": P(),
    "transformer_blocks.3.ff.net.2.weight": P(None, "tp"),
    "transformer_blocks.3.norm1.linear.weight": P(None, "tp"),
    "transformer_blocks.3.attn1.norm_q.weight": P(),
    "norm_out.linear.weight": P(),
    "encoder.block.0.layer.1.DenseReluDense.wi_1.weight": P("tp"),
    "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight": P(None, "tp"),
    "shared.weight": P(None, "tp"),
}


@pytest.mark.parametrize(("name", "spec"), WEIGHTS.items())
def test_a_weight_is_split_by_its_name(name, spec):
    assert weight_spec(name) == spec


def test_a_mesh_that_does_not_divide_the_weights_is_refused_and_nothing_moves():
    odd = {"num_attention_heads": 7, "attention_head_dim": 12, "num_layers": 1}
    pipe = small_pipelines.build(transformer=small_pipelines.transformer("5b", **odd))
    before = [type(part) for part in pipe.components.values()]
    with pytest.raises(
        ValueError, match=r"tp=8.* the 84 channels of .*to_q.*choose tp among \[1, 2, 3, 4, 6"
    ):
        port(pipe, mesh=make_mesh(1, 8))
    assert [type(part) for part in pipe.components.values()] == before
    parts = pipe.transformer, pipe.text_encoder, pipe.vae
    assert not any(runtime.on_jax(weight) for part in parts for weight in part.parameters())


def test_porting_again_moves_all_weights_to_another_mesh_and_keeps_a_split_on_the_same_one():
    pipe = small_pipelines.one_layer()
    for mesh, parallel, share in (((1, 2), "tensor", 2), ((1, 2), "context", 1), ((2, 4), "tensor", 4)):
        port(pipe, mesh=make_mesh(*mesh), parallel=parallel)
        array = runtime.array_of(pipe.transformer.transformer_blocks[0].attn1.to_q.weight)
        assert {shard.data.size for shard in array.addressable_shards} == {array.size // share}
        assert pipe.transformer.mesh == pipe.text_encoder.mesh == pipe.vae.mesh == make_mesh(*mesh)
    for network in (pipe.transformer, pipe.text_encoder):
        for name, weight in network.named_parameters():
            array, spec = runtime.array_of(weight), tuple(weight_spec(name))
            found = tuple(array.sharding.spec), array.size // array.addressable_shards[0].data.size
            assert found == (spec, 4 if "tp" in spec else 1), name
    port(pipe, mesh=make_mesh(2, 4))
    program = pipe.transformer.program  # `port` drops programs, and `place_on` for the same mesh keeps them
    pipe.transformer.place_on(make_mesh(2, 4))
    assert (pipe.transformer.parallelism.kind, pipe.transformer.program) == (TENSOR, program)
