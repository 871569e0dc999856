"""Frames: the runs in which a TPU computes them, their layout in its memory, and operations on whole frames.

A TPU keeps frames in the sublanes of its tiles. Nine frames fill them badly: they take two and a half times
as long as eight. Each kernel therefore computes the first of an odd number of frames alone, as an image, and
the others in runs of two, four or eight, and joins the runs at its end. XLA removes a join that the next
kernel's split undoes. An image may be cut into bands of rows, which fill the sublanes in place of frames.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float

from jax_kernels.common.dispatch import Target
from jax_kernels.common.pointwise import check_channels, precision_for

RUNS = 8, 4, 2
"""Numbers of frames that are computed together, in order of preference."""

MOST_IN_PATCHES = 2**29
"""Most bytes of patches, the pixels under all windows: `conv_patches` writes each pixel once for each tap."""

LARGE_FRAME = 16384
"""Pixels; see `is_large`."""


def splits_first_frame(target: Target, x: jax.Array) -> bool:
    """Return whether the first of an odd number of frames is a run by itself: in bfloat16 on a TPU."""
    return x.dtype == jnp.bfloat16 and target.on_tpu


def split_frames(
    target: Target, x: jax.Array, *others: jax.Array | None, time_axis: int = 1
) -> list[tuple[Any, ...]]:
    """Split the frames of arrays into runs; return the arrays of each run, in order.

    On a TPU, in bfloat16, the first of an odd number of frames is a run by itself, and the frames after it
    are equal runs of the largest of `RUNS` that divides their number. They are a single run if one of
    `others` has fewer frames than `x`, as latents have. Elsewhere all frames are one run. An array that is
    None is None in every run.
    """
    arrays, frames = (x, *others), x.shape[time_axis]
    if not splits_first_frame(target, x):  # anything but bfloat16 on a TPU
        return [arrays]
    alone = frames % 2  # frames that are computed alone: none, or the first
    length = next(length for length in RUNS if (frames - alone) % length == 0)  # of a run
    if any(array is not None and array.shape[time_axis] != frames for array in others):
        length = frames
    starts = [*range(alone), *range(alone, frames, length)]
    if len(starts) == 1:
        return [arrays]

    def take(start: int, stop: int | None) -> tuple[Any, ...]:
        return tuple(
            None if array is None else jax.lax.slice_in_dim(array, start, stop, axis=time_axis)
            for array in arrays
        )

    return list(map(take, starts, [*starts[1:], None]))


def join_frames(parts: Sequence[jax.Array], time_axis: int = 1) -> jax.Array:
    """Concatenate the results of successive runs (`split_frames`) along time."""
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=time_axis)


def is_image_for_tpu(target: Target, x: jax.Array) -> bool:
    """Return whether `x` (N T H W C) is an image in bfloat16 on a TPU.

    A TPU's kernels then have other forms, as one frame leaves the sublanes of a tile empty.
    """
    return x.shape[1] == 1 and splits_first_frame(target, x)


def split_bands(x: Float[Array, "N 1 H W C"], overlap: int, bands: int) -> Float[Array, "N B h W C"]:
    """Cut an image's rows into B bands of h = H / B + 2 `overlap` rows, along the axis of frames.

    Neighbouring bands overlap; zeros are beyond the image.
    """
    rows = x.shape[2] // bands
    padded = jnp.pad(x, [(0, 0), (0, 0), (overlap, overlap), (0, 0), (0, 0)])
    return jnp.concatenate(
        [padded[:, :, band * rows : (band + 1) * rows + 2 * overlap] for band in range(bands)], axis=1
    )


def join_bands(x: Float[Array, "N B h W C"], overlap: int) -> Float[Array, "N 1 H W C"]:
    """Join the bands of an image; leave out each band's first and last `overlap` rows."""
    kept = slice(overlap, x.shape[2] - overlap)
    return jnp.concatenate([x[:, band : band + 1, kept] for band in range(x.shape[1])], axis=2)


def pixels_first(x_NTHWC: jax.Array) -> jax.Array:
    """Transpose to (H, W, N, T, C), the order in which a TPU keeps the frames of a 2-D convolution."""
    return x_NTHWC.transpose(2, 3, 0, 1, 4)


def frames_first(x_HWNTC: jax.Array) -> jax.Array:
    """Invert `pixels_first`."""
    return x_HWNTC.transpose(2, 3, 0, 1, 4)


