"""Half of a residual block, or a decoder's end: a norm, SiLU and the causal 3-D convolution after it, in one
pass where large."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jax_kernels.common.columns import (
    by_platform,
    by_shards,
    column_mask,
    exchanged,
    has_neighbours,
    is_padded,
    jit_kernel,
    real_columns_here,
    shard_of,
)
from jax_kernels.common.first_frame import in_parts, joined
from jax_kernels.common.frames import repeat_nearest
from jax_kernels.common.layout import kept_pixels_first
from jax_kernels.conv3d.op import conv3d
from jax_kernels.group_norm import xla as norm_xla
from jax_kernels.group_norm.moments import column_moments, moments_of_columns, per_channel
from jax_kernels.group_norm.op import group_norm
from jax_kernels.norm_conv3d import sizes, tpu
from jax_kernels.spatial_norm import xla as spatial_xla
from jax_kernels.spatial_norm.op import spatial_norm


class Norm(NamedTuple):
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


class Columns(NamedTuple):
    """Mean and M2 of columns of pixels, in float32: what a norm's statistics are merged from."""

    mean: Float[Array, "N T W C"]
    m2: Float[Array, "N T W C"]


@jit_kernel(static_argnames=["num_groups", "eps", "lone_first"])
def norm_conv3d(
    x: Float[Array, "N T H W I"],
    norm: Norm,
    kernel: Float[Array, "kt kh kw I O"],
    bias: Float[Array, " O"] | None = None,
    cache: Float[Array, "N kt-1 H W I"] | None = None,
    columns: Columns | None = None,
    *,
    num_groups: int,
    eps: float = 1e-6,
    lone_first: bool = False,
    residual: Float[Array, "N T H W O"] | None = None,
    after: Float[Array, "N T H W O"] | None = None,
) -> tuple[Float[Array, "N T H W O"], Float[Array, "N kt-1 H W I"] | None, Columns | None]:
    """`conv3d(silu(norm(x)))`, which starts a video by repeating its first frame.

    On a TPU it is one Pallas kernel for what that takes (`sizes.takes`); else it is the two kernels one
    after the other.

    Args:
        x, kernel, bias, cache, residual, after: as `conv3d` takes them; the cache holds activated frames.
        norm: `group_norm`'s, or with latents `spatial_norm`'s.
        columns: what the call gave whose result `x` is, where that did; saves a pass on a TPU.
        num_groups, eps, lone_first: the norm's.

    Returns:
        The convolved frames; the cache for the next call; their columns' moments, or None where no kernel
        takes `x`.

    Raises:
        ValueError: what `conv3d`, `group_norm` or `spatial_norm` refuse.
    """
    plain = functools.partial(_plain, num_groups=num_groups, eps=eps, lone_first=lone_first)
    parts = in_parts(x, norm.zq, residual)
    whole = all(vector is not None for vector in (bias, norm.weight, norm.bias))
    # Latents whose first frame stands for the first frame alone are taken apart with it.
    whole = whole and lone_first == (parts[0][0].shape[1] == 1)
    if not whole or not all(
        sizes.takes(
            shard_of(frames),
            _grid(frames, zq),
            kernel,
            residual=added is not None,
            at_start=cache is None,
            pixels=x.shape[2] * x.shape[3],
        )
        for frames, zq, added in parts
    ):
        y, latest = plain(x, norm, kernel, bias, cache, residual, after=after)
        return y, latest, None

    def composed(*operands: Any) -> tuple[Array, Array | None, Columns]:
        y, latest = plain(*operands[:-1], after=after)
        return y, latest, Columns(*(jnp.squeeze(part, 2) for part in norm_xla.column_moments(y)))

    fused = functools.partial(_fused, num_groups=num_groups, eps=eps)
    return by_platform(x, norm, kernel, bias, cache, residual, columns, tpu=fused, default=composed)


def _plain(
    x: Array,
    norm: Norm,
    kernel: Array,
    bias: Array | None,
    cache: Array | None,
    residual: Array | None,
    *,
    num_groups: int,
    eps: float,
    lone_first: bool,
    after: Array | None,
) -> tuple[Array, Array | None]:
    weight, shift, *latents = norm
    if norm.zq is None:
        hidden = group_norm(
            x, weight, shift, num_groups=num_groups, eps=eps, channel_axis=-1, activation="silu"
        )
    else:
        zq, *convolutions = latents
        hidden = spatial_norm(
            x,
            zq,
            weight,
            shift,
            *convolutions,
            num_groups=num_groups,
            eps=eps,
            activation="silu",
            lone_first=lone_first,
        )
    return conv3d(hidden, kernel, bias, cache, residual=residual, after=after, start="replicate")


def _grid(x: Array, zq: Array | None) -> tuple[int, ...]:
    """Frames, rows and columns of a shard's coefficients: by column where some only pad a width."""
    if zq is None:
        return 1, 1, shard_of(x).shape[3] if is_padded() else 1
    return shard_of(zq).shape[1:4]


