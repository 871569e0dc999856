"""The transformer's plain layers: rounded once, statistics in float32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jax_kernels import adaptive_layer_norm, gated_linear, gelu, layer_norm, linear, linear_gelu
from tests.jax_kernels.devices import compiled_for, struct
from tests.reference import largest_error


def draw(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


def to_torch(x):
    return torch.from_numpy(np.array(x, np.float32))


@pytest.mark.parametrize("affine", [True, False])
def test_linear_and_layer_norm_are_torchs(affine):
    x, weight, *biases = draw(2, 5, 8) * 3 + 1, draw(5, 8, seed=1), draw(5, seed=2), draw(8, seed=3)
    bias, shift = biases if affine else (None, None)
    scale = draw(8, seed=4) if affine else None
    given = [None if part is None else to_torch(part) for part in (x, weight, bias, scale, shift)]
    want = torch.nn.functional.linear(*given[:3])
    assert largest_error(linear(x, weight, bias), want) < 1e-6
    want = torch.nn.functional.layer_norm(given[0], (8,), *given[3:], eps=1e-5)
    assert largest_error(layer_norm(x, scale, shift), want) < 1e-6


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


ROWS, KINDS, FIRST = struct(2, 10240, 256), struct(2, 2, 256), struct(dtype=jnp.int32)
KERNELS = {
    "adaptive_layer_norm": (adaptive_layer_norm, ROWS, struct(256), struct(256), KINDS, KINDS, FIRST),
    "linear_gelu": (linear_gelu, ROWS, struct(1024, 256), struct(1024)),
    "gated_linear": (gated_linear, ROWS, struct(256, 256), struct(256), ROWS, KINDS, FIRST),
    "gated_linear of 1920 outputs": (
        gated_linear,
        struct(2, 10240, 1920),
        struct(1920, 1920),
        struct(1920),
        struct(2, 10240, 1920),
        struct(2, 2, 1920),
        FIRST,
    ),
    "gated_linear of transposed": (
        functools.partial(gated_linear, transposed=True),
        struct(2, 256, 10240),
        struct(256, 256),
        struct(256),
        ROWS,
        KINDS,
        FIRST,
    ),
}
"""An op and what it takes."""


@pytest.mark.parametrize("topology", ["v6e:1x1", "v5e:1x1", "tpu7x:2x2x1"])
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.slow_cases(but=["*v6e*"])
def test_its_kernel_compiles_and_copies_no_activation(name, topology):
    op, *structs = KERNELS[name]
    found = compiled_for(topology, op, *structs)
    assert name.partition(" ")[0] in found.as_text()
    assert found.memory_analysis().temp_size_in_bytes < 2**21  # a fifth of one
