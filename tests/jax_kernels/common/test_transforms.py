"""Winograd's filtering gives what a filter of three taps gives, and rounds little even in its worst cases."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels.common.transforms import TRANSFORMS, filtered, transformed_taps

CHANNELS = 64


def over_channels(frames, taps):
    return jnp.einsum("npi,io->npo", frames, taps, precision="highest", preferred_element_type=jnp.float32)


def direct(frames, kernel):
    """Convolve in float64."""
    frames, kernel = (np.asarray(part, np.float64) for part in (frames, kernel))
    length = frames.shape[1] - 2
    return sum(frames[:, tap : tap + length] @ kernel[tap] for tap in range(3))


@pytest.mark.parametrize("tile", TRANSFORMS)
@pytest.mark.parametrize("tiles", [1, 2])
def test_it_is_exact_where_nothing_is_rounded(tile, tiles):
    rng = np.random.default_rng(0)
    frames = jnp.asarray(rng.integers(-8, 8, (3, tiles * tile + 2, 5)), jnp.float32)
    kernel = jnp.asarray(4 * rng.integers(-8, 8, (3, 5, 7)), jnp.float32)
    np.testing.assert_array_equal(filtered(frames, kernel, tile, over_channels), direct(frames, kernel))


@pytest.mark.parametrize("tile", TRANSFORMS)
def test_taps_are_transformed_in_their_dtype_without_a_product(tile):
    kernel = jnp.ones((3, 1, 1), jnp.bfloat16) * 1.01
    assert transformed_taps(kernel, tile).dtype == jnp.bfloat16
    text = jax.jit(transformed_taps, static_argnums=1).lower(kernel, tile).as_text()
    assert "dot_general" not in text  # which a TPU's compiler takes up to 15 s for


def of_frames(kind, rng, length=10):
    """Frames of one pixel, worst cases of the transforms among them."""
    noise = rng.normal(size=(16, length, CHANNELS))
    lone = np.zeros_like(noise)
    lone[:, length // 2] = 1e4
    alternating = np.where(np.arange(length) % 2, 1.0, -1.0)[None, :, None] * np.abs(noise[:, :1])
    constant = np.repeat(noise[:, :1], length, axis=1)
    return {
        "noise": noise,
        "large": 1e4 * noise,
        "one bright pixel": lone,
        "alternating": alternating,
        "constant": constant,
    }[kind]


@pytest.mark.parametrize("kind", ["noise", "large", "one bright pixel", "alternating", "constant"])
@pytest.mark.parametrize("tile", TRANSFORMS)
def test_rounding_is_within_a_few_units_of_what_each_result_sums(tile, kind):
    rng = np.random.default_rng(0)
    frames = jnp.asarray(of_frames(kind, rng), jnp.bfloat16)
    kernel = jnp.asarray(rng.normal(size=(3, CHANNELS, 32)) / 8, jnp.bfloat16)
    error = np.asarray(filtered(frames, kernel, tile, over_channels), np.float64) - direct(frames, kernel)
    # What the results of a tile round is a share of all that it sums.
    largest = np.sqrt(np.mean(np.square(np.asarray(frames, np.float64)), axis=(1, 2), keepdims=True))
    scale = largest * np.sqrt(np.sum(np.square(np.asarray(kernel, np.float64))) / kernel.shape[-1])
    assert np.sqrt(np.mean(np.square(error / scale))) < 2.0**-8
    assert np.max(np.abs(error / scale)) < 2.0**-5
