"""The forms of a causal 3-D convolution that XLA compiles: how the taps become 2-D convolutions, or not."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jax_kernels.common.columns import add_from_neighbours, with_clear_padding
from jax_kernels.common.dispatch import Target, with_derivatives_of
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
"""Fewest numbers of a kernel that a CPU copies before it convolves."""

SMALLEST_FILTERED = 256
"""Fewest pixels of a frame for which filtering saves a CPU more than the kernel's transform costs."""


def direct(frames: Array, kernel: Array, columns: Padding) -> Array:
    """Convolve in 3-D at once; return float32 sums.

    Every form pads rows so that their number stays, the width by `columns` (left, right), and no frames.
    """
    return jax.lax.conv_general_dilated(
        frames,
        kernel,
        window_strides=(1, 1, 1),
        padding=((0, 0), *_padding(kernel, columns)),
        dimension_numbers=("NDHWC", "DHWIO", "NDHWC"),
        precision=precision_for(frames.dtype),
        preferred_element_type=jnp.float32,
    )


def summed(frames: Array, kernel: Array, columns: Padding) -> Array:
    """Add one 2-D convolution for each tap of time, of the frames under it; return float32 sums."""
    return functools.reduce(
        jnp.add,
        (
            conv_frames(tap_frames, kernel[tap], padding=_padding(kernel, columns))
            for tap, tap_frames in enumerate(_frames_under_taps(frames, kernel))
        ),
    )


def folded(frames: Array, kernel: Array, columns: Padding) -> Array:
    """Convolve in 2-D the frames at all taps of time, with concatenated channels; return float32 sums."""
    inputs = jnp.concatenate(_frames_under_taps(frames, kernel), axis=-1)
    return conv_frames(inputs, jnp.concatenate(list(kernel), axis=2), padding=_padding(kernel, columns))


def filtered_on_cpu(frames: Array, kernel: Array, columns: Padding, *, at_start: bool = False) -> Array:
    """Compute `summed`, on a CPU by Winograd's filtering along time (`transforms`), which multiplies less.

    Frames are filtered four and two together; one that is left over comes first. With `at_start` the first
    three frames are equal, and the taps of the first result are added before they multiply.
    """
    plain = functools.partial(summed, columns=columns)
    by_filtering = functools.partial(_filtered, columns=columns, at_start=at_start)
    by_platform = functools.partial(jax.lax.platform_dependent, cpu=by_filtering, default=plain)
    # With `summed`'s derivatives, a differentiated program is the same as on every other platform.
    return with_derivatives_of(plain, by_platform)(frames, kernel)


def _filtered(frames: Array, kernel: Array, columns: Padding, at_start: bool) -> Array:
    if kernel.size >= LARGE_KERNEL:  # else XLA would transpose a weight of PyTorch's for every product
        kernel = _written_out(kernel, axis=0)
    if math.prod(frames.shape[:4]) <= kernel.shape[-1]:  # patches are smaller than the kernel
        return patches(frames, kernel, columns)
    convolve = functools.partial(conv_frames, padding=_padding(kernel, columns))
    length = frames.shape[1] - TAPS + 1
    is_large = frames.shape[2] * frames.shape[3] >= SMALLEST_FILTERED
    parts, done = [], length % 2
    if done:  # the first result by itself
        first = frames[:, :TAPS]
        parts = [convolve(first[:, :1], jnp.sum(kernel, 0)) if at_start else summed(first, kernel, columns)]
    for tile in (4, 2):
        count = (length - done) // tile * tile
        if count:
            under_taps = frames[:, done : done + count + TAPS - 1]
            by_tile = functools.partial(filtered, tile=tile, multiply=convolve, transform_taps=separate_taps)
            parts.append(by_tile(under_taps, kernel) if is_large else summed(under_taps, kernel, columns))
            done += count
    return join_frames(parts)


def _written_out(x: Array, axis: int) -> Array:
    """Return a copy of `x`, made slice by slice along an axis, in a loop that XLA cannot fuse."""

    def copy(x: Array) -> Array:
        def with_slice(index: Array, copied: Array) -> Array:
            of_x = jax.lax.dynamic_slice_in_dim(x, index, 1, axis)
            return jax.lax.dynamic_update_slice_in_dim(copied, of_x, index, axis)

        return jax.lax.fori_loop(0, x.shape[axis], with_slice, jnp.zeros_like(x))

    return with_derivatives_of(lambda x: x, copy)(x)


def suits_filtering(frames: Array, kernel: Array) -> bool:
    """Return whether a CPU may convolve frames by filtering: in float32, by three taps of time."""
    return frames.dtype == jnp.float32 and kernel.shape[0] == TAPS


def patches(frames: Array, kernel: Array, columns: Padding) -> Array:
    """Multiply the pixels under each window by the kernel as one product; return float32 sums."""
    padded = jnp.pad(frames, [(0, 0), (0, 0), *_padding(kernel, columns), (0, 0)])
    return conv_patches(_frames_under_taps(padded, kernel), kernel)


