"""A norm's sums keep their digits, as Pallas kernels too, which Mosaic compiles."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from benchmarks.plan import hlo
from jax_kernels import group_norm
from jax_kernels.common import columns, dispatch, tiles
from jax_kernels.group_norm import op, tpu, xla
from tests.jax_kernels.devices import compiled_for, on_mesh, struct
from tests.reference import tpu_interpreter

moments = functools.partial(op.moments, dispatch.Target())


def test_an_empty_batch_stays_empty():
    x = jnp.zeros((0, 8, 128, 256, 128))
    assert group_norm(x, None, None, num_groups=4, channel_axis=-1, activation="silu").shape == x.shape


def test_constant_input_has_variance_zero():
    x = jnp.full((1, 4, 3, 8, 8), 1234.567, jnp.float32)
    assert (moments(x, num_groups=2).variance == 0).all()
    assert (group_norm(x, None, jnp.ones(4), num_groups=2) == 1).all()


def test_no_temporary_of_the_size_of_the_input():
    x = jax.ShapeDtypeStruct((1, 64, 64, 64, 32), jnp.float32)
    compiled = jax.jit(lambda x: moments(x, num_groups=8, channel_axis=-1)).lower(x).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 64**3 * 32 * 4 / 8


def check(moments, x):
    """Check a kernel's moments, and derivatives of them; of a single row the deviations are zeros."""
    with tpu_interpreter():
        got, slopes = jax.jvp(moments, (x,), (x,))
    exact = np.asarray(x, np.float64)
    mean, m2 = exact.mean(2, keepdims=True), exact.var(2, keepdims=True) * x.shape[2]
    _, wanted_slopes = jax.jvp(xla.column_moments, (x,), (x,))
    for mine, plain in zip((*got, *slopes), (mean, m2, *wanted_slopes), strict=True):
        np.testing.assert_allclose(mine, plain, rtol=0, atol=1e-6 * np.abs(plain).max())


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("videos", "length", "height", "width", "rows"),
    [(1, 8, 12, 16, 12), (2, 9, 6, 21, 3), (1, 2, 5, 3, 1), (2, 1, 1, 18, 1)],
)
@pytest.mark.slow_cases("*-bfloat16", "2-*", "1-8-*")
def test_sums_keep_their_digits_far_from_zero(videos, length, height, width, rows, dtype, monkeypatch):
    x = jax.random.normal(jax.random.key(0), (videos, length, height, width, 128), dtype) + 1000
    monkeypatch.setattr(
        tpu, "BLOCK_BYTES", min(16, width) * (tpu._column_bytes(x) + rows * tpu._pixel_bytes(x))
    )
    check(tpu.column_moments, x)


@pytest.mark.parametrize(
    ("videos", "height", "width", "rows", "dtype"),
    [(1, 12, 40, 12, jnp.float32), (2, 6, 7, 2, jnp.bfloat16), (1, 5, 64, 1, jnp.float32)],
)
@pytest.mark.slow_cases(but=["1-5-64-1-float32"])
def test_an_images_sums_keep_their_digits_far_from_zero(videos, height, width, rows, dtype, monkeypatch):
    x = jax.random.normal(jax.random.key(0), (videos, 1, height, width, 128), dtype) + 1000
    assert tpu._image_rows_of_step(x) == height
    row, kept = (tiles.tiled_sublanes(width, jnp.dtype(kind)) * 128 for kind in (dtype, jnp.float32))
    monkeypatch.setattr(tpu, "BLOCK_BYTES", 3 * kept * 4 + rows * row * x.dtype.itemsize)
    assert tpu._image_rows_of_step(x) == rows
    check(tpu.image_moments, x)


