"""The Pallas kernels sum as XLA does, and Mosaic compiles them for the chips that they are for."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from benchmarks.estimate import chips, programs
from cogvideox_torchax.plan.programs import Work
from jax_kernels import group_norm
from jax_kernels.common.tiles import tiled_sublanes
from jax_kernels.group_norm import tpu, xla
from jax_kernels.group_norm.tpu import _column_bytes, _pixel_bytes, column_moments, image_moments
from tests.jax_kernels.chips import compiled_for, struct
from tests.reference import largest_error


def check(moments, x):
    """Check a kernel's moments against those of a reduction; of a single row the deviations are zeros."""
    with pltpu.force_tpu_interpret_mode():
        got = moments(x)
    for mine, plain in zip(got, xla.column_moments(x), strict=True):
        assert mine.shape == plain.shape
        np.testing.assert_allclose(mine, plain, rtol=0, atol=1e-6 * np.abs(plain).max())


every_block = pytest.mark.parametrize(
    ("videos", "length", "height", "width", "rows"),
    [(1, 8, 12, 16, 12), (2, 9, 6, 21, 3), (1, 2, 5, 3, 1), (2, 1, 1, 18, 1)],
)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@every_block
@pytest.mark.slow_cases("*-bfloat16")
def test_sums_are_those_of_a_reduction(videos, length, height, width, rows, dtype, monkeypatch):
    x = jax.random.normal(jax.random.key(0), (videos, length, height, width, 128), dtype) + 3
    block = min(16, width) * (_column_bytes(x) + rows * _pixel_bytes(x))
    monkeypatch.setattr(tpu, "BLOCK_BYTES", block)
    check(column_moments, x)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("videos", "height", "width", "rows"), [(1, 12, 40, 12), (2, 6, 7, 2), (1, 5, 64, 1)]
)
def test_an_images_sums_are_those_of_a_reduction(videos, height, width, rows, dtype, monkeypatch):
    x = jax.random.normal(jax.random.key(0), (videos, 1, height, width, 128), dtype) + 3
    assert tpu._image_rows_of_step(x) == height
    row, kept = (tiled_sublanes(width, jnp.dtype(kind)) * 128 for kind in (dtype, jnp.float32))
    monkeypatch.setattr(tpu, "BLOCK_BYTES", 3 * kept * 4 + rows * row * x.dtype.itemsize)
    assert tpu._image_rows_of_step(x) == rows
    check(image_moments, x)


@pytest.mark.parametrize(("moments", "frames"), [(column_moments, 2), (image_moments, 1)])
def test_statistics_far_from_zero_keep_their_digits(moments, frames):
    x = jax.random.normal(jax.random.key(0), (1, frames, 8, 16, 128)) + 1000
    with pltpu.force_tpu_interpret_mode():
        _, m2 = moments(x)
    exact = np.asarray(x, np.float64).var(2, keepdims=True) * x.shape[2]
    assert largest_error(m2, exact) < 1e-6


@pytest.mark.parametrize(("moments", "frames"), [(column_moments, 2), (image_moments, 1)])
@pytest.mark.slow_cases("_column_moments-2")
def test_its_derivatives_are_those_of_a_reduction(moments, frames):
    x = jax.random.normal(jax.random.key(0), (1, frames, 3, 4, 128))

    def squared(x, form):
        return sum(jnp.sum(part**2) for part in form(x))

    with pltpu.force_tpu_interpret_mode():
        got = jax.grad(squared)(x, moments)
    assert largest_error(got, jax.grad(squared)(x, xla.column_moments)) < 1e-5


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("length", [8, 9])
@pytest.mark.parametrize("topology", ["v5e:1x1", "v6e:1x1"])
@pytest.mark.slow_cases(but=["v6e:1x1-*-bfloat16"])
def test_mosaic_compiles_them_and_the_estimate_counts_their_bytes(topology, length, dtype):
    x, chip = struct(1, length, 64, 45, 256, dtype=dtype), chips.CHIPS[topology[:3]]
    sublanes = 8 if length == 8 else 16  # a tile holds eight
    pixels, columns = 64 * 45 * 256 * x.dtype.itemsize, 45 * 256 * 4
    compiled = compiled_for(topology, column_moments, x)
    plan = programs.read_times(Work("later", length, None, None), compiled, chip, 0.0, {})
    assert plan.kernels == 1
    assert plan.shares["kernels"] * chip.bandwidth == pytest.approx(sublanes * (pixels + 2 * columns))


@pytest.mark.parametrize(("topology", "width"), [("v6e:1x1", 90), ("v5e:1x1", 22)])
def test_mosaic_compiles_it_for_an_image(topology, width):
    assert "image_moments" in compiled_for(topology, image_moments, struct(1, 1, 16, width, 256)).as_text()


@pytest.mark.parametrize("shape", [(12, 9, 128, 128, 256), (24, 9, 128, 128, 128), (8, 9, 128, 128, 512)])
@pytest.mark.slow
@pytest.mark.product_cases("shape0", "shape2")
def test_many_videos_fit_the_memory_of_a_step_or_are_left_to_xla(shape):
    norm = functools.partial(group_norm, num_groups=4, channel_axis=-1, activation="silu")
    compiled_for("v5e:1x1", lambda x: norm(x, None, None), struct(*shape))
