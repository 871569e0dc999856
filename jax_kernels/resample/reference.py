"""Up- and downsampling in their plainest form, which the fast forms have to equal."""

import jax
import jax.numpy as jnp


def upsample(x, kernel, bias, *, expand_time, first_frame_alone=False):
    """Double in time (if `expand_time`) and in space first, then convolve every frame of (N, T, H, W, C)."""
    if expand_time:  # `first_frame_alone` is 0 or 1 here: the number of frames that are not doubled
        x = jnp.concatenate([x[:, :first_frame_alone], jnp.repeat(x[:, first_frame_alone:], 2, 1)], 1)
    x = jnp.repeat(jnp.repeat(x, 2, axis=2), 2, axis=3)
    pad_rows, pad_columns = kernel.shape[0] // 2, kernel.shape[1] // 2  # keep the doubled size
    return convolved(x, kernel, bias, ((pad_rows, pad_rows), (pad_columns, pad_columns)), stride=1)


def downsample(x, kernel, bias, *, compress_time, first_frame_alone=False):
    """Average pairs of frames (if `compress_time`), then convolve with stride 2, padded below and right."""
    if compress_time:
        paired = x[:, first_frame_alone:].astype(jnp.float32)  # False is 0, True is 1
        means = (paired[:, ::2] + paired[:, 1::2]) / 2
        x = jnp.concatenate([x[:, :first_frame_alone], means.astype(x.dtype)], axis=1)
    return convolved(x, kernel, bias, ((0, 1), (0, 1)), stride=2)


def convolved(x, kernel, bias, padding, *, stride):
    """Pad every frame of `x` with zeros, ((above, below), (left, right)), and convolve it in float32."""
    frames = jnp.pad(x.reshape(-1, *x.shape[2:]), ((0, 0), *padding, (0, 0)))
    y = jax.lax.conv_general_dilated(
        frames.astype(jnp.float32),
        kernel.astype(jnp.float32),
        (stride, stride),
        "VALID",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        precision=jax.lax.Precision.HIGHEST,
    )
    y = y if bias is None else y + bias.astype(jnp.float32)
    return y.astype(x.dtype).reshape(*x.shape[:2], *y.shape[1:])
