"""Causal 3-D convolution with a cache of past frames, in three formulations behind one signature."""

import functools
from typing import Literal

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jax_kernels.layout import (
    conv_frames,
    jit_kernel,
    kept_pixels_first,
    on_mesh,
    precision_for,
    select_frames,
    without_padding,
)

Implementation = Literal["direct", "summed", "folded"]


@jit_kernel(static_argnames=["implementation"])
def conv3d(
    x: Float[Array, "N T H W I"],
    kernel: Float[Array, "kt kh kw I O"],
    bias: Float[Array, " O"] | None = None,
    cache: Float[Array, "N kt-1 H W I"] | None = None,
    *,
    residual: Float[Array, "N T H W O"] | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "N T H W O"], Float[Array, "N kt-1 H W I"] | None]:
    """3-D convolution, causal in time and zero-padded to the same size in space.

    A frame sees itself and the kt - 1 frames before it: those of `cache`, or, at the start of a video, its
    first frame repeated (diffusers' `CogVideoXCausalConv3d` with `pad_mode="first"`). Sums are float32,
    rounded once.

    Args:
        x: a batch of frames.
        kernel: odd in space; `x`'s dtype.
        bias: (O,), or None.
        cache: what the call on the frames before returned; None at the start.
        residual: added to the sums before they are rounded, or None.
        implementation: "direct" is one 3-D convolution; "summed" adds kt 2-D convolutions; "folded" is one
            2-D convolution over kt * I channels. None takes the fastest known for the platform that is
            compiled for.

    Returns:
        The convolved frames, and the cache for the next call (None where kt is 1).

    Raises:
        ValueError: channels, cache, kernel or residual that do not fit each other.
    """
    _check(x, kernel, cache)
    if kernel.shape[2] > 1:
        x = without_padding(x)
    past, length = kernel.shape[0] - 1, x.shape[1]
    frames = x
    if past:
        if cache is None:
            cache = jnp.repeat(x[:, :1], past, axis=1)
        frames = jnp.concatenate([cache, x], axis=1)
    y = _convolve(frames, kernel, implementation)
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    if residual is not None:
        if residual.shape != y.shape:
            raise ValueError(f"conv3d got a residual of shape {residual.shape} for a result of {y.shape}")
        y = y + residual.astype(jnp.float32)
    y = y.astype(x.dtype)
    if _is_large(x) and y.shape[-1] >= 128 and not on_mesh():  # fewer channels would fill a tile with nothing
        y = kept_pixels_first(y)
    if not past:
        return y, None
    # From x alone where it is long enough, and after the old cache was read: a donated cache whose memory is
    # written while something still reads it is one that XLA copies first.
    latest = x if length >= past else frames
    return y, select_frames(latest, range(latest.shape[1] - past, latest.shape[1]), after=y)


def _convolve(frames: Array, kernel: Array, implementation: Implementation | None) -> Array:
    if kernel.shape[0] == 1:
        return _summed(frames, kernel)
    if implementation is not None:
        if implementation not in _IMPLEMENTATIONS:
            raise ValueError(f"implementation {implementation!r} is not one of {sorted(_IMPLEMENTATIONS)}")
        return _IMPLEMENTATIONS[implementation](frames, kernel)
    return lax.platform_dependent(frames, kernel, tpu=_for_tpu(frames, kernel), cuda=_direct, default=_summed)


def _for_tpu(frames: Array, kernel: Array):
    """The fastest formulation by the v6e compiler's estimate, measured for CogVideoX's own layer sizes.

    The 3-D form wins while a frame is small; on large ones its relayouts cost more than folding the taps'
    copies.
    """
    return _folded if _is_large(frames) else _direct


def _is_large(frames: Array) -> bool:
    return frames.shape[2] * frames.shape[3] > 120 * 180


def _direct(frames: Array, kernel: Array) -> Array:
    return lax.conv_general_dilated(
        frames,
        kernel,
        window_strides=(1, 1, 1),
        padding=((0, 0), *_same_padding(kernel)),
        dimension_numbers=("NDHWC", "DHWIO", "NDHWC"),
        precision=precision_for(frames.dtype),
        preferred_element_type=jnp.float32,
    )


def _summed(frames: Array, kernel: Array) -> Array:
    taps = kernel.shape[0]
    length = frames.shape[1] - taps + 1
    return functools.reduce(
        jnp.add,
        (
            conv_frames(frames[:, tap : tap + length], kernel[tap], padding=_same_padding(kernel))
            for tap in range(taps)
        ),
    )


def _folded(frames: Array, kernel: Array) -> Array:
    taps = kernel.shape[0]
    length = frames.shape[1] - taps + 1
    stacked = jnp.concatenate([frames[:, tap : tap + length] for tap in range(taps)], axis=-1)
    folded = jnp.concatenate(list(kernel), axis=2)
    return conv_frames(stacked, folded, padding=_same_padding(kernel))


_IMPLEMENTATIONS = {"direct": _direct, "summed": _summed, "folded": _folded}


def _same_padding(kernel: Array) -> tuple[tuple[int, int], tuple[int, int]]:
    rows, columns = (kernel.shape[1] - 1) // 2, (kernel.shape[2] - 1) // 2
    return (rows, rows), (columns, columns)


def _check(x: Array, kernel: Array, cache: Array | None) -> None:
    if x.ndim != 5 or kernel.ndim != 5:
        raise ValueError(
            f"conv3d got x {x.shape} and kernel {kernel.shape}: it needs N T H W I and kt kh kw I O"
        )
    if x.shape[-1] != kernel.shape[3]:
        raise ValueError(f"conv3d got {x.shape[-1]} channels for a kernel that takes {kernel.shape[3]}")
    if kernel.shape[1] % 2 == 0 or kernel.shape[2] % 2 == 0:
        raise ValueError(
            f"conv3d got a kernel of {kernel.shape[1]} x {kernel.shape[2]} pixels: both must be odd"
        )
    wanted = (x.shape[0], kernel.shape[0] - 1, *x.shape[2:])
    if cache is not None and cache.shape != wanted:
        raise ValueError(f"conv3d got a cache of shape {cache.shape}: {wanted} goes with x {x.shape}")