@pytest.mark.parametrize(
    ("topology", "name", "shape", "dtype"),
    [
        *(
            (topology, "column_moments", (1, length, 64, 45, 256), dtype)
            for topology in ("v5e:1x1", "v6e:1x1")
            for length in (8, 9)
            for dtype in (jnp.float32, jnp.bfloat16)
        ),
        ("v6e:1x1", "image_moments", (1, 1, 16, 90, 256), jnp.bfloat16),
        ("v5e:1x1", "image_moments", (1, 1, 16, 22, 256), jnp.bfloat16),
    ],
)
@pytest.mark.slow_cases("v5e:1x1-column*", "*-float32")
def test_mosaic_compiles_them(topology, name, shape, dtype):
    text = compiled_for(topology, getattr(tpu, name), struct(*shape, dtype=dtype)).as_text()
    assert name in text
    assert sum(instruction.is_kernel for instruction in hlo.instructions(text)) == 1


@pytest.mark.parametrize("shape", [(12, 9, 128, 128, 256), (24, 9, 128, 128, 128), (8, 9, 128, 128, 512)])
@pytest.mark.slow
@pytest.mark.product_cases("shape0", "shape2")
def test_many_videos_fit_the_memory_of_a_step_or_are_left_to_xla(shape):
    options = {"num_groups": 4, "channel_axis": -1, "activation": "silu"}
    compiled_for("v5e:1x1", lambda x: group_norm(x, None, None, **options), struct(*shape))


OUTLIERS = {
    "first pixel": np.s_[:, 0, :1, :1],
    "first row": np.s_[:, :, :1],
    "last row": np.s_[:, :, -1:],
    "first frame": np.s_[:, 0],
    "last column": np.s_[:, :, :, -1:],
    "every thirtieth row": np.s_[:, :, ::30],
}
"""The pixels that are far from all others."""


def norm(x, split=columns.WHOLE):
    stats = op.moments(dispatch.Target(split=split), x, num_groups=2, channel_axis=-1)
    return stats.mean, stats.variance, group_norm(x, None, None, num_groups=2, channel_axis=-1, split=split)


@pytest.fixture(params=["xla", "pallas"])
def width(request, monkeypatch):
    """Choose the form of the moments of columns; return a width that the other form has not traced."""
    if request.param == "xla":
        return 8
    monkeypatch.setattr(op, "_shard_column_moments", lambda _, x: tpu.column_moments(x))
    monkeypatch.setattr(
        tpu, "_block_shape", lambda x: (next(n for n in (120, 60, 4, 1) if x.shape[2] % n == 0), 2)
    )
    # Not the interpreter of a TPU's memory: it takes arrays through callbacks, which wait for each other
    # forever where they are large and the devices many.
    monkeypatch.setattr(pl, "pallas_call", functools.partial(pl.pallas_call, interpret=True))
    return 16


@pytest.mark.parametrize("rows", [8, 113, 480, 1080])
@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.slow_cases("pallas-1-113", "*-480", "*-1-1080")
def test_outliers_cost_no_accuracy(devices, rows, width):
    cases = [*itertools.product((1, 100, 1000), OUTLIERS.values())]  # distance in deviations, pixels
    x = np.repeat(np.random.default_rng(0).normal(0.5, 1, (1, 2, rows, width, 4)), len(cases), axis=0)
    for video, (deviations, pixels) in enumerate(cases):
        x[video : video + 1][pixels] += deviations
    x = x.astype(np.float32)
    groups = x.astype(np.float64).reshape(*x.shape[:-1], 2, 2)
    mean, variance = (part((1, 2, 3, 5), keepdims=True) for part in (groups.mean, groups.var))
    deviation = np.sqrt(variance + 1e-6)
    found = (jax.jit(norm) if devices == 1 else on_mesh(norm, 1, 1, 1, devices))(x)
    got_mean, got_variance, got_y = (np.asarray(part, np.float64) for part in found)
    y = (groups - mean) / deviation
    for error in (
        (got_mean.reshape(mean.shape) - mean) / deviation,
        got_variance.reshape(variance.shape) / variance - 1,
        (got_y.reshape(y.shape) - y) / np.abs(y).max((1, 2, 3, 4, 5), keepdims=True),
    ):
        wrong = np.abs(error).reshape(len(cases), -1).max(1) >= 2e-6
        assert not wrong.any(), [*itertools.compress(itertools.product((1, 100, 1000), OUTLIERS), wrong)]
