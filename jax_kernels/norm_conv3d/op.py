"""A norm, SiLU and the causal 3-D convolution after it: on a TPU one Pallas kernel for most inputs.

A residual block has this sequence twice, and a decoder ends with it. The Pallas kernel (`tpu`) takes the norm
as *coefficients*, a multiplier and an offset: for each channel of a video, or, if latents modulate the norm,
for each latent and channel. A *run* is a number of frames that are computed together (`common.frames`), and a
*column* is a column of pixels. Its *moments* are the mean and M2, the sum of squared deviations from it. A
mesh splits columns into *shards*, one for each device, and may pad the width with columns of zeros. A
*target* is the platform that the code is traced for, with the split into shards; `dispatch` passes one to the
body of an op, named `OP_on`.

The kernel convolves a frame in *strips* of columns if it is too wide for VMEM, and puts zeros beside each
strip. What the columns beside a strip add to the results of its first and of its last column are the strip's
left and right *edge*: XLA computes them, and the kernel adds them. `step` defines the kernel's other terms.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_kernels.common.columns import WHOLE, Split, exchanged
from jax_kernels.common.dispatch import Target, dispatch, map_shards
from jax_kernels.common.frames import join_frames, repeat_nearest, split_frames, store_pixels_first
from jax_kernels.common.transforms import filtered
from jax_kernels.conv3d.op import check_conv3d, conv3d_on
from jax_kernels.group_norm import xla as norm_xla
from jax_kernels.group_norm.op import (
    check_groups,
    column_moments,
    group_norm_on,
    moments_of_columns,
    scale_and_shift,
)
from jax_kernels.norm_conv3d import sizes, tpu
from jax_kernels.spatial_norm import xla as spatial_xla
from jax_kernels.spatial_norm.op import check_spatial_norm, spatial_norm_on


class NormParams(NamedTuple):
    """Parameters of a GroupNorm, or, with latents `zq`, of a `spatial_norm`.

    Attributes:
        weight, bias: GroupNorm's, (C,) each.
        zq: latents (N, t, h, w, Z), or None for a GroupNorm.
        kernel_y, bias_y: of the 1x1x1 convolution of the latents whose results multiply the normed frames,
            (Z, C) and (C,).
        kernel_b, bias_b: of the 1x1x1 convolution of the latents whose results are then added, (Z, C) and
            (C,).
    """

    weight: Any
    bias: Any
    zq: Any = None
    kernel_y: Any = None
    bias_y: Any = None
    kernel_b: Any = None
    bias_b: Any = None


class ColumnMoments(NamedTuple):
    """The float32 moments of each column of pixels (along H), which the next norm merges."""

    mean: Float[Array, "N T W C"]
    m2: Float[Array, "N T W C"]


def norm_conv3d(
    x: Float[Array, "N T H W I"],
    norm: NormParams,
    kernel: Float[Array, "kt kh kw I O"],
    bias: Float[Array, " O"] | None = None,
    cache: Float[Array, "N kt-1 H W I"] | None = None,
    moments: ColumnMoments | None = None,
    *,
    num_groups: int,
    eps: float = 1e-6,
    first_frame_alone: bool = False,
    residual: Float[Array, "N T H W O"] | None = None,
    split: Split = WHOLE,
    in_place: bool = True,
) -> tuple[Float[Array, "N T H W O"], Float[Array, "N kt-1 H W I"] | None, ColumnMoments | None]:
    """Return `conv3d(silu(norm(x)))` and the state for the next call.

    Before a video's first frame the convolution sees that frame again. On a TPU one Pallas kernel computes
    norm, SiLU and convolution for the inputs that it supports (`sizes.is_supported`); otherwise the norm runs
    first, then the convolution.

    Args:
        x: frames.
        norm: parameters of `group_norm`, or, with latents `zq`, of `spatial_norm`.
        kernel, bias: the convolution's; the kernel is odd in space, of `x`'s dtype.
        cache: second result of the call on the frames before: activated frames. None at the start of a video.
        moments: third result of the call that computed `x`; with None a TPU reads `x` once more for them.
        num_groups: number of groups of channels that are normed together.
        eps: added to the variance.
        first_frame_alone: whether the first latent frame covers the first frame alone (`spatial_norm`).
        residual: added to the convolution's sums before they are rounded, or None.
        split: the sharding of columns.
        in_place: whether a TPU writes the next cache into the memory of `cache`, which the program's caller
            then donates. If a caller cannot donate it, XLA would copy each cache first.

    Returns:
        The convolved frames; the cache for the next call, None where kt is 1; the moments of the convolved
        frames' columns of pixels, or None for inputs that the TPU's kernel does not support.

    Raises:
        ValueError: anything that `conv3d`, `group_norm` or `spatial_norm` refuse.
    """
    check_conv3d(x, kernel, bias, cache, residual)
    weight, norm_bias, zq, *zq_convolutions = norm  # the last: kernel and bias of two convolutions of `zq`
    if zq is None:
        check_groups("group_norm", x.shape[-1], num_groups, weight=weight, bias=norm_bias)
    else:
        check_spatial_norm(
            x,
            zq,
            weight,
            norm_bias,
            *zq_convolutions,
            num_groups=num_groups,
            first_frame_alone=first_frame_alone,
        )
    return dispatch(
        norm_conv3d_on,
        x,
        norm,
        kernel,
        bias,
        cache,
        moments,
        residual,
        num_groups=num_groups,
        eps=eps,
        first_frame_alone=first_frame_alone,
        split=split,
        in_place=in_place,
    )


def norm_conv3d_on(
    target: Target,
    x: Array,
    norm: NormParams,
    kernel: Array,
    bias: Array | None,
    cache: Array | None,
    moments: ColumnMoments | None,
    residual: Array | None,
    *,
    num_groups: int,
    eps: float,
    first_frame_alone: bool,
    in_place: bool,
) -> tuple[Array, Array | None, ColumnMoments | None]:
    """Compute `norm_conv3d` for a target: by the Pallas kernel, or by a norm and then a convolution."""
    # A program has a branch for each platform, and all branches must return the same shapes. On a TPU the
    # Pallas kernel returns moments. So for inputs that it would support there, every branch returns moments:
    # on every platform, the question is asked as if for a TPU.
    is_supported_on_tpu = _kernel_supports(
        replace(target, platform="tpu"), x, norm, kernel, bias, cache, residual, first_frame_alone
    )
    if is_supported_on_tpu and target.on_tpu:
        return _by_kernel(
            target,
            x,
            norm,
            kernel,
            bias,
            cache,
            residual,
            moments,
            num_groups=num_groups,
            eps=eps,
            in_place=in_place,
        )
    weight, norm_bias, zq, *zq_convolutions = norm
    if zq is None:
        norm_on = functools.partial(group_norm_on, channel_axis=x.ndim - 1)
        inputs = x, weight, norm_bias
    else:
        norm_on = functools.partial(spatial_norm_on, first_frame_alone=first_frame_alone)
        inputs = x, zq, weight, norm_bias, *zq_convolutions
    hidden = norm_on(target, *inputs, num_groups=num_groups, eps=eps, activation="silu")
    y, next_cache = conv3d_on(target, hidden, kernel, bias, cache, residual)
    if not is_supported_on_tpu:
        return y, next_cache, None
    # Mean and M2 keep the axis of rows, of length 1.
    moments = ColumnMoments(*(jnp.squeeze(moment, 2) for moment in norm_xla.column_moments(y)))
    return y, next_cache, moments


def _kernel_supports(
    target: Target,
    x: Array,
    norm: NormParams,
    kernel: Array,
    bias: Array | None,
    cache: Array | None,
    residual: Array | None,
    first_frame_alone: bool,
) -> bool:
    """Return whether the Pallas kernel supports each run of `x`, as one device has it: a shard."""
    runs = split_frames(target, x, norm.zq, residual)  # of each run: frames, latents `zq`, residual
    return (
        target.pallas  # the environment does not turn this kernel off
        and all(vector is not None for vector in (bias, norm.weight, norm.bias))
        # In a run all latent frames must cover equally many frames. So the first frame must be a run by
        # itself if the first latent frame covers that frame alone, and only then.
        and first_frame_alone == (runs[0][0].shape[1] == 1)
        and all(
            sizes.is_supported(
                target.split.shard_of(frames),
                _coefficient_grid(target.split, frames, zq),
                kernel,
                residual=run_residual is not None,
                at_start=cache is None,
                # Of a whole frame, not of a shard: XLA convolves small frames faster than the kernel.
                pixels=x.shape[2] * x.shape[3],
            )
            for frames, zq, run_residual in runs
        )
    )


def _coefficient_grid(split: Split, x: Array, zq: Array | None) -> tuple[int, ...]:
    """Return the numbers of frames, rows and columns of the coefficients that one device has for `x`."""
    if zq is None:
        # All pixels share their coefficients. In a padded width each column has its own, because those of the
        # padding columns are zeros: the padding must be zero after the norm too.
        return 1, 1, split.shard_of(x).shape[3] if split.is_padded else 1
    return split.shard_of(zq).shape[1:4]


def _by_kernel(
    target: Target,
    x: Array,
    norm: NormParams,
    kernel: Array,
    bias: Array | None,
    cache: Array | None,
    residual: Array | None,
    moments: ColumnMoments | None,
    *,
    num_groups: int,
    eps: float,
    in_place: bool,
) -> tuple[Array, Array | None, ColumnMoments]:
    """Compute `norm_conv3d` by the Pallas kernel: run after run, each on all devices at once."""
    # Statistics span all frames: they are computed before the first run, and are the same for every run.
    mean, m2 = column_moments(target, x) if moments is None else moments
    # GroupNorm as `x * scale + shift`: both for each video and channel.
    scale_shift = scale_and_shift(
        moments_of_columns(target, mean, m2, x.shape[2], num_groups=num_groups), norm.weight, norm.bias, eps
    )
    results = []  # of each run: frames, and mean and M2 of their columns
    for frames, zq, run_residual in split_frames(target, x, norm.zq, residual):
        # `map_shards` passes the arrays of its three groups on, in this order: the first group is split by
        # columns, the last one by videos. The second is the same on every device, so it has no latents `zq`,
        # which are sharded as the frames are. A run's last activated frames are the cache of the next run.
        y, cache, y_mean, y_m2 = map_shards(
            target,
            functools.partial(_convolve_run, in_place=in_place),
            (frames, cache, run_residual, zq),
            (kernel, bias, norm._replace(zq=None)),
            scale_shift,
        )
        # The moments come with an axis of rows (2), of length 1.
        results.append((y, jnp.squeeze(y_mean, 2), jnp.squeeze(y_m2, 2)))
    y, y_mean, y_m2 = (join_frames(of_all_runs) for of_all_runs in zip(*results, strict=True))
    return y, cache, ColumnMoments(y_mean, y_m2)


def _convolve_run(
    target: Target,
    x: Array,
    cache: Array | None,
    residual: Array | None,
    zq: Array | None,
    kernel: Array,
    bias: Array,
    norm: NormParams,
    scale_NC: Array,
    shift_NC: Array,
    *,
    in_place: bool,
) -> tuple[Array, ...]:
    """Convolve one device's part of a run; return frames, next cache, and mean and M2 of each column.

    GroupNorm is `x * scale_NC + shift_NC`; the latents `zq`, if there are any, modulate it.
    """
    split = target.split
    frames, _, columns, _ = x.shape[1:]
    *_, coefficient_columns = _coefficient_grid(split, x, zq)
    # Coefficients are needed twice: here as the registers that the kernel reads, and in `_edge_sums` for the
    # pixels of one column. So this is a function of `repeat`, which repeats them for one or the other.
    coefficients = functools.partial(_coefficients, split, norm, zq, scale_NC, shift_NC, coefficient_columns)
    multiplier, offset = coefficients(lambda values: tpu.to_registers(values, frames, columns))
    _, coefficient_rows, registers, *_ = multiplier.shape  # `registers` is the number for each row
    # The kernel chooses the same sizes. Here they tell into how many strips it cuts the frame.
    conv_sizes = sizes.sizes_of(x, coefficient_rows, registers, kernel.shape[-1], residual is not None)
    # The kernel takes the columns beside a strip as zeros, which is right if one strip has the whole frame.
    edges = None
    if conv_sizes.strips > 1 or split.shards > 1:
        edges = _edge_sums(target, x, cache, kernel, coefficients, conv_sizes)
    # The number of this shard's columns that are not padding.
    true_width = split.real_columns_here(columns) if split.is_padded else None
    y, next_cache, (mean, m2) = tpu.convolved(
        x, multiplier, offset, cache, residual, kernel, bias, edges, true_width, in_place=in_place
    )
    # Mean and M2 become (N, T, 1, W, O), because `map_shards` takes results of five axes.
    return y, next_cache, jnp.expand_dims(mean, 2), jnp.expand_dims(m2, 2)


def _coefficients(
    split: Split,
    norm: NormParams,
    zq: Array | None,
    scale_NC: Array,
    shift_NC: Array,
    coefficient_columns: int,
    repeat: Callable[[Array], Array],
) -> tuple[Array, Array]:
    """Return the norm's multiplier and offset, as `repeat` arranges them; those of padding columns are zeros.

    `repeat` is a function of an array (N, t, h, w, channels), which repeats its values to the kernel's
    registers, or to the pixels of one column. Here w is `coefficient_columns`: with latents, the columns of
    `zq`. Without latents t and h are 1, and w is 1 too unless the width is padded.
    """
    scale, shift = scale_NC[:, None, None, None], shift_NC[:, None, None, None]
    if zq is None:
        multiplier, offset = (
            repeat(jnp.repeat(each, coefficient_columns, axis=3)) for each in (scale, shift)
        )
    else:
        zq = repeat(zq)  # before it is convolved, because it has fewer channels than the results
        # The axes between the first two and the channels become one. XLA takes 47 s to compile the
        # convolution of 23 x 8 values, in registers and sublanes, and 7 s for that of 184 values on one axis.
        merged = zq.reshape(*zq.shape[:2], -1, zq.shape[-1])
        # A spatial norm is (x * scale + shift) * y + b, where y and b are convolutions of the latents.
        y, b = (
            spatial_xla.pointwise("nabz,zo->nabo", merged, kernel, bias).reshape(*zq.shape[:-1], -1)
            for kernel, bias in ((norm.kernel_y, norm.bias_y), (norm.kernel_b, norm.bias_b))
        )
        multiplier, offset = y * scale, y * shift + b
    if split.is_padded:  # with zeros for coefficients, activated padding columns are zero: SiLU(0) = 0
        # The mask is false for padding columns. It has the w of the coefficients, and 1 on all other axes. It
        # is repeated as they are, and `where` broadcasts it to their shape.
        mask = repeat(split.mask(coefficient_columns)[None, None, None, :, None])
        multiplier, offset = jnp.where(mask, multiplier, 0), jnp.where(mask, offset, 0)
    return multiplier, offset


def _edge_sums(
    target: Target,
    x: Array,
    cache: Array | None,
    kernel: Array,
    coefficients: Callable[..., tuple[Array, Array]],
    conv_sizes: sizes.ConvSizes,
) -> tuple[Array, Array]:
    """Return the left edges of all E strips, and their right edges, each (N, T, H, E, O), in float32.

    The columns beside a strip are in another strip or in a neighbour's shard; beside the frame they are
    zeros. `coefficients` is `_coefficients`, as a function of `repeat` alone.
    """
    # The first columns of all strips but the leftmost one.
    starts = range(conv_sizes.strip_columns, conv_sizes.columns, conv_sizes.strip_columns)
    # The edges are convolved as in the kernel, for the same rounding: by Winograd's filtering if the kernel
    # has a `tile` for it, else directly.
    winograd = functools.partial(filtered, tile=conv_sizes.tile, multiply=_component_sums)
    convolve = winograd if conv_sizes.tile else _column_sums
    activated = functools.partial(_activated_column, target, x, cache, coefficients)
    # By the first of the kernel's three column taps, the column before a strip adds to the strip's first
    # column. By the last tap, the column after a strip adds to the strip's last one. At each start one strip
    # has its left edge, and the strip before it its right edge.
    left_edges = [convolve(activated(start - 1), kernel[:, :, 0]) for start in starts]
    right_edges = [convolve(activated(start), kernel[:, :, -1]) for start in starts]
    # The left edge of the leftmost strip and the right edge of the rightmost one, by the neighbours' columns.
    if target.split.shards > 1:
        # Each device sends its first column to the left and its last one to the right. It gets the last
        # column of its left neighbour, and the first one of its right neighbour.
        left, right = exchanged(target.split, activated(0), activated(x.shape[3] - 1))
        leftmost, rightmost = convolve(left, kernel[:, :, 0]), convolve(right, kernel[:, :, -1])
    else:  # the frame ends here; it has several strips, so `left_edges` has an element to copy the shape of
        leftmost = rightmost = jnp.zeros_like(left_edges[0])
    return jnp.stack([leftmost, *left_edges], axis=3), jnp.stack([*right_edges, rightmost], axis=3)


def _activated_column(
    target: Target,
    x: Array,
    cache: Array | None,
    coefficients: Callable[..., tuple[Array, Array]],
    column: int,
) -> Float[Array, "N P H I"]:
    """Return a column of pixels in P = T + 2 frames: two of the cache, then those of `silu(norm(x))`.

    `coefficients` is `_coefficients`, as a function of `repeat` alone.
    """
    frames, height, columns = x.shape[1:4]

    def repeat_over_column(values: Array) -> Array:
        """Return the values that an array (N, t, h, w, Z) has for the column, repeated to T and H."""
        _, t, h, w, _ = values.shape
        index = column * w // columns  # each of the w elements covers `columns / w` columns of `x`
        return repeat_nearest(values[:, :, :, index : index + 1], {1: frames // t, 2: height // h})

    # This column is activated here as well as in the kernel, which keeps activated frames in VMEM. Without a
    # fixed layout XLA would copy all of `x` into the order that suits a single column.
    pixels = store_pixels_first(target, x[:, :, :, column : column + 1])
    activated = tpu.activated(pixels, *coefficients(repeat_over_column))
    first_twice = jnp.repeat(activated[:, :1], 2, axis=1)  # at a video's start, in place of a cache
    past = first_twice if cache is None else tpu.column_of_cache(cache, column)
    return jnp.squeeze(jnp.concatenate([past, activated], axis=1), 3)  # without the axis of columns


def _column_sums(
    hidden: Float[Array, "N P H I"], kernel: Float[Array, "kt 3 I O"]
) -> Float[Array, "N P-kt+1 H O"]:
    """Convolve a column of pixels over time and rows, by one column tap of a kernel; return float32 sums.

    Rows are padded with zeros.
    """
    time_taps = kernel.shape[0]
    frames, height = hidden.shape[1] - time_taps + 1, hidden.shape[2]
    hidden = jnp.pad(hidden, [(0, 0), (0, 0), (1, 1), (0, 0)])
    under_taps = [  # for each tap (time, row), the pixels under it; their channels become one axis
        hidden[:, time : time + frames, row : row + height] for time in range(time_taps) for row in range(3)
    ]
    weights = kernel.reshape(-1, kernel.shape[-1])
    return jnp.einsum(
        "nthi,io->ntho", jnp.concatenate(under_taps, axis=-1), weights, preferred_element_type=jnp.float32
    )


def _component_sums(
    hidden: Float[Array, "N tiles H I"], kernel: Float[Array, "3 I O"]
) -> Float[Array, "N tiles H O"]:
    """Convolve one component (`filtered`) over the rows of a column; return float32 sums."""
    return _column_sums(hidden, kernel[None])  # `_column_sums` takes an axis of time: here of one tap