def _fused(
    x: Array,
    norm: Norm,
    kernel: Array,
    bias: Array,
    cache: Array | None,
    residual: Array | None,
    columns: Columns | None,
    *,
    num_groups: int,
    eps: float,
) -> tuple[Array, Array | None, Columns]:
    channels = x.shape[-1]
    mean, m2 = column_moments(x) if columns is None else columns
    stats = moments_of_columns(mean, m2, x.shape[2], num_groups=num_groups)
    scale = per_channel(lax.rsqrt(stats.variance + eps), channels) * norm.weight.astype(jnp.float32)
    shift = norm.bias.astype(jnp.float32) - per_channel(stats.mean, channels) * scale
    results = []
    for frames, zq, added in in_parts(x, norm.zq, residual):
        y, cache, *found = by_shards(
            _convolved, (frames, cache, added, zq), (kernel, bias, norm._replace(zq=None)), (scale, shift)
        )
        results.append((y, *(jnp.squeeze(part, 2) for part in found)))
    y, *found = (joined(parts) for parts in zip(*results, strict=True))
    return y, cache, Columns(*found)


def _convolved(
    x: Array,
    cache: Array | None,
    residual: Array | None,
    zq: Array | None,
    kernel: Array,
    bias: Array,
    norm: Norm,
    scale_NC: Array,
    shift_NC: Array,
) -> tuple[Array, ...]:
    """The kernel on a device's own columns; their moments as one row."""
    frames, _, width, _ = x.shape[1:]
    coefficients = functools.partial(_coefficients, norm, zq, scale_NC, shift_NC, _grid(x, zq)[-1])
    multiplier, offset = coefficients(lambda part: tpu.in_registers(part, frames, width))
    _, rows, registers, *_ = multiplier.shape
    starts = sizes.sizes_of(x, rows, registers, kernel.shape[-1], residual is not None).starts
    edges = None
    if len(starts) > 1 or has_neighbours():
        edges = _edges(x, cache, kernel, coefficients, starts)
    real = real_columns_here(width) if is_padded() else None
    y, latest, moments = tpu.convolved(x, multiplier, offset, cache, residual, kernel, bias, edges, real)
    return y, latest, *(jnp.expand_dims(part, 2) for part in moments)


def _coefficients(
    norm: Norm,
    zq: Array | None,
    scale_NC: Array,
    shift_NC: Array,
    columns: int,
    placed: Callable[[Array], Array],
) -> tuple[Array, Array]:
    """Multipliers and offsets that do what the norm does under these latents: `placed` where they are needed,
    zeros in columns that only pad a width."""
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
    if is_padded():
        mask = placed(column_mask(columns)[None, None, None, :, None])
        multiplier, offset = (jnp.where(mask, part, 0) for part in (multiplier, offset))
    return multiplier, offset


def _edges(
    x: Array,
    cache: Array | None,
    kernel: Array,
    coefficients: Callable[..., tuple[Array, Array]],
    starts: range,
) -> tuple[Array, Array]:
    """What the columns beside strips that begin at `starts` add to the sums of their first and of their last
    column, N T H E O each for E strips: of the next strip, of a neighbour, or zeros."""
    hidden = functools.partial(_activated_column, x, cache, coefficients)
    before = [_sums(hidden(start - 1), kernel[:, :, 0]) for start in starts[1:]]
    after = [_sums(hidden(start), kernel[:, :, -1]) for start in starts[1:]]
    if has_neighbours():
        left, right = exchanged(hidden(0), hidden(x.shape[3] - 1))
        outer = _sums(left, kernel[:, :, 0]), _sums(right, kernel[:, :, -1])
    else:
        outer = (jnp.zeros_like(before[0]),) * 2
    return jnp.stack([outer[0], *before], axis=3), jnp.stack([*after, outer[1]], axis=3)


def _activated_column(
    x: Array, cache: Array | None, coefficients: Callable[..., tuple[Array, Array]], column: int
) -> Float[Array, "N P H I"]:
    """A column's activated frames and the two before them."""
    frames, height, columns = x.shape[1:4]

    def of_column(part: Array) -> Array:
        own = column * part.shape[3] // columns
        return repeat_nearest(
            part[:, :, :, own : own + 1], {1: frames // part.shape[1], 2: height // part.shape[2]}
        )

    # Cut out as they lie: in the order that suits one column XLA would first lay all of them.
    own = slice(column, column + 1)
    now = tpu.activated(kept_pixels_first(x[:, :, :, own]), *coefficients(of_column))
    start = jnp.repeat(now[:, :1], 2, axis=1)
    past = start if cache is None else tpu.column_of_cache(cache, column)
    return jnp.squeeze(jnp.concatenate([past, now], axis=1), 3)


def _sums(hidden: Float[Array, "N P H I"], kernel: Float[Array, "3 3 I O"]) -> Float[Array, "N P-2 H O"]:
    """A column's convolution over time and rows, as one product."""
    frames, height = hidden.shape[1] - 2, hidden.shape[2]
    hidden = jnp.pad(hidden, [(0, 0), (0, 0), (1, 1), (0, 0)])
    taps = [hidden[:, time : time + frames, row : row + height] for time in range(3) for row in range(3)]
    weights = kernel.reshape(-1, kernel.shape[-1])
    return jnp.einsum(
        "nthi,io->ntho", jnp.concatenate(taps, axis=-1), weights, preferred_element_type=jnp.float32
    )
