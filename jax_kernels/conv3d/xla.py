"""Causal 3-D convolution in XLA, in several forms.

A *form* is a function that convolves frames, which include the cached ones, and returns float32 sums. The
forms differ in the operations that they give to XLA: one 3-D convolution, 2-D convolutions, or a matrix
product. `convolve_frames` and `convolve_image` call a form, and do what surrounds it: neighbouring shards,
bias, residual, rounding and the next cache.

Frames are (N, T, H, W, I), a kernel is (kt, kh, kw, I, O), and sums are (N, T - kt + 1, H, W, O). A form pads
the rows with zeros so that their number stays the same, and the width with `column_padding`: the numbers of
zero columns on the left and on the right. It does not pad the time.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

from jax_kernels.common.columns import add_from_neighbours, with_clear_padding
from jax_kernels.common.dispatch import Target, on_platform, with_derivatives_of
from jax_kernels.common.frames import (
    LARGE_FRAME,
    MOST_IN_PATCHES,
    conv_frames,
    conv_patches,
    is_image_for_tpu,
    is_large,
    join_frames,
    kernel_layout,
    select_frames,
    store_columns_last,
    store_pixels_first,
)
from jax_kernels.common.pointwise import precision_for
from jax_kernels.common.tiles import LANES
from jax_kernels.common.transforms import TAPS, filtered, separate_taps

Padding = tuple[int, int]
"""Numbers of zeros before and after an axis."""

Form = Callable[[Array, Array, Padding], Array]
"""Function of frames, a kernel and the padding of columns, which returns float32 sums."""

FEW = 16
"""Most channels that count as few: they leave a TPU's matrix unit, or its tiles, nearly empty."""

LARGE_KERNEL = 2**20
"""Fewest weights of a kernel that a CPU copies before it filters (`_filtered`)."""

SMALLEST_FILTERED = 256
"""Fewest pixels of a frame for which filtering saves a CPU more than the kernel's transform costs."""


def direct(frames: Array, kernel: Array, column_padding: Padding) -> Array:
    """Convolve by one 3-D convolution; return float32 sums."""
    return jax.lax.conv_general_dilated(
        frames,
        kernel,
        window_strides=(1, 1, 1),
        padding=((0, 0), *_spatial_padding(kernel, column_padding)),
        dimension_numbers=("NDHWC", "DHWIO", "NDHWC"),
        precision=precision_for(frames.dtype),
        preferred_element_type=jnp.float32,
    )


def summed(frames: Array, kernel: Array, column_padding: Padding) -> Array:
    """Convolve in 2-D the frames under each tap of time, and add the results; return float32 sums."""
    return functools.reduce(
        jnp.add,
        (
            conv_frames(tap_frames, kernel[tap], padding=_spatial_padding(kernel, column_padding))
            for tap, tap_frames in enumerate(_frames_under_taps(frames, kernel))
        ),
    )


def folded(frames: Array, kernel: Array, column_padding: Padding, *, dtype: DTypeLike = jnp.float32) -> Array:
    """Convolve in 2-D once: the frames under all taps of time have their channels side by side.

    `dtype` is that of the sums before they are returned in float32.
    """
    return conv_frames(
        jnp.concatenate(_frames_under_taps(frames, kernel), axis=-1),
        jnp.concatenate(list(kernel), axis=2),
        padding=_spatial_padding(kernel, column_padding),
        dtype=dtype,
    ).astype(jnp.float32)


def rounded_on_gpu(frames: Array, kernel: Array, column_padding: Padding) -> Array:
    """Return what `summed` returns; on an NVIDIA GPU round the sums once to the frames' dtype.

    cuDNN's convolutions have one dtype: for float32 sums XLA would convert the frames to float32, which
    doubles the memory and halves the speed. PyTorch rounds a convolution's sums too.
    """
    return on_platform(
        functools.partial(summed, column_padding=column_padding),
        cuda=functools.partial(folded, column_padding=column_padding, dtype=frames.dtype),
    )(frames, kernel)


def filtered_on_cpu(
    frames: Array, kernel: Array, column_padding: Padding, *, at_start: bool = False
) -> Array:
    """Return what `summed` returns; on a CPU compute it by Winograd's filtering along time (`transforms`).

    Filtering needs fewer products. `at_start` says that the first three frames are equal, which they are at
    the start of a video.
    """
    return on_platform(
        functools.partial(summed, column_padding=column_padding),
        cpu=functools.partial(_filtered, column_padding=column_padding, at_start=at_start),
    )(frames, kernel)


