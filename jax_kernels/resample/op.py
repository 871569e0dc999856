"""Up- and downsamplers: a factor of two in space by a 2-D convolution, in time where asked."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_kernels.common.columns import (
    WHOLE,
    Split,
    add_columns,
    add_from_neighbours,
    neighbours_of,
    with_clear_padding,
)
from jax_kernels.common.dispatch import Target, dispatch, map_shards
from jax_kernels.common.frames import (
    average_pairs,
    check_convolution,
    conv_frames,
    is_image_for_tpu,
    join_bands,
    join_frames,
    kernel_layout,
    select_frames,
    split_bands,
    split_frames,
)
from jax_kernels.conv3d.xla import add_bias_and_residual
from jax_kernels.resample import upsampled, xla

OVERLAP = 1
"""Rows of its neighbours that a band of an image has above and below: as far as a 3 x 3 kernel sees."""


def upsample(
    x: Float[Array, "N T H W I"],
    kernel: Float[Array, "kh kw I O"],
    bias: Float[Array, " O"] | None,
    *,
    expand_time: bool,
    first_frame_alone: bool = False,
    split: Split = WHOLE,
) -> Float[Array, "N T2 2*H 2*W O"]:
    """Double rows and columns (nearest), with `expand_time` frames too, then convolve every frame in 2-D.

    XLA doubles frames after the convolution, which would compute the same numbers twice for doubled frames.
    On a TPU one Pallas kernel upsamples and convolves, if it supports the frames (`upsampled.is_supported`).

    Args:
        x: the activations.
        kernel: of odd height and width, in `x`'s dtype.
        bias: (O,), or None.
        expand_time: whether frames are doubled.
        first_frame_alone: whether the first frame stays a single one.
        split: the sharding of columns.

    Returns:
        2H x 2W pixels in `x`'s dtype; T2 is T, or with `expand_time` 2T, with `first_frame_alone` too 2T - 1.

    Raises:
        ValueError: a kernel that is even or does not take `x`, a bias of another length.
    """
    check_convolution("upsample", x, kernel, bias, "kh kw I O")
    return dispatch(
        upsample_on,
        x,
        kernel,
        bias,
        expand_time=expand_time,
        first_frame_alone=first_frame_alone,
        split=split,
    )


def upsample_on(
    target: Target, x: Array, kernel: Array, bias: Array | None, *, expand_time: bool, first_frame_alone: bool
) -> Array:
    """Compute `upsample` on `target`, the platform that is traced for, by runs of frames.

    A run is frames that are computed together: on a TPU 2, 4 or 8; the first of an odd number of frames is a
    run by itself. With `expand_time` frames are doubled too, but for the first one if `first_frame_alone`.
    """

    def upsample_run(frames: Array, expand_time: bool, first_frame_alone: bool) -> Array:
        """Upsample a run of frames by the Pallas kernel if it supports them, else as XLA compiles it."""
        by_xla = functools.partial(_by_xla, expand_time=expand_time, first_frame_alone=first_frame_alone)
        by_kernel = _kernel_for(target, frames, kernel, expand_time, first_frame_alone)  # None: unsupported
        return map_shards(target, by_kernel or by_xla, (frames,), (kernel, bias))

    return _split_and_resample(target, upsample_run, x, expand_time, first_frame_alone)


def _split_and_resample(
    target: Target, resample: Callable[..., Array], x: Array, in_time: bool, first_frame_alone: bool
) -> Array:
    """Resample frames `x` (N, T, H, W, C) in runs: frames that are computed together (`split_frames`).

    Args:
        target: the platform that is traced for, which decides about the runs.
        resample: `resample(frames, in_time, first_frame_alone)` returns the result of one run.
        x: the frames.
        in_time: whether the number of frames is doubled or halved too.
        first_frame_alone: whether the first frame stays single, if `in_time`.
    """
    # `split_frames` makes the first frame a run if the number of frames is odd. Where `first_frame_alone`
    # contradicts that, all frames are one run. A run is a tuple of one array.
    runs = split_frames(target, x) if first_frame_alone == (x.shape[1] % 2 == 1) else [(x,)]
    if len(runs) == 1:
        return resample(x, in_time, first_frame_alone)
    # Of several runs only the first can have a single frame, which is not resampled in time. All other runs
    # have whole pairs of frames: `first_frame_alone` is False.
    return join_frames([resample(frames, in_time and frames.shape[1] > 1, False) for (frames,) in runs])


def _kernel_for(
    target: Target, x: Array, kernel: Array, expand_time: bool, first_frame_alone: bool
) -> Callable[..., Array] | None:
    """Return the function that upsamples these frames by the Pallas kernel; None if it does not support them.

    The function takes a target, a device's frames, kernel and bias. The Pallas kernel computes several frames
    together; an image, one frame, is cut into bands of rows, which take the place of frames.
    """
    if not target.uses_pallas:
        return None
    shard = target.split.shard_of(x)
    videos, _, height, columns, channels = shard.shape
    # Small frames are not supported: `pixels` counts the whole frame's, not the shard's.
    is_supported = functools.partial(upsampled.is_supported, pixels=x.shape[2] * x.shape[3])
    if is_image_for_tpu(target, x) and (first_frame_alone or not expand_time):  # the result is an image too
        even_height = height + height % 2  # as `_image_by_kernel` pads it
        for bands in upsampled.FRAMES:  # the numbers of frames, here bands, that the kernel supports
            # Above and below its rows a band has `OVERLAP` rows of its neighbours, or zeros.
            shape = videos, bands, even_height // bands + 2 * OVERLAP, columns, channels
            if even_height % bands == 0 and is_supported(
                jax.ShapeDtypeStruct(shape, x.dtype), kernel, expand_time=False
            ):
                return functools.partial(_image_by_kernel, bands=bands)
    # Of several frames the kernel doubles all or none.
    elif not first_frame_alone and is_supported(shard, kernel, expand_time=expand_time):
        return functools.partial(_by_kernel, expand_time=expand_time)
    return None


def _by_kernel(target: Target, x: Array, kernel: Array, bias: Array | None, *, expand_time: bool) -> Array:
    """Upsample a device's own columns by the Pallas kernel, with the neighbours' columns beside them."""
    split = target.split
    bias = jnp.zeros(kernel.shape[-1:], kernel.dtype) if bias is None else bias
    # The neighbours' columns (left, right) of the shard; None for a whole frame, which has zeros beside it.
    beside = neighbours_of(split, x, 1) if split.has_neighbours else None
    # Number of the result's columns before its padding; the result has twice the width of `x`.
    true_width = split.real_columns_here(2 * x.shape[3]) if split.is_padded else None
    return upsampled.upsampled(x, kernel, bias, beside, true_width, expand_time)


def _image_by_kernel(target: Target, x: Array, kernel: Array, bias: Array | None, *, bands: int) -> Array:
    """Upsample one frame, (N, 1, H, W, C), by the Pallas kernel, which needs several frames.

    The image is cut into `bands` bands of rows, which overlap and take the place of frames. XLA takes 52 s to
    compile its own convolution of 120 x 180 x 512, and 3 s for this. An odd number of rows is padded with a
    row of zeros, which the convolution sees below an image anyway.
    """
    height = x.shape[2]
    even = jnp.pad(kernel_layout(x), [(0, 0), (0, 0), (0, height % 2), (0, 0), (0, 0)])
    y = _by_kernel(target, split_bands(even, OVERLAP, bands), kernel, bias, expand_time=False)
    # The rows by which bands overlap are doubled too.
    return kernel_layout(join_bands(y, 2 * OVERLAP)[:, :, : 2 * height])


def _by_xla(
    target: Target, x: Array, kernel: Array, bias: Array | None, *, expand_time: bool, first_frame_alone: bool
) -> Array:
    """Upsample a device's own columns by XLA's operations: double pixels, convolve, then double frames."""
    zero_rows, zero_columns = (size // 2 for size in kernel.shape[:2])  # on each side
    # Both forms give the same. On a TPU the first is faster for several frames, as a tile then holds frames
    # and channels.
    tiles_of_frames = target.on_tpu and x.shape[1] > 1
    doubled = xla.double_pixels_outside(x) if tiles_of_frames else xla.double_pixels(x)

    def convolve(x: Array, kernel: Array, columns: tuple[int, int]) -> Array:
        """Convolve frames with zeros above and below, and `columns` zeros on the left and right."""
        return conv_frames(x, kernel, padding=((zero_rows, zero_rows), columns))

    y = convolve(doubled, kernel, (zero_columns, zero_columns))
    y = add_from_neighbours(target.split, y, doubled, kernel, convolve)
    y = with_clear_padding(add_bias_and_residual(y, bias).astype(x.dtype), target.split)
    length, alone = x.shape[1], int(first_frame_alone)
    if not expand_time or length == alone:  # no frame is doubled
        return y
    # Each frame twice, but for the first one if it stays alone.
    return select_frames(
        target, y, [*range(alone), *(frame for frame in range(alone, length) for _ in range(2))]
    )


def downsample(
    x: Float[Array, "N T H W I"],
    kernel: Float[Array, "kh kw I O"],
    bias: Float[Array, " O"] | None,
    *,
    compress_time: bool,
    first_frame_alone: bool = False,
    split: Split = WHOLE,
) -> Float[Array, "N T2 H2 W2 O"]:
    """Average pairs of frames if `compress_time`, then convolve with stride 2, zero-padded below and right.

    Args:
        x: the activations.
        kernel: (3, 3, I, O), `x`'s dtype.
        bias: (O,), or None.
        compress_time: whether pairs of frames are averaged.
        first_frame_alone: whether the first frame stays single, and pairs begin after it.
        split: the sharding of columns.

    Returns:
        H2 = H // 2 and W2 = W // 2 pixels in `x`'s dtype; T2 is T, or with `compress_time` T / 2, with
        `first_frame_alone` too (T + 1) / 2.

    Raises:
        ValueError: a kernel of another size or that does not take `x`, a bias of another length; frames that
            cannot be paired; a shard with an odd number of columns.
    """
    if kernel.shape[:2] != (3, 3):
        size = " x ".join(map(str, kernel.shape[:2]))
        raise ValueError(f"downsample got a kernel of {size} pixels: it must have 3 x 3")
    check_convolution("downsample", x, kernel, bias, "kh kw I O")
    if compress_time and (x.shape[1] - first_frame_alone) % 2:
        after = " after the first" if first_frame_alone else ""
        raise ValueError(f"downsample got {x.shape[1]} frames: those{after} must be pairs to be averaged")

    return dispatch(
        downsample_on,
        x,
        kernel,
        bias,
        compress_time=compress_time,
        first_frame_alone=first_frame_alone,
        split=split,
    )


def downsample_on(
    target: Target,
    x: Array,
    kernel: Array,
    bias: Array | None,
    *,
    compress_time: bool,
    first_frame_alone: bool,
) -> Array:
    """Average pairs of frames if `compress_time`, then convolve with stride 2, by runs of frames.

    A run is frames that are computed together: on a TPU the first of an odd number alone, then 2, 4 or 8.
    `target` is the platform that is traced for.
    """

    def downsample_run(frames: Array, compress_time: bool, first_frame_alone: bool) -> Array:
        """Downsample a run of frames."""
        downsample_shard = functools.partial(
            _downsample_shard, compress_time=compress_time, first_frame_alone=first_frame_alone
        )
        return map_shards(target, downsample_shard, (frames,), (kernel, bias))

    return _split_and_resample(target, downsample_run, x, compress_time, first_frame_alone)


def _downsample_shard(
    target: Target,
    x: Array,
    kernel: Array,
    bias: Array | None,
    *,
    compress_time: bool,
    first_frame_alone: bool,
) -> Array:
    """Average pairs of frames if `compress_time`, then convolve with stride 2, on a device's own columns."""
    if compress_time and x.shape[1] > first_frame_alone:  # True is 1: a single first frame has no pair
        x = average_pairs(target, x, first_frame_alone=first_frame_alone)
    # As one matrix product of all 3 x 3 windows (patches), which XLA compiles faster for an image on a TPU.
    by_patches = is_image_for_tpu(target, x) and xla.suits_patches(x)
    halve = xla.downsampled_sums_by_patches if by_patches else xla.downsampled_sums
    y = halve(x, kernel, (0, 1))  # a column of zeros on the right, as diffusers pads
    if target.split.has_neighbours:
        if x.shape[3] % 2:
            raise ValueError(
                f"downsample got shards of {x.shape[3]} columns: over several an even number is needed"
            )
        # The last window's third column is the right neighbour's first; no window reaches to the left.
        _, right = neighbours_of(target.split, x, 1)
        y = add_columns(y, halve(right, kernel[:, 2:], (0, 0)), at=y.shape[3] - 1)
    return with_clear_padding(add_bias_and_residual(y, bias).astype(x.dtype), target.split)
