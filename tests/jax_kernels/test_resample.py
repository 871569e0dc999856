import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import downsample, reference, upsample
from tests.reference import largest_error


def _inputs(frames, height=4, width=6, dtype=jnp.float32):
    rng = np.random.default_rng(frames)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)  # noqa: E731
    return draw(2, frames, height, width, 4), draw(3, 3, 4, 5), draw(5)


@pytest.mark.parametrize("frames", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("expand_time", [False, True])
def test_upsample_equals_doubling_before_the_convolution(frames, expand_time):
    inputs = _inputs(frames)
    got, want = (f(*inputs, expand_time=expand_time) for f in (upsample, reference.upsample))
    assert largest_error(got, want) < 1e-6


@pytest.mark.parametrize("frames", [1, 2, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("compress_time", [False, True])
@pytest.mark.parametrize("width", [6, 7])
def test_downsample_equals_averaging_then_striding(frames, compress_time, width):
    inputs = _inputs(frames, width=width)
    got, want = (f(*inputs, compress_time=compress_time) for f in (downsample, reference.downsample))
    assert largest_error(got, want) < 1e-6


@pytest.mark.parametrize(
    "resample", [lambda *a: upsample(*a, expand_time=True), lambda *a: downsample(*a, compress_time=True)]
)
def test_bfloat16_keeps_its_dtype_and_sums_in_float32(resample):
    inputs = _inputs(5, dtype=jnp.bfloat16)
    got, want = resample(*inputs), resample(*(a.astype(jnp.float32) for a in inputs))
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.array(got, np.float32), np.array(want), rtol=2**-7, atol=0.05)
