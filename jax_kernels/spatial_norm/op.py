"""Spatially conditioned GroupNorm, `norm(x) * y(zq) + b(zq)`, in one pass over the activations."""

import functools
from collections.abc import Callable
from typing import Literal

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jax_kernels.common.activation import Activation, check_activation
from jax_kernels.common.checks import check_channels
from jax_kernels.common.columns import by_platform, by_shards, jit_kernel
from jax_kernels.common.first_frame import in_parts, joined
from jax_kernels.group_norm.moments import check_groups, moments, per_channel
from jax_kernels.spatial_norm import xla
from jax_kernels.spatial_norm.latents import check_sizes

Implementation = Literal["rows", "pixels_first"]


@jit_kernel(static_argnames=("num_groups", "eps", "activation", "lone_first", "implementation"))
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
    lone_first: bool = False,
    implementation: Implementation | None = None,
) -> Float[Array, "N T H W C"]:
    """`group_norm(x) * conv_y(zq) + conv_b(zq)`, `zq` upsampled to `x` by nearest neighbour (MoVQ, arXiv
    2209.09002).

    A 1x1x1 convolution commutes with nearest upsampling: both run on the latent's rows, an eighth of the
    pixels or less, and are repeated into place.

    Args:
        x: the activations.
        zq: the latents: H / h, W / w and T / t are whole; see `lone_first`.
        weight, bias: GroupNorm's affine.
        kernel_y, bias_y, kernel_b, bias_b: the two 1x1x1 convolutions.
        num_groups, eps: GroupNorm's.
        activation: applied to the result ("silu"), or None.
        lone_first: whether the first frame goes with the first latent frame alone, and the rest with the
            rest: then (T - 1) / (t - 1) is whole.
        implementation: "rows" broadcasts what comes of the latents over rows; "pixels_first" does so in the
            order that a TPU keeps large frames in. None takes the fastest known for the platform that is
            compiled for.

    Returns:
        The shape and dtype of `x`; everything in between is float32.

    Raises:
        ValueError: sizes of `x` that are no whole multiples of those of `zq`; weights of other sizes; an
            implementation or an activation that there is not.
    """
    channels = x.shape[-1]
    check_groups(channels, num_groups)
    check_activation(activation)
    check_channels("spatial_norm", channels, weight=weight, bias=bias, bias_y=bias_y, bias_b=bias_b)
    _check_kernels(zq.shape[-1], channels, kernel_y, kernel_b)
    check_sizes(zq, x.shape, lone_first=lone_first)
    if implementation is not None and implementation not in _IMPLEMENTATIONS:
        raise ValueError(f"implementation {implementation!r} is not one of {sorted(_IMPLEMENTATIONS)}")
    stats = moments(x, num_groups=num_groups, channel_axis=-1)
    scale = per_channel(lax.rsqrt(stats.variance + eps), channels) * weight.astype(jnp.float32)
    shift = bias.astype(jnp.float32) - per_channel(stats.mean, channels) * scale
    parts = in_parts(x, zq) if lone_first else [(x, zq)]
    modulated = functools.partial(
        _modulated,
        activation=activation,
        lone_first=lone_first and len(parts) == 1,
        implementation=implementation,
    )
    convolutions = (kernel_y, bias_y), (kernel_b, bias_b)
    return joined([by_shards(modulated, part, convolutions, (scale, shift)) for part in parts])


def _check_kernels(latent_channels: int, channels: int, *kernels: Array) -> None:
    for kernel in kernels:
        if kernel.shape != (latent_channels, channels):
            raise ValueError(
                f"spatial_norm got a kernel of shape {kernel.shape} for latents of {latent_channels} "
                f"channels and activations of {channels}: it needs ({latent_channels}, {channels})"
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
    lone_first: bool,
    implementation: Implementation | None,
) -> Array:
    inputs = x, scale_NC, shift_NC, zq, to_y, to_b
    if implementation is not None:
        return _IMPLEMENTATIONS[implementation](activation, lone_first, *inputs)
    named = {"tpu": "pixels_first" if x.shape[1] > 1 else "rows", "default": "rows"}
    forms = {
        platform: functools.partial(_IMPLEMENTATIONS[name], activation, lone_first)
        for platform, name in named.items()
    }
    return by_platform(*inputs, **forms)


_IMPLEMENTATIONS: dict[str, Callable[..., Array]] = {
    "rows": xla.by_rows,
    "pixels_first": xla.by_pixels,
}
