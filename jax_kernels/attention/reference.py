"""Attention in its plainest form: what the fast forms have to equal."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array


def attention(q: Array, k: Array, v: Array, *, scale: float | None = None):
    """All scores at once, everything in float32."""
    q_f32, k_f32, v_f32 = (x.astype(jnp.float32) for x in (q, k, v))
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    scores = jnp.einsum("nshd,nkhd->nhsk", q_f32, k_f32, precision=lax.Precision.HIGHEST) * factor
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    weights = weights / weights.sum(-1, keepdims=True)
    return jnp.einsum("nhsk,nkhd->nshd", weights, v_f32, precision=lax.Precision.HIGHEST).astype(q.dtype)
