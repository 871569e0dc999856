"""Causal 3-D convolution in its plainest form: what the fast forms have to equal."""

import jax
import jax.numpy as jnp


def conv3d(x, kernel, bias=None, cache=None, *, residual=None):
    """Convolve the past frames `cache` and the new frames `x` in 3-D, in float32, zero-padded in space.

    At a video's start, without a cache, the past repeats the first frame.
    """
    past = kernel.shape[0] - 1  # number of cached frames
    rows, columns = kernel.shape[1] // 2, kernel.shape[2] // 2  # of zeros on each side
    if cache is None:
        # `x[:, :0]` has no frames: with a `past` of 0 there is nothing else to concatenate.
        cache = jnp.concatenate([x[:, :0], *[x[:, :1]] * past], axis=1)
    frames = jnp.concatenate([cache, x], axis=1)
    padded = jnp.pad(frames, ((0, 0), (0, 0), (rows, rows), (columns, columns), (0, 0)))
    y = jax.lax.conv_general_dilated(
        padded.astype(jnp.float32),
        kernel.astype(jnp.float32),
        (1, 1, 1),
        "VALID",
        dimension_numbers=("NDHWC", "DHWIO", "NDHWC"),
        precision=jax.lax.Precision.HIGHEST,
    )
    y = sum((term.astype(jnp.float32) for term in (bias, residual) if term is not None), start=y)
    return y.astype(x.dtype), frames[:, frames.shape[1] - past :] if past else None
