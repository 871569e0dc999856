"""Spatially conditioned GroupNorm in its plainest form, which the fast forms have to equal."""

import jax
import jax.numpy as jnp

from jax_kernels.group_norm.reference import group_norm


def spatial_norm(
    x,
    zq,
    weight,
    bias,
    kernel_y,
    bias_y,
    kernel_b,
    bias_b,
    *,
    num_groups,
    eps=1e-6,
    activation=None,
    first_frame_alone=False,
):
    """Upsample the latents `zq`, convolve them to y and b, and return activation(GroupNorm(x) * y + b)."""
    x_f32, latents = x.astype(jnp.float32), upsampled(zq, x.shape, first_frame_alone).astype(jnp.float32)
    y, b = (
        jnp.einsum("nthwz,zc->nthwc", latents, kernel, precision=jax.lax.Precision.HIGHEST) + offset
        for kernel, offset in ((kernel_y, bias_y), (kernel_b, bias_b))
    )
    result = group_norm(x_f32, weight, bias, num_groups=num_groups, eps=eps, channel_axis=-1) * y + b
    return (jax.nn.silu(result) if activation == "silu" else result).astype(x.dtype)


def upsampled(zq, shape, first_frame_alone):
    """Repeat latents `zq` (N, t, h, w, c) to the frames and pixels of `shape` (N, T, H, W, C)."""
    _, frames, rows, columns, _ = shape
    _, t, h, w, _ = zq.shape
    alone = int(first_frame_alone)  # 1 if the first latent frame covers the first frame alone, else 0
    others = frames - alone  # number of the other frames, which the other `t - alone` latent frames cover
    # For each frame, the index of its latent frame.
    latent_frames = [*range(alone), *(alone + i * (t - alone) // others for i in range(others))]
    zq = zq[:, jnp.array(latent_frames)]
    zq = zq[:, :, jnp.array([i * h // rows for i in range(rows)])]
    return zq[:, :, :, jnp.array([i * w // columns for i in range(columns)])]
