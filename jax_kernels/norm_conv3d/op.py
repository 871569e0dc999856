"""Half of a residual block: a norm, SiLU and the causal 3-D convolution after it, in one pass where large."""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jax_kernels.common.columns import by_platform, jit_kernel
from jax_kernels.common.first_frame import in_parts, joined
from jax_kernels.conv3d.op import conv3d
from jax_kernels.group_norm import xla as norm_xla
from jax_kernels.group_norm.moments import column_moments, moments_of_columns, per_channel
from jax_kernels.group_norm.op import group_norm
from jax_kernels.norm_conv3d import tpu
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

    On a TPU it is one Pallas kernel for what that `takes`; else it is the two kernels one after the other.

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
    whole = whole and lone_first == (x.shape[1] == 1 or len(parts) > 1)
    if not whole or not all(
        tpu.takes(
            frames,
            (1, 1, 1) if zq is None else zq.shape[1:4],
            kernel,
            residual=added is not None,
            at_start=cache is None,
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
        multiplier, offset = _coefficients(norm, zq, scale, shift, frames.shape[1], frames.shape[3])
        y, cache, found = tpu.convolved(frames, multiplier, offset, cache, added, kernel, bias)
        results.append((y, *found))
    y, *found = (joined(parts) for parts in zip(*results, strict=True))
    return y, cache, Columns(*found)


def _coefficients(
    norm: Norm, zq: Array | None, scale_NC: Array, shift_NC: Array, frames: int, columns: int
) -> tuple[Array, Array]:
    """Multipliers and offsets that do what the norm does under these latents, `tpu.in_registers`."""
    scale, shift = (part[:, None, None, None] for part in (scale_NC, shift_NC))
    if zq is None:
        return tpu.in_registers(scale, frames, columns), tpu.in_registers(shift, frames, columns)
    zq = tpu.in_registers(zq, frames, columns)  # while it has few channels
    y = spatial_xla.pointwise("nhvsz,zc->nhvsc", zq, norm.kernel_y, norm.bias_y)
    b = spatial_xla.pointwise("nhvsz,zc->nhvsc", zq, norm.kernel_b, norm.bias_b)
    return y * scale, y * shift + b
