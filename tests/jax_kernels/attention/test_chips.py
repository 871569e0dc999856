"""Mosaic compiles the kernels for the chips that they are for, and they take and give arrays as they are."""

import functools
import math

import jax.numpy as jnp
import pytest

from jax_kernels import attention_transposed, qk_norm_rope
from jax_kernels.attention import tpu
from tests.jax_kernels.chips import compiled_for, struct

CASES = {
    "v6e": ("v6e:1x1", jnp.bfloat16, 64, 1000),
    "v6e, float32": ("v6e:1x1", jnp.float32, 32, 1000),
    "v6e, wide heads, few tokens": ("v6e:1x1", jnp.bfloat16, 128, 100),
    "v5e": ("v5e:1x1", jnp.bfloat16, 64, 1000),
    "v5p": ("v5p:2x2x1", jnp.bfloat16, 64, 1000),
    "tpu7x": ("tpu7x:2x2x1", jnp.bfloat16, 64, 1000),
}


@pytest.mark.parametrize(("topology", "dtype", "channels", "tokens"), CASES.values(), ids=CASES)
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
