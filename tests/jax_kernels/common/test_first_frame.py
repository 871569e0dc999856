"""Kernels that compute a first frame by itself give what they give of all frames together."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_kernels
from jax_kernels.common import first_frame
from jax_kernels.common.dispatch import Target
from jax_kernels.common.first_frame import in_parts, joined
from jax_kernels.norm_conv3d import sizes
from tests.reference import largest_error

CHANNELS, LATENTS, ANYWHERE = 8, 4, Target()
NORM = {"num_groups": 2}


def draw(*shape):
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), jnp.float32)


def convolve(x, z, lone_first):
    y, latest = jax_kernels.conv3d(x, draw(3, 3, 3, CHANNELS, 6), draw(6))
    return y, latest


def convolve_and_add(x, z, lone_first):
    y, _ = jax_kernels.conv3d(x, draw(3, 3, 3, CHANNELS, CHANNELS), residual=x * 2)
    return y


def affine():
    return draw(CHANNELS), draw(CHANNELS)


def convolutions():
    return draw(LATENTS, CHANNELS), draw(CHANNELS), draw(LATENTS, CHANNELS), draw(CHANNELS)


def spatial(x, z, lone_first):
    return jax_kernels.spatial_norm(x, z, *affine(), *convolutions(), **NORM, lone_first=lone_first)


def norm_and_convolve(x, z, lone_first):
    norm = jax_kernels.Norm(*affine(), z, *convolutions())
    kernel, bias = draw(3, 3, 3, CHANNELS, CHANNELS), draw(CHANNELS)
    y, latest, _ = jax_kernels.norm_conv3d(x, norm, kernel, bias, **NORM, residual=x, lone_first=lone_first)
    return y, latest


def resampled(resample, **options):
    return lambda x, z, lone_first: resample(
        x, draw(3, 3, CHANNELS, 6), draw(6), lone_first=lone_first, **options
    )


KERNELS = {
    "conv3d": convolve,
    "conv3d, with a residual": convolve_and_add,
    "a 1x1x1 convolution": lambda x, z, _: jax_kernels.conv3d(x, draw(1, 1, 1, CHANNELS, 6))[0],
    "group_norm": lambda x, z, _: jax_kernels.group_norm(x, *affine(), **NORM, channel_axis=-1),
    "spatial_norm": spatial,
    "norm_conv3d": norm_and_convolve,
    "upsample": resampled(jax_kernels.upsample, expand_time=False),
    "upsample in time": resampled(jax_kernels.upsample, expand_time=True),
    "downsample": resampled(jax_kernels.downsample, compress_time=False),
    "downsample in time": resampled(jax_kernels.downsample, compress_time=True),
    "silu": lambda x, z, _: jax_kernels.silu(x, time_axis=1),
}


@pytest.fixture
def as_on_a_tpu(monkeypatch):
    """From when it is called on, an odd number of frames is taken apart."""

    def begin():
        jax.clear_caches()  # what was traced before computes them together
        monkeypatch.setattr(first_frame, "stands_apart", lambda target, x: True)

    yield begin
    jax.clear_caches()


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("frames", [5, 6, 7])
def test_frames_in_parts_give_what_all_give_together(name, frames, as_on_a_tpu):
    x, z = draw(2, frames, 4, 6, CHANNELS) + 3, draw(2, 3, 2, 3, LATENTS)
    lone_first = frames % 2 == 1
    want = jax.tree.leaves(KERNELS[name](x, z, lone_first))
    as_on_a_tpu()
    got = jax.tree.leaves(KERNELS[name](x, z, lone_first))
    for mine, plain in zip(got, want, strict=True):
        assert largest_error(mine, plain) <= 1e-6
    if frames % 2 or name != "spatial_norm":  # which has fewer latents than frames, and none alone
        assert " concatenate(" in jax.jit(KERNELS[name], static_argnums=2).lower(x, z, lone_first).as_text(
            "hlo"
        )


@pytest.mark.parametrize(
    ("dtype", "platform", "apart"),
    [(jnp.bfloat16, "tpu", True), (jnp.bfloat16, "cuda", False), (jnp.float32, "tpu", False)],
)
def test_where_a_first_frame_stands_apart(dtype, platform, apart):
    assert first_frame.stands_apart(Target(platform), draw(1, 5, 2, 4, 1).astype(dtype)) == apart


PARTS = {
    1: [1],
    2: [2],
    4: [4],
    5: [1, 4],
    6: [2, 2, 2],
    9: [1, 8],
    12: [4, 4, 4],
    13: [1, 4, 4, 4],
    16: [8, 8],
}
PARTS |= {7: [1, 2, 2, 2], 17: [1, 8, 8]}


@pytest.mark.parametrize(("frames", "lengths"), PARTS.items())
def test_frames_are_taken_apart_and_joined(frames, lengths, as_on_a_tpu):
    x, fewer = draw(1, frames, 2), draw(1, (frames + 1) // 2, 2)
    assert [part.shape[1] for (part,) in in_parts(ANYWHERE, x)] == [frames]
    as_on_a_tpu()
    assert [part.shape[1] for part, _ in in_parts(ANYWHERE, x, None)] == lengths
    np.testing.assert_array_equal(joined([part for (part,) in in_parts(ANYWHERE, x)]), x)
    if frames > 2:
        of_both = [(part.shape[1], other.shape[1]) for part, other in in_parts(ANYWHERE, x, fewer)]
        alone = frames % 2
        assert of_both == [(1, 1)] * alone + [(frames - alone, fewer.shape[1] - alone)]


def test_kernels_take_every_part():
    assert set(first_frame.RUNS) == {frames for frames in range(2, 20) if takes(frames)}


def takes(frames):
    x = jax.ShapeDtypeStruct((1, frames, 64, 64, 128), jnp.bfloat16)
    kernel = jnp.zeros((3, 3, 3, 128, 128), jnp.bfloat16)
    return sizes.takes(x, (1, 1, 1), kernel, residual=False, at_start=True, pixels=64 * 64)
