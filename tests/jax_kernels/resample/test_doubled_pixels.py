"""The Pallas kernel repeats pixels, and Mosaic compiles it for the chips that it is for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from cogvideox_torchax.plan import chips, programs
from jax_kernels import upsample
from jax_kernels.common.tiles import SWITCH
from jax_kernels.resample import tpu, xla
from jax_kernels.resample.tpu import _pixel_bytes, doubled_pixels


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("videos", "length", "width", "blocks"), [(1, 8, 6, 1), (2, 9, 7, 3), (1, 1, 5, 5)])
def test_a_pixel_becomes_four(videos, length, width, blocks, dtype, monkeypatch):
    x = jax.random.normal(jax.random.key(0), (videos, length, 3, width, 128), dtype)
    monkeypatch.setattr(
        tpu,
        "BLOCK_BYTES",
        -(-width // blocks) * _pixel_bytes(x),
    )
    with pltpu.force_tpu_interpret_mode():
        got = doubled_pixels(x)
    np.testing.assert_array_equal(got, np.repeat(np.repeat(x, 2, axis=2), 2, axis=3))


def test_its_derivatives_are_those_of_repeating():
    x = jax.random.normal(jax.random.key(0), (1, 2, 3, 4, 128))

    def squared(x, form):
        return jnp.sum(jnp.sin(form(x)) ** 2)

    with pltpu.force_tpu_interpret_mode():
        got = jax.grad(squared)(x, doubled_pixels)
    np.testing.assert_allclose(got, jax.grad(squared)(x, xla.double_pixels), rtol=1e-5)


def lowered_for_tpu(shape, dtype):
    x, kernel = jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct((3, 3, shape[-1], 128), dtype)
    upsampled = jax.jit(lambda x, kernel: upsample(x, kernel, None, expand_time=False))
    return upsampled.trace(x, kernel).lower(lowering_platforms=("tpu",)).as_text()


@pytest.mark.parametrize(
    ("shape", "dtype", "taken"),
    [
        ((1, 16, 128, 256, 128), jnp.bfloat16, True),  # more than are upsampled by one kernel
        ((1, 8, 128, 256, 128), jnp.float32, True),
        ((1, 16, 128, 256, 128), jnp.float16, False),  # which Mosaic cannot load
        ((1, 16, 128, 256, 64), jnp.bfloat16, False),  # half a tile of channels
        ((1, 9000, 128, 256, 128), jnp.bfloat16, False),  # more of a pixel than a step can hold
        ((1, 16, 64, 64, 128), jnp.bfloat16, False),  # small: XLA chooses another order
    ],
)
def test_large_frames_that_the_kernel_takes_go_through_it_on_a_tpu(shape, dtype, taken):
    assert ("doubled_pixels" in lowered_for_tpu(shape, dtype)) == taken


def test_the_switch_leaves_the_work_to_xla(monkeypatch):
    monkeypatch.setenv(SWITCH, "off")
    shape = 1, 16, 128, 288, 128  # which nothing else has traced
    assert "doubled_pixels" not in lowered_for_tpu(shape, jnp.bfloat16)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("length", [8, 9])
@pytest.mark.parametrize("topology", ["v5e:1x1", "v6e:1x1"])
@pytest.mark.slow_cases(but=["v6e:1x1-*-bfloat16"])
def test_mosaic_compiles_it_and_the_planner_counts_its_bytes(topology, length, dtype):
    pytest.importorskip("libtpu", reason="the [tpu] extra is not installed")
    device = jax.sharding.SingleDeviceSharding(chips.topology_devices(topology)[0])
    x = jax.ShapeDtypeStruct((1, length, 16, 90, 256), dtype, sharding=device)
    compiled = jax.jit(doubled_pixels).lower(x).compile()
    chip = chips.CHIPS[topology[:3]]
    plan = programs.read_program("later", length, compiled, chip, 0.0)
    assert plan.kernels == 1
    sublanes = 8 if length == 8 else 16  # a tile holds eight
    moved = 5 * sublanes * 16 * 90 * 256 * x.dtype.itemsize
    assert plan.shares["kernels"] * chip.bandwidth == pytest.approx(moved)
