"""Mosaic compiles the kernels for the chips that they are for, and they take and give arrays as they are."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cogvideox_torchax.plan import chips
from jax_kernels import attention_transposed, prepare
from jax_kernels.attention import tpu


def compiled(topology, function, *structs):
    device = chips.topology_devices(topology)[0]
    place = jax.sharding.SingleDeviceSharding(device)
    arguments = [jax.ShapeDtypeStruct(shape, dtype, sharding=place) for shape, dtype in structs]
    with jax.set_mesh(jax.sharding.Mesh(np.array([device]), ("device",))):
        return jax.jit(function).lower(*arguments).compile()


CASES = {
    "v6e": ("v6e:1x1", jnp.bfloat16, 64, 1000, None),
    "v6e, bounded": ("v6e:1x1", jnp.bfloat16, 64, 1000, 1.0),
    "v6e, float32": ("v6e:1x1", jnp.float32, 32, 1000, None),
    "v6e, wide heads, few tokens": ("v6e:1x1", jnp.bfloat16, 128, 100, 1.0),
    "v5e": ("v5e:1x1", jnp.bfloat16, 64, 1000, None),
    "v5p": ("v5p:2x2x1", jnp.bfloat16, 64, 1000, None),
    "tpu7x": ("tpu7x:2x2x1", jnp.bfloat16, 64, 1000, 1.0),
}


@pytest.mark.parametrize(("topology", "dtype", "channels", "tokens", "bound"), CASES.values(), ids=CASES)
def test_attention_compiles_and_copies_nothing(topology, dtype, channels, tokens, bound, monkeypatch):
    pytest.importorskip("libtpu", reason="the [tpu] extra is not installed")
    monkeypatch.setattr(tpu, "BLOCKS", (512,))  # benchmarks/attention_schedule.py compiles whole ones
    attend = functools.partial(attention_transposed, bound=bound, valid=tokens - 10, scale=math.log(2))
    found = compiled(topology, attend, *[((2, 3, channels, tokens), dtype)] * 3)
    assert ("attention_bounded" if bound else "attention_transposed") in found.as_text()
    assert found.memory_analysis().temp_size_in_bytes < 2**16


@pytest.mark.parametrize("pairs", ["neighbours", "halves"])
@pytest.mark.parametrize("topology", ["v5e:1x1", "v6e:1x1", "tpu7x:2x2x1"])
def test_prepare_compiles_and_copies_no_activation(topology, pairs):
    pytest.importorskip("libtpu", reason="the [tpu] extra is not installed")
    prepared = functools.partial(prepare, heads=6, pairs=pairs)
    x, vector, table = ((2, 1000, 384), jnp.bfloat16), ((64,), jnp.bfloat16), ((1000, 64), jnp.float32)
    found = compiled(topology, prepared, x, vector, vector, table, table)
    assert "prepare" in found.as_text()
    assert found.memory_analysis().temp_size_in_bytes < 3 * 1024 * 64 * 4  # the tables, transposed
