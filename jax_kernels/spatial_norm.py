"""Spatially conditioned GroupNorm, `norm(x) * y(zq) + b(zq)`, as one multiply-add."""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jax_kernels.group_norm import check_groups, moments, per_channel
from jax_kernels.layout import precision_for, repeat_nearest, split_first_frame

Activation = Literal["silu"]


@functools.partial(jax.jit, static_argnames=("num_groups", "eps", "activation"))
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
) -> Float[Array, "N T H W C"]:
    """`group_norm(x) * conv_y(zq) + conv_b(zq)`, `zq` upsampled to `x` by nearest neighbour (MoVQ, arXiv
    2209.09002).

    Two exact rewrites: a 1x1x1 convolution commutes with nearest upsampling, so both run at the latent's
        resolution;
    then norm, affine and modulation are one `x * A + B` whose coefficients live there too and are repeated
    into place.

    Args:
        x: the activations.
        zq: the latents: H / h, W / w and T / t are whole. A batch with an odd number of frames above one
            matches its first frame with the first latent frame and the rest with the rest.
        weight, bias: GroupNorm's affine.
        kernel_y, bias_y, kernel_b, bias_b: the two 1x1x1 convolutions.
        num_groups, eps: GroupNorm's.
        activation: applied to the result ("silu"), or None.

    Returns:
        The shape and dtype of `x`; everything in between is float32.

    Raises:
        ValueError: sizes of `x` that are no whole multiples of those of `zq`.
    """
    check_groups(x.shape[-1], num_groups)
    stats = moments(x, num_groups=num_groups, channel_axis=-1)
    inverse_deviation = per_channel(lax.rsqrt(stats.variance + eps), x.shape[-1])
    scale = inverse_deviation * weight.astype(jnp.float32)
    shift = bias.astype(jnp.float32) - per_channel(stats.mean, x.shape[-1]) * scale
    y = _pointwise(zq, kernel_y, bias_y)
    multiplier = y * _over_pixels(scale)
    offset = y * _over_pixels(shift) + _pointwise(zq, kernel_b, bias_b)
    result = x.astype(jnp.float32) * match_frames(multiplier, x.shape) + match_frames(offset, x.shape)
    if activation == "silu":
        result = jax.nn.silu(result)
    return result.astype(x.dtype)


def match_frames(z_NTHWC: Array, target: tuple[int, ...]) -> Array:
    """Nearest upsampling of latent-sized frames to the frames, rows and columns of `target` (N T H W C)."""
    frames, rows, columns = target[1:4]
    parts = split_first_frame(z_NTHWC)
    lengths = [1, frames - 1] if len(parts) == 2 else [frames]
    resized = []
    for part, length in zip(parts, lengths, strict=True):
        factors = {}
        for axis, wanted in ((1, length), (2, rows), (3, columns)):
            if wanted % part.shape[axis]:
                raise ValueError(
                    f"spatial_norm got latents {z_NTHWC.shape} for activations {target}: not a multiple"
                )
            factors[axis] = wanted // part.shape[axis]
        resized.append(repeat_nearest(part, factors))
    return resized[0] if len(resized) == 1 else jnp.concatenate(resized, axis=1)


def _pointwise(z: Array, kernel_ZC: Array, bias_C: Array) -> Array:
    y = jnp.einsum(
        "nthwz,zc->nthwc", z, kernel_ZC, precision=precision_for(z.dtype), preferred_element_type=jnp.float32
    )
    return y + bias_C.astype(jnp.float32)


def _over_pixels(coefficient_NC: Array) -> Array:
    return coefficient_NC[:, None, None, None, :]
