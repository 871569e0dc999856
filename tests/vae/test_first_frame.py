"""A chunk whose first frame is computed by itself, as on a TPU, is what stock diffusers computes."""

import jax
import pytest

from cogvideox_torchax import make_mesh, runtime
from cogvideox_torchax.runtime.bridge import import_torchax
from cogvideox_torchax.vae.tolerances import FLOAT32_RELATIVE
from cogvideox_torchax.vae.torchax.modules import SiLU
from jax_kernels.common import first_frame
from tests import reference


@pytest.fixture
def parts():
    """Return a list with an entry for each first frame that a kernel split off."""
    found = []

    def splits_first_frame(_target, x):
        found.append(x.shape)
        return True

    with reference.traced_anew() as patch:
        patch.setattr(first_frame, "splits_first_frame", splits_first_frame)
        yield found


@pytest.mark.parametrize("name", ["torchax", "flax"])
@pytest.mark.parametrize("frames", [1, 5])
@pytest.mark.slow_cases(but=["5-torchax"])
def test_decoding(name, frames, stock, parts):
    z = reference.latents(frames, batch=2)
    got = reference.built(name, stock).decode(runtime.to_jax(z)).sample
    error = reference.largest_error(runtime.to_torch(got), reference.decoded(stock, z))
    assert error <= FLOAT32_RELATIVE
    assert parts


@pytest.mark.parametrize("name", ["torchax", "flax"])
@pytest.mark.parametrize("frames", [10, 13, 17])
@pytest.mark.slow_cases(but=["13-flax"])
def test_encoding(name, frames, stock, parts):
    x = reference.video(frames, height=12, width=20)
    got = reference.built(name, stock).encode(runtime.to_jax(x)).latent_dist.parameters
    error = reference.largest_error(runtime.to_torch(got), reference.encoded(stock, x))
    assert error <= FLOAT32_RELATIVE
    assert parts


def test_silu_is_cut_along_the_frames():
    x = jax.ShapeDtypeStruct((1, 4, 5, 2, 2), "bfloat16")
    with reference.as_on_a_tpu():
        traced = str(jax.make_jaxpr(import_torchax().interop.jax_view(SiLU().forward))(x))
    assert "bf16[1,4,1,2,2]" in traced


@pytest.mark.slow
def test_decoding_over_a_mesh_whose_shards_are_padded(stock, parts):
    z = reference.latents(5, width=12)
    vae = reference.built("torchax", stock)
    vae.place_on(make_mesh(1, 8))
    got = vae.decode(runtime.to_jax(z)).sample
    error = reference.largest_error(runtime.to_torch(got), reference.decoded(stock, z))
    assert error <= FLOAT32_RELATIVE
    assert parts
