"""Queries, keys and values are prepared as by diffusers' processors; Mosaic compiles this and attention."""

import functools
import importlib
import math

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jax_kernels import attention_transposed, qk_norm_rope
from jax_kernels.attention import tpu
from tests.jax_kernels.devices import compiled_for, struct
from tests.reference import interpreted_kernels, largest_error

module = importlib.import_module(
    "jax_kernels.attention.qk_norm_rope"
)  # the package has the function by that name


def inputs(*, heads=3, channels=16, positions=40, batch=2, dtype=jnp.float32):
    """Return a projection, the norm's weight and bias, and tables that leave 5 positions unrotated."""
    rng = np.random.default_rng(0)
    x = rng.normal(0.3, 2, (batch, positions, heads * channels))
    weight, bias = rng.normal(1, 0.3, channels), rng.normal(0, 0.3, channels)
    angles = np.repeat(rng.uniform(-9, 9, (positions, channels // 2)), 2, axis=1)
    angles[:5] = 0
    vectors = [jnp.asarray(vector, dtype) for vector in (x, weight, bias)]
    return [*vectors, jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32)]


def of_diffusers(x, weight, bias, cos, sin, *, heads, scale=1.0):
    """Apply diffusers' LayerNorm and rotary positions in float32; return (N, H, D, S)."""
    from diffusers.models.embeddings import apply_rotary_emb

    x, weight, bias, cos, sin = (
        torch.from_numpy(np.array(t, np.float32)) for t in (x, weight, bias, cos, sin)
    )
    x_NSHD = torch.nn.functional.layer_norm(
        x.unflatten(-1, (heads, -1)), weight.shape, weight, bias, eps=1e-6
    )
    return (apply_rotary_emb(x_NSHD, [cos, sin], sequence_dim=1) * scale).permute(0, 2, 3, 1).numpy()


def interpreted(*arrays, **options):
    """Run `qk_norm_rope` as a TPU does."""
    with interpreted_kernels(lanes=128) as traced:
        prepared = qk_norm_rope(*arrays, **options)
    assert traced == ["prepare"]
    return prepared


@pytest.mark.parametrize("form", [qk_norm_rope, interpreted], ids=["plain", "kernel"])
@pytest.mark.parametrize(
    ("heads", "channels", "positions", "dtype"),
    [
        pytest.param(4, 64, 130, jnp.bfloat16, id="lanes filled by two heads"),
        pytest.param(3, 64, 128, jnp.float32, id="an odd head left"),
        pytest.param(5, 16, 40, jnp.float32, id="small heads"),
        pytest.param(1, 128, 300, jnp.bfloat16, id="heads that fill the lanes"),
    ],
)
def test_it_is_diffusers_norm_and_rotary_positions(form, heads, channels, positions, dtype, monkeypatch):
    monkeypatch.setattr(module, "BLOCK_BYTES", 1)  # blocks of 128 positions
    arrays = inputs(heads=heads, channels=channels, positions=positions, dtype=dtype)
    want = of_diffusers(*arrays, heads=heads, scale=0.3)
    got = form(*arrays, heads=heads, scale=0.3)
    assert got.dtype == dtype
    assert largest_error(got, want) < (1e-5 if dtype == jnp.float32 else 2**-8)  # rounded once


def test_what_it_prepares_is_what_attention_takes():
    x, weight, bias, cos, sin = inputs()
    q, k = (qk_norm_rope(x, weight, bias, cos, sin, heads=3, scale=s) for s in (math.log2(math.e) / 4, 1.0))
    got = attention_transposed(q, k, qk_norm_rope(x, heads=3), scale=math.log(2))
    prepared = torch.from_numpy(of_diffusers(x, weight, bias, cos, sin, heads=3)).transpose(2, 3)
    v = torch.from_numpy(np.array(x)).unflatten(-1, (3, -1)).transpose(1, 2)
    want = torch.nn.functional.scaled_dot_product_attention(prepared, prepared, v).transpose(2, 3)
    assert largest_error(got, want) < 1e-5


@pytest.mark.parametrize(
    ("topology", "dtype", "channels", "tokens"),
    [
        pytest.param("v6e:1x1", jnp.bfloat16, 64, 1000, id="v6e"),
        pytest.param("v6e:1x1", jnp.float32, 32, 1000, id="v6e, float32"),
        pytest.param("v6e:1x1", jnp.bfloat16, 128, 100, id="v6e, wide heads, few tokens"),
        pytest.param("v5e:1x1", jnp.bfloat16, 64, 1000, id="v5e"),
        pytest.param("v5p:2x2x1", jnp.bfloat16, 64, 1000, id="v5p"),
        pytest.param("tpu7x:2x2x1", jnp.bfloat16, 64, 1000, id="tpu7x"),
    ],
)
def test_attention_compiles_and_copies_nothing(topology, dtype, channels, tokens, monkeypatch):
    for sizes in ("QUERIES", "KEYS"):
        monkeypatch.setattr(tpu, sizes, (512,))  # whole ones compile for long
    attend = functools.partial(attention_transposed, num_keys=tokens - 10, scale=math.log(2))
    found = compiled_for(topology, attend, *[struct(2, 3, channels, tokens, dtype=dtype)] * 3)
    assert "tpu_custom_call" in found.as_text()
    assert found.memory_analysis().temp_size_in_bytes < 2**16


@pytest.mark.parametrize("topology", ["v5e:1x1", "v6e:1x1", "tpu7x:2x2x1"])
def test_prepare_compiles_and_copies_no_activation(topology):
    prepared = functools.partial(qk_norm_rope, heads=6)
    tables = [struct(1000, 64, dtype=jnp.float32)] * 2
    found = compiled_for(topology, prepared, struct(2, 1000, 384), struct(64), struct(64), *tables)
    assert "prepare" in found.as_text()
    assert found.memory_analysis().temp_size_in_bytes < 3 * 1024 * 64 * 4  # the tables, transposed
