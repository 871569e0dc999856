"""Queries and keys as attention takes them: each head normalized, turned to its position, tokens last."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


@functools.partial(jax.jit, static_argnames="heads")
def heads_first(x: Float[Array, "N S C"], *, heads: int) -> Float[Array, "N H D S"]:
    """The channels of each head by themselves, and tokens last: nothing is padded to a TPU's lanes."""
    return x.transpose(0, 2, 1).reshape(x.shape[0], heads, -1, x.shape[1])


@jax.jit
def tokens_first(x: Float[Array, "N H D S"]) -> Float[Array, "N S C"]:
    """The inverse of `heads_first`."""
    return x.reshape(x.shape[0], -1, x.shape[-1]).transpose(0, 2, 1)


@functools.partial(jax.jit, static_argnames="eps")
def prepare(
    x: Float[Array, "N H D S"],
    weight: Float[Array, " D"],
    bias: Float[Array, " D"],
    cos: Float[Array, "D S"] | None = None,
    sin: Float[Array, "D S"] | None = None,
    eps: float = 1e-6,
) -> Float[Array, "N H D S"]:
    """LayerNorm of each head's channels, and rotary positions (Su et al. 2021).

    Neighbouring channels are a pair: (a, b) becomes (a cos - b sin, b cos + a sin).

    Args:
        x: any float dtype, D even.
        weight, bias: of the norm.
        cos, sin: float32, each angle once for either channel of its pair; None for no positions.
        eps: added to the variance.

    Returns:
        The dtype of `x`; all arithmetic is float32, and rounded once.
    """
    y = x.astype(jnp.float32)
    y = y - y.mean(2, keepdims=True)
    y = y * lax.rsqrt(jnp.square(y).mean(2, keepdims=True) + eps)
    y = y * weight.astype(jnp.float32)[:, None] + bias.astype(jnp.float32)[:, None]
    if cos is not None and sin is not None:
        first = (jnp.arange(y.shape[2]) % 2 == 0)[:, None]
        turned = jnp.where(first, -jnp.roll(y, -1, axis=2), jnp.roll(y, 1, axis=2))
        y = y * cos + turned * sin
    return lax.optimization_barrier(y.astype(x.dtype))
