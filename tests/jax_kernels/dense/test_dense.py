"""GELU far from zero, and the kernels of the transformer's layers, which Mosaic compiles."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jax_kernels import adaptive_layer_norm, gated_linear, gelu, linear, linear_gelu, split_linear
from jax_kernels.dense import reference, tpu
from tests.jax_kernels.devices import compiled_for, struct
from tests.reference import interpreted_kernels, largest_error


def test_gelu_and_its_gradient_are_torchs_by_tanh_far_from_zero_too():
    x = jnp.concatenate([jnp.linspace(-20, 20, 999), jnp.asarray([-1e4, 0.0])])
    given = torch.from_numpy(np.array(x)).requires_grad_()
    with torch.enable_grad():
        want = torch.nn.functional.gelu(given, approximate="tanh")
        want.sum().backward()
    assert largest_error(gelu(x), want.detach()) < 1e-6
    assert gelu(jnp.asarray([-1e30, 0.0, 1e30])).tolist() == [0, 0, np.float32(1e30)]
    np.testing.assert_allclose(jax.grad(lambda x: gelu(x).sum())(x), given.grad.numpy(), rtol=1e-5, atol=1e-6)


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


@pytest.mark.parametrize("topology", ["v6e:1x1", "v5e:1x1", "tpu7x:2x2x1"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.slow_cases(but=["*v6e*"])
def test_mosaic_compiles_it_for_tokens_in_eight_bits(transposed, topology):
    def run(scale, *arrays):
        return gated_linear(*arrays, scale=scale, dynamic=True, transposed=transposed)

    x, weight = struct(2, 256, 10240) if transposed else ROWS, struct(256, 256, dtype=jnp.int8)
    scale = struct(256, dtype=jnp.float32)
    found = compiled_for(topology, run, scale, x, weight, struct(256), ROWS, KINDS, FIRST)
    assert ("%quantize" in found.as_text()) != transposed
    assert found.memory_analysis().temp_size_in_bytes < 2**24  # tokens in int8, and a tile for each scale


SCALED = {
    "linear": (linear, (), {}),
    "linear, parts rounded": (linear, (), {"rounded_parts": True}),
    "split_linear": (split_linear, (), {"parts": 2}),
    "linear_gelu": (linear_gelu, (), {}),
    "gated_linear": (gated_linear, ((1, 40, 256), (1, 2, 256)), {}),
    "gated_linear, transposed": (gated_linear, ((1, 40, 256), (1, 2, 256)), {"transposed": True}),
}
"""An op, the shapes of what it takes after the bias, and its options."""


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", SCALED)
def test_a_weight_in_eight_bits_is_its_product_with_the_scale(name, dynamic, dtype):
    op, shapes, options = SCALED[name]
    draw = np.random.default_rng(0)
    x, bias, *rest = (jnp.asarray(draw.normal(size=size), dtype) for size in ((1, 40, 128), 256, *shapes))
    x = x.at[0, 0].set(0).at[0, 1, 0].set(30)  # a token of zeros, one with a number far from the others
    x = x[0] if op is split_linear else x.swapaxes(1, 2) if options.get("transposed") else x
    weight = jnp.asarray(draw.integers(-127, 128, (256, 128)), jnp.int8)
    scale = jnp.asarray(draw.uniform(0.01, 0.02, 256), jnp.float32)
    exact = [array.astype(jnp.float32) for array in (x, weight, bias, *rest)]
    first = [7] * bool(rest)
    options = options | {"scale": scale, "dynamic": dynamic}
    want = getattr(reference, op.__name__)(*exact, *first, **options)
    with interpreted_kernels() if dtype == jnp.bfloat16 else contextlib.nullcontext():
        got = op(x, weight, bias, *rest, *first, **options)
    assert got.dtype == dtype
    assert largest_error(got, want) < {"float32": 1e-5, "float16": 2e-3}.get(got.dtype.name, 1e-2)


def test_each_block_of_tokens_in_eight_bits_has_its_own_scales(monkeypatch):
    monkeypatch.setattr(tpu, "TOKENS", 32)
    monkeypatch.setattr(tpu, "TOKEN_BLOCKS", (32,))
    draw = np.random.default_rng(0)
    x = jnp.asarray(draw.normal(size=(2, 72, 128)) * draw.uniform(0.1, 9, (2, 72, 1)), jnp.bfloat16)
    weight, scale = jnp.asarray(draw.integers(-127, 128, (128, 128)), jnp.int8), jnp.full(128, 0.01)
    want = linear_gelu(x.astype(jnp.float32), weight, scale=scale, dynamic=True)
    with interpreted_kernels():
        assert largest_error(linear_gelu(x, weight, scale=scale, dynamic=True), want) < 4e-3


def test_tokens_in_eight_bits_have_the_gradient_of_whole_ones():
    x, weight, scale = jnp.ones((4, 128)) * 0.3, jnp.full((256, 128), 7, jnp.int8), jnp.full(256, 0.1)
    got, want = (
        jax.grad(lambda x: linear(x, weight, scale=scale, dynamic=dynamic).sum())(x)  # noqa: B023
        for dynamic in (True, False)
    )
    assert largest_error(got, want) == 0
    for token in (jnp.nan, jnp.inf):  # which int8 has not
        assert jnp.isnan(linear(x.at[1, 2].set(token), weight, scale=scale, dynamic=True)[1]).all()
