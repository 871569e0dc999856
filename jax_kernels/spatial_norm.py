"""Spatially conditioned GroupNorm, `norm(x) * y(zq) + b(zq)`, in one pass over the activations."""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jax_kernels.columns import by_platform, by_shards, jit_kernel, with_clear_padding
from jax_kernels.group_norm import Activation, check_activation, check_groups, moments, per_channel
from jax_kernels.layout import (
    frames_first,
    is_large,
    pixels_first,
    precision_for,
    repeat_nearest,
    split_first_frame,
    zero_of,
)
from jax_kernels.tpu.modulated import modulated, takes

Implementation = Literal["rows", "pixels_first", "kernel"]


@jit_kernel(static_argnames=("num_groups", "eps", "activation", "implementation"))
def spatial_norm(
    x: Float[Array, "N T H W C"],
    zq: Float[Array, "N t h w Z"],
    weight: Float[Array, " C"],
    bias: Float[Array, " C"],
    kernel_y: Float[Array, "Z C"],
    bias_y: Float[Array, " C"],
    kernel_b: Float[Array, "Z C"],
    bias_b: Float[Array, " C"],
    *,
    num_groups: int,
    eps: float = 1e-6,
    activation: Activation | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "N T H W C"]:
    """`group_norm(x) * conv_y(zq) + conv_b(zq)`, `zq` upsampled to `x` by nearest neighbour (MoVQ, arXiv
    2209.09002).

    A 1x1x1 convolution commutes with nearest upsampling: both run on the latent's rows, an eighth of the
    pixels or less, and are repeated into place.

    Args:
        x: the activations.
        zq: the latents: H / h, W / w and T / t are whole. A batch with an odd number of frames above one
            matches its first frame with the first latent frame and the rest with the rest.
        weight, bias: GroupNorm's affine.
        kernel_y, bias_y, kernel_b, bias_b: the two 1x1x1 convolutions.
        num_groups, eps: GroupNorm's.
        activation: applied to the result ("silu"), or None.
        implementation: "rows" broadcasts what comes of the latents over rows; "pixels_first" does so in the
            order that a TPU keeps large frames in; "kernel" is a Pallas kernel, for TPUs (`modulated`). None
            takes the fastest known for the platform that is compiled for, of those that take `x`.

    Returns:
        The shape and dtype of `x`; everything in between is float32.

    Raises:
        ValueError: sizes of `x` that are no whole multiples of those of `zq`; an implementation or an
            activation that there is not.
    """
    check_groups(x.shape[-1], num_groups)
    check_activation(activation)
    _check_sizes(zq, x.shape)
    if implementation is not None and implementation not in _IMPLEMENTATIONS:
        raise ValueError(f"implementation {implementation!r} is not one of {sorted(_IMPLEMENTATIONS)}")
    channels = x.shape[-1]
    stats = moments(x, num_groups=num_groups, channel_axis=-1)
    scale = per_channel(lax.rsqrt(stats.variance + eps), channels) * weight.astype(jnp.float32)
    shift = bias.astype(jnp.float32) - per_channel(stats.mean, channels) * scale
    return by_shards(
        functools.partial(_modulated, activation=activation, implementation=implementation),
        (x, zq),
        ((kernel_y, bias_y), (kernel_b, bias_b)),
        (scale, shift),
    )


def _modulated(
    x: Array,
    zq: Array,
    to_y: tuple[Array, Array],
    to_b: tuple[Array, Array],
    scale_NC: Array,
    shift_NC: Array,
    *,
    activation: Activation | None,
    implementation: Implementation | None,
) -> Array:
    inputs = x, scale_NC, shift_NC, zq, to_y, to_b
    if implementation is not None:
        return _IMPLEMENTATIONS[implementation](activation, *inputs)
    # Without an activation what comes next is better fused with the modulation than kept from it.
    by_kernel = activation is not None and is_large(x) and takes(x, zq)
    named = {"tpu": "kernel" if by_kernel else "pixels_first", "default": "rows"}
    forms = {
        platform: functools.partial(_IMPLEMENTATIONS[name], activation) for platform, name in named.items()
    }
    return by_platform(*inputs, **forms)