def is_large(x_NTHWC: jax.Array) -> bool:
    """Return whether frames are so large that a layout constraint on them helps a TPU; an image never is.

    The limit is between 192 x 44 pixels, where a constraint compiles for longer than twelve minutes, and 120
    x 180, where it reduces the v6e compiler's estimate of a chunk of CogVideoX's VAE from 178 ms to 156 ms.
    """
    return x_NTHWC.shape[1] > 1 and x_NTHWC.shape[2] * x_NTHWC.shape[3] >= LARGE_FRAME


def kernel_layout(x_NTHWC: jax.Array) -> jax.Array:
    """Return `x` in the memory layout of the Pallas kernels: H W N T C, or N T H W C for an image.

    Without the constraint XLA copies frames that are sliced from a concatenation into another order and back
    (v6e, 8 x 480 x 720 x 128: 4.3 ms).
    """
    order = (0, 1, 2, 3, 4) if x_NTHWC.shape[1] == 1 else (2, 3, 0, 1, 4)  # the outermost axis first
    return with_layout_constraint(x_NTHWC, Layout(order))


def store_pixels_first(target: Target, x_NTHWC: jax.Array) -> jax.Array:
    """Return `x`, kept in memory in the order (H, W, N, T, C) of `pixels_first` on a TPU.

    Where XLA does not find that order by itself, it copies and rounds an activation in separate passes (v6e,
    8 x 480 x 720 x 128: 11 ms). Small frames are better left to XLA, which compiles constraints on all of
    them for longer than ten minutes. On a mesh, call this inside `dispatch.map_shards`: outside, XLA's
    partitioner would gather the array.
    """
    if not target.on_tpu:
        return x_NTHWC
    # Without the barrier XLA leaves out the rounding of `x`, and keeps a residual in float32.
    return jax.lax.optimization_barrier(with_layout_constraint(x_NTHWC, Layout((2, 3, 0, 1, 4))))


def store_columns_last(target: Target, x_NTHWC: jax.Array) -> jax.Array:
    """Return `x`, kept in memory as N, C, T, H, W on a TPU, which suits few channels: columns fill the lanes.

    On a mesh, call it only inside `map_shards`: outside, XLA's partitioner would gather the array.
    """
    return with_layout_constraint(x_NTHWC, Layout((0, 4, 1, 2, 3))) if target.on_tpu else x_NTHWC


def zero_of(x: jax.Array) -> jax.Array:
    """Return zeros that are computed from `x`: an operation that adds them waits for `x`."""
    # XLA would drop an optimization barrier before it orders operations. The minimum of a NaN and 0 is NaN.
    return jnp.where(jnp.isnan(x), 0, jnp.minimum(jnp.abs(x), 0))


def check_convolution(name: str, x: Array, kernel: Array, bias: Array | None, kernel_axes: str) -> None:
    """Raise `ValueError` for frames, a kernel and a bias that do not fit each other, or an even kernel.

    The message has the function's `name` and its `kernel_axes`, such as "kh kw I O".
    """
    if x.ndim != 5 or kernel.ndim != len(kernel_axes.split()):
        raise ValueError(
            f"{name} got x {x.shape} and kernel {kernel.shape}: it needs N T H W I and {kernel_axes}"
        )
    rows, columns, inputs, outputs = kernel.shape[-4:]
    if x.shape[-1] != inputs:
        raise ValueError(f"{name} got {x.shape[-1]} channels for a kernel that takes {inputs}")
    if rows % 2 == 0 or columns % 2 == 0:
        raise ValueError(f"{name} got a kernel of {rows} x {columns} pixels: both must be odd")
    check_channels(name, outputs, bias=bias)


def conv_frames(
    x_NTHWC: Float[Array, "N T H W I"],
    kernel_HWIO: Float[Array, "kh kw I O"],
    *,
    padding: Sequence[tuple[int, int]],
    stride: int = 1,
) -> Float[Array, "N T H2 W2 O"]:
    """Convolve every frame in 2-D; return float32 sums. `padding` is ((above, below), (left, right))."""
    n, t = x_NTHWC.shape[:2]
    y = jax.lax.conv_general_dilated(
        x_NTHWC.reshape(n * t, *x_NTHWC.shape[2:]),
        kernel_HWIO,
        window_strides=(stride, stride),
        padding=padding,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        precision=precision_for(x_NTHWC.dtype),
        preferred_element_type=jnp.float32,
    )
    return y.reshape(n, t, *y.shape[1:])


