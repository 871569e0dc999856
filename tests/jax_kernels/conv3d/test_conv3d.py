import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import conv3d
from jax_kernels.common.dispatch import Target
from jax_kernels.conv3d import op, reference, xla
from tests.jax_kernels.devices import answer, check_rounded_once, drawn, struct
from tests.reference import largest_error

TPU = Target("tpu")


@pytest.mark.parametrize(
    ("window", "seen", "form"),
    [
        ((3, 3, 3), 2 * 9 * 7 * 24 * 9 * 2, "patches"),
        ((3, 3, 3), 2 * 9 * 7 * 24 * 9 * 2 - 1, "summed"),  # windows see too much
        ((1, 1, 1), 0, "patches"),
        ((3, 1, 1), 0, "patches"),
    ],
)
def test_an_image_is_convolved_as_a_tpu_compiles_fast(window, seen, form, monkeypatch, on_tpu):
    monkeypatch.setattr(xla, "MOST_IN_PATCHES", seen)
    x, kernel, bias = drawn((2, 1, 9, 7, 24), (*window, 24, 6), (6,))
    assert xla.image_form(TPU, x, kernel) is getattr(xla, form)
    y, _ = conv3d(x, kernel, bias)
    want, _ = reference.conv3d(*(part.astype(jnp.float32) for part in (x, kernel, bias)))
    check_rounded_once(y, want)


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
    x, kernel = struct(1, frames, height, 90, channels), struct(3, 3, 3, channels, outputs)
    found = [answer(functools.partial(op._fastest, target), x, kernel) for target in (TPU, Target())]
    assert found == [name, "summed"]  # of bfloat16


@pytest.mark.parametrize(
    ("frames", "height", "outputs", "cached", "products"),
    [
        (9, 16, 6, False, 1 + 7),  # the first frame, then tiles of four
        (9, 16, 6, True, 3 + 7),
        (7, 16, 6, False, 1 + 7 + 4),  # tiles of four and of two
        (2, 15, 6, False, 3),  # frames too small to be filtered
        (2, 2, 300, True, 0),  # patches are smaller than the kernel
    ],
)
@pytest.mark.slow_cases("9-16-6-True-*")
def test_a_cpu_multiplies_less_and_has_the_derivatives_of_the_reference(
    frames, height, outputs, cached, products, monkeypatch
):
    monkeypatch.setattr(xla, "LARGE_KERNEL", 0)  # the kernel is copied, as large ones are
    of_cache = (2, 2, height, 16, 5) if cached else None
    x, kernel, cache = drawn((2, frames, height, 16, 5), (3, 3, 3, 5, outputs), of_cache, dtype=jnp.float32)
    run = lambda op: lambda x, kernel: op(x, kernel, None, cache)[0]  # noqa: E731
    assert jax.jit(run(conv3d)).lower(x, kernel).as_text().count("stablehlo.convolution") == products
    y, pull = jax.vjp(run(conv3d), x, kernel)
    want, pull_plain = jax.vjp(run(reference.conv3d), x, kernel)
    assert (
        np.max(
            [largest_error(*pair) for pair in zip((y, *pull(want)), (want, *pull_plain(want)), strict=True)]
        )
        <= 2e-6
    )
