"""Queries, keys and values as the TPU's attention takes them: normed, rotated, scaled, heads first.

Axis letters here: N batch, S positions, C channels of all heads, H heads, D
channels of a head.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from jax_kernels.common.checks import check_channels
from jax_kernels.common.dispatch import Target, dispatched, with_derivatives_of
from jax_kernels.common.pointwise import standardized
from jax_kernels.common.tiles import BLOCK_BYTES, DTYPES, LANES

POSITIONS = 512
"""Most positions of a block, which a grid step computes."""

VMEM = 64 * 2**20
"""Bytes of VMEM that the kernel may use."""


def qk_norm_rope(
    x: Float[Array, "N S C"],
    weight: Float[Array, " D"] | None = None,
    bias: Float[Array, " D"] | None = None,
    cos: Float[Array, "S D"] | None = None,
    sin: Float[Array, "S D"] | None = None,
    *,
    heads: int,
    scale: float = 1.0,
    eps: float = 1e-6,
) -> Float[Array, "N H D S"]:
    """Apply a LayerNorm over each head's channels, rotary positions and a scale, for `attention_transposed`.

    On a TPU one pass by a Pallas kernel. The result is rounded once.

    Args:
        x: what a projection gives, any float dtype; head h has the channels from h D on.
        weight, bias: (D,), of the norm; None for no norm, as values take it. A bias takes a weight.
        cos, sin: (S, D), float32, each angle once for either channel of its pair: channels (a, b) = (2 i,
            2 i + 1) become (a cos - b sin, b cos + a sin). None for no position.
        heads: the number of heads, H.
        scale: of the result. Queries that hold log2(e) / sqrt(D) are for `attention_transposed(scale=ln 2)`.
        eps: added to the variance.

    Returns:
        The dtype of `x`; all arithmetic is float32 whatever it is.

    Raises:
        ValueError: channels that heads do not divide or pairs do not, vectors or tables that fit neither.
    """
    _check(x, weight, bias, cos, sin, heads)
    tables = () if cos is None or sin is None else (cos, _signed(sin))
    norm = () if weight is None else (weight, jnp.zeros_like(weight) if bias is None else bias)
    return _qk_norm_rope(x, norm, tables, heads=heads, scale=scale, eps=eps)


def qk_norm_rope_on(
    target: Target,
    x: Array,
    norm: tuple[Array, ...],
    tables: tuple[Array, ...],
    *,
    heads: int,
    scale: float,
    eps: float,
) -> Array:
    """Compute `qk_norm_rope` for the platform of `target`.

    `norm` holds weight and bias, `tables` holds cos and the signed sin; either may be empty.
    """
    options = {"heads": heads, "scale": scale, "eps": eps}
    plain, by_kernel = (functools.partial(form, **options) for form in (_xla_form, _by_kernel))
    form = with_derivatives_of(plain, by_kernel) if target.uses_pallas and is_supported(x, heads) else plain
    return form(x, norm, tables)


_qk_norm_rope = dispatched(qk_norm_rope_on, "tpu")


def is_supported(x: Float[Array, "N S C"], heads: int) -> bool:
    """Return whether the kernel supports these projections: float32 or bfloat16, heads of whole 8s."""
    return x.dtype in DTYPES and x.shape[-1] // heads % 8 == 0


def _check(x: Array, weight: Any, bias: Any, cos: Any, sin: Any, heads: int) -> None:
    """Raise `ValueError` for arrays or a number of heads that `qk_norm_rope` refuses."""
    if x.ndim != 3 or heads < 1 or x.shape[-1] % heads:
        raise ValueError(f"qk_norm_rope got x {x.shape} for {heads} heads: it takes (N, S, H D)")
    channels = x.shape[-1] // heads
    check_channels("qk_norm_rope", channels, weight=weight, bias=bias)
    if bias is not None and weight is None:
        raise ValueError("qk_norm_rope got a bias and no weight: a norm without a weight has one of ones")
    shapes = [None if table is None else table.shape for table in (cos, sin)]
    if shapes != [None, None] and (shapes != [(x.shape[1], channels)] * 2 or channels % 2):
        raise ValueError(
            f"qk_norm_rope got cos and sin of shapes {shapes} for x {x.shape} of {heads} heads: both take "
            f"{(x.shape[1], channels)}, or neither is given"
        )


def _signed(sin_SD: Array) -> Array:
    """Return the factor of each channel's partner in the rotation: -sin for a pair's first, sin else."""
    return jnp.where(lax.iota(jnp.int32, sin_SD.shape[1]) % 2 == 0, -sin_SD, sin_SD)


def _xla_form(
    x: Array,
    norm: tuple[Array, ...],
    tables: tuple[Array, ...],
    *,
    heads: int,
    scale: float,
    eps: float,
) -> Array:
    """Compute `qk_norm_rope` in its plainest form, which the kernel has to equal."""
    y = x.astype(jnp.float32).reshape(*x.shape[:2], heads, -1)
    if norm:
        y = standardized(y, eps)
        y = y * norm[0].astype(jnp.float32) + norm[1].astype(jnp.float32)
    if tables:
        cos, sin = (table[:, None] for table in tables)
        partner = jnp.flip(y.reshape(*y.shape[:-1], -1, 2), -1)
        y = y * cos + partner.reshape(y.shape) * sin
    return (y * scale).astype(x.dtype).transpose(0, 2, 3, 1)


def _by_kernel(
    x: Array,
    norm: tuple[Array, ...],
    tables: tuple[Array, ...],
    *,
    heads: int,
    scale: float,
    eps: float,
) -> Array:
    """Run the Pallas kernel over blocks of positions, with the arguments of `qk_norm_rope_on`."""
    videos, positions, width = x.shape
    channels = width // heads
    step = min(POSITIONS, max(LANES, BLOCK_BYTES // (width * x.dtype.itemsize) // LANES * LANES))
    norm_spec = pl.BlockSpec((channels, 1), lambda n, i: (0, 0))
    table_spec = pl.BlockSpec((channels, step), lambda n, i: (0, i))
    return pl.pallas_call(
        functools.partial(_process_block, normed=bool(norm), scale=scale, eps=eps),
        grid=(videos, pl.cdiv(positions, step)),
        in_specs=[
            pl.BlockSpec((None, step, width), lambda n, i: (n, i, 0)),
            *[norm_spec] * len(norm),
            *[table_spec] * len(tables),
        ],
        out_specs=pl.BlockSpec((None, heads, channels, step), lambda n, i: (n, 0, 0, i)),
        out_shape=jax.ShapeDtypeStruct((videos, heads, channels, positions), x.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=VMEM
        ),
        name="prepare",
    )(x, *(vector.astype(jnp.float32)[:, None] for vector in norm), *(table.T for table in tables))


def _process_block(x_ref, *others: Any, normed: bool, scale: float, eps: float) -> None:
    """Norm, rotate and scale a block of positions, as many heads at a time as fill whole tiles of lanes.

    `others` are references: weight and bias if `normed`, then cos and sin if given, then the result. A
    projection's channels are in its lanes, and the result's in its rows.
    """
    *operands, y_ref = others
    heads, channels, _ = y_ref.shape
    norm, tables = operands[: 2 * normed], operands[2 * normed :]

    def process_heads(first: Any, count: int) -> None:
        """Norm, rotate and scale `count` heads, from head `first` on."""
        lanes = pl.ds(pl.multiple_of(first * channels, LANES), count * channels)
        x = x_ref[:, lanes]
        y = x.astype(jnp.float32).T.reshape(count, channels, -1)
        if normed:
            y = standardized(y, eps, axis=1)
            y = y * norm[0][...] + norm[1][...]
        if tables:
            y = y * tables[0][...] + _partners(y) * tables[1][...]
        y_ref[pl.ds(first, count)] = (y * scale).astype(y_ref.dtype)

    together = math.lcm(channels, LANES) // channels
    whole, left = divmod(heads, together)

    @pl.loop(0, whole)
    def _(index: Array) -> None:
        process_heads(index * together, together)

    if left:
        process_heads(whole * together, left)


def _partners(y_HDS: Array) -> Array:
    """Return `y` with the two channels of each pair swapped."""
    y = y_HDS.reshape(-1, y_HDS.shape[-1])
    rows = y.shape[0]
    first = lax.broadcasted_iota(jnp.int32, (rows, 1), 0) % 2 == 0
    partners = jnp.where(first, pltpu.roll(y, rows - 1, 0), pltpu.roll(y, 1, 0))
    return partners.reshape(y_HDS.shape)
