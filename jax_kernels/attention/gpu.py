"""Attention on a GPU."""

import jax
import jax.numpy as jnp
from jaxtyping import Array


def is_supported(q: Array) -> bool:
    """Return whether cuDNN's attention supports these queries: 16 bits, and a GPU as JAX's backend.

    Tracing cuDNN's kernel queries the GPU, so a machine without one cannot lower it for a GPU.
    """
    return q.dtype != jnp.float32 and jax.default_backend() == "gpu"


def cudnn(q: Array, k: Array, v: Array, *, scale: float) -> Array:
    """Attend by cuDNN's fused kernel, for `q` (N, S, H, D), `k` and `v` (N, K, H, D) of any length."""
    return jax.nn.dot_product_attention(q, k, v, scale=scale, implementation="cudnn")
