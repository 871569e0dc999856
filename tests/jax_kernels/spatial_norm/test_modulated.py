"""The Pallas kernel takes blocks of any number of columns, and Mosaic compiles it for the chips it is for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from cogvideox_torchax.plan import chips, programs
from jax_kernels.common.columns import Split, split_columns
from jax_kernels.spatial_norm import tpu
from jax_kernels.spatial_norm.tpu import _cell_bytes, modulated


def inputs_of(videos, length, rows, columns, tall, wide, channels, dtype):
    """Activations, coefficients, latents with a channel of ones, and the kernel for both halves."""
    keys = jax.random.split(jax.random.key(0), 5)
    x = jax.random.normal(keys[0], (videos, length, rows * tall, columns * wide, channels), dtype)
    scale, shift = (jax.random.normal(key, (videos, channels)) for key in keys[1:3])
    zq = jax.random.normal(keys[3], (videos, length, rows, columns, 17), dtype).at[..., -1].set(1)
    return x, scale, shift, zq, jax.random.normal(keys[4], (17, 2 * channels), dtype)


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("videos", "length", "columns", "blocks", "tall", "wide"),
    [(1, 8, 6, 1, 8, 8), (2, 9, 7, 3, 2, 3), (1, 3, 5, 5, 1, 1), (2, 1, 4, 2, 4, 4)],
)
@pytest.mark.slow_cases("*-bfloat16-True", "*-float32-False")
def test_each_latent_modulates_the_pixels_above_it(
    videos, length, columns, blocks, tall, wide, dtype, silu, monkeypatch
):
    x, scale, shift, zq, kernel = inputs_of(videos, length, 2, columns, tall, wide, 128, dtype)
    cells = -(-columns // blocks)
    monkeypatch.setattr(tpu, "BLOCK_BYTES", cells * _cell_bytes(x, zq))
    with pltpu.force_tpu_interpret_mode():
        got = modulated(x, scale, shift, zq, kernel, silu=silu)
    full = jnp.repeat(jnp.repeat(zq, tall, axis=2), wide, axis=3).astype(jnp.float32)
    both = jnp.einsum("nthwz,zc->nthwc", full, kernel.astype(jnp.float32), precision="highest")
    y, b = both[..., :128], both[..., 128:]
    want = (x.astype(jnp.float32) * scale[:, None, None, None] + shift[:, None, None, None]) * y + b
    want = jax.nn.silu(want) if silu else want
    assert got.dtype == dtype
    np.testing.assert_allclose(
        np.array(got, np.float32), want, rtol=2**-8 if dtype == jnp.bfloat16 else 1e-5, atol=1e-5
    )


def test_a_product_of_float32_is_one_in_full_precision():
    inputs = inputs_of(1, 2, 2, 3, 2, 2, 128, jnp.float32)
    assert "Precision.HIGHEST" in str(jax.make_jaxpr(lambda *arrays: modulated(*arrays, silu=True))(*inputs))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("length", [8, 9])
@pytest.mark.parametrize("topology", ["v5e:1x1", "v6e:1x1"])
@pytest.mark.slow_cases(but=["v6e:1x1-*-bfloat16"])
def test_mosaic_compiles_it_and_the_planner_counts_its_bytes(topology, length, dtype):
    pytest.importorskip("libtpu", reason="the [tpu] extra is not installed")
    device = jax.sharding.SingleDeviceSharding(chips.topology_devices(topology)[0])
    inputs = jax.eval_shape(lambda: inputs_of(1, length, 4, 45, 4, 4, 256, dtype))
    inputs = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=device) for a in inputs]
    compiled = jax.jit(modulated, static_argnames="silu").lower(*inputs, silu=True).compile()
    plan = programs.read_program("later", length, compiled, chips.CHIPS[topology[:3]], 0.0)
    assert plan.kernels == 1
    sublanes = 8 if length == 8 else 16  # a tile holds eight
    pixels = 16 * 180 * 256 * dtype(0).itemsize
    moved = plan.shares["kernels"] * chips.CHIPS[topology[:3]].bandwidth
    assert moved == pytest.approx(2 * sublanes * pixels, rel=0.1)  # and the latents


def test_latents_that_only_pad_a_width_have_no_derivatives():
    x, scale, shift, zq, _ = inputs_of(1, 2, 2, 4, 2, 2, 128, jnp.float32)
    kernel, bias = jnp.ones((17, 128)), jnp.ones(128)

    @jax.jit  # differentiated from outside: rules are traced when nothing says how columns are split
    def modulate(x):
        with split_columns(Split(real=3, padded=4)):
            return tpu.by_kernel("silu", False, x, scale, shift, zq, (kernel, bias), (kernel, bias))

    with pltpu.force_tpu_interpret_mode():
        y, tangent = jax.jvp(modulate, (x,), (jnp.ones_like(x),))
    for found in (y, tangent):
        assert not jnp.any(found[:, :, :, 6:])
        assert jnp.any(found[:, :, :, :6])
