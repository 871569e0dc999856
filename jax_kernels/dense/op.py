"""What works on channels alone: a matrix product, LayerNorm and what modulates it, SiLU and GELU."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

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


@functools.partial(jax.jit, static_argnames="eps")
def modulated_norm(
    x: Float[Array, "N S C"],
    weight: Float[Array, " C"] | None,
    bias: Float[Array, " C"] | None,
    scale: Float[Array, "N 2 C"],
    shift: Float[Array, "N 2 C"],
    second: Bool[Array, " S"],
    eps: float = 1e-5,
) -> Float[Array, "N S C"]:
    """`layer_norm(x) * (1 + scale) + shift`, in one pass, for a sequence of two kinds of tokens.

    Args:
        x: any float dtype.
        weight, bias: of the norm, or None.
        scale, shift: for each video, of tokens of the first and of the second kind.
        second: which tokens are of the second kind.
        eps: added to the variance.

    Returns:
        The dtype of `x`; all arithmetic is float32, and rounded once.
    """
    check_channels("modulated_norm", x.shape[-1], weight=weight, bias=bias)
    scale, shift = (1 + scale.astype(jnp.float32)), shift.astype(jnp.float32)
    if bias is not None:
        shift = shift + scale * bias.astype(jnp.float32)
    if weight is not None:
        scale = scale * weight.astype(jnp.float32)
    y = x.astype(jnp.float32)
    y = y - y.mean(-1, keepdims=True)
    y = y * lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + eps)
    y = y * _of_kind(scale, second) + _of_kind(shift, second)
    return lax.optimization_barrier(y.astype(x.dtype))


@jax.jit
def gated_sum(
    x: Float[Array, "N S C"], y: Float[Array, "N S C"], gate: Float[Array, "N 2 C"], second: Bool[Array, " S"]
) -> Float[Array, "N S C"]:
    """`x + gate * y`, in one pass; see `modulated_norm`."""
    total = x.astype(jnp.float32) + _of_kind(gate.astype(jnp.float32), second) * y.astype(jnp.float32)
    return lax.optimization_barrier(total.astype(x.dtype))


def _of_kind(pair_N2C: Array, second: Array) -> Array:
    """Each token's own of two vectors."""
    return jnp.where(second[None, :, None], pair_N2C[:, 1:], pair_N2C[:, :1])


@jax.jit
def gelu(x: Float[Array, "*any"]) -> Float[Array, "*any"]:
    """GELU by its tanh approximation, in float32, rounded once and in a pass of its own.

    Inside the matrix product that takes it, XLA would compute it again for every block of outputs.
    """
    return lax.optimization_barrier(jax.nn.gelu(x.astype(jnp.float32), approximate=True).astype(x.dtype))
