"""The forms of a causal 3-D convolution that XLA compiles: how the taps become 2-D convolutions, or not."""

import functools
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jax_kernels.common.columns import add_from_neighbours, has_neighbours, with_clear_padding
from jax_kernels.common.frames import conv_frames, select_frames
from jax_kernels.common.layout import is_large, kept_columns_last, kept_pixels_first, precision_for
from jax_kernels.common.tiles import LANES

Columns = tuple[int, int]
Form = Callable[[Array, Array, Columns], Array]


FEW = 16
"""Output channels of all taps together that leave a TPU's matrix unit nearly empty."""


TOGETHER = 16
"""Columns that the narrow form computes together (v6e, 128 to 3 channels at 8 x 480 x 720: 7.4 ms one by one,
3.5 with 4 of them, 3.0 with 8, 2.6 with 16, the taps apart)."""


def direct(frames: Array, kernel: Array, columns: Columns) -> Array:
    return lax.conv_general_dilated(
        frames,
        kernel,
        window_strides=(1, 1, 1),
        padding=((0, 0), *_padding(kernel, columns)),
        dimension_numbers=("NDHWC", "DHWIO", "NDHWC"),
        precision=precision_for(frames.dtype),
        preferred_element_type=jnp.float32,
    )


def summed(frames: Array, kernel: Array, columns: Columns) -> Array:
    return functools.reduce(
        jnp.add,
        (
            conv_frames(tap, kernel[index], padding=_padding(kernel, columns))
            for index, tap in enumerate(_taps(frames, kernel))
        ),
    )


def folded(frames: Array, kernel: Array, columns: Columns) -> Array:
    return stacked(_taps(frames, kernel), kernel, columns)


def narrow(frames: Array, kernel: Array, columns: Columns) -> Array:
    taps, _, reach, _, out = kernel.shape
    videos, length, height, width, _ = frames.shape
    width += sum(columns) - (reach - 1)
    together = next(n for n in range(min(TOGETHER, width), 0, -1) if width % n == 0)
    each = jnp.concatenate(list(kernel), axis=-1)
    # A window moves by many columns, over all that they see.
    windows = [jnp.pad(each, [(0, 0), (i, together - 1 - i), (0, 0), (0, 0)]) for i in range(together)]
    kernel_HWIO = jnp.concatenate(windows, axis=-1)
    y = conv_frames(frames, kernel_HWIO, padding=_padding(kernel, columns), stride=(1, together))
    # Frames are added where they have few channels: no copies of them lie under the taps.
    y = y.reshape(videos, length, height, width, taps, out)
    return functools.reduce(
        jnp.add, (y[:, tap : tap + length - taps + 1, ..., tap, :] for tap in range(taps))
    )


def by_xla(
    x: Array,
    cache: Array,
    residual: Array | None,
    kernel: Array,
    bias: Array | None,
    *,
    form: Form,
) -> tuple[Array, Array]:
    past = cache.shape[1]
    frames = jnp.concatenate([cache, x], axis=1)
    y = finished(same(frames, kernel, form), bias, residual, like=x)
    # From x alone where it is long enough, and after the old cache was read: a donated cache whose memory is
    # written while something still reads it is one that XLA copies first.
    latest = x if x.shape[1] >= past else frames
    return y, select_frames(latest, range(latest.shape[1] - past, latest.shape[1]), after=y)


def of_image(
    x: Array, residual: Array | None, kernel: Array, bias: Array | None, *, replicate: bool
) -> tuple[Array, Array]:
    """A video's first frame by itself, of which every tap of time sees a copy, or all but the last one zeros.

    The taps are added up beforehand. In a narrow dtype their sum is two kernels, itself and what rounding
    took off it.
    """
    whole = jnp.sum(kernel, axis=0, keepdims=True, dtype=jnp.float32) if replicate else kernel[-1:]
    rounded = whole.astype(x.dtype)
    sums = same(x, rounded, summed)
    if rounded.dtype != whole.dtype:
        sums = sums + same(x, (whole - rounded.astype(whole.dtype)).astype(x.dtype), summed)
    past = kernel.shape[0] - 1
    earlier = x if replicate else jnp.zeros_like(x)
    return finished(sums, bias, residual, like=x), jnp.concatenate([*[earlier] * (past - 1), x], axis=1)


def same(frames: Array, kernel: Array, form: Form) -> Array:
    """The sums of the convolution that is zero-padded to the same size in space."""
    return add_from_neighbours(form(frames, kernel, same_columns(kernel)), frames, kernel, form)


def _taps(frames: Array, kernel: Array) -> list[Array]:
    """The frames under each tap of the kernel."""
    taps = kernel.shape[0]
    length = frames.shape[1] - taps + 1
    return [frames[:, tap : tap + length] for tap in range(taps)]


def stacked(taps: list[Array], kernel: Array, columns: Columns) -> Array:
    folded = jnp.concatenate(list(kernel), axis=2)
    return conv_frames(jnp.concatenate(taps, axis=-1), folded, padding=_padding(kernel, columns))


def same_columns(kernel: Array) -> Columns:
    return kernel.shape[2] // 2, kernel.shape[2] // 2


def _padding(kernel: Array, columns: Columns) -> tuple[tuple[int, int], Columns]:
    """Zeros for as many rows as there are, and these columns to the left and right."""
    rows = kernel.shape[1] // 2
    return (rows, rows), columns


def completed(sums: Array, bias: Array | None, residual: Array | None) -> Array:
    """The sums with what is added to them, not yet rounded."""
    if bias is not None:
        sums = sums + bias.astype(jnp.float32)
    return sums if residual is None else sums + residual.astype(jnp.float32)


def finished(sums: Array, bias: Array | None, residual: Array | None, *, like: Array) -> Array:
    y = with_clear_padding(completed(sums, bias, residual).astype(like.dtype))
    if not is_large(like):
        return y
    if y.shape[-1] >= LANES:
        return kept_pixels_first(y)
    return kept_columns_last(y) if y.shape[-1] <= FEW and not has_neighbours() else y
