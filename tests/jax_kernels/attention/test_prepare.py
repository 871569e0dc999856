"""Queries and keys prepared in one pass are what the plain layers make of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jax_kernels import layer_norm, prepare, rotate
from tests.reference import largest_error

FORMS = ("plain", "transposed")


def draw(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


def interpreted(*args, implementation, **options):
    if implementation == "plain":
        return prepare(*args, implementation=implementation, **options)
    with pltpu.force_tpu_interpret_mode():
        return prepare(*args, implementation=implementation, **options)


def problem(heads, channels, tokens, videos=1):
    x = draw(videos, tokens, heads * channels) * 3 + 1
    angles = jnp.repeat(draw(tokens, channels // 2, seed=3), 2, axis=1)
    return x, draw(channels, seed=1), draw(channels, seed=2), jnp.cos(angles), jnp.sin(angles)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("heads", "channels", "tokens", "videos"), [(4, 64, 130, 1), (3, 128, 40, 2), (8, 32, 600, 1)]
)
def test_norm_and_positions_in_one_pass_are_those_of_two(form, heads, channels, tokens, videos):
    x, weight, bias, cos, sin = problem(heads, channels, tokens, videos)
    by_heads = x.reshape(videos, tokens, heads, channels)
    want = rotate(layer_norm(by_heads, weight, bias, eps=1e-6), cos, sin).transpose(0, 2, 3, 1) * 0.5
    got = interpreted(x, weight, bias, cos.T, sin.T, heads=heads, factor=0.5, implementation=form)
    assert largest_error(got, want) < 2e-6


@pytest.mark.parametrize("form", FORMS)
def test_values_are_only_cut_into_heads(form):
    x = draw(2, 130, 256).astype(jnp.bfloat16)
    got = interpreted(x, heads=4, implementation=form)
    want = x.reshape(2, 130, 4, 64).transpose(0, 2, 3, 1)
    np.testing.assert_array_equal(np.array(got, np.float32), np.array(want, np.float32))


@pytest.mark.parametrize("form", FORMS)
def test_sixteen_bits_are_rounded_once(form):
    x, weight, bias, cos, sin = problem(2, 64, 140)
    x, weight, bias = (array.astype(jnp.bfloat16) for array in (x, weight, bias))
    exact = prepare(
        *(array.astype(jnp.float32) for array in (x, weight, bias)), cos.T, sin.T, heads=2
    ).astype(jnp.bfloat16)
    got = interpreted(x, weight, bias, cos.T, sin.T, heads=2, implementation=form)
    assert got.dtype == jnp.bfloat16
    equal = np.array(got, np.float32) == np.array(exact, np.float32)
    assert equal.mean() > 0.999  # sums in another order may round the other way


def test_the_kernel_has_the_plain_forms_derivatives():
    x, *vectors = problem(2, 64, 130)

    def total(implementation):
        def function(x):
            y = interpreted(
                x, *vectors[:2], *(v.T for v in vectors[2:]), heads=2, implementation=implementation
            )
            return jnp.sum(y**3)

        return jax.grad(function)(x)

    np.testing.assert_array_equal(total("transposed"), total("plain"))


@pytest.mark.usefixtures("shapes_unchecked")
def test_tables_and_heads_that_do_not_fit_are_refused():
    x, weight, bias, cos, sin = problem(2, 64, 130)
    with pytest.raises(ValueError, match=r"x \(1, 130, 128\) for 3 heads"):
        prepare(x, heads=3)
    with pytest.raises(ValueError, match=r"cos \(130, 64\): it takes \(N, S, H \* D\), \(D, S\)"):
        prepare(x, weight, bias, cos, sin, heads=2)
