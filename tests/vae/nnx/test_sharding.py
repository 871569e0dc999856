"""Over a mesh the Flax build is the same function, its arrays split along axis 3 of N T H W C."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from cogvideox_torchax import make_mesh, port
from cogvideox_torchax.flax import FlaxVAEForPipelines
from cogvideox_torchax.vae.directions import DECODE
from cogvideox_torchax.vae.tolerances import FLOAT32_RELATIVE, relative_error
from tests import reference


@pytest.fixture(scope="module")
def stock():
    return reference.small_vae(**reference.THREE_LEVELS)


def on_mesh(stock, dp, tp):
    return port(FlaxVAEForPipelines.from_diffusers(stock), mesh=make_mesh(dp, tp))


@pytest.fixture(scope="module")
def eight(stock):
    """One video over eight devices; shared, so that its programs are compiled once."""
    return on_mesh(stock, 1, 8)


def inputs(frames, batch, width):
    z = reference.latents(frames, batch=batch, height=1, width=width)
    return z, reference.video(4 * frames - 3, batch=batch, height=4, width=4 * width)


def local_share(array):
    """The part of an array that its largest shard holds."""
    return max(shard.data.size for shard in array.addressable_shards) / array.size


@pytest.mark.slow
def test_an_uneven_width_in_chunks_and_streams_changes_no_number(stock, eight):
    z, x = inputs(5, 1, 90)
    want = reference.decoded(stock, z), reference.encoded(stock, x)
    frames = torch.cat(list(eight.decode_stream(z)), 2)
    moments = torch.cat([part.parameters for part in eight.encode_stream(x)], 2)
    for got in ((eight.decode(z).sample, eight.encode(x).latent_dist.parameters), (frames, moments)):
        assert relative_error(got[0], want[0]) < FLOAT32_RELATIVE
        assert relative_error(got[1], want[1]) < FLOAT32_RELATIVE


def test_bytes_over_a_mesh_are_the_frames_that_they_stand_for(stock, eight):
    frames = torch.randint(0, 256, (1, 3, 9, 4, 4 * 45), dtype=torch.uint8)  # padded with what stands for -1
    moments = torch.cat([part.parameters for part in eight.encode_stream(frames)], 2)
    want = reference.encoded(stock, frames / 127.5 - 1)
    assert relative_error(moments, want) < FLOAT32_RELATIVE


@pytest.mark.slow
def test_a_batch_over_both_axes_changes_no_number(stock):
    z, x = inputs(1, 2, 85)
    vae = on_mesh(stock, 2, 4)
    assert relative_error(vae.decode(z).sample, reference.decoded(stock, z)) < FLOAT32_RELATIVE
    want = reference.encoded(stock, x)
    assert relative_error(vae.encode(x).latent_dist.parameters, want) < FLOAT32_RELATIVE


@pytest.mark.slow
def test_tiles_change_no_number_and_blend_in_shards(stock, eight):
    z, x = inputs(1, 1, 90)
    tiled = copy.deepcopy(stock)
    for vae in (tiled, eight, eight.flax_vae):
        vae.enable_tiling(tile_sample_min_height=48, tile_sample_min_width=4 * 60)
    try:
        array = eight.flax_vae.decode(jnp.asarray(z.permute(0, 2, 3, 4, 1).numpy()))
        moments = eight.flax_vae.encode(jnp.asarray(x.permute(0, 2, 3, 4, 1).numpy())).mean
        decoded, encoded = eight.decode(z).sample, eight.encode(x).latent_dist.parameters
    finally:
        eight.disable_tiling()
        eight.flax_vae.disable_tiling()
    want = tiled.decode(z).sample
    assert local_share(array) == local_share(moments) == 1 / 8
    assert reference.largest_error(np.moveaxis(np.asarray(array), -1, 1), want) < FLOAT32_RELATIVE
    assert relative_error(decoded, want) < FLOAT32_RELATIVE
    assert relative_error(encoded, tiled.encode(x).latent_dist.parameters) < FLOAT32_RELATIVE


def test_chunks_caches_and_results_lie_in_shards_and_weights_are_copied(eight):
    for array in jax.tree.leaves(nnx.state(eight.flax_vae, nnx.Param)):
        assert array.sharding.is_fully_replicated
        assert len(array.sharding.device_set) == 8
    run = eight.flax_vae.run(DECODE)
    result = run(jnp.zeros((1, 3, 1, 90, 16)))
    caches = jax.tree.leaves(run._cache)  # H W N T C
    assert {part.shape[1] for part in caches} == {96, 192, 384}
    assert result.shape[3] == 360
    for array, row, column in [(result, 2, 3), *((cache, 0, 1) for cache in caches)]:
        assert local_share(array) == 1 / 8
        for shard in array.addressable_shards:
            assert shard.data.shape[row] == array.shape[row]
            assert shard.data.shape[column] == array.shape[column] // 8


def test_a_mesh_that_make_mesh_did_not_make_is_refused(eight):
    with pytest.raises(ValueError, match="make one with make_mesh"):
        eight.flax_vae.place_on("dp=8")
    assert eight.mesh == make_mesh(1, 8)
