import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import downsample, upsample
from jax_kernels.resample import reference, xla
from tests.jax_kernels.meshes import on_mesh
from tests.reference import largest_error


def _inputs(frames, height=4, width=6, dtype=jnp.float32):
    rng = np.random.default_rng(frames)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)  # noqa: E731
    return draw(2, frames, height, width, 4), draw(3, 3, 4, 5), draw(5)


@pytest.mark.parametrize("first_frame_alone", [False, True])
@pytest.mark.parametrize("in_time", [False, True])
@pytest.mark.parametrize(("frames", "width"), [(1, 6), (2, 7), (3, 7), (4, 6), (9, 6)])
def test_resampling_is_its_definition_whichever_frame_is_alone(frames, width, in_time, first_frame_alone):
    inputs = _inputs(frames, width=width)
    up, down = {"expand_time": in_time}, {"compress_time": in_time}
    got, want = (
        f(*inputs, **up, first_frame_alone=first_frame_alone) for f in (upsample, reference.upsample)
    )
    assert got.shape[1] == (2 * frames - first_frame_alone if in_time else frames)
    assert largest_error(got, want) < 1e-6
    if not in_time or (frames - first_frame_alone) % 2 == 0:  # pairs
        got, want = (
            f(*inputs, **down, first_frame_alone=first_frame_alone)
            for f in (downsample, reference.downsample)
        )
        assert largest_error(got, want) < 1e-6


def image(height, width):
    x, kernel, bias = _inputs(1, height, width, jnp.bfloat16)
    return x[:1], kernel, bias


def check_rounded_once(got, operands):
    assert got.dtype == jnp.bfloat16
    want = reference.downsample(*(a.astype(jnp.float32) for a in operands), compress_time=False)
    np.testing.assert_allclose(np.array(got, np.float32), np.array(want), rtol=2**-8, atol=2**-8)


@pytest.mark.parametrize(("height", "width"), [(4, 6), (5, 6), (4, 7), (2, 2), (3, 9)])
@pytest.mark.parametrize("most", [0, xla.MOST_IN_PATCHES])
def test_an_image_is_halved_as_a_tpu_compiles_fast(height, width, most, monkeypatch, on_tpu):
    monkeypatch.setattr(xla, "MOST_IN_PATCHES", most)
    operands = image(height, width)
    halve = functools.partial(downsample, compress_time=True, first_frame_alone=True)
    text = str(jax.make_jaxpr(halve)(*operands))
    assert ("conv_general_dilated" in text) == (most == 0)
    check_rounded_once(halve(*operands), operands)


def test_an_image_in_shards_is_halved_with_its_neighbours_columns(interpreted_on_mesh):
    operands = image(4, 24)
    got = on_mesh(functools.partial(downsample, compress_time=False), 1, 1, 1, 4)(*operands)
    check_rounded_once(got, operands)
