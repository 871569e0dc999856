import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jax_kernels import conv3d
from jax_kernels.common import first_frame
from jax_kernels.conv3d import op, reference, xla

IMPLEMENTATIONS = ["direct", "summed", "folded", "patches", None]


def _inputs(frames=3, dtype=jnp.float32, taps=3):
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)  # noqa: E731
    return draw(2, frames, 5, 7, 4), draw(taps, 3, 3, 4, 6), draw(6)


def _torch_causal(x, kernel, bias, past):
    """torch's conv3d on (past, x): the definition."""
    frames = torch.from_numpy(np.concatenate([past, x], 1).astype(np.float32)).permute(0, 4, 1, 2, 3)
    weight = torch.from_numpy(np.array(kernel, np.float32)).permute(4, 3, 0, 1, 2)
    y = torch.nn.functional.conv3d(
        frames, weight, torch.from_numpy(np.array(bias, np.float32)), padding=(0, 1, 1)
    )
    return y.permute(0, 2, 3, 4, 1).numpy()


def check_rounded_once(got, sums):
    """Of sums in float32, which may have been added in another order."""
    assert got.dtype == jnp.bfloat16
    sums = np.array(sums)
    half_a_unit = np.exp2(np.floor(np.log2(np.abs(sums))) - 8)
    assert np.all(np.abs(np.array(got, np.float32) - sums) <= half_a_unit + 1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("frames", [1, 2, 3])
def test_start_of_a_video_repeats_its_first_frame(implementation, frames):
    x, kernel, bias = _inputs(frames)
    y, cache = conv3d(x, kernel, bias, implementation=implementation)
    past = np.repeat(np.array(x[:, :1]), 2, 1)
    np.testing.assert_allclose(np.array(y), _torch_causal(x, kernel, bias, past), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(np.array(cache), np.concatenate([past, np.array(x)], 1)[:, -2:])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("frames", [1, 3])
def test_start_of_a_video_may_have_zeros_before_it(implementation, frames):
    x, kernel, bias = _inputs(frames)
    y, cache = conv3d(x, kernel, bias, start="zeros", implementation=implementation)
    past = np.zeros((2, 2, 5, 7, 4), np.float32)
    np.testing.assert_allclose(np.array(y), _torch_causal(x, kernel, bias, past), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(np.array(cache), np.concatenate([past, np.array(x)], 1)[:, -2:])
    want, same = reference.conv3d(x, kernel, bias, start="zeros")
    np.testing.assert_allclose(np.array(y), np.array(want), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(np.array(cache), np.array(same))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_two_calls_with_the_cache_equal_one(implementation):
    x, kernel, bias = _inputs(5)
    whole, last = conv3d(x, kernel, bias, implementation=implementation)
    head, cache = conv3d(x[:, :1], kernel, bias, implementation=implementation)
    tail, cache = conv3d(x[:, 1:], kernel, bias, cache, implementation=implementation)
    np.testing.assert_allclose(np.concatenate([head, tail], 1), np.array(whole), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(np.array(cache), np.array(last))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bfloat16_sums_in_float32(implementation):
    x, kernel, bias = _inputs(3, jnp.bfloat16)
    y, cache = conv3d(x, kernel, bias, implementation=implementation)
    want, _ = reference.conv3d(*(a.astype(jnp.float32) for a in (x, kernel, bias)))
    assert y.dtype == cache.dtype == jnp.bfloat16
    # One rounding of the result: half a unit in the last place. A bfloat16 sum of the three taps would be off
    # by more.
    np.testing.assert_array_equal(np.array(y), np.array(want.astype(jnp.bfloat16)))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_residual_is_added_before_the_result_is_rounded(implementation):
    x, kernel, bias = _inputs(3, jnp.bfloat16)
    residual = jnp.asarray(np.random.default_rng(1).normal(size=(2, 3, 5, 7, 6)), jnp.bfloat16)
    y, cache = conv3d(x, kernel, bias, residual=residual, implementation=implementation)
    want, _ = reference.conv3d(*(a.astype(jnp.float32) for a in (x, kernel, bias)))
    check_rounded_once(y, want + residual)
    np.testing.assert_array_equal(np.array(cache), np.array(x[:, 1:]))


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("value", [3.0, jnp.inf, jnp.nan])
def test_what_is_waited_for_is_not_part_of_the_result(value, with_bias):
    x, kernel, bias = _inputs(3)
    bias = bias if with_bias else None
    got, _ = conv3d(x, kernel, bias, after=jnp.full((2, 3, 5, 7, 6), value))
    np.testing.assert_array_equal(np.array(got), np.array(conv3d(x, kernel, bias)[0]))


@pytest.mark.usefixtures("shapes_unchecked")
def test_a_residual_of_another_shape_is_refused():
    x, kernel, bias = _inputs(3)
    with pytest.raises(ValueError, match="residual of shape"):
        conv3d(x, kernel, bias, residual=jnp.zeros((2, 1, 5, 7, 6)))


def test_float32_asks_for_full_precision_on_every_path():
    x, kernel, bias = _inputs()
    for implementation in ("direct", "summed", "folded", "patches"):
        traced = jax.jit(lambda *a, i=implementation: conv3d(*a, implementation=i)).trace(x, kernel, bias)
        for platform in ("cpu", "tpu"):
            text = traced.lower(lowering_platforms=(platform,)).as_text()
            products = [
                line for line in text.splitlines() if re.search(r"\.(dot_general|convolution)\b", line)
            ]
            assert products, implementation
            assert all("HIGHEST" in line for line in products), implementation


def test_no_bias_and_a_kernel_of_one_frame():
    x, kernel, _ = _inputs(2, taps=1)
    y, cache = conv3d(x, kernel)
    assert cache is None
    np.testing.assert_allclose(
        np.array(y), _torch_causal(x, kernel, np.zeros(6), np.array(x[:, :0])), atol=1e-5
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x, k, c: (x[..., :3], k, c), "3 channels for a kernel that takes 4"),
        (lambda x, k, c: (x, k, c[:, :1]), "got a cache float32"),
        (lambda x, k, c: (x, k, c.astype(jnp.bfloat16)), "got a cache bfloat16"),
        (lambda x, k, c: (x, k[:, :2], c), "must be odd"),
        (lambda x, k, c: (x[0], k, c), "N T H W I"),
    ],
)
@pytest.mark.usefixtures("shapes_unchecked")
def test_bad_input_is_named(change, words):
    x, kernel, _ = _inputs()
    x, kernel, cache = change(x, kernel, x[:, :2])
    with pytest.raises(ValueError, match=words):
        conv3d(x, kernel, None, cache)


@pytest.mark.usefixtures("shapes_unchecked")
def test_a_bias_of_another_length_is_refused():
    x, kernel, bias = _inputs()
    with pytest.raises(ValueError, match=r"conv3d got a bias of shape \(1,\) for 6 channels"):
        conv3d(x, kernel, bias[:1])


@pytest.mark.usefixtures("shapes_unchecked")
def test_unknown_start_is_named():
    x, kernel, _ = _inputs()
    with pytest.raises(ValueError, match="'mirror' is not one of"):
        conv3d(x, kernel, start="mirror")  # pyright: ignore


@pytest.mark.usefixtures("shapes_unchecked")
def test_unknown_implementation_is_named():
    x, kernel, _ = _inputs()
    with pytest.raises(ValueError, match="'fast' is not one of"):
        conv3d(x, kernel, implementation="fast")


@pytest.mark.parametrize("start", ["replicate", "zeros"])
@pytest.mark.parametrize(
    ("window", "seen", "form"),
    [
        ((3, 3, 3), 2 * 9 * 7 * 24 * 9 * 2, "patches"),
        ((3, 3, 3), 2 * 9 * 7 * 24 * 9 * 2 - 1, "summed"),  # windows see too much
        ((1, 1, 1), 0, "patches"),
        ((3, 1, 1), 0, "patches"),
    ],
)
def test_an_image_is_convolved_as_a_tpu_compiles_fast(window, seen, form, start, monkeypatch):
    monkeypatch.setattr(first_frame, "is_tpu_device", lambda: True)
    monkeypatch.setattr(xla, "MOST_IN_PATCHES", seen)
    jax.clear_caches()  # what was traced before is for another platform
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.bfloat16)  # noqa: E731
    x, kernel, bias = draw(2, 1, 9, 7, 24), draw(*window, 24, 6), draw(6)
    assert xla.form_of_image(x, kernel) is getattr(xla, form)
    y, _ = conv3d(x, kernel, bias, start=start)
    want, _ = reference.conv3d(*(part.astype(jnp.float32) for part in (x, kernel, bias)), start=start)
    check_rounded_once(y, want)
    jax.clear_caches()


@pytest.mark.parametrize(
    ("frames", "channels", "outputs", "height", "name"),
    [
        (2, 16, 512, 60, "patches"),  # what a decoder begins with
        (2, 512, 32, 60, "patches"),  # what an encoder ends with
        (2, 512, 512, 60, "direct"),
        (8, 512, 32, 60, "direct"),  # of which windows see too much
        (8, 3, 128, 480, "folded"),  # what an encoder begins with
    ],
)
def test_how_a_tpu_convolves_frames(frames, channels, outputs, height, name):
    x = jax.ShapeDtypeStruct((1, frames, height, 90, channels), jnp.bfloat16)
    kernel = jax.ShapeDtypeStruct((3, 3, 3, channels, outputs), jnp.bfloat16)
    found = []
    jax.eval_shape(lambda x, kernel: found.append(op._for_tpu(x, kernel)), x, kernel)
    assert found == [name]
