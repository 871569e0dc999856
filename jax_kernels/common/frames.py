"""Frames: the runs in which a TPU computes them, their layout in its memory, and operations on whole frames.

A TPU keeps frames in the sublanes of its tiles. Nine frames fill them badly: they take two and a half times
as long as eight. Each kernel therefore splits frames into *runs*, which it computes one after the other, and
joins the results at its end. The first of an odd number of frames is a run by itself, computed as an image;
the frames after it are in runs of two, four or eight. XLA removes a join that the next kernel's split undoes.
An image may be cut into *bands* of rows, which fill the sublanes in place of frames.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jax_kernels.common.dispatch import Target
from jax_kernels.common.pointwise import check_channels, precision_for

RUNS = 8, 4, 2
"""Numbers of frames in a run, in order of preference."""

MOST_IN_PATCHES = 2**29
"""Most bytes of patches (`conv_patches`), which hold each pixel once for each tap of the kernel."""

LARGE_FRAME = 16384
"""Fewest pixels of a frame that `is_large` calls large."""


def splits_first_frame(target: Target, x: jax.Array) -> bool:
    """Return whether an odd number of frames is split after the first one: in bfloat16 on a TPU."""
    return x.dtype == jnp.bfloat16 and target.on_tpu


def split_frames(
    target: Target, x: jax.Array, *others: jax.Array | None, time_axis: int = 1
) -> list[tuple[Any, ...]]:
    """Split the frames of `x` and of `others` into runs; return a tuple of arrays for each run, in order.

    On a TPU, in bfloat16, the first of an odd number of frames is a run by itself, and the frames after it
    are equal runs of the largest of `RUNS` that divides their number. Elsewhere all frames are one run. An
    array that is None is None in every run.

    All arrays are sliced at the same indices. So if one of `others` has fewer frames than `x`, as latents
    have, only the first frame is split off: all frames after it are a single run.
    """
    arrays, num_frames = (x, *others), x.shape[time_axis]
    if not splits_first_frame(target, x):  # anything but bfloat16 on a TPU
        return [arrays]
    num_single = num_frames % 2  # frames that are a run by themselves: the first, or none
    # The number of all other frames is even, so at least the run of two, the last of `RUNS`, divides it.
    run_length = next(length for length in RUNS if (num_frames - num_single) % length == 0)
    if any(array is not None and array.shape[time_axis] != num_frames for array in others):
        run_length = num_frames  # long enough that all other frames are a single run
    starts = [*range(num_single), *range(num_single, num_frames, run_length)]
    if len(starts) == 1:
        return [arrays]

    def take(start: int, stop: int | None) -> tuple[Any, ...]:
        return tuple(
            None if array is None else jax.lax.slice_in_dim(array, start, stop, axis=time_axis)
            for array in arrays
        )

    return list(map(take, starts, [*starts[1:], None]))  # a run stops where the next one starts


def join_frames(parts: Sequence[jax.Array], time_axis: int = 1) -> jax.Array:
    """Concatenate the results of successive runs (`split_frames`) along time."""
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=time_axis)


def is_image_for_tpu(target: Target, x: jax.Array) -> bool:
    """Return whether `x` (N T H W C) is an image, a single frame, in bfloat16 on a TPU.

    The kernels have other forms for it. Those for several frames keep a pixel's frames in sublanes, of which
    a single frame would leave most empty.
    """
    # One frame is an odd number: `splits_first_frame` tells whether it is in bfloat16 on a TPU.
    return x.shape[1] == 1 and splits_first_frame(target, x)


def split_bands(x: Float[Array, "N 1 H W C"], overlap: int, bands: int) -> Float[Array, "N B h W C"]:
    """Cut an image's rows into B bands of h = H / B + 2 `overlap` rows; the bands take the axis of frames.

    B divides H. A band begins and ends with `overlap` rows of its neighbours, or of zeros beyond the image.
    """
    rows = x.shape[2] // bands  # of a band, without the overlap
    padded = jnp.pad(x, [(0, 0), (0, 0), (overlap, overlap), (0, 0), (0, 0)])
    return jnp.concatenate(
        [padded[:, :, band * rows : (band + 1) * rows + 2 * overlap] for band in range(bands)], axis=1
    )


def join_bands(x: Float[Array, "N B h W C"], overlap: int) -> Float[Array, "N 1 H W C"]:
    """Join the bands of an image; leave out each band's first and last `overlap` rows."""
    return jnp.concatenate([x[:, band : band + 1, overlap:-overlap] for band in range(x.shape[1])], axis=2)


