"""What the norms' weights prove of scores holds for every input, and is not far from what inputs reach."""

import math

import numpy as np
import pytest
import torch

from jax_kernels import score_bound

CHANNELS = 8


def weights(seed, *, biased=True):
    """Of the norms of queries and keys: spread, of either sign."""
    rng = np.random.default_rng(seed)
    vectors = [rng.normal(1, 0.7, CHANNELS) if i % 2 == 0 else rng.normal(0, 0.5, CHANNELS) for i in range(4)]
    return vectors if biased else [vectors[0], None, vectors[2], None]


def turned(x, angles, rotated):
    """Pairs of the last axis, each by its angle."""
    a, b = (x[:, 0::2], x[:, 1::2]) if rotated == "neighbours" else np.split(x, 2, axis=1)
    a, b = a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)
    return np.stack([a, b], 2).reshape(x.shape) if rotated == "neighbours" else np.concatenate([a, b], 1)


@torch.enable_grad()
def largest_score(rotated, q_weight, q_bias, k_weight, k_bias, seed):
    """Found by climbing from many starts: inputs of the norms, and their angles."""
    torch.manual_seed(seed)
    starts = 64
    x, y = (torch.randn(starts, CHANNELS, dtype=torch.float64, requires_grad=True) for _ in range(2))
    angles = torch.randn(starts, CHANNELS // 2, dtype=torch.float64, requires_grad=True)
    climb = torch.optim.Adam([x, y, angles], lr=0.05)
    to_torch = [None if w is None else torch.from_numpy(w) for w in (q_weight, q_bias, k_weight, k_bias)]
    for _ in range(300):
        q = torch.nn.functional.layer_norm(x, (CHANNELS,), *to_torch[:2], eps=1e-6)
        k = torch.nn.functional.layer_norm(y, (CHANNELS,), *to_torch[2:], eps=1e-6)
        pairs = (lambda t: (t[:, 0::2], t[:, 1::2])) if rotated == "neighbours" else (lambda t: t.chunk(2, 1))
        (a, b), (c, d) = pairs(q), pairs(k)
        cos, sin = angles.cos(), angles.sin()
        scores = ((a * cos - b * sin) * c + (b * cos + a * sin) * d).sum(1).abs() / math.sqrt(CHANNELS)
        climb.zero_grad()
        (-scores.sum()).backward()
        climb.step()
    return float(scores.detach().max())


@pytest.mark.parametrize("rotated", ["neighbours", "halves"])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.slow_cases(but=["True-neighbours"])
def test_no_score_climbs_over_the_bound_of_the_pairs_that_are_turned(rotated, biased):
    for seed in range(3):
        of_norms = weights(seed, biased=biased)
        bound = score_bound(*of_norms, rotated=rotated)
        found = largest_score(rotated, *of_norms, seed)
        assert found <= bound * (1 + 1e-9)
        assert found > 0.4 * bound
        assert bound <= score_bound(*of_norms) * (1 + 1e-9)


def test_equal_weights_reach_the_bound():
    ones = np.ones(64)
    assert score_bound(2 * ones, None, 3 * ones, None) == pytest.approx(6 * 64 / 8)
    assert score_bound(2 * ones, None, 3 * ones, None, scale=-0.5) == pytest.approx(6 * 64 / 2)
    found = largest_score("halves", 2 * np.ones(CHANNELS), None, 3 * np.ones(CHANNELS), None, seed=0)
    assert found == pytest.approx(6 * math.sqrt(CHANNELS), rel=1e-3)


@pytest.mark.parametrize("rotated", ["any", "neighbours", "halves"])
def test_biases_alone_reach_the_bound(rotated):
    none, bias = np.zeros(CHANNELS), np.arange(1.0, CHANNELS + 1)
    bound = score_bound(none, bias, none, bias, rotated=rotated)
    assert bound == pytest.approx(bias @ bias / math.sqrt(CHANNELS))


def test_pairs_whose_weights_are_not_large_together_have_a_smaller_bound():
    q, k = np.ones(CHANNELS), np.ones(CHANNELS)
    q[0], k[2] = 5, 5
    assert score_bound(q, None, k, None) == pytest.approx(25 * math.sqrt(CHANNELS))
    assert score_bound(q, None, k, None, rotated="neighbours") == pytest.approx(5 * math.sqrt(CHANNELS))


def test_a_weight_that_is_no_number_proves_nothing():
    broken = np.ones(CHANNELS)
    broken[3] = np.nan
    assert math.isnan(score_bound(broken, None, np.ones(CHANNELS), None))
    assert math.isnan(score_bound(np.ones(CHANNELS), None, np.ones(CHANNELS), broken, rotated="halves"))


@pytest.mark.parametrize(
    ("vectors", "rotated", "words"),
    [
        ((np.ones(8), None, np.ones(4), None), "any", "shapes"),
        ((np.ones((2, 4)), None, np.ones((2, 4)), None), "any", "shapes"),
        ((np.ones(7), None, np.ones(7), None), "halves", "even number"),
    ],
)
def test_weights_that_fit_nothing_are_named(vectors, rotated, words):
    with pytest.raises(ValueError, match=words):
        score_bound(*vectors, rotated=rotated)
