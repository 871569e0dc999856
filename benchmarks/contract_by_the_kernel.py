"""The contract in bfloat16 with the last level's frames through the kernel that a TPU has for large ones:
lengths, a batch, a stream, tiles, a mesh, both builds. More than the suite has time for.

    python -m pytest -n 0 -p tests.conftest benchmarks/contract_by_the_kernel.py
"""

import copy

import jax
import pytest
import torch

from cogvideox_torchax import make_mesh, runtime
from cogvideox_torchax.flax import FlaxVAEForPipelines
from cogvideox_torchax.vae.tolerances import BFLOAT16_RMS_RATIO, rms_error
from tests import reference

HEIGHT, WIDTH = 2, 6
LENGTHS = range(1, 14)


@pytest.fixture(scope="module")
def stock():
    return reference.small_vae(**reference.THREE_LEVELS)


@pytest.fixture(scope="module")
def traced():
    """The activations that the kernel was traced for."""
    with reference.interpreted_kernels(lanes=8, large=4 * HEIGHT * 4 * WIDTH, on_mesh=True) as found:
        yield found


@pytest.fixture(scope="module", params=["torchax", "flax", "torchax on a mesh", "flax on a mesh"])
def vae(request, stock, traced):
    jax.clear_caches()  # what one build has traced the other would take
    traced.clear()
    half = copy.deepcopy(stock).bfloat16()
    is_flax = request.param.startswith("flax")
    vae = FlaxVAEForPipelines.from_diffusers(half) if is_flax else reference.on_jax(half)
    if request.param.endswith("on a mesh"):
        vae.place_on(make_mesh(1, 4, devices=jax.devices()[:4]))
    return vae


def check(got, z, stock):
    """Whether frames are as near to those in float32 as PyTorch's in bfloat16."""
    want, half = reference.decoded(stock, z), reference.decoded(copy.deepcopy(stock).bfloat16(), z.bfloat16())
    assert got.shape == want.shape
    ratio = rms_error(runtime.to_torch(got).float(), want) / rms_error(half.float(), want)
    assert ratio <= BFLOAT16_RMS_RATIO


def latents(frames, **size):
    return reference.latents(frames, **{"height": HEIGHT, "width": WIDTH} | size)


@pytest.mark.parametrize("frames", LENGTHS)
def test_every_length_decodes(frames, vae, stock, traced):
    z = latents(frames)
    check(vae.decode(runtime.to_jax(z.bfloat16())).sample, z, stock)
    assert traced


@pytest.mark.parametrize(("frames", "larger"), [(1, 3), (9, 1), (10, 1), (13, 1), (16, 1)])
def test_encoding(frames, larger, vae, stock):
    # A still of 8 x 24 has too few latents for two errors to compare: 1.13 times, less when larger.
    x = reference.video(frames, height=4 * HEIGHT * larger, width=4 * WIDTH * larger)
    want = reference.encoded(stock, x)
    half = reference.encoded(copy.deepcopy(stock).bfloat16(), x.bfloat16())
    got = vae.encode(runtime.to_jax(x.bfloat16())).latent_dist.parameters
    ratio = rms_error(runtime.to_torch(got).float(), want) / rms_error(half.float(), want)
    assert ratio <= BFLOAT16_RMS_RATIO


def test_a_batch(vae, stock):
    z = latents(3, batch=2)
    check(vae.decode(runtime.to_jax(z.bfloat16())).sample, z, stock)


def test_a_stream(vae, stock):
    z = latents(5)
    pieces = list(vae.decode_stream(z.bfloat16()))
    assert len(pieces) == 2
    check(torch.cat(pieces, dim=2), z, stock)


def test_tiles(vae, stock):
    z = latents(3, height=6)
    options = {"tile_sample_min_height": 4 * 4, "tile_sample_min_width": 4 * WIDTH}
    options |= {"tile_overlap_factor_height": 0.5, "tile_overlap_factor_width": 0.5}
    in_tiles = copy.deepcopy(stock)
    for each in (vae, in_tiles):
        each.enable_tiling(**options)
    try:
        check(vae.decode(runtime.to_jax(z.bfloat16())).sample, z, in_tiles)
    finally:
        vae.disable_tiling()
