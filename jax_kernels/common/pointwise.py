"""Arithmetic and checks that several kernels share: precision, activation, standardization."""

from typing import Any, Literal

import jax
import jax.numpy as jnp

Activation = Literal["silu"]
"""An activation that norms apply to their result: SiLU, `x * sigmoid(x)`."""


def check_channels(op: str, channels: int, **vectors: Any) -> None:
    """Raise `ValueError` if a vector that is not None has another length than `channels`.

    `op` is the name of the op that got the vectors, for the message.
    """
    for name, vector in vectors.items():
        if vector is not None and vector.shape != (channels,):
            raise ValueError(
                f"{op} got a {name} of shape {vector.shape} for {channels} channels: it needs one number "
                f"for each, ({channels},)"
            )


def check_choice(name: str, value: str | None, *choices: str | None) -> None:
    if value not in choices:
        raise ValueError(f"{name} {value!r} is not one of {list(choices)}")


def precision_for(dtype: jnp.dtype) -> jax.lax.Precision:
    """Return the precision of products: full for float32, the hardware's default for narrower dtypes.

    By default a TPU multiplies float32 in bfloat16, and a recent GPU in TF32: far less precise than the tests
    allow.
    """
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT


def quantized(x: jax.Array, axis: int = -1) -> tuple[jax.Array, jax.Array]:
    """Return `x` in int8 and its scales in float32: the largest number along `axis` becomes 127 or -127.

    The scales have the axis with length 1. An infinity or a NaN is also in the scale. That of zeros is 0, so
    that it does not matter which integers 0 / 0 becomes.
    """
    x = x.astype(jnp.float32)
    largest = jnp.abs(x).max(axis, keepdims=True)
    return jnp.rint(x * (127 / largest)).astype(jnp.int8), largest / 127


def activate(x: jax.Array, activation: Activation | None) -> jax.Array:
    return jax.nn.silu(x) if activation == "silu" else x


def standardized(x: jax.Array, eps: float, axis: int = -1) -> jax.Array:
    """Return `(x - mean) / sqrt(variance + eps)` over `axis` of a float32 `x`."""
    # The variance is computed after the mean is subtracted. The mean of squares minus the squared mean would
    # be a difference of two large numbers, of which rounding leaves little.
    x = x - x.mean(axis, keepdims=True)
    return x * jax.lax.rsqrt(jnp.square(x).mean(axis, keepdims=True) + eps)
