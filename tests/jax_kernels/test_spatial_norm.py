import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import reference, spatial_norm
from tests.reference import largest_error

# Latent frames to frames, as they meet in the decoder: a first batch of 1, 2 or 3 latents, after 0, 1 or 2
# doublings.
FRAMES = [(1, 1), (2, 2), (2, 4), (2, 8), (3, 3), (3, 5), (3, 9)]


def _inputs(latent_frames, frames, scale=2, dtype=jnp.float32):
    rng = np.random.default_rng(latent_frames * 10 + frames)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)  # noqa: E731
    x, zq = draw(2, frames, 3 * scale, 5 * scale, 8), draw(2, latent_frames, 3, 5, 4)
    return x, zq, draw(8), draw(8), draw(4, 8), draw(8), draw(4, 8), draw(8)


@pytest.mark.parametrize(("latent_frames", "frames"), FRAMES)
@pytest.mark.parametrize("scale", [1, 8])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_equals_modulation_at_full_resolution(latent_frames, frames, scale, activation):
    inputs = _inputs(latent_frames, frames, scale)
    got = spatial_norm(*inputs, num_groups=4, activation=activation)
    want = reference.spatial_norm(*inputs, num_groups=4, activation=activation)
    assert largest_error(got, want) < 1e-6


@pytest.mark.parametrize("activation", [None, "silu"])
def test_bfloat16_rounds_once(activation):
    inputs = _inputs(3, 9, dtype=jnp.bfloat16)
    got = spatial_norm(*inputs, num_groups=4, activation=activation)
    want = reference.spatial_norm(
        *(a.astype(jnp.float32) for a in inputs), num_groups=4, activation=activation
    )
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.array(got, np.float32), np.array(want), rtol=2**-8, atol=1e-4)


def test_sizes_that_do_not_fit_are_named():
    x, zq, *rest = _inputs(2, 4)
    with pytest.raises(ValueError, match="no multiple"):
        spatial_norm(x[:, :, :5], zq, *rest, num_groups=4)