def pixels_first(x_NTHWC: jax.Array) -> jax.Array:
    """Transpose to (H, W, N, T, C), the order in which a TPU keeps the frames of a 2-D convolution."""
    return x_NTHWC.transpose(2, 3, 0, 1, 4)


def frames_first(x_HWNTC: jax.Array) -> jax.Array:
    """Invert `pixels_first`, by the same permutation: it swaps the first two axes with the next two."""
    return x_HWNTC.transpose(2, 3, 0, 1, 4)


def is_large(x_NTHWC: jax.Array) -> bool:
    """Return whether frames are so large that a layout constraint on them helps a TPU; an image never is.

    With a constraint on frames of 192 x 44 pixels, XLA compiles for longer than twelve minutes. On frames of
    120 x 180 pixels it reduces the v6e compiler's estimate of a chunk of CogVideoX's VAE from 178 ms to 156
    ms. `LARGE_FRAME` is between the two.
    """
    return x_NTHWC.shape[1] > 1 and x_NTHWC.shape[2] * x_NTHWC.shape[3] >= LARGE_FRAME


def kernel_layout(x_NTHWC: jax.Array) -> jax.Array:
    """Return `x` in the memory layout of the Pallas kernels: H W N T C, or N T H W C for an image.

    The frames are often slices of a concatenation. Without the constraint XLA copies such slices into another
    order and back: the first chunk of CogVideoX's encoding, 9 frames of 480 x 720, would take 54.1 ms instead
    of 50.0 (estimates for a v6e, moves by their bytes).
    """
    # A layout is the axes of `x` from the outermost to the innermost one in memory.
    return with_layout_constraint(
        x_NTHWC, Layout((0, 1, 2, 3, 4) if x_NTHWC.shape[1] == 1 else (2, 3, 0, 1, 4))
    )


def store_pixels_first(target: Target, x_NTHWC: jax.Array) -> jax.Array:
    """Return `x`, kept in memory in the order (H, W, N, T, C) of `pixels_first` on a TPU.

    Where XLA does not find that order by itself, it copies and rounds an activation in passes of their own
    (estimate for a v6e, 8 x 480 x 720 x 128: 11 ms). Call this for large frames only: small ones gain little,
    and with a constraint on every activation XLA compiles for longer than ten minutes. On a mesh, call it
    only inside `dispatch.map_shards`: outside, XLA's partitioner would gather the array.
    """
    if not target.on_tpu:
        return x_NTHWC
    # The caller has rounded `x`, mostly to bfloat16. Without the barrier XLA leaves the rounding out. If `x`
    # is a later layer's residual, XLA then keeps it in float32, which takes twice the memory.
    return jax.lax.optimization_barrier(with_layout_constraint(x_NTHWC, Layout((2, 3, 0, 1, 4))))


def store_columns_last(target: Target, x_NTHWC: jax.Array) -> jax.Array:
    """Return `x`, kept in memory as N, C, T, H, W on a TPU, which suits few channels: columns fill the lanes.

    On a mesh, call it only inside `map_shards`: outside, XLA's partitioner would gather the array.
    """
    return with_layout_constraint(x_NTHWC, Layout((0, 4, 1, 2, 3))) if target.on_tpu else x_NTHWC


def zero_of(x: jax.Array) -> jax.Array:
    """Return zeros that are computed from `x`: an operation that adds them waits for `x`.

    An optimization barrier would not do, because XLA drops it before it orders operations.
    """
    # The minimum of |x| and 0 is 0, except for a NaN, which is replaced.
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
    dtype: DTypeLike = jnp.float32,
) -> Float[Array, "N T H2 W2 O"]:
    """Convolve every frame in 2-D; return sums in float32, or rounded to `dtype`.

    `padding` is ((above, below), (left, right)).
    """
    n, t = x_NTHWC.shape[:2]
    y = jax.lax.conv_general_dilated(
        x_NTHWC.reshape(n * t, *x_NTHWC.shape[2:]),
        kernel_HWIO,
        window_strides=(stride, stride),
        padding=padding,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        precision=precision_for(x_NTHWC.dtype),
        preferred_element_type=dtype,
    )
    return y.reshape(n, t, *y.shape[1:])


