"""The forms that only a TPU takes, run here on the CPU: each has to be the other form's equal."""

import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels.common import frames as over_frames
from jax_kernels.common.dispatch import Target
from jax_kernels.resample import xla

TPU = Target("tpu")
DTYPES = [jnp.float32, jnp.bfloat16]


def _frames(frames=4, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(0).normal(size=(2, frames, 4, 6, 3)), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_doubling_outside_is_the_same(dtype):
    x = _frames(dtype=dtype)
    got, want = xla.double_pixels_outside(x), xla.double_pixels(x)
    np.testing.assert_array_equal(np.array(got), np.array(want))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("frames", [[2, 3], [0, 1, 1, 2, 2, 3, 3], [0]])
def test_picked_frames_are_the_selected_ones(dtype, frames):
    x = _frames(dtype=dtype)
    for target in (TPU, Target()):
        picked = over_frames.select_frames(target, x, frames, after=3 - x)
        np.testing.assert_array_equal(np.array(picked), np.array(x[:, np.asarray(frames)]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("frames", [2, 3, 8, 9])
def test_pairs_averaged_by_a_product_are_the_means(dtype, frames):
    x = _frames(frames, dtype)
    got, want = (
        over_frames.average_pairs(target, x, first_frame_alone=frames % 2 == 1) for target in (TPU, Target())
    )
    assert got.dtype == dtype
    np.testing.assert_array_equal(np.array(got), np.array(want))
    pairs = np.array(x, np.float32)[:, frames % 2 :].reshape(2, frames // 2, 2, 4, 6, 3)
    np.testing.assert_array_equal(np.array(want)[:, frames % 2 :], pairs.mean(2).astype(want.dtype))


def test_what_is_waited_for_adds_nothing():
    x = jnp.array([1.0, -2.0, 0.0, jnp.inf, jnp.nan])
    np.testing.assert_array_equal(np.array(over_frames.zero_of(x)), np.zeros(5))


def test_pixels_first_and_back():
    x = _frames()
    assert over_frames.pixels_first(x).shape == (4, 6, 2, 4, 3)
    np.testing.assert_array_equal(
        np.array(over_frames.frames_first(over_frames.pixels_first(x))), np.array(x)
    )
