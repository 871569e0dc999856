"""CogVideoX's up- and downsamplers: a factor of two in space by a 2-D convolution, in time where asked."""

import functools

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jax_kernels.columns import (
    add_columns,
    add_from_neighbours,
    by_shards,
    has_neighbours,
    jit_kernel,
    neighbours_of,
    with_clear_padding,
)
from jax_kernels.layout import (
    average_pairs,
    conv_frames,
    first_frame_stays,
    frames_first,
    is_large,
    pixels_first,
    repeat_nearest,
    select_frames,
)
from jax_kernels.tpu.doubled_pixels import doubled_pixels, takes


@jit_kernel(static_argnames=["expand_time"])
def upsample(
    x: Float[Array, "N T H W I"],
    kernel: Float[Array, "kh kw I O"],
    bias: Float[Array, " O"] | None,
    *,
    expand_time: bool,
) -> Float[Array, "N T2 2H 2W O"]:
    """Nearest 2x in space, in time too where `expand_time`, then a 2-D convolution of every frame.

    Doubled frames are equal when the convolution sees them, so it runs before the doubling: half the work,
    the same numbers. One frame stays one frame; an odd batch keeps its first frame single
    (`first_frame_stays`).

    Args:
        x: the activations.
        kernel: odd in space, `x`'s dtype.
        bias: (O,), or None.
        expand_time: whether frames are doubled.

    Returns:
        2H x 2W pixels in `x`'s dtype; T2 is T, or with `expand_time` 2T (T even), 2T - 1 (T odd).
    """
    return by_shards(functools.partial(_upsample, expand_time=expand_time), (x,), (kernel, bias))


def _upsample(x: Array, kernel: Array, bias: Array | None, *, expand_time: bool) -> Array:
    rows = kernel.shape[0] // 2

    def convolve(x: Array, kernel: Array, columns: tuple[int, int]) -> Array:
        return conv_frames(x, kernel, padding=((rows, rows), columns))

    doubled = _doubled(x)
    y = convolve(doubled, kernel, (kernel.shape[1] // 2, kernel.shape[1] // 2))
    y = add_from_neighbours(y, doubled, kernel, convolve)
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    y = with_clear_padding(y.astype(x.dtype))
    if not expand_time or x.shape[1] == 1:
        return y
    length = x.shape[1]
    kept = 1 if first_frame_stays(length) else 0
    return select_frames(y, [*range(kept), *(frame for frame in range(kept, length) for _ in range(2))])


def _doubled(x: Array) -> Array:
    # Of shards XLA keeps the columns outermost, and would copy what the kernel gives into that order.
    by_kernel = is_large(x) and takes(x) and not has_neighbours()
    for_tpu = doubled_pixels if by_kernel else _double_pixels_outside
    return lax.platform_dependent(x, tpu=for_tpu, default=_double_pixels)


def _double_pixels(x: Array) -> Array:
    return repeat_nearest(x, {2: 2, 3: 2})


def _double_pixels_outside(x: Array) -> Array:
    """`_double_pixels` as a product with ones, one pass in the order that a TPU keeps pixels in.

    XLA does not see through the barriers that these are ones, and that two axes become one: a broadcast
    written out takes 9.1 ms where this takes 3.4, two broadcasts of inner axes take more (v6e, 8 x 240 x 360
    x 256 doubled).
    """
    h, w, n, t, c = pixels_first(x).shape
    ones = lax.optimization_barrier(jnp.ones((1, 2, 1, 2, 1, 1, 1), x.dtype))
    doubled = lax.optimization_barrier(pixels_first(x)[:, None, :, None] * ones)
    return frames_first(doubled.reshape(2 * h, 2 * w, n, t, c))


@jit_kernel(static_argnames=["compress_time"])
def downsample(
    x: Float[Array, "N T H W I"],
    kernel: Float[Array, "kh kw I O"],
    bias: Float[Array, " O"] | None,
    *,
    compress_time: bool,
) -> Float[Array, "N T2 H2 W2 O"]:
    """Frames averaged in pairs where `compress_time`, then a 2-D convolution of stride 2, zero-padded below
    and right.

    Args:
        x: the activations.
        kernel: (3, 3, I, O), `x`'s dtype.
        bias: (O,), or None.
        compress_time: whether pairs of frames are averaged; the first of an odd number of frames stays by
            itself.

    Returns:
        H2 = H // 2 and W2 = W // 2 pixels in `x`'s dtype; T2 is T, or with `compress_time` (T + 1) // 2.

    Raises:
        ValueError: columns split over devices, an odd number each.
    """
    return by_shards(functools.partial(_downsample, compress_time=compress_time), (x,), (kernel, bias))


def _downsample(x: Array, kernel: Array, bias: Array | None, *, compress_time: bool) -> Array:
    if compress_time and x.shape[1] > 1:
        x = average_pairs(x)
    y = conv_frames(x, kernel, padding=((0, 1), (0, 1)), stride=2)
    if has_neighbours():
        if x.shape[3] % 2:
            raise ValueError(
                f"downsample got shards of {x.shape[3]} columns: over several an even number is needed"
            )
        _, right = neighbours_of(x, 1)
        edge = conv_frames(right, kernel[:, 2:], padding=((0, 1), (0, 0)), stride=2)
        y = add_columns(y, edge, at=y.shape[3] - 1)
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    return with_clear_padding(y.astype(x.dtype))