def match_frames_and_columns(z_NTHWC: Array, target: tuple[int, ...]) -> Array:
    """Nearest upsampling of latent-sized frames to the frames and columns of `target` (N T H W C); rows stay.

    An odd number of frames above one pairs its first frame with the first latent frame, the rest with the
    rest.
    """
    parts, lengths, columns = *_matched(z_NTHWC, target), target[3]
    resized = [
        repeat_nearest(part, {1: length // part.shape[1], 3: columns // part.shape[3]})
        for part, length in zip(parts, lengths, strict=True)
    ]
    return resized[0] if len(resized) == 1 else jnp.concatenate(resized, axis=1)


def _matched(z_NTHWC: Array, target: tuple[int, ...]) -> tuple[list[Array], list[int]]:
    """The parts of the latents' frames, and how many frames each stands for."""
    parts = split_first_frame(z_NTHWC)
    return parts, [1, target[1] - 1] if len(parts) == 2 else [target[1]]


def _check_sizes(z_NTHWC: Array, target: tuple[int, ...]) -> None:
    for part, length in zip(*_matched(z_NTHWC, target), strict=True):
        wanted = length, *target[2:4]
        if 0 in part.shape[1:4] or any(n % m for n, m in zip(wanted, part.shape[1:4], strict=True)):
            raise ValueError(
                f"spatial_norm got latents {z_NTHWC.shape} for activations {target}: no multiple; frames, "
                "rows and columns must each be a whole one"
            )


def _by_rows(
    activation: Activation | None,
    x: Array,
    scale_NC: Array,
    shift_NC: Array,
    zq: Array,
    to_y: tuple[Array, Array],
    to_b: tuple[Array, Array],
) -> Array:
    """`activation((x * scale + shift) * y + b)` as one multiply-add, `y` and `b` at the latents' rows."""
    zq = match_frames_and_columns(zq, x.shape)
    y = _pointwise("nthwz,zc->nthwc", zq, *to_y)
    multiplier = y * _over_pixels(scale_NC)
    offset = y * _over_pixels(shift_NC) + _pointwise("nthwz,zc->nthwc", zq, *to_b)
    n, t, h, w, c = multiplier.shape
    rows = x.reshape(n, t, h, x.shape[2] // h, w, c)
    result = _activate(
        rows.astype(jnp.float32) * multiplier[:, :, :, None] + offset[:, :, :, None], activation
    )
    return with_clear_padding(result.astype(x.dtype).reshape(x.shape))


def _pixels_first(
    activation: Activation | None,
    x: Array,
    scale_NC: Array,
    shift_NC: Array,
    zq: Array,
    to_y: tuple[Array, Array],
    to_b: tuple[Array, Array],
) -> Array:
    """`_by_rows` in the order H W N T C, in which a TPU keeps the activations of a convolution over frames.

    There, repeating a row is a broadcast over an outer axis, which costs nothing inside a fusion: two
    multiply-adds a pixel are less than a pass that makes them one. The barriers keep XLA from moving the
    reshape past the multiplication: it would then write the broadcast `y` and `b` out, in float32 and at full
    size (v6e, a block at 8 x 480 x 720 x 128: 61 ms instead of 41). Without an activation nothing keeps what
    comes after from being fused.
    """
    zq = match_frames_and_columns(zq, x.shape)
    # Not before the statistics: the compiler would compute the `y` and `b` of all norms first, and keep them.
    zero = zero_of(scale_NC[:, :1, None])  # of each video, whose statistics other videos' shards do not have
    y, b = (
        _pointwise("hwntz,zc->hwntc", pixels_first(zq), kernel, bias + zero) for kernel, bias in (to_y, to_b)
    )
    h, w, n, t, c = y.shape
    rows = lax.optimization_barrier(pixels_first(x).reshape(h, x.shape[2] // h, w, n, t, c))
    normed = rows.astype(jnp.float32) * scale_NC[:, None] + shift_NC[:, None]
    result = _activate(normed * y[:, None] + b[:, None], activation)
    result = with_clear_padding(result.astype(x.dtype), column_axis=2)
    if activation is not None:
        result = lax.optimization_barrier(result)
    return frames_first(result.reshape(x.shape[2], w, n, t, c))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _by_kernel(
    activation: Activation | None,
    x: Array,
    scale_NC: Array,
    shift_NC: Array,
    zq: Array,
    to_y: tuple[Array, Array],
    to_b: tuple[Array, Array],
) -> Array:
    """`_by_rows` by the Pallas kernel."""
    kernel = jnp.concatenate([jnp.vstack(conv) for conv in (to_y, to_b)], axis=1)
    zq = match_frames_and_columns(zq, (*x.shape[:3], zq.shape[3], x.shape[4]))
    ones = jnp.ones((*zq.shape[:-1], 1), zq.dtype)
    # Where latents only pad a width, so does the result: factors and offsets of zero clear it.
    zq = with_clear_padding(jnp.concatenate([zq, ones], axis=-1))
    dtype = jnp.promote_types(zq.dtype, kernel.dtype)
    zq, kernel = zq.astype(dtype), kernel.astype(dtype)
    return modulated(x, scale_NC, shift_NC, zq, kernel, silu=activation == "silu")


@_by_kernel.defjvp
def _(activation: Activation | None, primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> Any:
    of_plain = jax.jvp(functools.partial(_by_rows, activation), primals, tangents)
    return _by_kernel(activation, *primals), of_plain[1]


_IMPLEMENTATIONS: dict[str, Callable[..., Array]] = {
    "rows": _by_rows,
    "pixels_first": _pixels_first,
    "kernel": _by_kernel,
}


def _activate(x: Array, activation: Activation | None) -> Array:
    return jax.nn.silu(x) if activation == "silu" else x


def _pointwise(equation: str, z: Array, kernel_ZC: Array, bias_C: Array) -> Array:
    """A 1x1x1 convolution, in float32."""
    precision = precision_for(jnp.promote_types(z.dtype, kernel_ZC.dtype))
    y = jnp.einsum(equation, z, kernel_ZC, precision=precision, preferred_element_type=jnp.float32)
    return y + bias_C.astype(jnp.float32)


def _over_pixels(coefficient_NC: Array) -> Array:
    return coefficient_NC[:, None, None, None, :]
