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


def check_decoded(got, z, stock):
    check(got, reference.decoded(stock, z), reference.decoded(copy.deepcopy(stock).bfloat16(), z.bfloat16()))


def counted(traced):
    """Return the numbers of traced convolutions and upsamplers, each first frame by itself."""
    return [traced.count(name) for name in ("norm_conv3d", "upsampled")]


HOOKED = {"up_blocks.2.resnets.0.norm1": 5, "conv_act": 3, "conv_out": 3}
"""Number of kernels traced beside a hook on one of these; without one it is four."""


@pytest.mark.parametrize("module", HOOKED)
@pytest.mark.slow
def test_a_hook_sees_what_its_layer_gives(module, stock):
    vae = build("torchax", stock)
    seen = []
    vae.decoder.get_submodule(module).register_forward_hook(lambda *_: seen.append(1))
    z = reference.latents(2, height=2, width=6)
    with reference.interpreted_kernels(**LARGE) as traced:
        got = vae.decode(runtime.to_jax(z.bfloat16())).sample
    check_decoded(got, z, stock)
    assert len(seen) == 1
    assert sum(counted(traced)) == HOOKED[module]


@pytest.fixture(scope="module")
def traced():
    """Return the kernels that were traced."""
    with reference.interpreted_kernels(**LARGE, on_mesh=True) as found:
        yield found


@pytest.fixture(scope="module")
def vae(request, stock, traced):
    """Return a build of the VAE, "torchax" or "flax", on one device or "on a mesh"."""
    traced.clear()
    vae = build(request.param.split()[0], stock)
    if request.param.endswith("on a mesh"):
        vae.place_on(make_mesh(1, 4, devices=jax.devices()[:4]))
    with reference.traced_anew():  # what one build has traced the other would take
        yield vae


# A first chunk of 1, 2 or 3 latent frames, or 1 or 8 to 15 frames, is a program of its own, and so is a later
# chunk: 1, 4 and 13 latent frames have all of them. Flax, and both on a mesh, have a first and a later one.
OTHER_LENGTHS = {2, 3, *range(5, 13)}
DECODED = {"torchax": range(1, 14), "flax": (1, 13)}
ENCODED = {"torchax": (1, 9, 16), "flax": (13,), "torchax on a mesh": (10,), "flax on a mesh": (16,)}


def cases(lengths):
    """Return the parameters "vae" and "frames" of a test."""
    pairs = [
        pytest.param(
            build, frames, marks=[pytest.mark.product] * (lengths is DECODED and frames in OTHER_LENGTHS)
        )
        for build, numbers in lengths.items()
        for frames in numbers
    ]
    return pytest.mark.parametrize(("vae", "frames"), pairs, indirect=["vae"])


@cases(DECODED)
@pytest.mark.slow
def test_every_length_decodes(frames, vae, stock, traced):
    z = reference.latents(frames, height=2, width=6)
    check_decoded(vae.decode(runtime.to_jax(z.bfloat16())).sample, z, stock)
    assert all(counted(traced))


@cases(ENCODED)
@pytest.mark.slow
def test_every_kind_of_length_encodes(frames, vae, stock, traced):
    # A still of 8 x 24 has too few latents for two errors to compare: 1.13 times, less when larger.
    larger = 3 if frames == 1 else 1
    x = reference.video(frames, height=8 * larger, width=24 * larger)
    traced.clear()
    got = vae.encode(runtime.to_jax(x.bfloat16())).latent_dist.parameters
    check(got, reference.encoded(stock, x), reference.encoded(copy.deepcopy(stock).bfloat16(), x.bfloat16()))
    convolutions, upsamplers = counted(traced)
    assert convolutions
    assert not upsamplers


@pytest.mark.parametrize("vae", ["torchax on a mesh"], indirect=True)
@pytest.mark.slow
def test_a_stream_of_a_batch(vae, stock):
    z = reference.latents(4, batch=2, height=2, width=6)
    pieces = list(vae.decode_stream(z.bfloat16()))
    assert len(pieces) == 2
    check_decoded(torch.cat(pieces, dim=2), z, stock)


@pytest.mark.parametrize("vae", ["torchax", "flax"], indirect=True)
@pytest.mark.slow
def test_tiles(vae, stock):
    z = reference.latents(2, height=3, width=6)  # tiles of 2 and of 1 rows: two programs
    options = {"tile_sample_min_height": 16, "tile_sample_min_width": 24}
    options |= {"tile_overlap_factor_height": 0.5, "tile_overlap_factor_width": 0.0}
    in_tiles = copy.deepcopy(stock)
    for each in (vae, in_tiles):
        each.enable_tiling(**options)
    try:
        check_decoded(vae.decode(runtime.to_jax(z.bfloat16())).sample, z, in_tiles)
    finally:
        vae.disable_tiling()
