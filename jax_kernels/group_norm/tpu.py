"""GroupNorm's statistics, on a TPU by a Pallas kernel.

The kernel fetches each pixel from HBM once, and computes for less time than HBM takes to send the pixels. The
form for XLA takes three times as long as that (estimates for a v6e and 8 x 480 x 720 x 128: 1.4 ms, where
sending takes 0.43 ms). M2 is the sum of squared deviations from the mean. An *image* is a single frame, for
which there is a second kernel. A grid step may have `BLOCK_BYTES` of pixels and moments in VMEM.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from jax_kernels.common.dispatch import with_derivatives_of
from jax_kernels.common.tiles import (
    BLOCK_BYTES,
    PARTLY_UNROLLED,
    SUBLANES,
    fills_tiles,
    largest_divisor,
    tiled_sublanes,
)
from jax_kernels.group_norm import xla

COLUMNS = 16
"""Columns that a grid step of the kernel for several frames reads."""

TOGETHER = 4
"""Columns that a loop reduces together: the sums of more columns would not stay in registers."""

UNROLLED = 5 if PARTLY_UNROLLED else 1
"""Rows that a loop's body adds; only one if JAX cannot unroll a loop in part."""


def is_supported(x: Float[Array, "N T H W C"]) -> bool:
    """Return whether the kernel for several frames supports these activations.

    It needs float32 or bfloat16, and whole tiles of channels. One pixel of each of `COLUMNS` columns, in all
    frames, and these columns' moments must fit into `BLOCK_BYTES`.
    """
    return fills_tiles(x) and COLUMNS * (_column_bytes(x) + _pixel_bytes(x)) <= BLOCK_BYTES


def _pixel_bytes(x: Array) -> int:
    """Return a cautious bound of the bytes of VMEM that one pixel takes: in all videos and frames, twice."""
    # Cautious, because a grid step reads a single video, and `BLOCK_BYTES` counts what it reads only once. A
    # smaller bound would give larger blocks, whose times nobody has estimated.
    videos, length, _, _, channels = x.shape
    return 2 * videos * tiled_sublanes(length, x.dtype) * channels * x.dtype.itemsize


def _column_bytes(x: Array) -> int:
    """Return a bound of the VMEM that a column takes besides its pixels: mean, M2 and origin, in float32."""
    videos, length, _, _, channels = x.shape
    return 3 * videos * tiled_sublanes(length, jnp.dtype(jnp.float32)) * channels * 4


