"""Attention and the preparation of its inputs in their plainest form, which the fast forms have to equal."""

import math

import jax
import jax.numpy as jnp


def attention(q, k, v, *, scale=None, num_keys=None):
    """Compute attention of (N, S, H, D) in float32; keys from `num_keys` on are padding and are left out."""
    q_f32, k_f32, v_f32 = (x.astype(jnp.float32) for x in (q, k[:, :num_keys], v[:, :num_keys]))
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = jnp.einsum("nshd,nkhd->nhsk", q_f32, k_f32, precision=jax.lax.Precision.HIGHEST) * scale
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    weights = weights / weights.sum(-1, keepdims=True)
    return jnp.einsum("nhsk,nkhd->nshd", weights, v_f32, precision=jax.lax.Precision.HIGHEST).astype(q.dtype)


def attention_transposed(q, k, v, *, scale=None, num_keys=None):
    """Compute `attention` of arrays with channels before positions."""
    q, k, v = (x.transpose(0, 3, 1, 2) for x in (q, k, v))
    return attention(q, k, v, scale=scale, num_keys=num_keys).transpose(0, 2, 3, 1)


def qk_norm_rope(x, weight=None, bias=None, cos=None, sin=None, *, heads, scale=1.0, eps=1e-6):
    """Norm each head, then rotate it, then scale it, in float32: from (N, S, H D) to (N, H, D, S).

    Without `weight` nothing is normed, and without `cos` nothing is rotated.
    """
    y = x.astype(jnp.float32).reshape(*x.shape[:2], heads, -1)
    if weight is not None:
        y = (y - y.mean(-1, keepdims=True)) / jnp.sqrt(y.var(-1, keepdims=True) + eps)
        y = y * weight + (0 if bias is None else bias)
    if cos is not None:
        y = apply_rotary(y, cos, sin)
    return (y * scale).astype(x.dtype).transpose(0, 2, 3, 1)


def apply_rotary(x, cos, sin):
    """Rotate channel pairs (a, b) of the last P positions, the patches, to (a cos - b sin, b cos + a sin)."""
    x_f32, num_text = x.astype(jnp.float32), x.shape[1] - cos.shape[0]
    a, b = x_f32[:, num_text:, :, ::2], x_f32[:, num_text:, :, 1::2]
    cos, sin = (table[:, None, ::2] for table in (cos, sin))  # tables have each angle twice
    pairs = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return jnp.concatenate([x_f32[:, :num_text], pairs.reshape(*pairs.shape[:3], -1)], axis=1).astype(x.dtype)
