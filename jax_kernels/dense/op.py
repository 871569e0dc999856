"""What works on channels alone: a matrix product, LayerNorm, and SiLU."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jax_kernels.common.checks import check_channels
from jax_kernels.common.layout import precision_for


@jax.jit
def linear(
    x: Float[Array, "*batch I"], weight: Float[Array, "O I"], bias: Float[Array, " O"] | None = None
) -> Float[Array, "*batch O"]:
    """`x weight^T + bias`, summed in float32 and rounded once, as PyTorch's `linear` does.

    Args:
        x: any float dtype.
        weight: (O, I), `x`'s dtype.
        bias: (O,), or None.

    Returns:
        The dtype of `x`.

    Raises:
        ValueError: channels that the weight does not take, a bias of another length.
    """
    if x.shape[-1] != weight.shape[1]:
        raise ValueError(f"linear got {x.shape[-1]} channels for a weight that takes {weight.shape[1]}")
    check_channels("linear", weight.shape[0], bias=bias)
    y = lax.dot_general(
        x,
        weight,
        (((x.ndim - 1,), (1,)), ((), ())),
        precision=precision_for(x.dtype),
        preferred_element_type=jnp.float32,
    )
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    return y.astype(x.dtype)


@functools.partial(jax.jit, static_argnames="eps")
def layer_norm(
    x: Float[Array, "*batch C"],
    weight: Float[Array, " C"] | None,
    bias: Float[Array, " C"] | None,
    eps: float = 1e-5,
) -> Float[Array, "*batch C"]:
    """Layer normalization (Ba et al. 2016) over the last axis.

    Args:
        x: any float dtype.
        weight, bias: (C,), or None.
        eps: added to the variance.

    Returns:
        The dtype of `x`; statistics and arithmetic are float32 whatever it is.

    Raises:
        ValueError: a weight or bias of another length.
    """
    check_channels("layer_norm", x.shape[-1], weight=weight, bias=bias)
    y = x.astype(jnp.float32)
    y = y - y.mean(-1, keepdims=True)
    y = y * lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + eps)
    if weight is not None:
        y = y * weight.astype(jnp.float32)
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    return y.astype(x.dtype)


@jax.jit
def silu(x: Float[Array, "*any"]) -> Float[Array, "*any"]:
    """`x * sigmoid(x)` in float32, rounded once, as PyTorch does; `jax.nn.silu` rounds the sigmoid too."""
    return jax.nn.silu(x.astype(jnp.float32)).astype(x.dtype)