def _filtered(frames: Array, kernel: Array, column_padding: Padding, at_start: bool) -> Array:
    """Filter along time in tiles of four results, then of two; an odd first result is computed directly."""
    if kernel.size >= LARGE_KERNEL:
        # The kernel may be a transposition of PyTorch's weights, whose axes have another order. Without this
        # copy, XLA would transpose them again for each product.
        kernel = _written_out(kernel, axis=0)
    # If there are no more pixels than output channels, patches are no larger than the kernel, which filtering
    # would transform: patches have kt * kh * kw * I numbers for each pixel, and a kernel has as many for each
    # output channel.
    if math.prod(frames.shape[:4]) <= kernel.shape[-1]:
        return patches(frames, kernel, column_padding)
    convolve = functools.partial(conv_frames, padding=_spatial_padding(kernel, column_padding))
    length = frames.shape[1] - TAPS + 1  # number of results
    has_large_frames = frames.shape[2] * frames.shape[3] >= SMALLEST_FILTERED
    results = []
    num_done = length % 2  # number of results so far: of an odd number, the first is by itself
    if num_done:
        window = frames[:, :TAPS]
        if at_start:  # three equal frames: one of them is multiplied by the sum of the taps
            results.append(convolve(window[:, :1], jnp.sum(kernel, 0)))
        else:
            results.append(summed(window, kernel, column_padding))
    for tile in (4, 2):
        count = (length - num_done) // tile * tile  # number of results in tiles of this length
        if count:
            window = frames[:, num_done : num_done + count + TAPS - 1]
            # `separate_taps` returns the transformed taps as one array for each product, which suits a CPU.
            filter_tiles = functools.partial(
                filtered, tile=tile, multiply=convolve, transform_taps=separate_taps
            )
            # For small frames the kernel's transform would cost more than filtering saves, so their results
            # are summed tap by tap. They are cut into the same groups, although such sums do not need it.
            results.append(
                filter_tiles(window, kernel) if has_large_frames else summed(window, kernel, column_padding)
            )
            num_done += count
    return join_frames(results)


def _written_out(x: Array, axis: int) -> Array:
    """Copy `x` slice by slice along `axis`, so that XLA writes the copy to memory before it is read."""

    def copy(x: Array) -> Array:
        def with_next_slice(index: Array, copied: Array) -> Array:
            next_slice = jax.lax.dynamic_slice_in_dim(x, index, 1, axis)
            return jax.lax.dynamic_update_slice_in_dim(copied, next_slice, index, axis)

        # XLA cannot fuse a loop with what reads its result.
        return jax.lax.fori_loop(0, x.shape[axis], with_next_slice, jnp.zeros_like(x))

    # With the derivatives of the identity function JAX need not differentiate the loop.
    return with_derivatives_of(lambda x: x, copy)(x)


def patches(frames: Array, kernel: Array, column_padding: Padding) -> Array:
    """Convolve by one matrix product: the pixels under each window, times the kernel (`conv_patches`)."""
    padded = jnp.pad(frames, [(0, 0), (0, 0), *_spatial_padding(kernel, column_padding), (0, 0)])
    return conv_patches(_frames_under_taps(padded, kernel), kernel)


def suits_patches(x: Array, kernel: Array) -> bool:
    """Return whether a TPU convolves by `patches`: few channels, small frames, and patches that fit."""
    # With few output channels XLA would compile a convolution for half a minute, with few input channels for
    # ten seconds. Output channels count as few if they leave lanes of a tile empty.
    return (
        (x.shape[-1] <= FEW or kernel.shape[-1] < LANES)
        and x.shape[2] * x.shape[3] < LARGE_FRAME
        and _patch_bytes(x, kernel.shape[:3]) <= MOST_IN_PATCHES
    )


def _patch_bytes(x: Array, window: tuple[int, ...]) -> int:
    return x.size * math.prod(window) * x.dtype.itemsize


def convolve_frames(
    target: Target,
    x: Array,
    cache: Array,
    residual: Array | None,
    kernel: Array,
    bias: Array | None,
    *,
    form: Form,
) -> tuple[Array, Array]:
    """Convolve frames `x` after the frames of `cache`; return the result and the next cache."""
    past = cache.shape[1]  # number of cached frames
    frames = jnp.concatenate([cache, x], axis=1)
    if not target.on_tpu:
        next_cache = _written_out(frames[:, -past:], axis=1)
        # The convolution reads its last frames from the next cache, so XLA makes that cache first. Otherwise
        # XLA makes all caches at the end of the program, and keeps the frames of all layers until then.
        frames = jnp.concatenate([frames[:, :-past], next_cache], axis=1)
        return finish(target, convolve_same(target, frames, kernel, form), bias, residual, like=x), next_cache
    y = finish(target, convolve_same(target, frames, kernel, form), bias, residual, like=x)
    # The next cache takes the memory of the old one, if that is donated. If an operation could read the old
    # cache later than that, XLA would copy the old cache first. So the frames of the next cache are selected
    # only once `y` is computed from the old one, and from `x` alone if `x` has enough frames.
    source = x if x.shape[1] >= past else frames
    return y, select_frames(target, source, range(source.shape[1] - past, source.shape[1]), after=y)


