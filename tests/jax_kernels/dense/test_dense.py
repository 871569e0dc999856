"""The transformer's plain layers: rounded once, statistics in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jax_kernels import gelu, layer_norm, linear, silu
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


@pytest.mark.parametrize("affine", [True, False])
def test_layer_norm_is_torchs(affine):
    x = draw(2, 5, 16) * 3 + 1
    weight, bias = (draw(16, seed=1), draw(16, seed=2)) if affine else (None, None)
    parts = [None if part is None else to_torch(part) for part in (weight, bias)]
    want = torch.nn.functional.layer_norm(to_torch(x), (16,), *parts, eps=1e-5)
    assert largest_error(layer_norm(x, weight, bias), want) < 1e-6


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


def test_gelu_is_torchs_by_tanh():
    x = jnp.concatenate([jnp.linspace(-20, 20, 999), jnp.asarray([-1e30, 1e30, 0.0])])
    want = torch.nn.functional.gelu(to_torch(x), approximate="tanh")
    assert largest_error(gelu(x)[:-3], want[:-3]) < 1e-6
    np.testing.assert_array_equal(np.array(gelu(x)[-3:]), [0, np.float32(1e30), 0])
