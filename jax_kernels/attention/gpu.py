"""Attention on a GPU."""

import jax
from jaxtyping import Array


def cudnn(q: Array, k: Array, v: Array, *, scale: float) -> Array:
    """cuDNN's fused attention, which takes any length."""
    return jax.nn.dot_product_attention(q, k, v, scale=scale, implementation="cudnn")
