"""Both builds in bfloat16 with the last level's frames through the kernels that a TPU has for large ones."""

import copy

import jax
import pytest
import torch

from cogvideox_torchax import make_mesh, runtime
from cogvideox_torchax.vae.tolerances import BFLOAT16_RMS_RATIO, rms_error
from tests import reference

LARGE = {"lanes": 8, "large": 8 * 24}


def build(name, stock):
    return reference.built(name, copy.deepcopy(stock).bfloat16())


def check(got, want, in_torch):
    assert got.shape == want.shape
    ratio = rms_error(runtime.to_torch(got).float(), want) / rms_error(in_torch.float(), want)
    assert ratio <= BFLOAT16_RMS_RATIO


def check_decoded(got, z, small_vae):
    check(
        got,
        reference.decoded(small_vae, z),
        reference.decoded(copy.deepcopy(small_vae).bfloat16(), z.bfloat16()),
    )


def counted(traced):
    """Return the numbers of traced convolutions and upsamplers, each first frame by itself."""
    return [traced.count(name) for name in ("norm_conv3d", "upsampled")]


HOOKED = {"up_blocks.2.resnets.0.norm1": 5, "conv_act": 3, "conv_out": 3}
"""Number of kernels traced beside a hook on one of these; without one it is four."""


@pytest.mark.parametrize("module", HOOKED)
@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.product_cases(but=["1-*norm1"])
@pytest.mark.slow
def test_a_hook_sees_what_its_layer_gives(module, devices, small_vae):
    vae = build("torchax", small_vae)
    if devices > 1:
        vae.place_on(make_mesh(1, devices, devices=jax.devices()[:devices]))
    seen = []
    vae.decoder.get_submodule(module).register_forward_hook(lambda *_: seen.append(1))
    z = reference.latents(1, height=2, width=6)
    with reference.interpreted_kernels(**LARGE, on_mesh=devices > 1) as traced:
        got = vae.decode(runtime.to_jax(z.bfloat16())).sample
    check_decoded(got, z, small_vae)
    assert len(seen) == 1
    assert sum(counted(traced)) == HOOKED[module]


@pytest.fixture(scope="module")
def traced():
    """Return the kernels that were traced."""
    with reference.interpreted_kernels(**LARGE, on_mesh=True) as found:
        yield found


BUILDS = ["torchax", "flax", "torchax on a mesh", "flax on a mesh"]
each_build = pytest.mark.parametrize("vae", BUILDS, indirect=True)


@pytest.fixture(scope="module")
def vae(request, small_vae, traced):
    traced.clear()
    vae = build(request.param.split()[0], small_vae)
    if request.param.endswith("on a mesh"):
        vae.place_on(make_mesh(1, 4, devices=jax.devices()[:4]))
    with reference.traced_anew():  # what one build has traced the other would take
        yield vae


# A first chunk of 1, 2 or 3 latent frames, or 1 or 8 to 15 frames, is a program of its own, and so is a later
# chunk: 1, 4 and 5 latent frames have all of them. Most lengths and builds are left out of `make test-all`.
@pytest.mark.parametrize("frames", range(1, 14))
@each_build
@pytest.mark.product_cases(but=["torchax-5", "flax-1", "flax on a mesh-1"])
@pytest.mark.slow
def test_every_length_decodes(frames, vae, small_vae, traced):
    z = reference.latents(frames, height=2, width=6)
    check_decoded(vae.decode(runtime.to_jax(z.bfloat16())).sample, z, small_vae)
    assert all(counted(traced))


@pytest.mark.parametrize(("frames", "larger"), [(1, 3), (9, 1), (10, 1), (13, 1), (16, 1)])
@each_build
@pytest.mark.product_cases(but=["torchax-1-3", "flax-16-1", "torchax on a mesh-10-1"])
@pytest.mark.slow
def test_every_kind_of_length_encodes(frames, larger, vae, small_vae, traced):
    # A still of 8 x 24 has too few latents for two errors to compare: 1.13 times, less when larger.
    x = reference.video(frames, height=8 * larger, width=24 * larger)
    traced.clear()
    got = vae.encode(runtime.to_jax(x.bfloat16())).latent_dist.parameters
    check(
        got,
        reference.encoded(small_vae, x),
        reference.encoded(copy.deepcopy(small_vae).bfloat16(), x.bfloat16()),
    )
    assert [bool(number) for number in counted(traced)] == [True, False]


@each_build
@pytest.mark.product
@pytest.mark.slow
def test_a_stream_of_a_batch(vae, small_vae):
    z = reference.latents(5, batch=2, height=2, width=6)
    pieces = list(vae.decode_stream(z.bfloat16()))
    assert len(pieces) == 2
    check_decoded(torch.cat(pieces, dim=2), z, small_vae)


# Tiles of two heights are two programs; with an overlap of columns too there are six shapes.
@pytest.mark.parametrize(("shape", "overlap"), [((2, 3, 6), 0.0), ((3, 6, 6), 0.5)])
@each_build
@pytest.mark.product
@pytest.mark.slow
def test_tiles(shape, overlap, vae, small_vae):
    frames, height, width = shape
    z = reference.latents(frames, height=height, width=width)
    options = {"tile_sample_min_height": 16, "tile_sample_min_width": 24}
    options |= {"tile_overlap_factor_height": 0.5, "tile_overlap_factor_width": overlap}
    with reference.tiled(vae, in_tiles := copy.deepcopy(small_vae), **options):
        check_decoded(vae.decode(runtime.to_jax(z.bfloat16())).sample, z, in_tiles)
