"""How large attention's scores can become: what the norms of queries and keys prove of it."""

import math
from typing import Any

import numpy as np

LARGEST_BOUND = 63 * math.log(2)
"""Scores up to this size need no maximum taken off before the softmax: their exponentials are 2^-63 to 2^63,
126 powers of two and so normal numbers, and sums of 2^24 of them with values up to 2^40 are finite."""


def score_bound(
    q_weight: Any, q_bias: Any, k_weight: Any, k_bias: Any, *, scale: float | None = None
) -> float:
    """Return what `|scale q . k|` cannot exceed for `q` and `k` of a LayerNorm over a head's channels, then
    rotated by positions in pairs of neighbours, as `prepare` rotates them.

    Proof. A LayerNorm gives `w x + b` with `|x|^2 = D var / (var + eps) <= D`. Positions rotate pairs of
    channels, each by itself, which keeps the pair's norm. In pair g, with `m` the larger `|w|` and `c` the
    norm of `b` there, `|q_g| <= m_g |x_g| + c_g`; likewise for `k`, of `m'`, `c'` and `y`. By Cauchy and
    Schwarz in each pair, then over pairs,

        |q . k| <= sum_g (m_g |x_g| + c_g) (m'_g |y_g| + c'_g)
                <= max_g(m_g m'_g) D + (|m c'| + |m' c|) sqrt(D) + sum_g c_g c'_g.

    Rounding `q` and `k` to bfloat16, five times in all, adds less than a hundredth, which `LARGEST_BOUND`
    leaves room for.

    Args:
        q_weight, k_weight: (D,), of the norms.
        q_bias, k_bias: (D,), or None.
        scale: as `attention` takes it.

    Returns:
        The bound, for the `bound` of `attention`; NaN where a weight or a bias holds one.

    Raises:
        ValueError: weights or biases that do not fit each other, or an odd number of channels.
    """
    weights = [np.asarray(weight, np.float64) for weight in (q_weight, k_weight)]
    channels = weights[0].size
    biases = [np.asarray(np.zeros(channels) if b is None else b, np.float64) for b in (q_bias, k_bias)]
    vectors = weights + biases
    if channels % 2 or any(x.shape != (channels,) for x in vectors):
        raise ValueError(
            f"score_bound got weights and biases of shapes {[x.shape for x in vectors]}: all take "
            f"(channels,), an even number"
        )
    scale = 1 / math.sqrt(channels) if scale is None else scale
    m_q, m_k = (np.abs(x.reshape(-1, 2)).max(1) for x in weights)
    c_q, c_k = (np.linalg.norm(x.reshape(-1, 2), axis=1) for x in biases)
    crossed = np.linalg.norm(m_q * c_k) + np.linalg.norm(m_k * c_q)
    return float(abs(scale) * (max(m_q * m_k) * channels + crossed * math.sqrt(channels) + c_q @ c_k))
