"""Operations on channels alone: matrix products, LayerNorm and its modulation, SiLU and GELU.

Some of them treat the tokens of text and the patches of frames differently. A video's text tokens come first,
and its patches begin at the index `first`. On a device whose tokens are all patches `first` is zero or
negative, and where all are text it is beyond the tokens. A gate, scale or shift (N, 2, C) has one vector for
a video's text tokens, then one for its patches.

A weight of fewer bits, such as int8, is cast to the dtype of `x` where it is multiplied. Its argument `scale`
has a factor for each output channel, and multiplies the float32 sums: so `weight * scale[:, None]` is meant.

With `dynamic` the weight is int8, and `x` is rounded to int8 as well: each token has a scale, by which its
largest number becomes 127 or -127 (`common.pointwise.quantized`). Products are summed exactly, in int32, then
multiplied by both scales in float32. Derivatives are those without `dynamic`.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int8

from jax_kernels.common.dispatch import Target, dispatch, jitted, kernel_or_plain, with_derivatives_of
from jax_kernels.common.frames import join_frames, split_frames
from jax_kernels.common.pointwise import check_channels, precision_for, quantized, standardized
from jax_kernels.common.tiles import fills_tiles
from jax_kernels.dense import tpu

Weight = Float[Array, "O I"] | Int8[Array, "O I"]
"""A weight, of O output channels for I input channels."""


@jitted("dynamic", "rounded_parts")
def linear(
    x: Float[Array, "*batch I"],
    weight: Weight,
    bias: Float[Array, " O"] | None = None,
    *,
    scale: Float[Array, " O"] | None = None,
    dynamic: bool = False,
    rounded_parts: bool = False,
) -> Float[Array, "*batch O"]:
    """Return `x weight^T + bias`, summed in float32 and rounded once, as PyTorch's `linear` does.

    Args:
        x: any float dtype.
        weight: (O, I), of `x`'s dtype or of fewer bits.
        bias: (O,), or None.
        scale: (O,), the weight's factors (see the module's docstring), or None.
        dynamic: whether `x` is rounded to int8 (see the module's docstring).
        rounded_parts: whether sums are rounded before the bias is added. If the input channels are split over
            devices, each device then rounds its part of a sum, and for bfloat16 the devices exchange numbers
            of 16 bits instead of 32. With `dynamic` it makes no difference: they exchange exact sums.

    Returns:
        The dtype of `x`.

    Raises:
        ValueError: channels that the weight does not take, a bias or scale of another length, or `dynamic`
            without a weight in int8 and its scale.
    """
    if x.shape[-1] != weight.shape[1]:
        raise ValueError(f"linear got {x.shape[-1]} channels for a weight that takes {weight.shape[1]}")
    _check_weight("linear", weight, bias, scale, dynamic)
    # Sums that are not scaled yet would overflow float16.
    rounded_parts = rounded_parts and (scale is None or x.dtype != jnp.float16)
    if dynamic:
        y = with_derivatives_of(_sums, _dynamic_sums)(x, weight)
    else:
        y = _sums(x, weight, x.dtype if rounded_parts else jnp.float32)
    if scale is not None:
        y = y.astype(jnp.float32) * scale.astype(jnp.float32)
    if bias is not None:
        y = y.astype(jnp.float32) + bias.astype(jnp.float32)
    return y.astype(x.dtype)


def _sums(x: Array, weight: Array, dtype: Any = jnp.float32) -> Array:
    """Return `x weight^T` in a dtype, without scale and bias."""
    return jax.lax.dot_general(
        x,
        weight.astype(x.dtype),
        (((x.ndim - 1,), (1,)), ((), ())),
        precision=precision_for(x.dtype),
        preferred_element_type=dtype,
    )


def _dynamic_sums(x: Array, weight: Array) -> Array:
    int8, token_scale = quantized(x)
    return _sums(int8, weight, jnp.int32).astype(jnp.float32) * token_scale


@jitted("eps")
def layer_norm(
    x: Float[Array, "*batch C"],
    weight: Float[Array, " C"] | None,
    bias: Float[Array, " C"] | None,
    eps: float = 1e-5,
) -> Float[Array, "*batch C"]:
    """Apply layer normalization (Ba et al. 2016) over the last axis.

    Args:
        x: any float dtype.
        weight, bias: (C,), or None.
        eps: added to the variance.

    Returns:
        The dtype of `x`; statistics and arithmetic are float32 for every dtype.

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
    """Return `x * sigmoid(x)`, computed in float32 and rounded once, as PyTorch does.

    `jax.nn.silu` would round twice. `time_axis` is the axis of the frames: with it, a TPU computes a few
    frames at a time, which saves temporaries. None computes all frames at once.
    """
    return dispatch(silu_on, x, time_axis=time_axis)


def silu_on(target: Target, x: Array, *, time_axis: int | None) -> Array:
    if time_axis is None:
        return jax.nn.silu(x.astype(jnp.float32)).astype(x.dtype)
    # A run is the few frames that a TPU computes together: only they need memory for float32 at a time.
    runs = split_frames(target, x, time_axis=time_axis)
    return join_frames([silu_on(target, frames, time_axis=None) for (frames,) in runs], time_axis)


def split_linear(
    x: Float[Array, "S I"],
    weight: Weight,
    bias: Float[Array, " O"] | None = None,
    *,
    scale: Float[Array, " O"] | None = None,
    dynamic: bool = False,
    parts: int,
) -> Float[Array, "parts S O/parts"]:
    """Compute `linear`, and return its outputs O in `parts` equal parts along a new first axis.

    If the parts were sliced from the result of `linear`, XLA would copy each of them.
    """
    bias = _checked_bias("split_linear", weight, bias, scale, dynamic)
    return dispatch(split_linear_on, x, weight, bias, scale, dynamic=dynamic, parts=parts)


def split_linear_on(
    target: Target, x: Array, weight: Array, bias: Array, scale: Array | None, *, dynamic: bool, parts: int
) -> Array:
    """Compute `split_linear` of tokens `x` (S, I); the result is (parts, S, O / parts)."""

    def plain(x: Array, weight: Array, bias: Array, scale: Array | None) -> Array:
        if dynamic:
            y = linear(x, weight, bias, scale=scale, dynamic=True)
            return y.reshape(len(x), parts, -1).swapaxes(0, 1)
        y = jnp.einsum(
            "si,poi->pso",  # s tokens, i inputs, p parts of o outputs each
            x,
            weight.astype(x.dtype).reshape(parts, -1, x.shape[-1]),
            precision=precision_for(x.dtype),
            preferred_element_type=jnp.float32,
        )
        y = y if scale is None else y * scale.astype(jnp.float32).reshape(parts, 1, -1)
        return (y + bias.astype(jnp.float32).reshape(parts, 1, -1)).astype(x.dtype)

    def by_kernel(x: Array, weight: Array, bias: Array, scale: Array | None) -> Array:
        # The kernel takes tokens of several videos, (N, S, I). Here N is 1.
        return tpu.product(x[None], weight, bias, scale, dynamic=dynamic, parts=parts)

    return kernel_or_plain(
        target, by_kernel, plain, is_supported=tpu.supports_product(x[None], weight, parts)
    )(x, weight, bias, scale)


def adaptive_layer_norm(
    x: Float[Array, "N S C"],
    weight: Float[Array, " C"] | None,
    bias: Float[Array, " C"] | None,
    scale: Float[Array, "N 2 C"],
    shift: Float[Array, "N 2 C"],
    first: Int[Array, ""] | int,
    eps: float = 1e-5,
) -> Float[Array, "N S C"]:
    """Return `layer_norm(x) * (1 + scale) + shift` for each token, in one pass over `x`.

    The module's docstring explains `scale`, `shift` and `first`; `weight` and `bias` are the norm's, or None.
    `eps` is added to the variance. The result has the dtype of `x`; all arithmetic is float32, and its result
    is rounded once.

    Raises:
        ValueError: a weight or bias of another length.
    """
    check_channels("adaptive_layer_norm", x.shape[-1], weight=weight, bias=bias)
    # With the norm's weight and bias, (y * weight + bias) * (1 + scale) + shift is y * factor + offset.
    factor = 1 + scale.astype(jnp.float32)
    offset = shift.astype(jnp.float32)
    if bias is not None:
        offset = offset + factor * bias.astype(jnp.float32)
    if weight is not None:
        factor = factor * weight.astype(jnp.float32)
    return dispatch(adaptive_layer_norm_on, x, factor, offset, jnp.asarray(first, jnp.int32), eps=eps)


def adaptive_layer_norm_on(
    target: Target, x: Array, factor: Array, offset: Array, first_patch: Array, *, eps: float
) -> Array:
    """Return `standardized(x) * factor + offset` for each token.

    `factor` and `offset` (N, 2, C) have one vector for text and one for patches, which begin at the index
    `first_patch`.
    """

    def plain(x: Array, factor: Array, offset: Array, first_patch: Array) -> Array:
        y = standardized(x.astype(jnp.float32), eps)
        y = y * _token_vectors(factor, x, first_patch) + _token_vectors(offset, x, first_patch)
        # Without the barrier XLA would fuse the norm into each product that reads it, and compute it again.
        return jax.lax.optimization_barrier(y.astype(x.dtype))

    by_kernel = functools.partial(tpu.adaptive_layer_norm, eps=eps)
    return kernel_or_plain(target, by_kernel, plain, is_supported=fills_tiles(x))(
        x, factor, offset, first_patch
    )


@jitted()
def gated_residual(
    x: Float[Array, "N S C"],
    y: Float[Array, "N S C"],
    gate: Float[Array, "N 2 C"],
    first: Int[Array, ""] | int,
) -> Float[Array, "N S C"]:
    """Return `x + gate * y` for each token, in one pass.

    The module's docstring explains `gate` and `first`. The result has the dtype of `x`; the arithmetic is
    float32.
    """
    total = x.astype(jnp.float32) + _token_vectors(gate.astype(jnp.float32), x, first) * y.astype(jnp.float32)
    # Without the barrier XLA would compute the sum again in each operation that reads it.
    return jax.lax.optimization_barrier(total.astype(x.dtype))


def linear_gelu(
    x: Float[Array, "N S I"],
    weight: Weight,
    bias: Float[Array, " O"] | None = None,
    *,
    scale: Float[Array, " O"] | None = None,
    dynamic: bool = False,
) -> Float[Array, "N S O"]:
    """Return `gelu(x weight^T + bias)`; other arguments are as `linear` takes them.

    A Pallas kernel on a TPU computes the product and GELU in one pass and rounds once. The form for XLA
    rounds after each of them.

    Raises:
        ValueError: see `linear`.
    """
    bias = _checked_bias("linear_gelu", weight, bias, scale, dynamic)
    return dispatch(linear_gelu_on, x, weight, bias, scale, dynamic=dynamic)


def linear_gelu_on(
    target: Target, x: Array, weight: Array, bias: Array, scale: Array | None, *, dynamic: bool
) -> Array:

    def plain(x: Array, weight: Array, bias: Array, scale: Array | None) -> Array:
        return gelu(linear(x, weight, bias, scale=scale, dynamic=dynamic))

    by_kernel = functools.partial(tpu.product, gelu=True, dynamic=dynamic)
    return kernel_or_plain(target, by_kernel, plain, is_supported=tpu.supports_product(x, weight))(
        x, weight, bias, scale
    )


def gated_linear(
    x: Float[Array, "N S_or_I I_or_S"],
    weight: Weight,
    bias: Float[Array, " O"] | None,
    residual: Float[Array, "N S O"],
    gate: Float[Array, "N 2 O"],
    first: Int[Array, ""] | int,
    *,
    scale: Float[Array, " O"] | None = None,
    dynamic: bool = False,
    transposed: bool = False,
) -> Float[Array, "N S O"]:
    """Return `residual + gate * linear(x, weight, bias)` for each token.

    On a TPU a Pallas kernel computes this in one pass and rounds once. The form for XLA rounds the product,
    then the sum.

    Args:
        x: (N, S, I), or (N, I, S) if `transposed`.
        weight, bias, scale, dynamic: as `linear` takes them.
        residual: the tokens that the gated product is added to.
        gate, first: the factors of the product, and the index of the first patch: see the module's docstring.
        transposed: whether channels of `x` come before its tokens, as `attention_transposed` returns them.

    Raises:
        ValueError: see `linear`.
    """
    bias = _checked_bias("gated_linear", weight, bias, scale, dynamic)
    return dispatch(
        gated_linear_on,
        x,
        weight,
        bias,
        scale,
        residual,
        gate,
        jnp.asarray(first, jnp.int32),
        dynamic=dynamic,
        transposed=transposed,
    )


def gated_linear_on(
    target: Target,
    x: Array,
    weight: Array,
    bias: Array,
    scale: Array | None,
    residual: Array,
    gate: Array,
    first_patch: Array,
    *,
    dynamic: bool,
    transposed: bool,
) -> Array:
    """Compute `residual + gate * (x weight^T + bias)`; `x` is (N, S, I), or (N, I, S) if `transposed`."""

    def plain(
        x: Array,
        weight: Array,
        bias: Array,
        scale: Array | None,
        residual: Array,
        gate: Array,
        first_patch: Array,
    ) -> Array:
        # Videos and tokens become one axis, because XLA's CPU backend cannot transpose bfloat16 that has an
        # axis of length 1, such as one video.
        x_SC = (x.swapaxes(1, 2) if transposed else x).reshape(-1, weight.shape[1])
        y = linear(x_SC, weight, bias, scale=scale, dynamic=dynamic).reshape(residual.shape)
        return gated_residual(residual, y, gate, first_patch)

    by_kernel = functools.partial(tpu.product, dynamic=dynamic, transposed=transposed)
    return kernel_or_plain(target, by_kernel, plain, is_supported=tpu.supports_product(x, weight))(
        x, weight, bias, scale, residual, gate, first_patch
    )


def _check_weight(name: str, weight: Array, bias: Array | None, scale: Array | None, dynamic: bool) -> None:
    """Raise `ValueError` for the op `name` if the bias or the scale is wrong, or `dynamic` cannot be."""
    check_channels(name, weight.shape[0], bias=bias, scale=scale)
    if dynamic and (weight.dtype != jnp.int8 or scale is None):
        raise ValueError(
            f"{name} got dynamic=True for a weight of {weight.dtype} "
            f"{'without' if scale is None else 'with'} a scale: give one of int8 with a scale"
        )


def _checked_bias(name: str, weight: Array, bias: Array | None, scale: Array | None, dynamic: bool) -> Array:
    """Return the bias, or zeros in place of None, after `_check_weight`."""
    _check_weight(name, weight, bias, scale, dynamic)
    return jnp.zeros(weight.shape[0], jnp.float32) if bias is None else bias


def _token_vectors(vectors_N2C: Array, x_NSC: Array, first_patch: Array | int) -> Array:
    """Return the vector (N, S, C) of each token of `x`: its video's vector for text, or that for patches."""
    is_patch = jnp.arange(x_NSC.shape[1]) >= first_patch
    return jnp.where(is_patch[:, None], vectors_N2C[:, 1:], vectors_N2C[:, :1])


@jitted()
def gelu(x: Float[Array, "*any"]) -> Float[Array, "*any"]:
    """Compute GELU by its tanh approximation, in float32, and round once."""
    # Without the barrier XLA would compute GELU again for every block of the next matrix product.
    return jax.lax.optimization_barrier(_gelu(x.astype(jnp.float32)).astype(x.dtype))


@jax.custom_jvp
def _gelu(x: jax.Array) -> jax.Array:
    # With z = `_gelu_inner(x)`, x * (1 + tanh(z)) / 2 equals x / (1 + exp(-2 z)): an exponential, no tanh.
    return x / (1 + jnp.exp(-2 * _gelu_inner(x)))


def _gelu_inner(x: jax.Array) -> jax.Array:
    """Return z, the argument of tanh in GELU's approximation `x * (1 + tanh(z)) / 2`."""
    return math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)


@_gelu.defjvp
def _gelu_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Return `_gelu(x)` and its tangent.

    JAX's own derivative of the division by 1 + exp(-2 z) would be inf / inf where the exponential overflows.
    """
    (x,), (tangent,) = primals, tangents
    share = jax.nn.sigmoid(2 * _gelu_inner(x))  # GELU is x * share
    slope = 2 * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x**2)  # derivative of 2 z
    return _gelu(x), tangent * share * (1 + x * (1 - share) * slope)
