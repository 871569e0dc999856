"""A norm, SiLU and the causal 3-D convolution after it, in one pass if large.

They are half of a residual block, or a decoder's end.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jax_kernels.common.columns import WHOLE, Split, exchanged
from jax_kernels.common.dispatch import Target, dispatched, map_shards
from jax_kernels.common.first_frame import join_frames, split_frames
from jax_kernels.common.frames import repeat_nearest
from jax_kernels.common.layout import store_pixels_first
from jax_kernels.conv3d.op import check_conv3d, conv3d_on
from jax_kernels.group_norm import xla as norm_xla
from jax_kernels.group_norm.moments import column_moments, moments_of_columns, per_channel
from jax_kernels.group_norm.op import check_group_norm, group_norm_on
from jax_kernels.norm_conv3d import sizes, tpu
from jax_kernels.norm_conv3d.transforms import filtered
from jax_kernels.spatial_norm import xla as spatial_xla
from jax_kernels.spatial_norm.op import check_spatial_norm, spatial_norm_on


class NormParams(NamedTuple):
    """GroupNorm's affine, (C,) each, and what modulates it: `zq` and two 1x1x1 convolutions (`spatial_norm`).

    Without `zq` it is a plain GroupNorm.
    """

    weight: Any
    bias: Any
    zq: Any = None
    kernel_y: Any = None
    bias_y: Any = None
    kernel_b: Any = None
    bias_b: Any = None


class ColumnMoments(NamedTuple):
    """Mean and M2 of columns of pixels, in float32: what a norm's statistics are merged from."""

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
) -> tuple[Float[Array, "N T H W O"], Float[Array, "N kt-1 H W I"] | None, ColumnMoments | None]:
    """Return `conv3d(silu(norm(x)))`; a video starts with its first frame repeated.

    On a TPU it is one Pallas kernel for supported inputs (`sizes`); else it is the two kernels one after the
    other.

    Args:
        x, kernel, bias, cache, residual, split: as `conv3d` takes them; the cache holds activated frames.
        norm: parameters of `group_norm`, or with latents of `spatial_norm`.
        moments: the third result of the call that computed `x`, or None; it saves a pass on a TPU.
        num_groups, eps, first_frame_alone: the norm's.

    Returns:
        The convolved frames; the cache for the next call; their columns' moments, or None if no kernel ran.

    Raises:
        ValueError: anything that `conv3d`, `group_norm` or `spatial_norm` refuse.
    """
    check_conv3d(x, kernel, bias, cache, residual)
    if norm.zq is None:
        check_group_norm(x.shape[-1], norm.weight, norm.bias, num_groups)
    else:
        check_spatial_norm(
            x, norm.zq, *norm[:2], *norm[3:], num_groups=num_groups, first_frame_alone=first_frame_alone
        )
    return _norm_conv3d(
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
) -> tuple[Array, Array | None, ColumnMoments | None]:
    """Compute `norm_conv3d` for a target; without the kernel `moments` are not used."""
    # Asked for a TPU on every platform, as all return moments for the same shapes.
    is_supported = _is_taken(
        replace(target, platform="tpu"), x, norm, kernel, bias, cache, residual, first_frame_alone
    )
    if is_supported and target.on_tpu:
        return _fused(target, x, norm, kernel, bias, cache, residual, moments, num_groups=num_groups, eps=eps)
    norm_form = functools.partial(group_norm_on, channel_axis=-1 % x.ndim)
    if norm.zq is not None:
        norm_form = functools.partial(spatial_norm_on, first_frame_alone=first_frame_alone)
    weight, shift, zq, *convolutions = norm
    inputs = (x, weight, shift) if zq is None else (x, zq, weight, shift, *convolutions)
    hidden = norm_form(target, *inputs, num_groups=num_groups, eps=eps, activation="silu")
    y, latest = conv3d_on(target, hidden, kernel, bias, cache, residual)
    column_parts = (jnp.squeeze(part, 2) for part in norm_xla.column_moments(y)) if is_supported else ()
    return y, latest, ColumnMoments(*column_parts) if is_supported else None


_norm_conv3d = dispatched(norm_conv3d_on, "tpu", "cuda")


