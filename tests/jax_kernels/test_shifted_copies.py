"""The Pallas kernel writes what its definition says, and Mosaic compiles it for the chips that it is for."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from cogvideox_torchax import planner
from jax_kernels import conv3d
from jax_kernels.shifted_copies import SWITCH, shifted_copies, takes
from tests.reference import largest_error

module = importlib.import_module("jax_kernels.shifted_copies")  # the package has the function by that name
PAST = 2


def frames_of(videos, length, height, width, channels, dtype):
    """A cache and the frames after it."""
    keys = jax.random.split(jax.random.key(0))
    shapes = [(videos, n, height, width, channels) for n in (PAST, length)]
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("length", [2, 3, 8, 9])
@pytest.mark.parametrize(("videos", "width", "columns"), [(1, 7, 7), (2, 8, 5)])
def test_copies_are_the_frames_under_each_earlier_tap(dtype, length, videos, width, columns, monkeypatch):
    cache, x = frames_of(videos, length, 3, width, 128, dtype)
    pixel = videos * 16 * 128 * x.dtype.itemsize * (2 * PAST + 1)
    monkeypatch.setattr(module, "BLOCK_BYTES", columns * pixel)  # of 8 then 4 are a block
    with pltpu.force_tpu_interpret_mode():
        copies, latest = shifted_copies(cache, x)
    frames = np.concatenate([cache, x], axis=1)
    for tap, copy in enumerate(copies):
        np.testing.assert_array_equal(copy, frames[:, tap : tap + length])
    np.testing.assert_array_equal(latest, frames[:, -PAST:])


@pytest.mark.parametrize("length", [2, 5])
def test_a_convolution_of_the_copies_is_the_convolution(length):
    cache, x = frames_of(1, length, 4, 5, 128, jnp.float32)
    kernel, bias = jax.random.normal(jax.random.key(1), (3, 3, 3, 128, 4)), jnp.arange(4.0)
    residual = jnp.ones((1, length, 4, 5, 4))
    with pltpu.force_tpu_interpret_mode():
        got, latest = conv3d(x, kernel, bias, cache, residual=residual, implementation="copied")
    want, cache = conv3d(x, kernel, bias, cache, residual=residual, implementation="direct")
    assert largest_error(got, want) < 1e-5
    np.testing.assert_array_equal(latest, cache)


def test_what_the_kernel_does_not_take_is_left_to_xla(monkeypatch):
    _, x = frames_of(1, 8, 2, 2, 128, jnp.bfloat16)
    assert takes(x, PAST)
    assert not takes(x[..., :64], PAST)  # half a tile of channels
    assert not takes(x[:, :1], PAST)  # too short to be the next past
    monkeypatch.setenv(SWITCH, "off")
    assert not takes(x, PAST)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("length", [8, 9])
@pytest.mark.parametrize("topology", ["v5e:1x1", "v6e:1x1"])
def test_mosaic_compiles_it(topology, length, dtype):
    device = jax.sharding.SingleDeviceSharding(planner.topology_devices(topology)[0])
    cache, x = (
        jax.ShapeDtypeStruct((1, frames, 16, 360, 256), dtype, sharding=device) for frames in (PAST, length)
    )
    compiled = jax.jit(shifted_copies).lower(cache, x).compile()
    sublanes = 8 if length == 8 else 16  # a tile holds eight
    moved = PAST + sublanes + PAST * sublanes + PAST  # frames in, and frames out
    (counted,) = planner.kernel_bytes(compiled.as_text())
    assert counted == moved * 16 * 360 * 256 * x.dtype.itemsize
