"""GroupNorm's two passes over an activation, on a TPU each by a Pallas kernel: sums, then scaling and SiLU.

Both compute a tile in less time than its bytes take. XLA's own passes take two to three times what the bytes
do (v6e, 8 x 480 x 720 x 128: 1.4 ms to reduce, of 0.43, and 2.15 ms to scale, of 0.86).
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from jax_kernels.layout import frames_first, pixels_first
from jax_kernels.tpu.tiles import BLOCK_BYTES, fills_tiles, in_sublanes, pixel_bytes

COLUMNS = 16
"""Columns of a step."""

SUMMED_TOGETHER, SCALED_TOGETHER = 4, 8
"""Columns that a step of a kernel's loop takes: as many as registers hold what is kept of them."""

UNROLLED = 4
"""Rows of a step of a kernel's loop."""


def takes(x: Float[Array, "N T H W C"]) -> bool:
    """Whether the kernels take these activations: float32 or bfloat16, whole tiles of channels, and no more
    frames than a step can hold.
    """
    return fills_tiles(x) and COLUMNS * (_column_bytes(x) + _pixel_bytes(x)) <= BLOCK_BYTES


def _pixel_bytes(x: Array) -> int:
    """What a step holds of one pixel and of its result."""
    return pixel_bytes(x, *[x.shape[1]] * 2)


def _column_bytes(x: Array) -> int:
    """What a step holds of one column besides: two sums in float32, and its first pixel."""
    videos, length, _, _, channels = x.shape
    sums = 2 * videos * in_sublanes(length, jnp.dtype(jnp.float32)) * channels * 4
    return sums + pixel_bytes(x, length)


def _block(x: Array) -> tuple[int, int]:
    """How many rows and columns a step takes; rows divide the height, columns may leave a remainder."""
    height, width = x.shape[2:4]
    columns = min(COLUMNS, width)
    fit = min((BLOCK_BYTES // columns - _column_bytes(x)) // _pixel_bytes(x), height)
    return next(rows for rows in range(fit, 0, -1) if height % rows == 0), columns


def column_sums(
    x: Float[Array, "N T H W C"],
) -> tuple[Float[Array, "N T 1 W C"], Float[Array, "N T 1 W C"]]:
    """The sums over each column of pixels, and the sums of squares, of `x` less the column's first pixel, in
    float32.

    Args:
        x: activations that the kernel `takes`.
    """
    videos, length, height, width, channels = x.shape
    rows, columns = _block(x)
    of_columns = (columns, videos, length, channels)
    sums = pl.pallas_call(
        _sum,
        grid=(-(-width // columns), height // rows),
        in_specs=[pl.BlockSpec((rows, *of_columns), lambda column, row: (row, column, 0, 0, 0))],
        out_specs=[pl.BlockSpec(of_columns, lambda column, row: (column, 0, 0, 0))] * 2,
        # Said to be in HBM: XLA else brings small ones into VMEM and back.
        out_shape=[pltpu.HBM((width, videos, length, channels), jnp.float32)] * 2,
        scratch_shapes=[pltpu.VMEM(of_columns, x.dtype)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        name="column_sums",
    )(pixels_first(x))
    total, squares = (frames_first(part[None]) for part in sums)
    return total, squares


def _sum(x_ref, total_ref, squares_ref, first_ref) -> None:
    @pl.when(pl.program_id(1) == 0)
    def _():
        first_ref[...] = x_ref[0]
        total_ref[...] = jnp.zeros_like(total_ref)
        squares_ref[...] = jnp.zeros_like(squares_ref)

    for column in range(0, x_ref.shape[1], SUMMED_TOGETHER):
        columns = slice(column, column + SUMMED_TOGETHER)
        first = first_ref[columns].astype(jnp.float32)

        def add_row(row: Array, sums: tuple[Array, Array], columns=columns, first=first):
            shifted = x_ref[row, columns].astype(jnp.float32) - first
            return sums[0] + shifted, sums[1] + shifted * shifted

        zeros = jnp.zeros_like(first)
        total, squares = lax.fori_loop(0, x_ref.shape[0], add_row, (zeros, zeros), unroll=UNROLLED)
        total_ref[columns] += total
        squares_ref[columns] += squares


def scaled(
    x: Float[Array, "N T H W C"],
    mean: Float[Array, "N W C"],
    scale: Float[Array, "N W C"],
    shift: Float[Array, "N W C"],
) -> Float[Array, "N T H W C"]:
    """`silu((x - mean) * scale + shift)`.

    Args:
        x: activations that the kernel `takes`.
        mean, scale, shift: of each video, column and channel, float32.
    """
    videos, length, height, width, channels = x.shape
    rows, columns = _block(x)
    block = pl.BlockSpec(
        (rows, columns, videos, length, channels), lambda column, row: (row, column, 0, 0, 0)
    )
    of_columns = pl.BlockSpec((columns, videos, 1, channels), lambda column, row: (column, 0, 0, 0))
    coefficients = (part.swapaxes(0, 1)[:, :, None] for part in (mean, scale, shift))
    pixels = pixels_first(x)
    result = pl.pallas_call(
        _scale,
        grid=(-(-width // columns), height // rows),
        in_specs=[block, of_columns, of_columns, of_columns],
        out_specs=block,
        out_shape=pltpu.HBM(pixels.shape, x.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        name="scaled",
    )(pixels, *coefficients)
    return frames_first(result)


def _scale(x_ref, mean_ref, scale_ref, shift_ref, result_ref) -> None:
    for column in range(0, x_ref.shape[1], SCALED_TOGETHER):
        columns = slice(column, column + SCALED_TOGETHER)
        mean, scale, shift = mean_ref[columns], scale_ref[columns], shift_ref[columns]

        def scale_row(row: Array, carry: None, columns=columns, mean=mean, scale=scale, shift=shift) -> None:
            y = (x_ref[row, columns].astype(jnp.float32) - mean) * scale + shift
            result_ref[row, columns] = jax.nn.silu(y).astype(result_ref.dtype)

        lax.fori_loop(0, x_ref.shape[0], scale_row, None, unroll=UNROLLED)
