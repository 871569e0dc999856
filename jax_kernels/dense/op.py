"""What works on channels alone: a matrix product, LayerNorm and what modulates it, SiLU and GELU."""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jax_kernels.common.checks import check_channels
from jax_kernels.common.dispatch import Target, dispatched
from jax_kernels.common.first_frame import in_parts, joined
from jax_kernels.common.jitted import jitted
from jax_kernels.common.layout import precision_for
from jax_kernels.common.pointwise import standardized


@jitted("rounded_parts")
def linear(
    x: Float[Array, "*batch I"],
    weight: Float[Array, "O I"],
    bias: Float[Array, " O"] | None = None,
    *,
    rounded_parts: bool = False,
) -> Float[Array, "*batch O"]:
    """`x weight^T + bias`, summed in float32 and rounded once, as PyTorch's `linear` does.

    Args:
        x: any float dtype.
        weight: (O, I), `x`'s dtype.
        bias: (O,), or None.
        rounded_parts: where the inputs' channels are split over devices, whether each rounds its sum before
            they are added, so that 16 bits travel and not 32.

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
        preferred_element_type=x.dtype if rounded_parts else jnp.float32,
    )
    if bias is not None:
        y = y.astype(jnp.float32) + bias.astype(jnp.float32)
    return y.astype(x.dtype)


@jitted("eps")
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
    y = standardized(x.astype(jnp.float32), eps)
    if weight is not None:
        y = y * weight.astype(jnp.float32)
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    return y.astype(x.dtype)


def silu(x: Float[Array, "*any"], *, time_axis: int | None = None) -> Float[Array, "*any"]:
    """`x * sigmoid(x)` in float32, rounded once, as PyTorch does; `jax.nn.silu` rounds the sigmoid too.

    Args:
        x: of any float dtype.
        time_axis: along which frames lie, where `x` has some.
    """
    return _silu(x, time_axis=time_axis)


def silu_on(target: Target, x: Array, *, time_axis: int | None) -> Array:
    """`silu` for a target."""
    parts = [(x,)] if time_axis is None else in_parts(target, x, time_axis=time_axis)
    return joined(
        [jax.nn.silu(part.astype(jnp.float32)).astype(x.dtype) for (part,) in parts], time_axis or 0
    )


_silu = dispatched(silu_on, "tpu")


@jitted("parts")
def linear_parts(
    x: Float[Array, "S I"],
    weight: Float[Array, "O I"],
    bias: Float[Array, " O"] | None = None,
    *,
    parts: int,
) -> Float[Array, "parts S O/parts"]:
    """`linear` whose outputs come in so many parts, each by itself: cut apart later they would be copied."""
    y = jnp.einsum(
        "si,poi->pso",
        x,
        weight.reshape(parts, -1, x.shape[-1]),
        precision=precision_for(x.dtype),
        preferred_element_type=jnp.float32,
    )
    if bias is not None:
        y = y + bias.astype(jnp.float32).reshape(parts, 1, -1)
    return y.astype(x.dtype)


@jitted("eps")
def modulated_norm(
    x: Float[Array, "S C"],
    weight: Float[Array, " C"] | None,
    bias: Float[Array, " C"] | None,
    scale: Float[Array, "K C"],
    shift: Float[Array, "K C"],
    kind: Int[Array, " S"],
    eps: float = 1e-5,
) -> Float[Array, "S C"]:
    """`layer_norm(x) * (1 + scale) + shift`, in one pass, for tokens of a few kinds.

    Args:
        x: any float dtype.
        weight, bias: of the norm, or None.
        scale, shift: of each kind.
        kind: of each token.
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
    y = standardized(x.astype(jnp.float32), eps)
    y = y * _of_kind(scale, kind) + _of_kind(shift, kind)
    return lax.optimization_barrier(y.astype(x.dtype))


@jitted()
def gated_sum(
    x: Float[Array, "S C"], y: Float[Array, "S C"], gate: Float[Array, "K C"], kind: Int[Array, " S"]
) -> Float[Array, "S C"]:
    """`x + gate * y`, in one pass; see `modulated_norm`."""
    total = x.astype(jnp.float32) + _of_kind(gate.astype(jnp.float32), kind) * y.astype(jnp.float32)
    return lax.optimization_barrier(total.astype(x.dtype))


def _of_kind(vectors_KC: Array, kind: Array) -> Array:
    """Each token's own of a few vectors: chosen, as a TPU looks nothing up in registers."""
    chosen = vectors_KC[:1]
    for index in range(1, len(vectors_KC)):
        chosen = jnp.where(kind[:, None] == index, vectors_KC[index], chosen)
    return chosen


@jitted()
def gelu(x: Float[Array, "*any"]) -> Float[Array, "*any"]:
    """GELU by its tanh approximation, in float32, rounded once and in a pass of its own.

    Inside the matrix product that takes it, XLA would compute it again for every block of outputs.
    """
    return lax.optimization_barrier(_gelu(x.astype(jnp.float32)).astype(x.dtype))


@jax.custom_jvp
def _gelu(x: jax.Array) -> jax.Array:
    # x * (1 + tanh(z)) / 2 is x / (1 + exp(-2 z)), with one transcendental function and no other.
    return x / (1 + jnp.exp(-2 * _gelu_inner(x)))


def _gelu_inner(x: jax.Array) -> jax.Array:
    return math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)


@_gelu.defjvp
def _gelu_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """By itself the quotient's derivative is infinity by infinity where the exponential overflows."""
    (x,), (tangent,) = primals, tangents
    share = jax.nn.sigmoid(2 * _gelu_inner(x))
    slope = 2 * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x**2)
    return _gelu(x), tangent * share * (1 + x * (1 - share) * slope)
