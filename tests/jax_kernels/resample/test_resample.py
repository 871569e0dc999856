import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cogvideox_torchax.vae.chunks import first_frame_is_alone
from jax_kernels import downsample, upsample
from jax_kernels.resample import reference, xla
from tests.jax_kernels.meshes import on_mesh
from tests.reference import largest_error


def _inputs(frames, height=4, width=6, dtype=jnp.float32):
    rng = np.random.default_rng(frames)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)  # noqa: E731
    return draw(2, frames, height, width, 4), draw(3, 3, 4, 5), draw(5)


@pytest.mark.parametrize("frames", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("expand_time", [False, True])
def test_upsample_equals_doubling_before_the_convolution(frames, expand_time):
    inputs = _inputs(frames)
    options = {"expand_time": expand_time, "lone_first": first_frame_is_alone(frames)}
    got, want = (f(*inputs, **options) for f in (upsample, reference.upsample))
    assert largest_error(got, want) < 1e-6


@pytest.mark.parametrize("frames", [1, 2, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("compress_time", [False, True])
@pytest.mark.parametrize("width", [6, 7])
def test_downsample_equals_averaging_then_striding(frames, compress_time, width):
    inputs = _inputs(frames, width=width)
    options = {"compress_time": compress_time, "lone_first": first_frame_is_alone(frames)}
    got, want = (f(*inputs, **options) for f in (downsample, reference.downsample))
    assert largest_error(got, want) < 1e-6


@pytest.mark.parametrize("lone_first", [False, True])
@pytest.mark.parametrize("frames", [1, 2, 3, 4])
def test_the_caller_says_which_frame_is_alone(frames, lone_first):
    x, kernel, bias = _inputs(frames)
    up = upsample(x, kernel, bias, expand_time=True, lone_first=lone_first)
    assert up.shape[1] == 2 * frames - lone_first
    want = reference.upsample(x, kernel, bias, expand_time=True, lone_first=lone_first)
    assert largest_error(up, want) < 1e-6
    shrink = functools.partial(downsample, x, kernel, bias, compress_time=True, lone_first=lone_first)
    if (frames - lone_first) % 2:
        with pytest.raises(ValueError, match=f"got {frames} frames: .* pairs"):
            shrink()
    else:
        want = reference.downsample(x, kernel, bias, compress_time=True, lone_first=lone_first)
        assert largest_error(shrink(), want) < 1e-6


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
    halve = functools.partial(downsample, compress_time=True, lone_first=True)
    text = str(jax.make_jaxpr(halve)(*operands))
    assert ("conv_general_dilated" in text) == (most == 0)
    check_rounded_once(halve(*operands), operands)


def test_an_image_in_shards_is_halved_with_its_neighbours_columns(interpreted_on_mesh):
    operands = image(4, 24)
    got = on_mesh(functools.partial(downsample, compress_time=False), 1, 1, 1, 4)(*operands)
    check_rounded_once(got, operands)


UP, DOWN = functools.partial(upsample, expand_time=False), functools.partial(downsample, compress_time=False)


@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize(
    ("resample", "change", "words"),
    [
        (UP, lambda x, k, b: (x, k[:2, :2], b), "upsample got a kernel of 2 x 2 pixels: both must be odd"),
        (UP, lambda x, k, b: (x, k[:, :2], b), "upsample got a kernel of 3 x 2 pixels: both must be odd"),
        (
            DOWN,
            lambda x, k, b: (x, k[:2, :2], b),
            "downsample got a kernel of 2 x 2 pixels: it must",
        ),
        (UP, lambda x, k, b: (x, k, b[:1]), "a bias of shape (1,) for 5 channels"),
        (DOWN, lambda x, k, b: (x, k, b[:1]), "a bias of shape (1,) for 5 channels"),
        (UP, lambda x, k, b: (x[..., :3], k, b), "got 3 channels for a kernel that takes 4"),
        (DOWN, lambda x, k, b: (x[0], k, b), "it needs N T H W I and kh kw I O"),
    ],
)
def test_bad_input_is_named(resample, change, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        resample(*change(*_inputs(2)))
