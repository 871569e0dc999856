"""Up- and downsampling by two: of rows and columns by a 2-D convolution, and of frames if the caller asks.

A *run* is a group of frames that a TPU computes together. An *image* is a single frame, and a *band* some of
its rows. A mesh may split columns into *shards*, one for each device, and may pad the width with columns of
zeros. A *target* is the platform that the code is traced for, with the split into shards; `dispatch` passes
one to the body of an op, named `OP_on`.
"""

import functools
from collections.abc import Callable, Sequence

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
from jax_kernels.common.dispatch import Target, dispatch, map_shards, on_platform
from jax_kernels.common.frames import (
    MOST_IN_PATCHES,
    average_pairs,
    check_convolution,
    conv_frames,
    conv_patches,
    is_image_for_tpu,
    join_bands,
    join_frames,
    kernel_layout,
    repeat_nearest,
    select_frames,
    split_bands,
    split_frames,
)
from jax_kernels.conv3d.xla import add_bias_and_residual
from jax_kernels.resample import upsampled

OVERLAP = 1
"""Rows of the next bands that a band of an image has above and below: as far as a 3 x 3 kernel sees."""


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

    The form for XLA doubles the frames after the convolution, because two equal frames would be convolved
    with the same result. On a TPU one Pallas kernel upsamples and convolves, if it supports the frames.

    Args:
        x: the activations.
        kernel: of odd height and width, in `x`'s dtype.
        bias: (O,), or None.
        expand_time: whether frames are doubled.
        first_frame_alone: whether the first frame stays a single one.
        split: the sharding of columns.

    Returns:
        2H x 2W pixels in `x`'s dtype. T2 is T; with `expand_time` it is 2T, or 2T - 1 if the first frame
        stays single.

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
    """Compute `upsample` for a target: one run of frames after the other, each on all devices."""

    def upsample_run(frames: Array, expand_time: bool, first_frame_alone: bool) -> Array:
        """Upsample a run on each device; the flags are the run's, which may differ from those of the op."""
        by_xla = functools.partial(_by_xla, expand_time=expand_time, first_frame_alone=first_frame_alone)
        upsample_shard = _kernel_for(target, frames, kernel, expand_time, first_frame_alone) or by_xla
        return map_shards(target, upsample_shard, (frames,), (kernel, bias))

    return _split_and_resample(target, upsample_run, x, expand_time, first_frame_alone)


def _split_and_resample(
    target: Target, resample: Callable[..., Array], x: Array, in_time: bool, first_frame_alone: bool
) -> Array:
    """Resample the frames of `x` in runs, and join the results.

    `resample(frames, in_time, first_frame_alone)` returns the result of one run. `in_time` says whether
    frames are doubled, or averaged in pairs.
    """
    # `split_frames` makes the first frame a run by itself if the number of frames is odd. That must agree
    # with `first_frame_alone`: otherwise all frames are one run.
    runs = [(x,)] if x.shape[1] % 2 != first_frame_alone else split_frames(target, x)
    if len(runs) == 1:
        return resample(x, in_time, first_frame_alone)
    # A run of one frame is the first frame, which is not resampled in time. All other runs have whole pairs
    # of frames, so `first_frame_alone` is False for each of them.
    return join_frames([resample(run, in_time and run.shape[1] > 1, False) for (run,) in runs])


def _kernel_for(
    target: Target, x: Array, kernel: Array, expand_time: bool, first_frame_alone: bool
) -> Callable[..., Array] | None:
    """Return the function that upsamples these frames by the Pallas kernel; None if the kernel cannot."""
    if not target.uses_pallas:
        return None
    shard = target.split.shard_of(x)  # shape and dtype of what one device has
    pixels = x.shape[2] * x.shape[3]  # of a whole frame, not of the shard: small frames are not supported
    # An image whose result is an image too: its frame is alone, or frames are not doubled.
    if is_image_for_tpu(target, x) and (first_frame_alone or not expand_time):
        bands = _bands_of(shard, kernel, pixels)
        return functools.partial(_image_by_kernel, bands=bands) if bands else None
    # The kernel doubles either all frames or none, so it cannot leave a first one alone.
    if first_frame_alone or not upsampled.is_supported(shard, kernel, expand_time=expand_time, pixels=pixels):
        return None
    return functools.partial(_by_kernel, expand_time=expand_time)


