"""Sharding of tokens and weights on a mesh, and exchanges between devices."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import PartitionSpec as P

from cogvideox_torchax import make_mesh
from cogvideox_torchax.pipelines.sequence import Sequence, SequencePlacement
from cogvideox_torchax.pipelines.sharding import CONTEXT, TENSOR, Parallelism, weight_spec
from cogvideox_torchax.runtime.programs import Place, Program

PARTS = 8


@pytest.mark.parametrize("videos", [1, 3])
def test_tokens_come_to_their_heads_and_back(videos):
    placement = SequencePlacement(make_mesh(1, PARTS), Parallelism(CONTEXT), heads=PARTS)
    sequence = Sequence.from_placement(placement, videos=videos, text=5, tokens=16)
    x_NSC = jnp.arange(videos * 16 * 24).reshape(videos, 16, 24)

    def there_and_back(own_NSC):
        x_PNC = own_NSC.reshape(-1, PARTS, 24 // PARTS).swapaxes(0, 1)
        heads_NSC = sequence.to_heads(x_PNC, videos)
        return heads_NSC, sequence.to_tokens(heads_NSC.swapaxes(1, 2)).swapaxes(1, 2)

    tokens, heads = P(None, "tp", None), P(None, None, "tp")
    exchanged = jax.shard_map(
        there_and_back, mesh=placement.mesh, in_specs=tokens, out_specs=(heads, tokens), check_vma=False
    )
    for got in exchanged(x_NSC):
        np.testing.assert_array_equal(got, x_NSC)


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


def test_on_tpus_a_program_is_compiled_to_compute_while_it_exchanges():
    def options(platform):
        mesh = SimpleNamespace(devices=np.array([[SimpleNamespace(platform=platform)]]))
        return SequencePlacement(mesh).compiler_options()

    assert options("tpu") == {"xla_tpu_enable_async_all_to_all": "true"}
    assert options("cpu") == {}

    class Mistaken(Place):
        def compiler_options(self):
            return {"no_such_option": "true"}

    class Unchanged(torch.nn.Module):
        def forward(self, inputs, cache):
            return inputs, cache

    program = Program(Unchanged(), Mistaken())
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
