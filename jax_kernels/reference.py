"""The plainest form of every kernel: what the fast forms have to equal. Written to be read, not to be run
fast."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jax_kernels.conv3d import conv3d
from jax_kernels.spatial_norm import match_frames_and_columns


def group_norm(
    x: Array, weight: Array, bias: Array, *, num_groups: int, eps: float = 1e-6, channel_axis: int = 1
):
    """Two passes in float32: the mean, then the mean of the squared deviations."""
    y = jnp.moveaxis(x, channel_axis, 1).astype(jnp.float32)
    grouped = y.reshape(y.shape[0], num_groups, -1)
    mean = grouped.mean(-1, keepdims=True)
    variance = jnp.square(grouped - mean).mean(-1, keepdims=True)
    y = ((grouped - mean) / jnp.sqrt(variance + eps)).reshape(y.shape)
    shape = (1, -1) + (1,) * (y.ndim - 2)
    y = y * weight.astype(jnp.float32).reshape(shape) + bias.astype(jnp.float32).reshape(shape)
    return jnp.moveaxis(y, 1, channel_axis).astype(x.dtype)


def attention(q: Array, k: Array, v: Array, *, scale: float | None = None):
    """All scores at once, everything in float32."""
    q_f32, k_f32, v_f32 = (x.astype(jnp.float32) for x in (q, k, v))
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    scores = jnp.einsum("nshd,nkhd->nhsk", q_f32, k_f32, precision=lax.Precision.HIGHEST) * factor
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    weights = weights / weights.sum(-1, keepdims=True)
    return jnp.einsum("nhsk,nkhd->nshd", weights, v_f32, precision=lax.Precision.HIGHEST).astype(q.dtype)


def causal_conv3d(x: Array, kernel: Array, bias: Array, cache: Array | None = None):
    """One 3-D convolution over the cached frames and the new ones."""
    return conv3d(x, kernel, bias, cache, implementation="direct")


def spatial_norm(
    x, zq, weight, bias, kernel_y, bias_y, kernel_b, bias_b, *, num_groups, eps=1e-6, activation=None
):
    """The latents upsampled first, both 1x1x1 convolutions at full resolution, then the modulation."""
    full = jnp.repeat(match_frames_and_columns(zq, x.shape), x.shape[2] // zq.shape[2], axis=2)
    y, b = (
        jnp.einsum("nthwz,zc->nthwc", full, kernel, precision=lax.Precision.HIGHEST) + offset
        for kernel, offset in ((kernel_y, bias_y), (kernel_b, bias_b))
    )
    result = group_norm(x, weight, bias, num_groups=num_groups, eps=eps, channel_axis=-1) * y + b
    return jax.nn.silu(result) if activation == "silu" else result


def upsample(x: Array, kernel: Array, bias: Array, *, expand_time: bool):
    """Doubled in space and time first, every frame convolved after."""
    if expand_time and x.shape[1] > 1:
        x = (
            jnp.concatenate([x[:, :1], jnp.repeat(x[:, 1:], 2, 1)], 1)
            if x.shape[1] % 2
            else jnp.repeat(x, 2, 1)
        )
    x = jnp.repeat(jnp.repeat(x, 2, axis=2), 2, axis=3)
    y, _ = conv3d(x, kernel[None], bias, implementation="direct")
    return y


def downsample(x: Array, kernel: Array, bias: Array, *, compress_time: bool):
    """Pairs averaged, then padded by hand, then every second pixel of an unpadded convolution."""
    if compress_time and x.shape[1] > 1:
        odd = x.shape[1] % 2
        pairs = (x[:, odd::2].astype(jnp.float32) + x[:, odd + 1 :: 2].astype(jnp.float32)) / 2
        x = jnp.concatenate([x[:, :odd], pairs.astype(x.dtype)], axis=1)
    padded = jnp.pad(x, ((0, 0), (0, 0), (0, 1), (0, 1), (0, 0)))
    y = lax.conv_general_dilated(
        padded,
        kernel[None],
        (1, 2, 2),
        "VALID",
        dimension_numbers=("NDHWC", "DHWIO", "NDHWC"),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return (y + bias.astype(jnp.float32)).astype(x.dtype)
