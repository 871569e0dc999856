"""Attention as XLA compiles it on any platform."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jax_kernels.common.layout import precision_for

QUERY_BLOCK = 1024
"""Queries that the plain form holds scores for at a time."""


def plain(q: Array, k: Array, v: Array, *, scale: float) -> Array:
    """Compute attention in XLA, a block of queries at a time, so that scores take memory for one block.

    Args:
        q: queries (N, S, H, D).
        k, v: keys and values (N, K, H, D), all real.
        scale: factor of the scores.
    """
    length = q.shape[1]
    if length <= QUERY_BLOCK:
        return _plain_block(q, k, v, scale)
    blocks = -(-length // QUERY_BLOCK)
    padded = jnp.pad(q, ((0, 0), (0, blocks * QUERY_BLOCK - length), (0, 0), (0, 0)))
    stacked = jnp.moveaxis(padded.reshape(q.shape[0], blocks, QUERY_BLOCK, *q.shape[2:]), 1, 0)
    y = lax.map(lambda block: _plain_block(block, k, v, scale), stacked)
    return jnp.moveaxis(y, 0, 1).reshape(padded.shape)[:, :length]


def _plain_block(q: Array, k: Array, v: Array, scale: float) -> Array:
    """Compute attention for a block of queries, with all of its scores in memory at once."""
    precision = precision_for(q.dtype)
    scores = jnp.einsum("nshd,nkhd->nhsk", q, k, precision=precision, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(scores * scale, axis=-1)
    y = jnp.einsum("nhsk,nkhd->nshd", weights, v.astype(jnp.float32), precision=lax.Precision.HIGHEST)
    return y.astype(q.dtype)
