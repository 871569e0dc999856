"""What may follow a norm in the same pass."""

from typing import Literal

import jax

Activation = Literal["silu"]
"""SiLU, `x * sigmoid(x)`."""


def check_activation(activation: str | None) -> None:
    if activation not in (None, "silu"):
        raise ValueError(f"got the activation {activation!r}: 'silu' or None can be fused with a norm")


def activate(x: jax.Array, activation: Activation | None) -> jax.Array:
    """`x` under the activation, or as it is."""
    return jax.nn.silu(x) if activation == "silu" else x
