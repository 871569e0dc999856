import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_kernels import group_norm
from jax_kernels.group_norm import reference
from jax_kernels.group_norm.moments import moments
from jax_kernels.group_norm.welford import Moments, merge

SHAPES = {"audio": (2, 8, 7), "image": (2, 8, 5, 6), "video": (2, 8, 3, 5, 6), "one pixel": (1, 8, 1, 1, 1)}


def _normal(shape, *, mean=0.0, deviation=1.0, seed=0, dtype=jnp.float32):
    draws = np.random.default_rng(seed).normal(mean, deviation, shape)
    return jnp.asarray(draws, jnp.float32).astype(dtype)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("channel_axis", [1, -1])
def test_float32_equals_torch(shape, channel_axis):
    x, weight, bias = _normal(shape, mean=0.3), _normal((8,), seed=1), _normal((8,), seed=2)
    want = torch.nn.functional.group_norm(*(torch.from_numpy(np.array(a)) for a in (x,)), 4, eps=1e-6)
    shape_C = (1, -1) + (1,) * (len(shape) - 2)
    want = want.numpy() * np.array(weight).reshape(shape_C) + np.array(bias).reshape(shape_C)
    got = group_norm(jnp.moveaxis(x, 1, channel_axis), weight, bias, num_groups=4, channel_axis=channel_axis)
    np.testing.assert_allclose(np.moveaxis(np.array(got), channel_axis, 1), want, atol=3e-6)


def test_bfloat16_has_float32_statistics():
    x = _normal((1, 8, 4, 16, 16), mean=30.0, dtype=jnp.bfloat16)
    weight, bias = jnp.ones(8), jnp.zeros(8)
    got = group_norm(x, weight, bias, num_groups=4)
    want = reference.group_norm(x.astype(jnp.float32), weight, bias, num_groups=4)
    assert got.dtype == jnp.bfloat16
    # Rounding the result alone costs half a unit in the last of 8 bits; rounded statistics cost many times
    # that.
    np.testing.assert_allclose(np.array(got, np.float32), np.array(want), rtol=2**-8, atol=1e-3)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("channel_axis", [1, -1])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_an_activation_is_applied_before_the_result_is_rounded(shape, channel_axis, dtype):
    x = jnp.moveaxis(_normal(shape, dtype=dtype), 1, channel_axis)
    weight, bias = _normal((8,), seed=1), _normal((8,), seed=2)
    options = {"num_groups": 4, "channel_axis": channel_axis}
    got = group_norm(x, weight, bias, activation="silu", **options)
    want = jax.nn.silu(group_norm(x.astype(jnp.float32), weight, bias, **options)).astype(dtype)
    assert got.dtype == dtype
    np.testing.assert_allclose(np.array(got, np.float32), np.array(want, np.float32), rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("shapes_unchecked")
def test_an_activation_that_there_is_not_is_refused():
    with pytest.raises(ValueError, match="'relu'"):
        group_norm(_normal((1, 8, 4)), None, None, num_groups=4, activation="relu")  # pyright: ignore


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
    stats = moments(jnp.full((1, 4, 3, 8, 8), 1234.567, jnp.float32), num_groups=2)
    assert (stats.variance == 0).all()
    y = group_norm(jnp.full((1, 4, 3, 8, 8), 1234.567, jnp.float32), None, jnp.ones(4), num_groups=2)
    np.testing.assert_array_equal(np.array(y), 1.0)


def test_an_outlier_in_the_first_pixel_costs_no_accuracy():
    x = np.random.default_rng(0).normal(0, 1, (1, 2, 1, 64, 8)).astype(np.float32)
    x[..., 0, :] = 3e4
    got = np.array(moments(jnp.asarray(x), num_groups=1).variance)
    np.testing.assert_allclose(got, x.astype(np.float64).reshape(1, 1, -1).var(-1), rtol=1e-5)


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


def test_gradient_equals_the_references():
    x, weight, bias = _normal((1, 8, 2, 4, 4), mean=2.0), _normal((8,), seed=1), _normal((8,), seed=2)
    target = _normal(x.shape, seed=3)

    def loss(norm):
        return lambda x, weight, bias: jnp.sum(norm(x, weight, bias, num_groups=2) * target)

    got = jax.grad(loss(group_norm), (0, 1, 2))(x, weight, bias)
    want = jax.grad(loss(reference.group_norm), (0, 1, 2))(x, weight, bias)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(np.array(a), np.array(b), atol=2e-5)


@pytest.mark.parametrize(
    ("shape", "groups", "words"), [((2, 8), 4, "rank 2"), ((2, 8, 5), 3, "8 channels in 3 groups")]
)
@pytest.mark.usefixtures("shapes_unchecked")
def test_bad_input_is_named(shape, groups, words):
    with pytest.raises(ValueError, match=words):
        group_norm(jnp.zeros(shape), None, None, num_groups=groups)


@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize(("lengths", "name"), [((1, 8), "weight"), ((8, 1), "bias")])
def test_weights_of_another_length_are_refused(lengths, name):
    with pytest.raises(ValueError, match=rf"group_norm got a {name} of shape \(1,\) for 8 channels"):
        group_norm(jnp.zeros((2, 8, 5)), *(jnp.ones(length) for length in lengths), num_groups=4)
