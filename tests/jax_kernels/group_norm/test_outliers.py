"""Statistics keep their digits under white borders, subtitle bars and dead pixels, in every form."""

import functools
import itertools

import jax
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jax_kernels import group_norm
from jax_kernels.common.columns import WHOLE, Split
from jax_kernels.common.dispatch import Target
from jax_kernels.group_norm import moments as norm_moments, tpu

LARGEST_ERROR = 2e-6
EPS = 1e-6
FRAMES, CHANNELS, GROUPS = 2, 4, 2


def outliers(rows):
    """Return the pixels of each kind of outlier in frames of so many rows, as indices."""
    some = np.random.default_rng(1).permutation(rows)[: -(-rows // 100)]
    return {
        "first pixel": [np.s_[:, 0, 0, 0]],
        "first row": [np.s_[:, :, 0]],
        "last row": [np.s_[:, :, -1]],
        "first frame": [np.s_[:, 0]],
        "border": [np.s_[:, :, 0], np.s_[:, :, -1], np.s_[:, :, :, 0], np.s_[:, :, :, -1]],
        "subtitle": [np.s_[:, :, rows // 2 : rows // 2 + -(-rows // 12)]],
        "scattered rows": [np.s_[:, :, some]],
        "every thirtieth row": [np.s_[:, :, ::30]],
    }


CASES = list(itertools.product((1, 100, 1000), outliers(1)))
"""Outliers' distance in deviations, and their pixels: a video for each."""


def frames_of(rows, width, deviations, kind):
    x = np.random.default_rng(0).normal(0.5, 1, (1, FRAMES, rows, width, CHANNELS))
    for pixels in outliers(rows)[kind]:
        x[pixels] += deviations
    return x.astype(np.float32)


def exact(x):
    """Mean and variance of each group, and the normalized frames, in float64."""
    grouped = x.astype(np.float64).reshape(*x.shape[:-1], GROUPS, CHANNELS // GROUPS)
    axes = (1, 2, 3, 5)
    mean, variance = grouped.mean(axes), grouped.var(axes)
    centre, scale = (part[:, None, None, None, :, None] for part in (mean, 1 / np.sqrt(variance + EPS)))
    return mean, variance, ((grouped - centre) * scale).reshape(x.shape)


def norm(x, split=WHOLE):
    stats = norm_moments.moments(Target(split=split), x, num_groups=GROUPS, channel_axis=-1)
    y = group_norm(x, None, None, num_groups=GROUPS, eps=EPS, channel_axis=-1, split=split)
    return stats.mean, stats.variance, y


def over_eight():
    """Return `norm` as eight devices compute it, each on its local columns."""
    mesh = Mesh(np.array(jax.devices()), ("tp",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec(None, None, None, "tp"))

    @jax.jit
    def traced(x):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return norm(x, Split(columns=("tp",)))

    return lambda x: traced(jax.device_put(x, sharding))


@pytest.fixture(params=["xla", "pallas"])
def width(request, monkeypatch):
    """Choose the form of the moments of columns; return a width that the other form has not traced."""
    if request.param == "xla":
        yield 8
        return
    monkeypatch.setattr(norm_moments, "_shard_column_moments", lambda _, x: tpu.column_moments(x))
    monkeypatch.setattr(
        tpu, "_block_shape", lambda x: (next(n for n in (120, 60, 4, 1) if x.shape[2] % n == 0), 2)
    )
    # Not the interpreter of a TPU's memory: it takes arrays through callbacks, which wait for each other
    # forever where they are large and the devices many.
    monkeypatch.setattr(pl, "pallas_call", functools.partial(pl.pallas_call, interpret=True))
    yield 16


@pytest.mark.parametrize("rows", [8, 113, 480, 1080])
@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.slow_cases("pallas-1-113", "*-480")
def test_outliers_cost_no_accuracy(devices, rows, width):
    x = np.concatenate([frames_of(rows, width, *case) for case in CASES])
    want_mean, want_variance, want_y = exact(x)
    found = (jax.jit(norm) if devices == 1 else over_eight())(x)
    mean, variance, y = (np.asarray(part, np.float64) for part in found)
    largest = np.abs(want_y).max((1, 2, 3, 4), keepdims=True)
    errors = {
        "mean": (mean - want_mean) / np.sqrt(want_variance),
        "variance": variance / want_variance - 1,
        "result": (y - want_y) / largest,
    }
    for what, error in errors.items():
        wrong = np.abs(error).reshape(len(CASES), -1).max(1) >= LARGEST_ERROR
        assert not wrong.any(), (what, list(itertools.compress(CASES, wrong)))
