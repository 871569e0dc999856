"""What works on channels alone, by Pallas kernels for TPUs.

Axis letters here: N videos, S tokens, C channels.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from jax_kernels.common import tiles
from jax_kernels.common.pointwise import standardized

TOKENS = 512
"""The most of a block."""

ROWS = 16
"""Tokens that are normed at a time: a tile of bfloat16."""

UNROLLED = 4
"""Times that this is in a loop's body."""

VMEM = 64 * 2**20
"""What the kernel may take of it."""


def takes(x: Float[Array, "N S C"]) -> bool:
    """Return whether the kernel takes such tokens: float32 or bfloat16, channels in whole tiles."""
    return x.size > 0 and x.dtype in tiles.DTYPES and x.shape[-1] % tiles.LANES == 0


def modulated_norm(
    x: Float[Array, "N S C"],
    factor: Float[Array, "N 2 C"],
    offset: Float[Array, "N 2 C"],
    first: Int[Array, ""],
    *,
    eps: float,
) -> Float[Array, "N S C"]:
    """`standardized(x) * factor + offset`, in one pass, of tokens that it `takes`.

    Args:
        x: tokens.
        factor, offset: float32, of the tokens before `first` and of the others.
        first: may lie outside of the tokens.
        eps: added to the variance.
    """
    videos, tokens, width = x.shape
    held = tiles.BLOCK_BYTES // (width * x.dtype.itemsize) // ROWS * ROWS
    block = max(ROWS, min(TOKENS, held, -(-tokens // ROWS) * ROWS))
    of_tokens = pl.BlockSpec((None, block, width), lambda n, i, _: (n, i, 0))
    of_kinds = pl.BlockSpec((None, 2, width), lambda n, i, _: (n, 0, 0))
    return pl.pallas_call(
        functools.partial(_modulated_norm, eps=eps),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(videos, pl.cdiv(tokens, block)),
            in_specs=[of_tokens, of_kinds, of_kinds],
            out_specs=of_tokens,
        ),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=VMEM
        ),
        name="modulated_norm",
    )(first.reshape(1), x, factor, offset)


def _modulated_norm(first_ref, x_ref, factor_ref, offset_ref, y_ref, *, eps: float) -> None:
    block = x_ref.shape[0]
    begins = first_ref[0] - pl.program_id(1) * block

    def norm(at: Array) -> None:
        own = pl.ds(pl.multiple_of(at, ROWS), ROWS)
        second = at + lax.broadcasted_iota(jnp.int32, (ROWS, 1), 0) >= begins
        factor, offset = (jnp.where(second, ref[1:], ref[:1]) for ref in (factor_ref, offset_ref))
        y = standardized(x_ref[own].astype(jnp.float32), eps)
        y_ref[own] = (y * factor + offset).astype(y_ref.dtype)

    pl.loop(0, block, step=ROWS, unroll=min(UNROLLED, block // ROWS))(norm)