def conv_patches(
    tap_frames: Sequence[Float[Array, "N T H W I"]],
    kernel: Float[Array, "*taps kh kw I O"],
    *,
    stride: int = 1,
) -> Float[Array, "N T H2 W2 O"]:
    """Convolve frames by one matrix product; return float32 sums.

    A row of the product's input is a patch: the pixels of all taps in a window, with their channels side by
    side. `tap_frames` has the frames under each of the kernel's taps of time, already padded in space.
    """
    window_rows, window_columns, _, outputs = kernel.shape[-4:]
    height, width = (  # of the result
        (size - window) // stride + 1
        for size, window in zip(tap_frames[0].shape[2:4], (window_rows, window_columns), strict=True)
    )
    # For each tap of the kernel, in its order (time, row, column), the pixels under it in all windows. The
    # windows are `stride` pixels apart, and the first one begins at the first pixel.
    pixels_under_taps = [
        frames[
            :,
            :,
            row : row + stride * (height - 1) + 1 : stride,
            column : column + stride * (width - 1) + 1 : stride,
        ]
        for frames in tap_frames
        for row in range(window_rows)
        for column in range(window_columns)
    ]
    return jnp.einsum(
        "nthwi,io->nthwo",
        jnp.concatenate(pixels_under_taps, axis=-1),
        kernel.reshape(-1, outputs),
        precision=precision_for(tap_frames[0].dtype),
        preferred_element_type=jnp.float32,
    )


def repeat_nearest(x: Array, factors: dict[int, int]) -> Array:
    """Upsample by nearest neighbour: repeat each element `factors[axis]` times along every `axis`.

    With an integer `jnp.repeat` is a broadcast and a reshape. With an array of counts it would be a gather,
    which on a mesh collects all of a sharded axis on every device.
    """
    # The last axis, the columns, is repeated first, while the array is smallest. On a mesh, devices exchange
    # columns if the shards of the narrow and of the wide frame do not begin at the same pixels.
    for axis in sorted(factors, reverse=True):
        x = jnp.repeat(x, factors[axis], axis=axis)
    return x


def select_frames(
    target: Target, x_NTHWC: jax.Array, frames: Sequence[int], *, after: jax.Array | None = None
) -> jax.Array:
    """Return `x[:, frames]`; on a TPU, where slicing sublanes is slow, by a matrix of zeros and ones.

    The product is exact. With an array `after`, a TPU selects the frames only once `after` has been computed.
    With slices instead, a steady chunk of CogVideoX's encoding, 8 frames of 480 x 720, has 3.3 GiB of
    temporaries on a v6e, where it has 2.2; the estimated times are the same.
    """
    index = np.asarray(frames)
    if not target.on_tpu:
        return x_NTHWC[:, index]
    # A row for each frame to select, and a column for each frame of `x`: a one marks the frame to select.
    weights = jnp.asarray(index[:, None] == np.arange(x_NTHWC.shape[1])[None], x_NTHWC.dtype)
    # A zero that is computed from `after` makes the matrix product wait for it.
    return _mix_frames(weights if after is None else weights + zero_of(after[0, 0, 0, 0, 0]), x_NTHWC)


def _mix_frames(weights_ST: jax.Array, x_NTHWC: jax.Array) -> jax.Array:
    """Return S weighted sums of the T frames of `x`."""
    return jnp.einsum("st,nthwc->nshwc", weights_ST, x_NTHWC, precision=precision_for(x_NTHWC.dtype))


def average_pairs(target: Target, x_NTHWC: jax.Array, *, first_frame_alone: bool) -> jax.Array:
    """Return the means of pairs of frames; with `first_frame_alone` the first frame, then the means.

    Frames must be finite: on a TPU the means are a matrix product, in which 0 times an infinity is NaN. With
    means over pairs of sublanes a steady chunk of CogVideoX's encoding, 8 frames of 480 x 720, would take
    36.6 ms instead of 33.3 (estimates for a v6e, moves by their bytes).
    """
    if target.on_tpu:
        length = x_NTHWC.shape[1]
        unpaired = int(first_frame_alone)  # number of frames that are no part of a pair
        weights = np.zeros((unpaired + length // 2, length))  # a row for each result, a column for each frame
        weights[:unpaired, :unpaired] = 1
        # A row for each pair: 0.5 for its two frames.
        weights[unpaired:, unpaired:] = np.kron(np.eye(length // 2), [0.5, 0.5])
        return _mix_frames(jnp.asarray(weights, x_NTHWC.dtype), x_NTHWC)
    first_frames = [x_NTHWC[:, :1]] if first_frame_alone else []
    others = x_NTHWC[:, 1:] if first_frame_alone else x_NTHWC
    pairs = others.reshape(others.shape[0], others.shape[1] // 2, 2, *others.shape[2:])
    means = jnp.mean(pairs.astype(jnp.float32), axis=2).astype(x_NTHWC.dtype)
    return jnp.concatenate([*first_frames, means], axis=1)
