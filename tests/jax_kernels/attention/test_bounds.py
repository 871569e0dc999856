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


@torch.enable_grad()
def largest_score(q_weight, q_bias, k_weight, k_bias, seed):
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
        (a, b), (c, d) = ((t[:, 0::2], t[:, 1::2]) for t in (q, k))
        cos, sin = angles.cos(), angles.sin()
        scores = ((a * cos - b * sin) * c + (b * cos + a * sin) * d).sum(1).abs() / math.sqrt(CHANNELS)
        climb.zero_grad()
        (-scores.sum()).backward()
        climb.step()
    return float(scores.detach().max())


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.slow_cases("False")
def test_no_score_climbs_over_the_bound(biased):
    for seed in range(3):
        of_norms = weights(seed, biased=biased)
        bound = score_bound(*of_norms)
        found = largest_score(*of_norms, seed)
        assert found <= bound * (1 + 1e-9)
        assert found > 0.4 * bound


def test_equal_weights_reach_the_bound():
    ones = np.ones(64)
    assert score_bound(2 * ones, None, 3 * ones, None) == pytest.approx(6 * 64 / 8)
    assert score_bound(2 * ones, None, 3 * ones, None, scale=-0.5) == pytest.approx(6 * 64 / 2)
    found = largest_score(2 * np.ones(CHANNELS), None, 3 * np.ones(CHANNELS), None, seed=0)
    assert found == pytest.approx(6 * math.sqrt(CHANNELS), rel=1e-3)


def test_biases_alone_reach_the_bound():
    none, bias = np.zeros(CHANNELS), np.arange(1.0, CHANNELS + 1)
    bound = score_bound(none, bias, none, bias)
    assert bound == pytest.approx(bias @ bias / math.sqrt(CHANNELS))


def test_pairs_whose_weights_are_not_large_together_have_a_smaller_bound():
    q, k = np.ones(CHANNELS), np.ones(CHANNELS)
    q[0], k[2] = 5, 5
    assert score_bound(q, None, k, None) == pytest.approx(5 * math.sqrt(CHANNELS))
    k[1] = 5
    assert score_bound(q, None, k, None) == pytest.approx(25 * math.sqrt(CHANNELS))


def test_a_weight_that_is_no_number_proves_nothing():
    broken = np.ones(CHANNELS)
    broken[3] = np.nan
    assert math.isnan(score_bound(broken, None, np.ones(CHANNELS), None))
    assert math.isnan(score_bound(np.ones(CHANNELS), None, np.ones(CHANNELS), broken))


@pytest.mark.parametrize("shapes", [((8,), (4,)), ((2, 4), (2, 4)), ((7,), (7,))])
def test_weights_that_fit_nothing_are_named(shapes):
    q, k = map(np.ones, shapes)
    with pytest.raises(ValueError, match="even number"):
        score_bound(q, None, k, None)
