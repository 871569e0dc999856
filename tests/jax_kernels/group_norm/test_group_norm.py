import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from jax_kernels import group_norm
from jax_kernels.common.dispatch import Target
from jax_kernels.group_norm import op
from jax_kernels.group_norm.xla import Moments, merge

moments = functools.partial(op.moments, Target())
SHAPES = {"audio": (2, 8, 7), "image": (2, 8, 5, 6), "video": (2, 8, 3, 5, 6), "one pixel": (1, 8, 1, 1, 1)}


def _normal(shape, *, mean=0.0, deviation=1.0, seed=0, dtype=jnp.float32):
    draws = np.random.default_rng(seed).normal(mean, deviation, shape)
    return jnp.asarray(draws, jnp.float32).astype(dtype)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("channel_axis", [1, -1])
def test_float32_equals_torch(shape, channel_axis):
    x, weight, bias = _normal(shape, mean=0.3), _normal((8,), seed=1), _normal((8,), seed=2)
    given, *affine = (torch.from_numpy(np.array(array)) for array in (x, weight, bias))
    want = torch.nn.functional.group_norm(given, 4, *affine, eps=1e-6)
    got = group_norm(jnp.moveaxis(x, 1, channel_axis), weight, bias, num_groups=4, channel_axis=channel_axis)
    np.testing.assert_allclose(np.moveaxis(np.array(got), channel_axis, 1), want, atol=3e-6)


def test_an_empty_batch_stays_empty():
    x = jnp.zeros((0, 8, 128, 256, 128))
    assert group_norm(x, None, None, num_groups=4, channel_axis=-1, activation="silu").shape == x.shape


def test_variance_is_right_where_sums_of_squares_fail():
    x = _normal((1, 4, 2, 64, 64), mean=1000.0, deviation=1.0)
    grouped = np.array(x, np.float64).reshape(1, 2, -1)
    exact = grouped.var(-1)
    naive = jnp.square(x.reshape(1, 2, -1)).mean(-1) - jnp.square(x.reshape(1, 2, -1).mean(-1))
    welford = jax.jit(lambda x: moments(x, num_groups=2).variance)(x)
    assert np.abs(np.array(naive) / exact - 1).max() > 1e-3
    assert np.abs(np.array(welford) / exact - 1).max() < 1e-4


def test_constant_input_has_variance_zero():
    x = jnp.full((1, 4, 3, 8, 8), 1234.567, jnp.float32)
    assert (moments(x, num_groups=2).variance == 0).all()
    assert (group_norm(x, None, jnp.ones(4), num_groups=2) == 1).all()


@settings(deadline=None, max_examples=30)
@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=2, max_size=40), st.data())
def test_merged_parts_have_the_moments_of_the_whole(values, data):
    cut = data.draw(st.integers(1, len(values) - 1))

    def of(part):
        part = np.asarray(part, np.float64)
        return Moments(len(part), part.mean(), np.square(part - part.mean()).sum())

    merged, whole = merge(of(values[:cut]), of(values[cut:])), of(values)
    assert merged.count == whole.count
    np.testing.assert_allclose([merged.mean, merged.m2], [whole.mean, whole.m2], rtol=1e-9, atol=1e-6)


def test_no_temporary_of_the_size_of_the_input():
    x = jax.ShapeDtypeStruct((1, 64, 64, 64, 32), jnp.float32)
    compiled = jax.jit(lambda x: moments(x, num_groups=8, channel_axis=-1)).lower(x).compile()
    size = 64**3 * 32 * 4
    assert compiled.memory_analysis().temp_size_in_bytes < size / 8
