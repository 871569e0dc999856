"""How large attention's scores can become: what the norms of queries and keys prove of it."""

import math
from typing import Any, Literal

import numpy as np

LARGEST_BOUND = 63 * math.log(2)
"""Scores up to this size need no maximum taken off before the softmax: their exponentials are 2^-63 to 2^63,
126 powers of two and so normal numbers, and sums of 2^24 of them with values up to 2^40 are finite."""

Rotated = Literal["any", "neighbours", "halves"]


def score_bound(
    q_weight: Any,
    q_bias: Any,
    k_weight: Any,
    k_bias: Any,
    *,
    scale: float | None = None,
    rotated: Rotated = "any",
) -> float:
    """What `|scale q . k|` cannot exceed where `q` and `k` come of a LayerNorm over the channels of a head,
    then turned by positions.

    Proof. A LayerNorm gives `w x + b` with `|x|^2 = D var / (var + eps) <= D`. Positions turn groups of
    channels, each by itself, which keeps the group's norm. In group g, with `m` the largest `|w|` and `c` the
    norm of `b` there, `|q_g| <= m_g |x_g| + c_g`; likewise for `k`, of `m'`, `c'` and `y`. By Cauchy and
    Schwarz in each group, then over groups,

        |q . k| <= sum_g (m_g |x_g| + c_g) (m'_g |y_g| + c'_g)
                <= max_g(m_g m'_g) D + (|m c'| + |m' c|) sqrt(D) + sum_g c_g c'_g.

    Rounding `q` and `k` to bfloat16, five times in all, adds less than a hundredth, which `LARGEST_BOUND`
    leaves room for.

    Args:
        q_weight, k_weight: (D,), of the norms.
        q_bias, k_bias: (D,), or None.
        scale: as `attention` takes it.
        rotated: which channels are turned together: "neighbours" 2 i and 2 i + 1, "halves" i and i + D / 2.
            "any" holds for both and for every other rotation, and is the largest.

    Returns:
        The bound, for the `bound` of `attention`; NaN where a weight or a bias holds one.

    Raises:
        ValueError: weights or biases that do not fit each other, or channels that are no pairs.
    """
    weights = [np.asarray(weight, np.float64) for weight in (q_weight, k_weight)]
    channels = weights[0].size
    biases = [np.asarray(np.zeros(channels) if b is None else b, np.float64) for b in (q_bias, k_bias)]
    vectors = weights + biases
    if any(x.shape != (channels,) for x in vectors):
        raise ValueError(
            f"score_bound got weights and biases of shapes {[x.shape for x in vectors]}: all take (channels,)"
        )
    scale = 1 / math.sqrt(channels) if scale is None else scale
    m_q, m_k = (np.abs(_groups(x, rotated)).max(1) for x in weights)
    c_q, c_k = (np.linalg.norm(_groups(x, rotated), axis=1) for x in biases)
    crossed = np.linalg.norm(m_q * c_k) + np.linalg.norm(m_k * c_q)
    return float(abs(scale) * (max(m_q * m_k) * channels + crossed * math.sqrt(channels) + c_q @ c_k))


def _groups(x: np.ndarray, rotated: Rotated) -> np.ndarray:
    """Channels that are turned together, a row each."""
    if rotated == "any":
        return x[None]
    if x.size % 2:
        raise ValueError(f"score_bound got {x.size} channels, rotated {rotated}: pairs take an even number")
    return x.reshape(-1, 2) if rotated == "neighbours" else x.reshape(2, -1).T
