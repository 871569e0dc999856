"""The preparation of queries, keys and values for the TPU's attention: norm, rotation, scale, transposition.

Axis letters here: N batch, S positions, C channels of all heads, H heads, D channels of a head.

Rotary positions rotate pairs of channels: (a, b) becomes (a cos - b sin, b cos + a sin). The forms here
compute each channel as `channel * cos + partner * signed_sin`. The partner is the other channel of its pair.
`signed_sin` is minus the sine for the first channel of a pair, and the sine for the second.

In every form, `norm` is (weight, bias), each (D,), or () for no norm. `tables` is (cos, signed_sin), each
(S, D), or () for no rotation.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from jax_kernels.common.dispatch import Target, dispatch, kernel_or_plain
from jax_kernels.common.pointwise import check_channels, standardized
from jax_kernels.common.tiles import BLOCK_BYTES, DTYPES, KERNEL_VMEM, LANES

POSITIONS = 512
"""Most positions of a block, which one grid step of the kernel computes."""


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

    On a TPU one Pallas kernel does this in one pass. The result is rounded once.

    Args:
        x: a projection to queries, keys or values, any float dtype; head h has the channels from h D on.
        weight, bias: the norm's, (D,). Without a weight there is no norm, as for values. A bias needs a
            weight.
        cos, sin: (S, D), float32, each angle twice: channels (a, b) = (2 i, 2 i + 1) become (a cos - b sin, b
            cos + a sin). None for no rotation.
        heads: the number of heads, H.
        scale: factor of the result; 1 for keys and values. Attention computes exp(s q k) as a power of two,
            and so would multiply all scores by s log2(e), with s = 1 / sqrt(D). If queries get this factor
            here, `attention_transposed` is called with scale=ln 2, for which it multiplies by 1.
        eps: added to the variance.

    Returns:
        The dtype of `x`, channels before positions; all arithmetic is float32.

    Raises:
        ValueError: channels that `heads` does not divide; a rotation of an odd number of channels; vectors or
            tables that do not fit; a bias without a weight.
    """
    _check_arguments(x, weight, bias, cos, sin, heads)
    tables = () if cos is None or sin is None else (cos, _signed(sin))
    norm = () if weight is None else (weight, jnp.zeros_like(weight) if bias is None else bias)
    return dispatch(qk_norm_rope_on, x, norm, tables, heads=heads, scale=scale, eps=eps)


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
    """Compute `qk_norm_rope` of `x` (N, S, C) on `target`; the result is (N, H, D, S)."""
    plain, by_kernel = (
        functools.partial(function, heads=heads, scale=scale, eps=eps) for function in (_xla_form, _by_kernel)
    )
    # The kernel needs float32 or bfloat16, and heads of a multiple of 8 channels, the rows of its result.
    is_supported = x.dtype in DTYPES and x.shape[-1] // heads % 8 == 0
    return kernel_or_plain(target, by_kernel, plain, is_supported=is_supported)(x, norm, tables)


def _check_arguments(x: Array, weight: Any, bias: Any, cos: Any, sin: Any, heads: int) -> None:
    if x.ndim != 3 or heads < 1 or x.shape[-1] % heads:
        raise ValueError(f"qk_norm_rope got x {x.shape} for {heads} heads: it takes (N, S, H D)")
    channels = x.shape[-1] // heads  # of one head
    check_channels("qk_norm_rope", channels, weight=weight, bias=bias)
    if bias is not None and weight is None:
        raise ValueError("qk_norm_rope got a bias and no weight: pass a weight of ones")
    shapes = [None if table is None else table.shape for table in (cos, sin)]
    if shapes != [None, None] and (shapes != [(x.shape[1], channels)] * 2 or channels % 2):
        raise ValueError(
            f"qk_norm_rope got cos and sin of shapes {shapes} for x {x.shape} of {heads} heads: both take "
            f"{(x.shape[1], channels)}, or neither is given"
        )


def _signed(sin_SD: Array) -> Array:
    """Return a table of sines with a minus for the first channel of each pair."""
    return jnp.where(jax.lax.iota(jnp.int32, sin_SD.shape[1]) % 2 == 0, -sin_SD, sin_SD)


