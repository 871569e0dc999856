"""GELU far from zero, and the kernels of the transformer's layers, which Mosaic compiles."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jax_kernels import adaptive_layer_norm, gated_linear, gelu, linear_gelu
from tests.jax_kernels.devices import compiled_for, struct
from tests.reference import largest_error


def test_gelu_and_its_gradient_are_torchs_by_tanh_far_from_zero_too():
    x = jnp.concatenate([jnp.linspace(-20, 20, 999), jnp.asarray([-1e4, 0.0])])
    given = torch.from_numpy(np.array(x)).requires_grad_()
    with torch.enable_grad():
        want = torch.nn.functional.gelu(given, approximate="tanh")
        want.sum().backward()
    assert largest_error(gelu(x), want.detach()) < 1e-6
    assert gelu(jnp.asarray([-1e30, 0.0, 1e30])).tolist() == [0, 0, np.float32(1e30)]
    got = jax.grad(lambda x: gelu(x).sum())(x)
    np.testing.assert_allclose(got, given.grad.numpy(), rtol=1e-5, atol=1e-6)


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