def _is_taken(
    target: Target,
    x: Array,
    norm: NormParams,
    kernel: Array,
    bias: Array | None,
    cache: Array | None,
    residual: Array | None,
    first_frame_alone: bool,
) -> bool:
    """Return whether a TPU's kernel supports all parts of the frames."""
    parts = split_frames(target, x, norm.zq, residual)
    is_complete = target.pallas and all(vector is not None for vector in (bias, norm.weight, norm.bias))
    # A first latent frame that covers the first frame alone is split off together with it.
    return (
        is_complete
        and first_frame_alone == (parts[0][0].shape[1] == 1)
        and all(
            sizes.is_supported(
                target.split.shard_of(frames),
                _grid(target.split, frames, zq),
                kernel,
                residual=added is not None,
                at_start=cache is None,
                pixels=x.shape[2] * x.shape[3],
            )
            for frames, zq, added in parts
        )
    )


def _grid(split: Split, x: Array, zq: Array | None) -> tuple[int, ...]:
    """Return frames, rows and columns of the coefficients, the norm's factors and offsets, of a shard.

    They differ by column if some columns are padding.
    """
    if zq is None:
        return 1, 1, split.shard_of(x).shape[3] if split.is_padded else 1
    return split.shard_of(zq).shape[1:4]


def _fused(
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
) -> tuple[Array, Array | None, ColumnMoments]:
    """Run norm and convolution as the TPU's kernel, a run of frames after the other.

    The kernel takes the norm as a scale and shift of each channel, from the moments of `x`. Returns what
    `norm_conv3d` does.
    """
    channels = x.shape[-1]
    mean, m2 = column_moments(target, x) if moments is None else moments
    stats = moments_of_columns(target, mean, m2, x.shape[2], num_groups=num_groups)
    scale = per_channel(lax.rsqrt(stats.variance + eps), channels) * norm.weight.astype(jnp.float32)
    shift = norm.bias.astype(jnp.float32) - per_channel(stats.mean, channels) * scale
    weights, results = (kernel, bias, norm._replace(zq=None)), []
    for frames, zq, added in split_frames(target, x, norm.zq, residual):
        y, cache, *column_parts = map_shards(
            target, _convolved, (frames, cache, added, zq), weights, (scale, shift)
        )
        results.append((y, *(jnp.squeeze(part, 2) for part in column_parts)))
    y, *column_parts = (join_frames(parts) for parts in zip(*results, strict=True))
    return y, cache, ColumnMoments(*column_parts)


def _convolved(
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
) -> tuple[Array, ...]:
    """Run the kernel on a device's local columns.

    The results are the frames, the next cache, and mean and M2 of columns, each with an axis of one row.
    """
    split = target.split
    frames, _, width, _ = x.shape[1:]
    columns = _grid(split, x, zq)[-1]
    coefficients = functools.partial(_coefficients, split, norm, zq, scale_NC, shift_NC, columns)
    multiplier, offset = coefficients(lambda part: tpu.to_registers(part, frames, width))
    _, rows, registers, *_ = multiplier.shape
    conv_sizes = sizes.sizes_of(x, rows, registers, kernel.shape[-1], residual is not None)
    edges = None
    if conv_sizes.strips > 1 or split.has_neighbours:
        edges = _edges(target, x, cache, kernel, coefficients, conv_sizes)
    true_width = split.real_columns_here(width) if split.is_padded else None
    y, latest, moments = tpu.convolved(
        x, multiplier, offset, cache, residual, kernel, bias, edges, true_width
    )
    return y, latest, *(jnp.expand_dims(part, 2) for part in moments)


def _coefficients(
    split: Split,
    norm: NormParams,
    zq: Array | None,
    scale_NC: Array,
    shift_NC: Array,
    columns: int,
    placed: Callable[[Array], Array],
) -> tuple[Array, Array]:
    """Return the norm's multipliers and offsets under these latents, with zeros in padding columns.

    `placed` repeats an array N t h w Z, of one value a latent, to the kernel's registers or to a column.
    """
    scale, shift = (part[:, None, None, None] for part in (scale_NC, shift_NC))
    if zq is None:
        multiplier, offset = (placed(jnp.repeat(part, columns, axis=3)) for part in (scale, shift))
    else:
        zq = placed(zq)  # while it has few channels
        # Registers' rows on one axis: a product of 23 registers of 8 compiles for 47 s, of 184 rows for 7.
        rows = zq.reshape(*zq.shape[:2], -1, zq.shape[-1])
        y, b = (
            spatial_xla.pointwise("nabz,zo->nabo", rows, kernel, bias).reshape(*zq.shape[:-1], -1)
            for kernel, bias in ((norm.kernel_y, norm.bias_y), (norm.kernel_b, norm.bias_b))
        )
        multiplier, offset = y * scale, y * shift + b
    if split.is_padded:
        mask = placed(split.mask(columns)[None, None, None, :, None])
        multiplier, offset = (jnp.where(mask, part, 0) for part in (multiplier, offset))
    return multiplier, offset