def conv_patches(
    taps: Sequence[Float[Array, "N T H W I"]], kernel: Float[Array, "*taps kh kw I O"], *, stride: int = 1
) -> Float[Array, "N T H2 W2 O"]:
    """Convolve frames by one matrix product of all windows (patches); return float32 sums.

    `taps` has the frames, padded in space, under each of the kernel's taps of time.
    """
    window_rows, window_columns, _, outputs = kernel.shape[-4:]
    height, width = (  # of the result
        (size - window) // stride + 1
        for size, window in zip(taps[0].shape[2:4], (window_rows, window_columns), strict=True)
    )
    patches = [  # for each tap of the kernel (of time, row, column), the pixels under it in all windows
        frames[
            :,
            :,
            row : row + stride * (height - 1) + 1 : stride,
            column : column + stride * (width - 1) + 1 : stride,
        ]
        for frames in taps
        for row in range(window_rows)
        for column in range(window_columns)
    ]
    return jnp.einsum(
        "nthwi,io->nthwo",
        jnp.concatenate(patches, axis=-1),
        kernel.reshape(-1, outputs),
        precision=precision_for(taps[0].dtype),
        preferred_element_type=jnp.float32,
    )


def repeat_nearest(x: Array, factors: dict[int, int]) -> Array:
    """Upsample by whole factors (nearest): repeat each element `factors[axis]` times along every `axis`.

    By whole factors `jnp.repeat` is a broadcast and a reshape. By an array of counts it would be a gather,
    which on a mesh collects all of a sharded axis on every device.
    """
    # Columns before rows and frames, while the array is smallest: where the shards of a width and of its
    # multiple do not line up, devices exchange columns.
    for axis in sorted(factors, reverse=True):
        x = jnp.repeat(x, factors[axis], axis=axis)
    return x


def select_frames(
    target: Target, x_NTHWC: jax.Array, frames: Sequence[int], *, after: jax.Array | None = None
) -> jax.Array:
    """Return `x[:, frames]`; on a TPU, where slicing sublanes is slow, by a matrix of zeros and ones.

    This is exact. The estimate for a v6e: two of 8 frames of 480 x 720 x 128 take 1.7 ms instead of 4.7. A
    TPU selects the frames once the array `after`, if any, has been computed.
    """
    index = np.asarray(frames)
    if not target.on_tpu:
        return x_NTHWC[:, index]
    weights = jnp.asarray(index[:, None] == np.arange(x_NTHWC.shape[1])[None], x_NTHWC.dtype)
    # A zero that is computed from `after` makes the matrix product wait for it.
    return _mix_frames(weights if after is None else weights + zero_of(after[0, 0, 0, 0, 0]), x_NTHWC)


def _mix_frames(weights_ST: jax.Array, x_NTHWC: jax.Array) -> jax.Array:
    """Return S weighted sums of the T frames of `x`."""
    return jnp.einsum("st,nthwc->nshwc", weights_ST, x_NTHWC, precision=precision_for(x_NTHWC.dtype))


def average_pairs(target: Target, x_NTHWC: jax.Array, *, first_frame_alone: bool) -> jax.Array:
    """Return the means of pairs of frames; `first_frame_alone` keeps the first frame, before the pairs.

    Frames must be finite: on a TPU the means are a matrix product, in which 0 times an infinity is NaN. A
    mean over pairs of sublanes would take 25.6 ms (v6e, 8 x 480 x 720 x 128).
    """
    if target.on_tpu:
        length = x_NTHWC.shape[1]
        alone = int(first_frame_alone)  # frames that are kept
        weights = np.zeros((alone + length // 2, length))  # of each frame in each result
        weights[:alone, :alone] = 1
        # A row for each pair: 0.5 for its two frames.
        weights[alone:, alone:] = np.kron(np.eye(length // 2), [0.5, 0.5])
        return _mix_frames(jnp.asarray(weights, x_NTHWC.dtype), x_NTHWC)
    kept, paired = ([x_NTHWC[:, :1]], x_NTHWC[:, 1:]) if first_frame_alone else ([], x_NTHWC)
    pairs = paired.reshape(paired.shape[0], paired.shape[1] // 2, 2, *paired.shape[2:])
    return jnp.concatenate([*kept, jnp.mean(pairs.astype(jnp.float32), axis=2).astype(paired.dtype)], axis=1)