def convolve_image(
    target: Target, x: Array, residual: Array | None, kernel: Array, bias: Array | None
) -> tuple[Array, Array]:
    """Convolve a video's first frame alone, in 2-D; return the result and the next cache.

    The frames before `x` are copies of it, so the 2-D kernel is the sum of all taps of time. That sum in
    bfloat16 would lose precision: two kernels, its rounded value and the rounding error, represent it, and
    their results are added.
    """
    taps_sum = jnp.sum(kernel, axis=0, keepdims=True, dtype=jnp.float32)
    rounded = taps_sum.astype(x.dtype)
    form = image_form(target, x, kernel)  # the function that convolves
    if rounded.dtype == taps_sum.dtype:
        sums = convolve_same(target, x, rounded, form)
    else:
        rounding_error = (taps_sum - rounded.astype(taps_sum.dtype)).astype(x.dtype)
        # One convolution gives the results of both, side by side in the channels.
        both_sums = convolve_same(target, x, jnp.concatenate([rounded, rounding_error], axis=-1), form)
        sums = functools.reduce(jnp.add, jnp.split(both_sums, 2, axis=-1))
    # The next cache has kt - 1 frames: the last kt - 2 of the frames before `x`, then `x`.
    return finish(target, sums, bias, residual, like=x), jnp.concatenate([x] * (kernel.shape[0] - 1), axis=1)


def image_form(target: Target, x: Array, kernel: Array) -> Form:
    """Return the form for a kernel of one tap of time: `patches` for an image on a TPU, else `summed`."""
    if not is_image_for_tpu(target, x):
        return summed
    # An encoder's last layer has an image of 60 x 90 x 512. XLA compiles `summed` for it in 111 s, and
    # `patches` in 5 s.
    window = kernel.shape[1:3]
    # Patches must not take too much memory. Those of a window of one pixel are the image itself.
    return patches if window == (1, 1) or _patch_bytes(x, window) <= MOST_IN_PATCHES else summed


def convolve_same(target: Target, frames: Array, kernel: Array, form: Form) -> Array:
    """Convolve frames to the same height and width; return float32 sums."""
    form = rounded_on_gpu if form is summed and not target.on_tpu and frames.dtype != jnp.float32 else form
    # Beside whole frames are zeros. Beside a shard are its neighbours' columns: the sums are computed with
    # zeros, and the contributions of these columns are added.
    own_sums = form(frames, kernel, same_width_padding(kernel))
    return add_from_neighbours(target.split, own_sums, frames, kernel, form)


def _frames_under_taps(frames: Array, kernel: Array) -> list[Array]:
    length = frames.shape[1] - len(kernel) + 1
    return [frames[:, tap : tap + length] for tap in range(len(kernel))]


def same_width_padding(kernel: Array) -> Padding:
    return kernel.shape[2] // 2, kernel.shape[2] // 2


def _spatial_padding(kernel: Array, column_padding: Padding) -> tuple[tuple[int, int], Padding]:
    """Return the padding of rows and of columns; the padding of rows keeps their number."""
    rows = kernel.shape[1] // 2
    return (rows, rows), column_padding


def add_bias_and_residual(sums: Array, bias: Array | None, residual: Array | None = None) -> Array:
    if bias is not None:
        sums = sums + bias.astype(jnp.float32)
    return sums if residual is None else sums + residual.astype(jnp.float32)


def finish(target: Target, sums: Array, bias: Array | None, residual: Array | None, *, like: Array) -> Array:
    """Add bias and residual, unless they are None, to a convolution's float32 sums, and round the result.

    Padding columns get zeros. The result has the dtype of `like`, the convolution's input, and, on a TPU, the
    memory layout in which the next operation reads results of this size.
    """
    y = with_clear_padding(add_bias_and_residual(sums, bias, residual).astype(like.dtype), target.split)
    if is_image_for_tpu(target, like):
        return kernel_layout(y)
    if not is_large(like):
        return y
    if y.shape[-1] >= LANES:
        return store_pixels_first(target, y)  # frames in the sublanes of tiles, channels in their lanes
    # Few channels leave most lanes of a tile empty. Columns fill them, but a shard may have too few columns.
    columns_fill_lanes = y.shape[-1] <= FEW and target.split.shards == 1
    return store_columns_last(target, y) if columns_fill_lanes else y