def suits_patches(x: Array, kernel: Array) -> bool:
    """Return whether to convolve by `patches`: few channels of small frames, whose patches fit into memory.

    XLA would compile a convolution to few channels for half a minute, one from few channels for ten seconds.
    """
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
        # The convolution reads its last frames from the next cache, so XLA computes that first. Otherwise it
        # does so at the end of the program, and keeps the frames of all layers until then.
        frames = jnp.concatenate([frames[:, :-past], next_cache], axis=1)
        return finish(target, convolve_same(target, frames, kernel, form), bias, residual, like=x), next_cache
    y = finish(target, convolve_same(target, frames, kernel, form), bias, residual, like=x)
    # The next cache takes the memory of the old one, if that is donated. XLA copies the old cache first if
    # anything reads it later: so the frames are selected after `y`, and from `x` if it has enough frames.
    latest = x if x.shape[1] >= past else frames
    return y, select_frames(target, latest, range(latest.shape[1] - past, latest.shape[1]), after=y)


def convolve_image(
    target: Target, x: Array, residual: Array | None, kernel: Array, bias: Array | None, *, replicate: bool
) -> tuple[Array, Array]:
    """Convolve a video's first frame alone, by one 2-D kernel; return the result and the next cache.

    With `replicate` the frames before `x` are copies of it, and the 2-D kernel is the sum of all taps of
    time. Without it they are zeros, and the 2-D kernel is the last tap. A sum of taps in a narrow dtype is
    represented by two kernels, its rounded value and the rounding error, whose results are added.
    """
    taps_sum = jnp.sum(kernel, axis=0, keepdims=True, dtype=jnp.float32) if replicate else kernel[-1:]
    rounded = taps_sum.astype(x.dtype)
    form = image_form(target, x, kernel)  # the function that convolves
    if rounded.dtype == taps_sum.dtype:
        sums = convolve_same(target, x, rounded, form)
    else:
        rounding_error = (taps_sum - rounded.astype(taps_sum.dtype)).astype(x.dtype)
        both = convolve_same(target, x, jnp.concatenate([rounded, rounding_error], axis=-1), form)
        sums = functools.reduce(jnp.add, jnp.split(both, 2, axis=-1))
    # The next cache has kt - 1 frames: these, then `x`.
    earlier = [x if replicate else jnp.zeros_like(x)] * (kernel.shape[0] - 2)
    return finish(target, sums, bias, residual, like=x), jnp.concatenate([*earlier, x], axis=1)


def image_form(target: Target, x: Array, kernel: Array) -> Form:
    """Return the form for one tap of time: `patches` for an image on a TPU, where they fit, else `summed`.

    XLA takes 111 s to compile the convolution of an image of 60 x 90 x 512, an encoder's last, and 5 s for
    patches.
    """
    if not is_image_for_tpu(target, x):
        return summed
    window = kernel.shape[1:3]
    # The patches of a window of one pixel are the image itself.
    return patches if window == (1, 1) or _patch_bytes(x, window) <= MOST_IN_PATCHES else summed


def convolve_same(target: Target, frames: Array, kernel: Array, form: Form) -> Array:
    """Convolve with zero padding to the same size, neighbouring shards included; return float32 sums."""
    own_sums = form(frames, kernel, same_width_padding(kernel))
    return add_from_neighbours(target.split, own_sums, frames, kernel, form)


def _frames_under_taps(frames: Array, kernel: Array) -> list[Array]:
    taps = kernel.shape[0]
    length = frames.shape[1] - taps + 1
    return [frames[:, tap : tap + length] for tap in range(taps)]


def same_width_padding(kernel: Array) -> Padding:
    return kernel.shape[2] // 2, kernel.shape[2] // 2


def _padding(kernel: Array, columns: Padding) -> tuple[tuple[int, int], Padding]:
    """Return the padding of rows, which keeps their number, and of columns, as given."""
    rows = kernel.shape[1] // 2
    return (rows, rows), columns


def add_bias_and_residual(sums: Array, bias: Array | None, residual: Array | None = None) -> Array:
    if bias is not None:
        sums = sums + bias.astype(jnp.float32)
    return sums if residual is None else sums + residual.astype(jnp.float32)


def finish(target: Target, sums: Array, bias: Array | None, residual: Array | None, *, like: Array) -> Array:
    """Add bias and residual, where given, to a convolution's float32 sums, and round them.

    Padding columns get zeros. The result gets the dtype of the convolution's input `like`, and for its size
    the memory layout that a TPU's next operation reads.
    """
    y = with_clear_padding(add_bias_and_residual(sums, bias, residual).astype(like.dtype), target.split)
    if is_image_for_tpu(target, like):
        return kernel_layout(y)
    if not is_large(like):
        return y
    if y.shape[-1] >= LANES:
        return store_pixels_first(target, y)
    # Few channels leave most lanes of a tile empty. Columns fill them, but a shard may have too few columns.
    columns_fill_lanes = y.shape[-1] <= FEW and not target.split.has_neighbours
    return store_columns_last(target, y) if columns_fill_lanes else y
