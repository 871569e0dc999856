"""A chunk whose first frame is computed by itself, as on a TPU, is what stock diffusers computes."""

from unittest import mock

import jax
import pytest

from cogvideox_torchax import make_mesh, port, runtime
from cogvideox_torchax.runtime.bridge import import_torchax
from cogvideox_torchax.vae.tolerances import FLOAT32_RELATIVE
from cogvideox_torchax.vae.torchax.modules import SiLU
from jax_kernels.common import frames as over_frames
from tests import reference


@pytest.fixture
def splits_first_frame():
    """Have each kernel that is asked split the first frame off; return the mock that it asks."""
    answer = mock.Mock(return_value=True)
    with reference.traced_anew() as patch:
        patch.setattr(over_frames, "splits_first_frame", answer)
        yield answer


def test_silu_is_cut_along_the_frames():
    x = jax.ShapeDtypeStruct((1, 4, 5, 2, 2), "bfloat16")
    with reference.as_on_a_tpu():
        traced = str(jax.make_jaxpr(import_torchax().interop.jax_view(SiLU().forward))(x))
    assert "bf16[1,4,1,2,2]" in traced


CASES = {
    "decode 1": (reference.latents(1, batch=2), None),
    "decode 5": (reference.latents(5, batch=2), None),
    "decode 5 over a mesh whose shards are padded": (reference.latents(5, width=12), (1, 8)),
    **{f"encode {n}": (reference.video(n, height=12, width=20), None) for n in (10, 13, 17)},
}


@pytest.mark.parametrize("build", ["torchax", "flax"])
@pytest.mark.parametrize(("x", "mesh"), CASES.values(), ids=CASES)
@pytest.mark.slow_cases(but=["decode 5-torchax", "encode 13-flax"])
@pytest.mark.product_cases(
    "decode 1-flax", "decode 5-flax", "*mesh*-torchax", "encode 1[03]-torchax", "*17-flax"
)
def test_a_chunk_is_that_of_stock_diffusers(build, x, mesh, small_vae, splits_first_frame):
    vae = port(reference.built(build, small_vae), mesh=mesh and make_mesh(*mesh))
    if x.shape[1] == 3:
        got, want = vae.encode(runtime.to_jax(x)).latent_dist.parameters, reference.encoded(small_vae, x)
    else:
        got, want = vae.decode(runtime.to_jax(x)).sample, reference.decoded(small_vae, x)
    assert reference.largest_error(runtime.to_torch(got), want) <= FLOAT32_RELATIVE
    assert splits_first_frame.called