def _block_shape(x: Array) -> tuple[int, int]:
    """Return the numbers of rows, which divide the height, and of columns that a grid step reads."""
    height, width = x.shape[2:4]
    columns = min(COLUMNS, width)
    # Each column has an equal part of `BLOCK_BYTES`: for its moments, and for its pixels, one in each row.
    return largest_divisor(height, (BLOCK_BYTES // columns - _column_bytes(x)) // _pixel_bytes(x)), columns


def _column_moments(
    x: Float[Array, "N T H W C"],
) -> tuple[Float[Array, "N T 1 W C"], Float[Array, "N T 1 W C"]]:
    """Return mean and M2 of each column of pixels, in float32; each pixel is fetched once."""
    videos, length, height, width, channels = x.shape
    rows, columns = _block_shape(x)
    column_shape = (columns, length, channels)
    mean, m2 = pl.pallas_call(
        functools.partial(_add_block, blocks=height // rows),
        # The axes are videos, blocks of columns (of which -(-a // b) rounds the number up), and blocks of
        # rows. Successive steps add the blocks of rows to the moments of the same columns.
        grid=(videos, -(-width // columns), height // rows),
        # A step reads a block (rows, columns, T, C) of the pixels. Blocks of moments have no axis of rows.
        # Here `column` and `row` count blocks.
        in_specs=[
            pl.BlockSpec((None, rows, *column_shape), lambda video, column, row: (video, row, column, 0, 0))
        ],
        out_specs=[pl.BlockSpec((None, *column_shape), lambda video, column, row: (video, column, 0, 0))] * 2,
        # Declared in HBM: XLA would copy small results into VMEM and back.
        out_shape=[pltpu.HBM((videos, width, length, channels), jnp.float32)] * 2,
        scratch_shapes=[pltpu.VMEM(column_shape, jnp.float32)],  # the origins: a typical value of each column
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        name="column_moments",
    )(x.transpose(0, 2, 3, 1, 4))  # N H W T C: frames are in the sublanes of a tile
    # From (N, W, T, C) to (N, T, 1, W, C).
    return mean.swapaxes(1, 2)[:, :, None], m2.swapaxes(1, 2)[:, :, None]


column_moments = with_derivatives_of(xla.column_moments, _column_moments)


def supports_image(x: Float[Array, "N 1 H W C"]) -> bool:
    """Return whether the kernel for images supports `x`: its channels fill tiles, and its rows fit a step."""
    return fills_tiles(x) and _image_rows_of_step(x) > 0


def _image_rows_of_step(x: Float[Array, "N 1 H W C"]) -> int:
    """Return the number of rows that a grid step reads, a divisor of the height; 0 if not one row fits."""
    height, width, channels = x.shape[2:]
    # In VMEM a row is padded to whole tiles of pixels.
    row_bytes = tiled_sublanes(width, x.dtype) * channels * x.dtype.itemsize
    # Of each column: mean, M2 and an origin, three numbers of float32 (4 bytes).
    moment_bytes = 3 * tiled_sublanes(width, jnp.dtype(jnp.float32)) * channels * 4
    return largest_divisor(height, (BLOCK_BYTES - moment_bytes) // row_bytes)


def _image_moments(
    x: Float[Array, "N 1 H W C"],
) -> tuple[Float[Array, "N 1 1 W C"], Float[Array, "N 1 1 W C"]]:
    """Return mean and M2 of each column of an image, in float32; each pixel is fetched once."""
    videos, _, height, width, channels = x.shape
    block_rows = _image_rows_of_step(x)
    mean, m2 = pl.pallas_call(
        # A loop of `_add_block` reduces `TOGETHER` registers. A register has 8 `SUBLANES`: in an image they
        # hold 8 columns, in several frames the frames of a single column.
        functools.partial(_add_block, blocks=height // block_rows, together=TOGETHER * SUBLANES),
        grid=(videos, 1, height // block_rows),  # the 1: a block has all columns
        in_specs=[
            pl.BlockSpec((None, block_rows, width, channels), lambda video, _, block: (video, block, 0, 0))
        ],
        out_specs=[pl.BlockSpec((None, width, channels), lambda video, _, block: (video, 0, 0))] * 2,
        out_shape=[pltpu.HBM((videos, width, channels), jnp.float32)] * 2,
        scratch_shapes=[pltpu.VMEM((width, channels), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        name="image_moments",
    )(x[:, 0])
    return mean[:, None, None], m2[:, None, None]


image_moments = with_derivatives_of(xla.column_moments, _image_moments)


def _add_block(x_ref, mean_ref, m2_ref, origin_ref, *, blocks: int, together: int = TOGETHER) -> None:
    """Add a block of rows (rows, columns, T, C) to the moments (columns, T, C) of its columns.

    A grid step adds one block, and successive steps add all `blocks` blocks of the same columns. An image has
    no axis T. The sums are of differences from a typical value of each column, the origin in `origin_ref`,
    because sums of large values would lose digits. Until the last block is added, `mean_ref` has the means
    minus the origins. A loop reduces `together` columns at a time.
    """
    # The grid is (videos, blocks of columns, blocks of rows). `pl.num_programs` could be wrong: JAX 0.11
    # reuses a kernel's trace for blocks of the same shapes, even in a grid of another size.
    blocks_before, rows = pl.program_id(2), x_ref.shape[0]

    @pl.when(blocks_before == 0)
    def _():
        origin_ref[...] = xla.median_of_three(
            *(x_ref[row].astype(jnp.float32) for row in (0, rows // 2, rows - 1))
        )
        mean_ref[...] = jnp.zeros_like(mean_ref)
        m2_ref[...] = jnp.zeros_like(m2_ref)

    share = 1 / (blocks_before + 1).astype(jnp.float32)  # this block's rows, as a fraction of all rows so far
    for column in range(0, x_ref.shape[1], together):
        columns = slice(column, column + together)
        origin = origin_ref[columns]

        # `columns` and `origin` change from iteration to iteration: the defaults bind their values.
        def add_row(row: Array, total: Array, columns=columns, origin=origin) -> Array:
            return total + (x_ref[row, columns].astype(jnp.float32) - origin)

        # The block's mean, minus the origin.
        offset = jax.lax.fori_loop(0, rows, add_row, jnp.zeros_like(origin), unroll=UNROLLED) / rows
        block_mean = origin + offset

        def add_square(row: Array, squares: Array, columns=columns, block_mean=block_mean) -> Array:
            deviation = x_ref[row, columns].astype(jnp.float32) - block_mean
            return squares + deviation * deviation

        squares = jax.lax.fori_loop(0, rows, add_square, jnp.zeros_like(origin), unroll=UNROLLED)
        # Chan's formula merges this block, of n = `rows` rows, with the m = `blocks_before` * n rows before.
        # It weights the squared difference of the means by m n / (m + n), which is share * m.
        delta = offset - mean_ref[columns]
        mean_ref[columns] += delta * share
        m2_ref[columns] += squares + delta * delta * (share * blocks_before.astype(jnp.float32) * rows)

    @pl.when(blocks_before == blocks - 1)
    def _():
        mean_ref[...] += origin_ref[...]
