"""First frames by themselves, and the rounding of Winograd's filtering."""

import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels.common import dispatch, frames as over_frames, transforms
from jax_kernels.norm_conv3d import sizes
from tests.jax_kernels.devices import answer, struct


@pytest.mark.parametrize(
    ("dtype", "platform", "apart"),
    [(jnp.bfloat16, "tpu", True), (jnp.bfloat16, "default", False), (jnp.float32, "tpu", False)],
)
def test_where_a_first_frame_stands_apart(dtype, platform, apart):
    assert (
        over_frames.splits_first_frame(dispatch.Target(platform), jnp.zeros((1, 5, 2, 4, 1), dtype)) == apart
    )


def test_what_is_waited_for_adds_nothing():
    assert (over_frames.zero_of(jnp.array([1.0, -2.0, 0.0, jnp.inf, jnp.nan])) == 0).all()


def test_kernels_take_every_part():
    def takes(x, kernel):
        return sizes.is_supported(x, (1, 1, 1), kernel, residual=False, at_start=True, pixels=64 * 64)

    structs = {frames: (struct(1, frames, 64, 64, 128), struct(3, 3, 3, 128, 128)) for frames in range(2, 20)}
    assert set(over_frames.RUNS) == {frames for frames, given in structs.items() if answer(takes, *given)}


def over_channels(frames, taps):
    return jnp.einsum("npi,io->npo", frames, taps, precision="highest", preferred_element_type=jnp.float32)


TIMES = np.arange(10)[:, None]


@pytest.mark.parametrize(
    "make",
    [
        # Frames of one pixel that are made of noise, worst cases of the transforms among them.
        pytest.param(lambda noise: noise, id="noise"),
        pytest.param(lambda noise: 1e4 * noise, id="large"),
        pytest.param(lambda noise: np.full_like(noise, 1e4) * (TIMES == 5), id="one bright pixel"),
        pytest.param(lambda noise: np.abs(noise[:, :1]) * np.where(TIMES % 2, 1, -1), id="alternating"),
        pytest.param(lambda noise: noise[:, :1] * np.ones_like(TIMES), id="constant"),
    ],
)
@pytest.mark.parametrize("tile", transforms.TRANSFORMS)
def test_rounding_is_within_a_few_units_of_what_each_result_sums(tile, make):
    rng = np.random.default_rng(0)
    frames = jnp.asarray(make(rng.normal(size=(16, len(TIMES), 64))), jnp.bfloat16)
    kernel = jnp.asarray(rng.normal(size=(3, 64, 32)) / 8, jnp.bfloat16)
    got = transforms.filtered(frames, kernel, tile, over_channels)
    frames, kernel, got = (np.asarray(part, np.float64) for part in (frames, kernel, got))
    error = got - sum(frames[:, tap : tap + len(TIMES) - 2] @ kernel[tap] for tap in range(3))
    # What the results of a tile round is a share of all that it sums.
    largest = np.sqrt(np.mean(np.square(frames), axis=(1, 2), keepdims=True))
    scale = largest * np.sqrt(np.sum(np.square(kernel)) / kernel.shape[-1])
    assert np.sqrt(np.mean(np.square(error / scale))) < 2.0**-8
    assert np.max(np.abs(error / scale)) < 2.0**-5
