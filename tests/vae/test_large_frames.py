"""Both builds in bfloat16 with the last level's frames through the kernels that a TPU has for large ones."""

import contextlib
import copy

import jax
import pytest

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
    check(
        got,
        reference.decoded(stock, z),
        reference.decoded(copy.deepcopy(stock).bfloat16(), z.bfloat16()),
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
each_decoder = pytest.mark.parametrize("decoder", BUILDS, indirect=True)


@contextlib.contextmanager
def ready(name, stock, traced):
    traced.clear()
    vae = build(name.split()[0], stock)
    if name.endswith("on a mesh"):
        vae.place_on(make_mesh(1, 4, devices=jax.devices()[:4]))
    with reference.traced_anew():  # what one build has traced the other would take
        yield vae


@pytest.fixture(scope="module")
def decoder(request, shallow_vae, traced):
    with ready(request.param, shallow_vae, traced) as vae:
        yield vae


@pytest.fixture(scope="module")
def encoder(request, small_vae, traced):
    with ready(request.param, small_vae, traced) as vae:
        yield vae


# A first chunk of 1, 2 or 3 latent frames, or 1 or 8 to 15 frames, is a program of its own, and so is a later
# chunk: 1, 4 and 5 latent frames have all of them. Most lengths and builds are left out of `make test-all`.
@pytest.mark.parametrize("frames", range(1, 14))
@each_decoder
@pytest.mark.product_cases(but=["torchax-5", "flax-1", "flax on a mesh-1"])
@pytest.mark.slow
def test_every_length_decodes(frames, decoder, shallow_vae, traced):
    z = reference.latents(frames, height=2, width=6)
    check_decoded(decoder.decode(runtime.to_jax(z.bfloat16())).sample, z, shallow_vae)
    assert all(counted(traced))


@pytest.mark.parametrize(("frames", "larger"), [(1, 3), (9, 1), (10, 1), (13, 1), (16, 1)])
@pytest.mark.parametrize("encoder", BUILDS, indirect=True)
@pytest.mark.product_cases(but=["torchax-1-3", "flax-16-1", "torchax on a mesh-10-1"])
@pytest.mark.slow
def test_every_kind_of_length_encodes(frames, larger, encoder, small_vae, traced):
    # A still of 8 x 24 has too few latents for two errors to compare: 1.13 times, less when larger.
    x = reference.video(frames, height=8 * larger, width=24 * larger)
    traced.clear()
    got = encoder.encode(runtime.to_jax(x.bfloat16())).latent_dist.parameters
    check(
        got,
        reference.encoded(small_vae, x),
        reference.encoded(copy.deepcopy(small_vae).bfloat16(), x.bfloat16()),
    )
    assert [bool(number) for number in counted(traced)] == [True, False]
