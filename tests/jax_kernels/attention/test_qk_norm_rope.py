"""Queries, keys and values of any heads are prepared as defined; Mosaic compiles this and attention."""

import functools
import math

import jax.numpy as jnp
import pytest

from jax_kernels import attention_transposed, qk_norm_rope
from jax_kernels.attention import qk_norm_rope as module, reference, tpu
from tests.jax_kernels.devices import compiled_for, drawn, struct
from tests.reference import interpreted_kernels, largest_error


@pytest.mark.parametrize(
    ("heads", "channels", "positions", "dtype"),
    [
        pytest.param(4, 64, 130, jnp.bfloat16, id="lanes filled by two heads"),
        pytest.param(3, 64, 128, jnp.float32, id="an odd head left"),
        pytest.param(5, 16, 40, jnp.float32, id="small heads"),
        pytest.param(1, 128, 300, jnp.bfloat16, id="heads that fill the lanes"),
    ],
)
def test_blocks_of_any_heads_are_the_definition(heads, channels, positions, dtype, monkeypatch):
    monkeypatch.setattr(module, "BLOCK_BYTES", 1)  # blocks of 128 positions
    x, weight, bias = drawn((2, positions, heads * channels), (channels,), (channels,), dtype=dtype)
    angles = jnp.repeat(jnp.linspace(-9, 9, positions * channels // 2).reshape(positions, -1), 2, axis=1)
    arrays = x, weight, bias, jnp.cos(angles), jnp.sin(angles)
    with interpreted_kernels(lanes=128) as traced:
        got = qk_norm_rope(*arrays, heads=heads, scale=0.3)
    assert (traced, got.dtype) == (["prepare"], dtype)
    want = reference.qk_norm_rope(*(array.astype(jnp.float32) for array in arrays), heads=heads, scale=0.3)
    assert largest_error(got, want) < (1e-5 if dtype == jnp.float32 else 2**-8)  # rounded once


@pytest.mark.parametrize(
    ("topology", "dtype", "channels", "tokens"),
    [
        pytest.param("v6e:1x1", jnp.float32, 32, 1000, id="v6e, float32"),
        pytest.param("v6e:1x1", jnp.bfloat16, 128, 100, id="v6e, wide heads, few tokens"),
        pytest.param("v5e:1x1", jnp.bfloat16, 64, 1000, id="v5e"),
    ],
)
def test_attention_compiles_and_copies_nothing(topology, dtype, channels, tokens, monkeypatch):
    for sizes in ("QUERIES", "KEYS"):
        monkeypatch.setattr(tpu, sizes, (512,))  # whole ones compile for long
    attend = functools.partial(attention_transposed, num_keys=tokens - 10, scale=math.log(2))
    found = compiled_for(topology, attend, *[struct(2, 3, channels, tokens, dtype=dtype)] * 3)
    assert "tpu_custom_call" in found.as_text()
    assert found.memory_analysis().temp_size_in_bytes < 2**16


@pytest.mark.parametrize("topology", ["v5e:1x1", "v6e:1x1"])
def test_prepare_compiles_and_copies_no_activation(topology):
    prepared = functools.partial(qk_norm_rope, heads=6)
    tables = [struct(1000, 64, dtype=jnp.float32)] * 2
    found = compiled_for(topology, prepared, struct(2, 1000, 384), struct(64), struct(64), *tables)
    assert "prepare" in found.as_text()
    assert found.memory_analysis().temp_size_in_bytes < 3 * 1024 * 64 * 4  # the tables, transposed
