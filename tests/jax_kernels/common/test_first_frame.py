"""Kernels that compute a first frame by itself give what they give of all frames together."""

import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels.common import frames as over_frames
from jax_kernels.common.dispatch import Target
from jax_kernels.common.frames import join_frames, split_frames
from jax_kernels.norm_conv3d import sizes
from tests.jax_kernels.chips import answer, struct

ANYWHERE = Target()


def draw(*shape):
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), jnp.float32)


@pytest.fixture
def as_on_a_tpu(monkeypatch):
    """Return a function from whose call on the first of an odd number of frames is split off."""
    return lambda: monkeypatch.setattr(over_frames, "splits_first_frame", lambda target, x: True)


@pytest.mark.parametrize(
    ("dtype", "platform", "apart"),
    [(jnp.bfloat16, "tpu", True), (jnp.bfloat16, "default", False), (jnp.float32, "tpu", False)],
)
def test_where_a_first_frame_stands_apart(dtype, platform, apart):
    assert over_frames.splits_first_frame(Target(platform), draw(1, 5, 2, 4, 1).astype(dtype)) == apart


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
    assert [part.shape[1] for (part,) in split_frames(ANYWHERE, x)] == [frames]
    as_on_a_tpu()
    assert [part.shape[1] for part, _ in split_frames(ANYWHERE, x, None)] == lengths
    np.testing.assert_array_equal(join_frames([part for (part,) in split_frames(ANYWHERE, x)]), x)
    if frames > 2:
        of_both = [(part.shape[1], other.shape[1]) for part, other in split_frames(ANYWHERE, x, fewer)]
        alone = frames % 2
        assert of_both == [(1, 1)] * alone + [(frames - alone, fewer.shape[1] - alone)]


def test_what_is_waited_for_adds_nothing():
    x = jnp.array([1.0, -2.0, 0.0, jnp.inf, jnp.nan])
    assert (over_frames.zero_of(x) == 0).all()


def test_kernels_take_every_part():
    def takes(x, kernel):
        return sizes.is_supported(x, (1, 1, 1), kernel, residual=False, at_start=True, pixels=64 * 64)

    structs = {frames: (struct(1, frames, 64, 64, 128), struct(3, 3, 3, 128, 128)) for frames in range(2, 20)}
    assert set(over_frames.RUNS) == {frames for frames, given in structs.items() if answer(takes, *given)}