def _bands_of(image: jax.ShapeDtypeStruct, kernel: Array, pixels: int) -> int | None:
    """Return the number of bands into which an image is cut for the Pallas kernel; None if no number fits.

    The kernel needs several frames, so it gets the bands in their place (`_image_by_kernel`). `image` may be
    a shard; `pixels` counts the whole image's.
    """
    videos, _, height, columns, channels = image.shape
    even_height = height + height % 2  # `_image_by_kernel` pads an odd height
    for bands in upsampled.FRAMES:  # the numbers of frames that the kernel supports, the largest first
        # A band also has `OVERLAP` rows of the next bands, or zeros, above and below.
        rows = even_height // bands + 2 * OVERLAP
        bands_as_frames = jax.ShapeDtypeStruct((videos, bands, rows, columns, channels), image.dtype)
        if even_height % bands == 0 and upsampled.is_supported(
            bands_as_frames, kernel, expand_time=False, pixels=pixels
        ):
            return bands
    return None


def _by_kernel(target: Target, x: Array, kernel: Array, bias: Array | None, *, expand_time: bool) -> Array:
    """Upsample whole frames, or a shard of them, by the Pallas kernel."""
    split = target.split
    bias = jnp.zeros(kernel.shape[-1:], kernel.dtype) if bias is None else bias
    # The columns (left, right) of the neighbouring shards; None for a whole frame, which has zeros beside it.
    beside = neighbours_of(split, x, 1) if split.shards > 1 else None
    # The result has twice the width of `x`, and its columns from `true_width` on are padding.
    true_width = split.real_columns_here(2 * x.shape[3]) if split.is_padded else None
    return upsampled.upsampled(x, kernel, bias, beside, true_width, expand_time)


def _image_by_kernel(target: Target, x: Array, kernel: Array, bias: Array | None, *, bands: int) -> Array:
    """Upsample an image by the Pallas kernel, which needs several frames: `bands` bands are its frames."""
    # For 120 x 180 x 512, XLA takes 3 s to compile this function, and 52 s to compile its own convolution.
    # `kernel_layout` fixes the order of axes in memory, because XLA might copy the image into another order.
    height = x.shape[2]
    # An odd number of rows is padded with a row of zeros, which the convolution sees below an image anyway.
    even = jnp.pad(kernel_layout(x), [(0, 0), (0, 0), (0, height % 2), (0, 0), (0, 0)])
    y = _by_kernel(target, split_bands(even, OVERLAP, bands), kernel, bias, expand_time=False)
    # The rows by which bands overlap are doubled too; the results of the row of zeros are cut off.
    return kernel_layout(join_bands(y, 2 * OVERLAP)[:, :, : 2 * height])


def _by_xla(
    target: Target, x: Array, kernel: Array, bias: Array | None, *, expand_time: bool, first_frame_alone: bool
) -> Array:
    """Double pixels, convolve them by XLA, and double the results' frames if `expand_time`."""
    # Rows and columns of zeros on each side, which keep the doubled size.
    zero_rows, zero_columns = kernel.shape[0] // 2, kernel.shape[1] // 2
    doubled = repeat_nearest(x, {2: 2, 3: 2})

    def convolve(columns: Array, taps: Array, padding: tuple[int, int]) -> Array:
        """Convolve the shard's columns, or a neighbour's, with so many columns of zeros (left, right)."""
        return _convolved_sums(target, columns, taps, ((zero_rows, zero_rows), padding))

    # First with zeros in place of the neighbours' columns. `add_from_neighbours` fetches these columns,
    # convolves them by the taps that see them, and adds the results.
    y = convolve(doubled, kernel, (zero_columns, zero_columns))
    y = add_from_neighbours(target.split, y, doubled, kernel, convolve)
    y = with_clear_padding(add_bias_and_residual(y, bias).astype(x.dtype), target.split)
    alone = int(first_frame_alone)  # the number of frames that stay single
    length = x.shape[1]
    if not expand_time or length == alone:
        return y
    # `select_frames` selects by a matrix product on a TPU, where it is slow to index or to repeat frames.
    each_twice = [frame for frame in range(alone, length) for _ in range(2)]
    return select_frames(target, y, [*range(alone), *each_twice])


