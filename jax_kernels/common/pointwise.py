"""Operations on single numbers, or on a few together, that several kernels use."""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

Activation = Literal["silu"]
"""SiLU, `x * sigmoid(x)`."""


def check_activation(activation: str | None) -> None:
    """Raise `ValueError` for an activation function other than "silu" or None."""
    if activation not in (None, "silu"):
        raise ValueError(f"got the activation {activation!r}: 'silu' or None can be fused with a norm")


def activate(x: jax.Array, activation: Activation | None) -> jax.Array:
    """Apply the activation function; None is the identity."""
    return jax.nn.silu(x) if activation == "silu" else x


def standardized(x: jax.Array, eps: float, axis: int = -1) -> jax.Array:
    """Return `(x - mean) / sqrt(variance + eps)` with mean and variance over `axis`; `x` is float32.

    The variance is taken of the differences from the mean, in a second pass, against cancellation.
    """
    x = x - x.mean(axis, keepdims=True)
    return x * lax.rsqrt(jnp.square(x).mean(axis, keepdims=True) + eps)
