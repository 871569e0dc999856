"""A pipeline's weights over a mesh: what is split, what is moved for it, and what cannot be."""

import pytest

from cogvideox_torchax import make_mesh, port, runtime
from cogvideox_torchax.pipelines import networks
from cogvideox_torchax.plan import report
from tests import small_pipelines
from tests.pipelines.test_pipeline import pipeline


def largest_share(tensor):
    array = runtime.array_of(tensor)
    return max(shard.data.size for shard in array.addressable_shards) / array.size


@pytest.fixture(scope="module")
def spread():
    """Return a ported pipeline over two by four devices, its transformer's weights split by channels."""
    return pipeline(placement="2x4 tensor")


def test_matrices_are_split_kind_and_tied_ones_stay_tied(spread):
    block, layer = spread.transformer.transformer_blocks[0], spread.text_encoder.encoder.block[0].layer
    attention, feed_forward = block.attn1, block.ff.net
    split = [attention.to_q, attention.to_k, attention.to_v, attention.to_out[0], feed_forward[0].proj]
    split += [feed_forward[2], block.norm1.linear, layer[0].SelfAttention.q, layer[0].SelfAttention.o]
    split += [layer[1].DenseReluDense.wi_0, layer[1].DenseReluDense.wo, spread.text_encoder.shared]
    assert [largest_share(module.weight) for module in split] == [1 / 4] * len(split)
    columns, rows = (runtime.array_of(m.weight).sharding.spec for m in (attention.to_q, attention.to_out[0]))
    assert (columns[0], rows[1]) == ("tp", "tp")
    encoder = spread.text_encoder
    assert encoder.shared.weight is encoder.encoder.embed_tokens.weight


@pytest.fixture(scope="module")
def step_report(spread):
    tensors = networks.step_tensors(spread.transformer, batch=2, frames=3, height=4, width=8)
    return report.report_network(spread.transformer, tensors)


def test_the_halves_of_guidance_go_over_dp_and_sums_and_a_few_vectors_travel(step_report):
    rows = {row.layer: row for row in step_report.layers}
    layers = [f"model.transformer_blocks.{i}" for i in range(2)]
    assert {(rows[name].spec, rows[name].shards) for name in layers} == {("P('dp', None, None)", 2)}
    tokens, channels, blocks = 16 + 3 * 4 * 8 // 4, 128, 2
    # Of one of the two videos: after attention and the feed-forward its tokens, six vectors before each.
    summed = blocks * 2 * 4 * (tokens * channels + 6 * channels)
    assert step_report.traffic["all-reduce"]["bytes"] == summed
    assert set(step_report.collectives) == {"all-reduce", "all-gather"}
    result = 2 * 3 * 16 * 4 * 8 * 4
    assert step_report.collectives["all-gather"][1] == result


def test_a_mesh_that_does_not_divide_the_weights_is_refused_and_nothing_moves():
    odd = {"num_attention_heads": 7, "attention_head_dim": 12, "num_layers": 1}
    pipe = small_pipelines.build(transformer=small_pipelines.transformer("5b", **odd))
    before = {name: type(part) for name, part in pipe.components.items()}
    with pytest.raises(
        ValueError, match=r"tp=8.* the 84 channels of .*to_q.*choose tp among \[1, 2, 3, 4, 6"
    ):
        port(pipe, mesh=make_mesh(1, 8))
    assert {name: type(part) for name, part in pipe.components.items()} == before
    parts = pipe.transformer, pipe.text_encoder, pipe.vae
    assert {weight.device.type for part in parts for weight in part.parameters()} == {"cpu"}


def test_porting_again_moves_the_pipeline_to_another_mesh():
    pipe = small_pipelines.build(transformer=small_pipelines.transformer("5b", num_layers=1))
    port(pipe, mesh=make_mesh(1, 2), parallel="tensor")
    weight = pipe.transformer.transformer_blocks[0].attn1.to_q.weight
    assert largest_share(weight) == 1 / 2
    port(pipe, mesh=make_mesh(1, 2), parallel="context")
    assert largest_share(weight) == 1
    port(pipe, mesh=make_mesh(2, 4), parallel="tensor")
    assert largest_share(weight) == 1 / 4
    assert pipe.transformer.mesh == pipe.text_encoder.mesh == pipe.vae.mesh == make_mesh(2, 4)