def _convolved_sums(
    target: Target, x: Array, kernel: Array, padding: Sequence[tuple[int, int]], stride: int = 1
) -> Array:
    """Convolve every frame by `conv_frames`; return float32 sums, which a GPU rounds once to `x`'s dtype."""
    plain = functools.partial(conv_frames, padding=padding, stride=stride)
    if target.on_tpu or x.dtype == jnp.float32:
        return plain(x, kernel)

    def rounded(x: Array, kernel: Array) -> Array:
        return plain(x, kernel, dtype=x.dtype).astype(jnp.float32)  # why: see `conv3d.xla.rounded_on_gpu`

    return on_platform(plain, cuda=rounded)(x, kernel)


def downsample(
    x: Float[Array, "N T H W I"],
    kernel: Float[Array, "kh kw I O"],
    bias: Float[Array, " O"] | None,
    *,
    compress_time: bool,
    first_frame_alone: bool = False,
    split: Split = WHOLE,
) -> Float[Array, "N T2 H2 W2 O"]:
    """Average pairs of frames if `compress_time`, then convolve with stride 2, padded below and right.

    Args:
        x: the activations.
        kernel: (3, 3, I, O), `x`'s dtype.
        bias: (O,), or None.
        compress_time: whether the number of frames is halved, by the mean of each pair.
        first_frame_alone: whether the first frame stays single, and pairs begin after it.
        split: the sharding of columns.

    Returns:
        H2 = H // 2 and W2 = W // 2 pixels in `x`'s dtype. T2 is T; with `compress_time` it is T / 2, or
        (T + 1) / 2 if the first frame stays single.

    Raises:
        ValueError: a kernel of another size or that does not take `x`, a bias of another length; frames that
            cannot be paired; a shard with an odd number of columns.
    """
    if kernel.shape[:2] != (3, 3):
        raise ValueError(
            "downsample got a kernel of {} x {} pixels: it must have 3 x 3".format(*kernel.shape)
        )
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
    """Compute `downsample` for a target: one run of frames after the other, each on all devices."""

    def downsample_run(frames: Array, compress_time: bool, first_frame_alone: bool) -> Array:
        """Downsample a run on each device; the flags are the run's, which may differ from those of the op."""
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
    """Average pairs of frames if `compress_time`, and convolve the shard with stride 2."""
    if compress_time and x.shape[1] > int(first_frame_alone):  # a single first frame has no pair
        x = average_pairs(target, x, first_frame_alone=first_frame_alone)
    # For an image on a TPU, XLA compiles one matrix product of all 3 x 3 windows, at every second row and
    # column (patches), in 5 s, and a convolution in 14 to 60 s. Patches must fit into memory.
    by_patches = is_image_for_tpu(target, x) and x.size // 4 * 9 * x.dtype.itemsize <= MOST_IN_PATCHES

    def convolve(x: Array, kernel: Array, columns: tuple[int, int]) -> Array:
        """Convolve with stride 2, a row of zeros below and `columns` zeros (left, right)."""
        if by_patches:
            # `conv_patches` takes the frames under each tap of time, in a list: this kernel has no such axis.
            return conv_patches([jnp.pad(x, [(0, 0), (0, 0), (0, 1), columns, (0, 0)])], kernel, stride=2)
        return _convolved_sums(target, x, kernel, ((0, 1), columns), stride=2)

    y = convolve(x, kernel, (0, 1))  # a column of zeros on the right, as diffusers pads
    if target.split.shards > 1:
        if x.shape[3] % 2:
            raise ValueError(
                f"downsample got shards of {x.shape[3]} columns: over several an even number is needed"
            )
        # The third column of a row's last window is the right neighbour's first column, in whose place `y`
        # has zeros. Its products with the kernel's third column (2) are added. No window reaches to the left.
        _left, right = neighbours_of(target.split, x, 1)
        y = add_columns(y, convolve(right, kernel[:, 2:], (0, 0)), at=y.shape[3] - 1)
    return with_clear_padding(add_bias_and_residual(y, bias).astype(x.dtype), target.split)
