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
        lone_first=first_frame_is_alone(inputs[0].shape[1]),
        implementation=implementation,
    )


def _reference(inputs, activation):
    alone = first_frame_is_alone(inputs[0].shape[1])
    return reference.spatial_norm(*inputs, num_groups=4, activation=activation, lone_first=alone)


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


@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_sizes_that_do_not_fit_are_named(implementation):
    x, zq, *rest = _inputs(2, 4)
    for wrong in (x[:, :, :5], x[:, :, :, :9], x[:, :3, :, :], x[:, :, :, :3]):
        with pytest.raises(ValueError, match="no multiple"):
            spatial_norm(wrong, zq, *rest, num_groups=4, implementation=implementation)
    wrong = x[:, :3], zq[:, :1], *rest
    with pytest.raises(ValueError, match="no multiple"):  # none is left for the rest of the frames
        spatial_norm(*wrong, num_groups=4, lone_first=True, implementation=implementation)
    with pytest.raises(ValueError, match="no multiple"):
        spatial_norm(x, zq[:, :, :0], *rest, num_groups=4, implementation=implementation)


@pytest.mark.usefixtures("shapes_unchecked")
def test_an_activation_that_there_is_not_is_refused():
    with pytest.raises(ValueError, match="'relu'"):
        spatial_norm(*_inputs(2, 4), num_groups=4, activation="relu")  # pyright: ignore


@pytest.mark.usefixtures("shapes_unchecked")
def test_an_implementation_that_there_is_not_is_refused():
    with pytest.raises(ValueError, match="is not one of"):
        spatial_norm(*_inputs(2, 4), num_groups=4, implementation="columns")  # pyright: ignore


@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize(
    ("position", "name"),
    [(2, "weight"), (3, "bias"), (5, "bias_y"), (7, "bias_b"), (4, "kernel"), (6, "kernel")],
)
def test_weights_of_another_length_are_refused(position, name):
    inputs = list(_inputs(2, 4))
    inputs[position] = inputs[position][..., :1]
    with pytest.raises(ValueError, match=rf"spatial_norm got a {name} of shape"):
        spatial_norm(*inputs, num_groups=4)
