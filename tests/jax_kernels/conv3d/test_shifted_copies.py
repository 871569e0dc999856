"""The Pallas kernel writes what its definition says, and Mosaic compiles it for the chips that it is for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from cogvideox_torchax.plan import chips, programs
from jax_kernels import conv3d
from jax_kernels.common.tiles import SWITCH
from jax_kernels.conv3d import tpu
from jax_kernels.conv3d.tpu import _pixel_bytes, shifted_copies
from tests.reference import largest_error

PAST = 2


def frames_of(videos, length, height, width, channels, dtype):
    """A cache and the frames after it."""
    keys = jax.random.split(jax.random.key(0))
    shapes = [(videos, n, height, width, channels) for n in (PAST, length)]
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("length", [2, 3, 8, 9])
@pytest.mark.parametrize(("videos", "width", "blocks", "sparing"), [(1, 7, 1, False), (2, 8, 3, True)])
def test_copies_are_the_frames_under_each_earlier_tap(
    dtype, length, videos, width, blocks, sparing, monkeypatch
):
    cache, x = frames_of(videos, length, 3, width, 128, dtype)
    pixel = _pixel_bytes(x, PAST)
    monkeypatch.setattr(tpu, "BLOCK_BYTES", 3 * width // blocks * pixel)
    with pltpu.force_tpu_interpret_mode():
        copies, latest = shifted_copies(cache, x, sparing)
    frames = np.concatenate([cache, x], axis=1)
    for tap, copy in enumerate(copies):
        np.testing.assert_array_equal(copy, frames[:, tap : tap + length])
    np.testing.assert_array_equal(latest, frames[:, -PAST:])


@pytest.mark.parametrize(("length", "channels"), [(2, 128), (5, 128), (3, 256)])
def test_a_convolution_of_the_copies_is_the_convolution(length, channels):
    cache, x = frames_of(1, length, 4, 5, channels, jnp.float32)
    kernel, bias = jax.random.normal(jax.random.key(1), (3, 3, 3, channels, 128)), jnp.arange(128.0)
    residual = jnp.ones((1, length, 4, 5, 128))
    with pltpu.force_tpu_interpret_mode():
        got, latest = conv3d(x, kernel, bias, cache, residual=residual, implementation="copied")
    want, cache = conv3d(x, kernel, bias, cache, residual=residual, implementation="direct")
    assert largest_error(got, want) < 1e-5
    np.testing.assert_array_equal(latest, cache)


def test_its_derivatives_are_those_of_the_convolution():
    cache, x = frames_of(1, 3, 2, 2, 128, jnp.float32)
    kernel = jax.random.normal(jax.random.key(1), (3, 3, 3, 128, 4))

    def squared(cache, x, implementation):
        return jnp.sum(conv3d(x, kernel, None, cache, implementation=implementation)[0] ** 2)

    gradient = jax.grad(squared, argnums=(0, 1))
    with pltpu.force_tpu_interpret_mode():
        got = gradient(cache, x, "copied")
    for mine, direct in zip(got, gradient(cache, x, "direct"), strict=True):
        assert largest_error(mine, direct) < 1e-5


def lowered_for_tpu(x, out_channels=128, frames=3):
    """A convolution of such frames as it is given to the TPU's compiler."""
    kernel = jax.ShapeDtypeStruct((frames, 3, 3, x.shape[-1], out_channels), x.dtype)
    return jax.jit(conv3d).trace(x, kernel).lower(lowering_platforms=("tpu",)).as_text()


@pytest.mark.parametrize(
    ("shape", "dtype", "taken"),
    [
        ((1, 8, 128, 256, 128), jnp.bfloat16, True),
        ((1, 8, 128, 256, 128), jnp.float32, True),
        ((1, 8, 128, 256, 128), jnp.float16, False),  # which Mosaic cannot load
        ((1, 8, 128, 256, 64), jnp.bfloat16, False),  # half a tile of channels
        ((1, 1, 128, 256, 128), jnp.bfloat16, False),  # too short to be the next past
        ((1, 6000, 128, 256, 128), jnp.bfloat16, False),  # more of a pixel than a step can hold
        ((1, 8, 64, 64, 128), jnp.bfloat16, False),  # small: XLA's 3-D form is faster
    ],
)
def test_large_frames_that_the_kernel_takes_go_through_it_on_a_tpu(shape, dtype, taken):
    assert ("shifted_copies" in lowered_for_tpu(jax.ShapeDtypeStruct(shape, dtype))) == taken


def test_the_switch_leaves_the_work_to_xla(monkeypatch):
    monkeypatch.setenv(SWITCH, "off")
    x = jax.ShapeDtypeStruct((1, 8, 128, 257, 128), jnp.bfloat16)  # which nothing else has traced
    assert "shifted_copies" not in lowered_for_tpu(x)


def test_large_frames_can_be_differentiated():
    x = jax.ShapeDtypeStruct((1, 2, 128, 256, 128), jnp.float32)
    kernel = jax.ShapeDtypeStruct((3, 3, 3, 128, 128), jnp.float32)
    gradient = jax.eval_shape(jax.grad(lambda x, kernel: jnp.sum(conv3d(x, kernel)[0])), x, kernel)
    assert gradient.shape == x.shape


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("length", [8, 9])
@pytest.mark.parametrize("topology", ["v5e:1x1", "v6e:1x1"])
@pytest.mark.slow_cases(but=["v6e:1x1-9-bfloat16"])
def test_mosaic_compiles_it_in_place_and_the_planner_counts_its_bytes(topology, length, dtype):
    pytest.importorskip("libtpu")
    device = jax.sharding.SingleDeviceSharding(chips.topology_devices(topology)[0])
    cache, x = (
        jax.ShapeDtypeStruct((1, frames, 16, 48, 256), dtype, sharding=device) for frames in (PAST, length)
    )
    compiled = jax.jit(shifted_copies).lower(cache, x).compile()
    assert "output_to_operand_aliasing={{2}: (0, {})}" in compiled.as_text()
    sublanes = 8 if length == 8 else 16  # a tile holds eight
    moved = PAST + sublanes + PAST * sublanes + PAST  # frames in, and frames out
    chip = chips.CHIPS[topology[:3]]
    plan = programs.read_program("later", length, compiled, chip, 0.0)
    assert plan.shares["kernels"] * chip.bandwidth == pytest.approx(moved * 16 * 48 * 256 * x.dtype.itemsize)
    assert plan.seconds == sum(plan.shares.values())
    assert plan.kernels == plan.kernels_by_bytes == 1
