"""Both builds in bfloat16 with the last level's frames through the kernel that a TPU has for large ones.

`benchmarks/contract_by_the_kernel.py` decodes every length to 13 and encodes some, on a mesh too.
"""

import copy

import jax
import pytest

from cogvideox_torchax import make_mesh, runtime
from cogvideox_torchax.flax import FlaxVAEForPipelines
from cogvideox_torchax.vae.tolerances import BFLOAT16_RMS_RATIO, rms_error
from tests import reference

LARGE = {"lanes": 8, "large": 8 * 24}


@pytest.fixture(scope="module")
def stock():
    return reference.small_vae(**reference.THREE_LEVELS)


def build(name, stock):
    stock = copy.deepcopy(stock).bfloat16()
    return reference.on_jax(stock) if name == "torchax" else FlaxVAEForPipelines.from_diffusers(stock)


def check(got, want, in_torch):
    ratio = rms_error(runtime.to_torch(got).float(), want) / rms_error(in_torch.float(), want)
    assert ratio <= BFLOAT16_RMS_RATIO


CHUNKS = 9, 8
"""Frames of two chunks as the last level has them."""


def traced_for(chunks, upsampled=False):
    """Of each chunk what is upsampled to that level, a first frame by itself; then a convolution without a
    residual and one with it, and where it is upsampled the last one, to three channels."""
    shapes = []
    for frames in chunks:
        if upsampled:
            shapes += [(1, 1, 4, 12, 8)] * (frames % 2) + [(1, frames // 2, 4, 12, 8)]
        shapes += [(1, frames, 8, 24, 8)] * (2 + upsampled)
    return shapes


@pytest.mark.slow
def test_decoded_chunks_are_as_accurate_as_pytorchs(stock):
    z = reference.latents(5, height=2, width=6)
    want, half = reference.decoded(stock, z), reference.decoded(copy.deepcopy(stock).bfloat16(), z.bfloat16())
    vae = build("torchax", stock)
    with reference.interpreted_kernels(**LARGE) as traced:
        got = vae.decode(runtime.to_jax(z.bfloat16())).sample
    assert traced == traced_for(CHUNKS, upsampled=True)
    check(got, want, half)


@pytest.mark.slow
def test_encoded_chunks_are_as_accurate_as_pytorchs(stock):
    x = reference.video(sum(CHUNKS), height=8, width=24)
    want = reference.encoded(stock, x)
    half = reference.encoded(copy.deepcopy(stock).bfloat16(), x.bfloat16())
    vae = build("flax", stock)
    with reference.interpreted_kernels(**LARGE) as traced:
        got = vae.encode(runtime.to_jax(x.bfloat16())).latent_dist.parameters
    assert traced == traced_for(CHUNKS)
    check(got, want, half)


HOOKED = {"up_blocks.2.resnets.0.norm1": 5, "conv_act": 3, "conv_out": 3}
"""How many kernels are traced beside a hook on one of these; without one it is four."""


@pytest.mark.parametrize(("module", "devices"), [*[(name, 1) for name in HOOKED], (next(iter(HOOKED)), 4)])
@pytest.mark.slow
def test_a_hook_sees_what_its_layer_gives(module, devices, stock):
    vae = build("torchax", stock)
    if devices > 1:
        vae.place_on(make_mesh(1, devices, devices=jax.devices()[:devices]))
    seen = []
    vae.decoder.get_submodule(module).register_forward_hook(lambda *_: seen.append(1))
    z = reference.latents(2, height=2, width=6)
    want, half = reference.decoded(stock, z), reference.decoded(copy.deepcopy(stock).bfloat16(), z.bfloat16())
    with reference.interpreted_kernels(**LARGE, on_mesh=devices > 1) as traced:
        got = vae.decode(runtime.to_jax(z.bfloat16())).sample
    check(got, want, half)
    assert len(seen) == 1
    assert len(traced) == HOOKED[module]
