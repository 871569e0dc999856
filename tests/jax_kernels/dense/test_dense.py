"""The transformer's plain layers: rounded once, statistics in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jax_kernels import gated_sum, gelu, layer_norm, linear, linear_parts, modulated_norm, silu
from tests.reference import largest_error


def draw(*shape, seed=0, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def to_torch(x):
    return torch.from_numpy(np.array(x, np.float32))


@pytest.mark.parametrize("biased", [True, False])
def test_linear_is_torchs(biased):
    x, weight, bias = draw(2, 3, 8), draw(5, 8, seed=1), draw(5, seed=2) if biased else None
    want = torch.nn.functional.linear(to_torch(x), to_torch(weight), None if bias is None else to_torch(bias))
    assert largest_error(linear(x, weight, bias), want) < 1e-6


def test_linear_adds_the_bias_before_it_rounds():
    x, weight, bias = (
        draw(*s, seed=i, dtype=jnp.bfloat16) for i, s in enumerate([(64, 32), (16, 32), (16,)])
    )
    exact = linear(*(a.astype(jnp.float32) for a in (x, weight, bias * 3)))
    got = linear(x, weight, bias * 3)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.array(got, np.float32), np.array(exact.astype(jnp.bfloat16), np.float32))


@pytest.mark.parametrize("affine", [True, False])
def test_layer_norm_is_torchs(affine):
    x = draw(2, 5, 16) * 3 + 1
    weight, bias = (draw(16, seed=1), draw(16, seed=2)) if affine else (None, None)
    parts = [None if part is None else to_torch(part) for part in (weight, bias)]
    want = torch.nn.functional.layer_norm(to_torch(x), (16,), *parts, eps=1e-5)
    assert largest_error(layer_norm(x, weight, bias), want) < 1e-6


def test_layer_norm_has_its_statistics_in_float32():
    x = (draw(4, 64) + 100).astype(jnp.bfloat16)
    exact = layer_norm(x.astype(jnp.float32), None, None)
    got = layer_norm(x, None, None)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.array(got, np.float32), np.array(exact.astype(jnp.bfloat16), np.float32))


@pytest.mark.usefixtures("shapes_unchecked")
def test_channels_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match="8 channels for a weight that takes 6"):
        linear(draw(2, 8), draw(4, 6))


@pytest.mark.usefixtures("shapes_unchecked")
def test_weights_of_another_length_are_refused():
    x, one = draw(2, 8), jnp.ones(1)
    for name, weights in (("weight", (one, None)), ("bias", (None, one))):
        with pytest.raises(ValueError, match=rf"layer_norm got a {name} of shape \(1,\) for 8 channels"):
            layer_norm(x, *weights)
    with pytest.raises(ValueError, match=r"linear got a bias of shape \(1,\) for 5 channels"):
        linear(x, draw(5, 8), one)


def test_silu_is_rounded_once():
    x = jnp.asarray(np.random.default_rng(0).normal(size=1000), jnp.bfloat16)
    want = torch.nn.functional.silu(torch.from_numpy(np.array(x, np.float32)).bfloat16())
    np.testing.assert_array_equal(np.array(silu(x), np.float32), want.float().numpy())


def test_the_gradient_of_gelu_is_torchs_far_below_zero_too():
    x = jnp.asarray([-1e4, -20.0, -10.5, -3.0, -0.7, 0.0, 0.3, 2.0, 20.0])
    given = to_torch(x).requires_grad_()
    with torch.enable_grad():
        torch.nn.functional.gelu(given, approximate="tanh").sum().backward()
    got = jax.grad(lambda x: gelu(x).sum())(x)
    np.testing.assert_allclose(np.array(got), given.grad.numpy(), rtol=1e-5, atol=1e-6)


def test_outputs_in_parts_are_linears():
    x, weight, bias = draw(7, 8), draw(12, 8, seed=1), draw(12, seed=2)
    for given in (bias, None):
        got = linear_parts(x, weight, given, parts=3)
        assert largest_error(jnp.concatenate(list(got), axis=1), linear(x, weight, given)) < 1e-6


def modulation(kinds, channels, seed):
    return [draw(kinds, channels, seed=seed + i) for i in range(3)], jnp.asarray([0, 1, 2, 1, 0, 2, 2])


@pytest.mark.parametrize("affine", [True, False])
def test_a_modulated_norm_has_each_tokens_own_vectors(affine):
    x = draw(7, 16) * 3 + 1
    (scale, shift, _), kind = modulation(3, 16, 5)
    weight, bias = (draw(16, seed=1), draw(16, seed=2)) if affine else (None, None)
    want = layer_norm(x, weight, bias) * (1 + scale[kind]) + shift[kind]
    assert largest_error(modulated_norm(x, weight, bias, scale, shift, kind), want) < 1e-6


def test_a_gated_sum_has_each_tokens_own_gate():
    x, y = draw(7, 16), draw(7, 16, seed=1)
    (gate, *_), kind = modulation(3, 16, 5)
    assert largest_error(gated_sum(x, y, gate, kind), x + gate[kind] * y) < 1e-6


def test_what_is_done_to_tokens_is_rounded_once():
    x, y = (draw(7, 64, seed=i, dtype=jnp.bfloat16) for i in range(2))
    vectors, kind = modulation(3, 64, 5)
    scale, shift, gate = (vector.astype(jnp.bfloat16) for vector in vectors)

    def results(x, y, scale, shift, gate):
        return (
            modulated_norm(x, None, None, scale, shift, kind),
            gated_sum(x, y, gate, kind),
            gelu(x),
        )

    exact = results(*(array.astype(jnp.float32) for array in (x, y, scale, shift, gate)))
    for got, want in zip(results(x, y, scale, shift, gate), exact, strict=True):
        assert got.dtype == jnp.bfloat16
        np.testing.assert_array_equal(
            np.array(got, np.float32), np.array(want.astype(jnp.bfloat16), np.float32)
        )


def test_gelu_is_torchs_by_tanh():
    x = jnp.concatenate([jnp.linspace(-20, 20, 999), jnp.asarray([-1e30, 1e30, 0.0])])
    want = torch.nn.functional.gelu(to_torch(x), approximate="tanh")
    assert largest_error(gelu(x)[:-3], want[:-3]) < 1e-6
    np.testing.assert_array_equal(np.array(gelu(x)[-3:]), [0, np.float32(1e30), 0])
