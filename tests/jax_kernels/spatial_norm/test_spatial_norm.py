"""Every way to modulate is the same function, and is taken where it is meant to be."""

import jax.numpy as jnp
import numpy as np
import pytest

from cogvideox_torchax.vae.chunks import first_frame_is_alone
from jax_kernels import spatial_norm
from jax_kernels.spatial_norm import reference
from tests.reference import largest_error

# Latent frames to frames, as they meet in the decoder: a first batch of 1, 2 or 3 latents, after 0, 1 or 2
# doublings.
FRAMES = [(1, 1), (2, 2), (2, 4), (2, 8), (3, 3), (3, 5), (3, 9)]
IMPLEMENTATIONS = [None, "rows", "pixels_first"]


def _inputs(latent_frames, frames, scale=2, dtype=jnp.float32, channels=8):
    rng = np.random.default_rng(latent_frames * 10 + frames)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)  # noqa: E731
    x, zq = draw(2, frames, 3 * scale, 5 * scale, channels), draw(2, latent_frames, 3, 5, 4)
    pointwise = [draw(*shape) for _ in "yb" for shape in ((4, channels), (channels,))]
    return x, zq, draw(channels), draw(channels), *pointwise


def _run(inputs, implementation, activation=None):
    return spatial_norm(
        *inputs,
        num_groups=4,
        activation=activation,
        first_frame_alone=first_frame_is_alone(inputs[0].shape[1]),
        implementation=implementation,
    )


def _reference(inputs, activation):
    alone = first_frame_is_alone(inputs[0].shape[1])
    return reference.spatial_norm(*inputs, num_groups=4, activation=activation, first_frame_alone=alone)


@pytest.mark.parametrize(("latent_frames", "frames"), FRAMES)
@pytest.mark.parametrize("scale", [1, 8])
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.slow_cases("None-*", "*-None-8-*", "*-silu-1-*")
def test_equals_modulation_at_full_resolution(latent_frames, frames, scale, activation, implementation):
    inputs = _inputs(latent_frames, frames, scale)
    got = _run(inputs, implementation, activation)
    want = _reference(inputs, activation)
    assert largest_error(got, want) < 1e-6