def _edges(
    target: Target,
    x: Array,
    cache: Array | None,
    kernel: Array,
    coefficients: Callable[..., tuple[Array, Array]],
    conv_sizes: sizes.ConvSizes,
) -> tuple[Array, Array]:
    """Return the contributions of the columns beside strips to each strip's first and last column.

    They come from the next strip, from a neighbour, or are zeros: N T H E O each for E strips. `coefficients`
    takes a function that repeats the norm's factors and offsets to where they are needed.
    """
    starts, sums = conv_sizes.starts, functools.partial(_sums, tile=conv_sizes.tile)
    hidden = functools.partial(_activated_column, target, x, cache, coefficients)
    before = [sums(hidden(start - 1), kernel[:, :, 0]) for start in starts[1:]]
    after = [sums(hidden(start), kernel[:, :, -1]) for start in starts[1:]]
    if target.split.has_neighbours:
        left, right = exchanged(target.split, hidden(0), hidden(x.shape[3] - 1))
        outer = sums(left, kernel[:, :, 0]), sums(right, kernel[:, :, -1])
    else:
        outer = (jnp.zeros_like(before[0]),) * 2
    return jnp.stack([outer[0], *before], axis=3), jnp.stack([*after, outer[1]], axis=3)


def _activated_column(
    target: Target,
    x: Array,
    cache: Array | None,
    coefficients: Callable[..., tuple[Array, Array]],
    column: int,
) -> Float[Array, "N P H I"]:
    """Return a column's activated frames and the two before them."""
    frames, height, columns = x.shape[1:4]

    def of_column(part: Array) -> Array:
        """Repeat the coefficients of one column to all of its frames and rows."""
        index = column * part.shape[3] // columns
        return repeat_nearest(
            part[:, :, :, index : index + 1], {1: frames // part.shape[1], 2: height // part.shape[2]}
        )

    # Cut out as they lie: in the order that suits one column XLA would first lay all of them.
    own = slice(column, column + 1)
    now = tpu.activated(store_pixels_first(target, x[:, :, :, own]), *coefficients(of_column))
    start = jnp.repeat(now[:, :1], 2, axis=1)
    past = start if cache is None else tpu.column_of_cache(cache, column)
    return jnp.squeeze(jnp.concatenate([past, now], axis=1), 3)


def _sums(
    hidden: Float[Array, "N P H I"], kernel: Float[Array, "3 3 I O"], tile: int
) -> Float[Array, "N P-2 H O"]:
    """Return a column's convolution over time and rows, rounded as the kernel rounds it.

    `tile` is the number of frames that the kernel filters together by Winograd's method, or 0.
    """
    if tile:
        return filtered(hidden, kernel, tile, lambda frames, taps: _over_taps(frames, taps[None]))
    return _over_taps(hidden, kernel)


def _over_taps(
    hidden: Float[Array, "N P H I"], kernel: Float[Array, "times 3 I O"]
) -> Float[Array, "N P-times+1 H O"]:
    """Convolve a column over time and rows as one product."""
    times = kernel.shape[0]
    frames, height = hidden.shape[1] - times + 1, hidden.shape[2]
    hidden = jnp.pad(hidden, [(0, 0), (0, 0), (1, 1), (0, 0)])
    taps = [hidden[:, time : time + frames, row : row + height] for time in range(times) for row in range(3)]
    weights = kernel.reshape(-1, kernel.shape[-1])
    return jnp.einsum(
        "nthi,io->ntho", jnp.concatenate(taps, axis=-1), weights, preferred_element_type=jnp.float32
    )