def _xla_form(
    x: Array,
    norm: tuple[Array, ...],
    tables: tuple[Array, ...],
    *,
    heads: int,
    scale: float,
    eps: float,
) -> Array:
    y = x.astype(jnp.float32).reshape(*x.shape[:2], heads, -1)  # N S H D
    if norm:
        weight, bias = norm
        y = standardized(y, eps) * weight.astype(jnp.float32) + bias.astype(jnp.float32)
    if tables:
        cos, signed_sin = (table[:, None] for table in tables)  # (S, 1, D): the same for all heads
        partners = jnp.flip(y.reshape(*y.shape[:-1], -1, 2), -1)  # (a, b) of each pair becomes (b, a)
        y = y * cos + partners.reshape(y.shape) * signed_sin
    return (y * scale).astype(x.dtype).transpose(0, 2, 3, 1)  # N H D S, as `attention_transposed` takes it


def _by_kernel(
    x: Array,
    norm: tuple[Array, ...],
    tables: tuple[Array, ...],
    *,
    heads: int,
    scale: float,
    eps: float,
) -> Array:
    """Run the Pallas kernel: a grid step computes all heads of a block of one video's positions.

    The rows of its result are channels. So it takes the norm's vectors as columns, and transposed tables.
    """
    videos, positions, width = x.shape
    channels = width // heads
    # Positions of a block: as many as `BLOCK_BYTES` hold, in whole tiles of lanes (at least one tile), up to
    # `POSITIONS`.
    block = min(POSITIONS, max(LANES, BLOCK_BYTES // (width * x.dtype.itemsize) // LANES * LANES))
    return pl.pallas_call(
        functools.partial(_process_block, normed=bool(norm), scale=scale, eps=eps),
        grid=(videos, pl.cdiv(positions, block)),  # a step (n, i) computes block i of video n
        in_specs=[
            pl.BlockSpec((None, block, width), lambda n, i: (n, i, 0)),
            *[pl.BlockSpec((channels, 1), lambda n, i: (0, 0))] * len(norm),
            *[pl.BlockSpec((channels, block), lambda n, i: (0, i))] * len(tables),
        ],
        out_specs=pl.BlockSpec((None, heads, channels, block), lambda n, i: (n, 0, 0, i)),
        out_shape=jax.ShapeDtypeStruct((videos, heads, channels, positions), x.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=KERNEL_VMEM
        ),
        name="prepare",
    )(x, *(vector.astype(jnp.float32)[:, None] for vector in norm), *(table.T for table in tables))


def _process_block(x_ref, *other_refs: Any, normed: bool, scale: float, eps: float) -> None:
    """Norm, rotate and scale a block of positions, a group of heads at a time.

    `x_ref` is (S, H D). `other_refs` are weight and bias, (D, 1), if `normed`; then cos and the signed sin,
    (D, S), if positions are rotated; then the result, (H, D, S).
    """
    *operand_refs, y_ref = other_refs
    heads, channels, _ = y_ref.shape
    tables_at = 2 if normed else 0  # after weight and bias

    def process_heads(first_head: Any, count: int) -> None:
        lanes = pl.ds(pl.multiple_of(first_head * channels, LANES), count * channels)
        y = x_ref[:, lanes].astype(jnp.float32).T.reshape(count, channels, -1)  # heads, channels, positions
        if normed:
            weight_ref, bias_ref = operand_refs[:tables_at]
            y = standardized(y, eps, axis=1) * weight_ref[...] + bias_ref[...]
        if operand_refs[tables_at:]:
            cos_ref, signed_sin_ref = operand_refs[tables_at:]
            y = y * cos_ref[...] + _partners(y) * signed_sin_ref[...]
        y_ref[pl.ds(first_head, count)] = (y * scale).astype(y_ref.dtype)

    # A slice of the lanes of `x_ref` must begin at a tile. So a group has the fewest heads whose channels are
    # whole tiles. The heads after the last whole group are fewer, but they begin at a tile too.
    group = math.lcm(channels, LANES) // channels
    groups, remaining_heads = divmod(heads, group)

    @pl.loop(0, groups)
    def _(index: Array) -> None:
        process_heads(index * group, group)

    if remaining_heads:
        process_heads(groups * group, remaining_heads)


def _partners(y_HDS: Array) -> Array:
    """Return `y` with the two channels of each pair swapped; call it inside the kernel."""
    y = y_HDS.reshape(-1, y_HDS.shape[-1])  # the channels of all heads, positions
    is_first_of_pair = jax.lax.broadcasted_iota(jnp.int32, (len(y), 1), 0) % 2 == 0
    # `roll` takes no negative shift, but it goes around: a shift by all channels but one is one by -1, which
    # brings the next channel.
    next_channel, channel_before = pltpu.roll(y, len(y) - 1, 0), pltpu.roll(y, 1, 0)
    return jnp.where(is_first_of_pair, next_channel, channel_before).reshape(y_HDS.shape)
