"""Rotary positions of queries and keys."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jax_kernels.common.jitted import jitted
from jax_kernels.common.layout import precision_for


@jitted()
def apply_rotary(
    x: Float[Array, "N S H D"], cos: Float[Array, "P D"], sin: Float[Array, "P D"]
) -> Float[Array, "N S H D"]:
    """Apply rotary positions (Su et al. 2021) to the last P of S positions, and copy the positions before.

    Neighbouring channels are a pair: (a, b) becomes (a cos - b sin, b cos + a sin). A product with a matrix
    of 0, 1 and -1, which is exact, swaps the channels of pairs: an axis of two channels would fill a TPU's
    lanes with padding.

    Args:
        x: any float dtype, D even.
        cos, sin: float32, each angle twice, for both channels of its pair.

    Returns:
        The shape and dtype of `x`; the arithmetic is float32.

    Raises:
        ValueError: tables that do not fit `x`.
    """
    positions, channels = cos.shape
    if cos.shape != sin.shape or x.ndim != 4 or channels != x.shape[-1] or positions > x.shape[1]:
        raise ValueError(
            f"apply_rotary got x {x.shape}, cos {cos.shape}, sin {sin.shape}: it takes (N, S, H, D), (P, D)"
        )
    padding = ((x.shape[1] - positions, 0), (0, 0))  # positions without a rotation: cos is 1 and sin 0
    cos_SHD = jnp.pad(cos, padding, constant_values=1.0)[:, None]
    sin_SHD = jnp.pad(sin, padding)[:, None]
    partners = jnp.einsum(
        "nshd,de->nshe", x, _pair_rotation(channels, x.dtype), precision=precision_for(x.dtype)
    )
    return (x.astype(jnp.float32) * cos_SHD + partners.astype(jnp.float32) * sin_SHD).astype(x.dtype)


def _pair_rotation(channels: int, dtype: jnp.dtype) -> Array:
    """Return the matrix M, (D, D), with which `x @ M` takes every pair (a, b) of channels to (-b, a)."""
    return jnp.asarray(np.kron(np.eye(channels // 2), [[0, 1], [-1, 0]]), dtype)
