"""The forms that only a TPU takes, run here on the CPU: each equals the plain form."""

import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels.common import frames as over_frames
from jax_kernels.common.dispatch import Target
from jax_kernels.resample import xla

each_dtype = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
each_target = pytest.mark.parametrize("target", [Target("tpu"), Target()], ids=["tpu", "default"])


def draw(frames=4, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(0).normal(size=(2, frames, 4, 6, 3)), dtype)


@each_dtype
def test_pixels_doubled_outside_are_doubled_pixels(dtype):
    x = draw(dtype=dtype)
    np.testing.assert_array_equal(xla.double_pixels_outside(x), xla.double_pixels(x))


@each_target
@each_dtype
@pytest.mark.parametrize("frames", [[2, 3], [0, 1, 1, 2, 2, 3, 3], [0]])
def test_frames_are_selected_by_a_product_as_by_their_indices(dtype, frames, target):
    x = draw(dtype=dtype)
    picked = over_frames.select_frames(target, x, frames, after=3 - x)
    np.testing.assert_array_equal(picked, x[:, np.asarray(frames)])


@each_target
@each_dtype
@pytest.mark.parametrize("frames", [2, 3, 8, 9])
def test_pairs_averaged_by_a_product_are_the_means(dtype, frames, target):
    x, alone = draw(frames, dtype), frames % 2
    got = over_frames.average_pairs(target, x, first_frame_alone=alone == 1)
    pairs = np.array(x, np.float32)[:, alone:].reshape(2, frames // 2, 2, 4, 6, 3)
    np.testing.assert_array_equal(got[:, alone:], pairs.mean(2).astype(dtype))
    np.testing.assert_array_equal(got[:, :alone], x[:, :alone])
