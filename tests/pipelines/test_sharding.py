"""Sharding of a pipeline on a mesh: its tokens and weights, what is moved for them, and what cannot be."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import PartitionSpec as P

from cogvideox_torchax import make_mesh, port, runtime
from cogvideox_torchax.pipelines.sequence import Sequence, SequencePlacement
from cogvideox_torchax.pipelines.sharding import TENSOR, Parallelism, weight_spec
from cogvideox_torchax.runtime.programs import Place, Program
from tests import small_pipelines


@pytest.mark.parametrize(("heads", "own"), [(8, (2, 16, 24 // 4, 2)), (6, (2, 16 // 4, 24, 6))])
def test_by_channels_queries_are_prepared_by_heads_or_where_tp_does_not_divide_them_by_tokens(heads, own):
    seen = []

    def qk_norm_rope(x_NSC, *, heads):
        seen.append((*x_NSC.shape, heads))
        return jnp.zeros((x_NSC.shape[0], heads, 1, x_NSC.shape[1]))

    placement = SequencePlacement(make_mesh(1, 4, devices=jax.devices()[:4]), Parallelism(TENSOR), heads)
    sequence = Sequence.from_placement(placement, videos=2, text=4, tokens=16)
    assert sequence.shard_heads(qk_norm_rope, heads)(jnp.zeros((2, 16, 24))).shape == (2, heads, 1, 16)
    assert seen == [own]


@pytest.mark.parametrize(("tokens", "length"), [(136, 136), (226 + 17_550, 17_792)])
def test_a_sequence_is_padded_to_whole_tiles_unless_that_would_make_it_half_longer(tokens, length):
    assert Sequence.from_placement(None, videos=2, text=64, tokens=tokens).length == length


def test_on_tpus_a_program_is_compiled_to_compute_while_it_exchanges(monkeypatch):
    for platform in ("tpu", "cpu"):
        mesh = SimpleNamespace(devices=np.array([[SimpleNamespace(platform=platform)]]))
        asked = SequencePlacement(mesh).compiler_options().get("xla_tpu_enable_async_all_to_all")
        assert asked == ("true" if platform == "tpu" else None)

    class Unchanged(torch.nn.Module):
        def forward(self, inputs, cache):
            return inputs, cache

    monkeypatch.setattr(Place, "compiler_options", lambda self: {"no_such_option": "true"})
    program = Program(Unchanged(), Place())
    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_option"):
        program.run({}, jnp.zeros(1))


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
    for part in (pipe.transformer, pipe.text_encoder, pipe.vae):
        assert not any(map(runtime.on_jax, part.parameters()))


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
            assert tuple(array.sharding.spec) == spec, name
            assert array.addressable_shards[0].data.size == array.size // (4 if "tp" in spec else 1), name
    port(pipe, mesh=make_mesh(2, 4))
    program = pipe.transformer.program  # `port` drops programs, and `place_on` for the same mesh keeps them
    pipe.transformer.place_on(make_mesh(2, 4))
    assert pipe.transformer.parallelism.kind == TENSOR
    assert pipe.transformer.program is program
