"""The frames that the Pallas kernel supports, and the sizes that it is compiled for.

A grid step modulates one *block* of two rows of pixels, and convolves another one. To modulate is to compute
`silu(x * multiplier + offset)`. Multiplier and offset, the coefficients, come in *registers* (8 sublanes of
128 lanes), each for the pixels of a *cell*. A frame too wide for VMEM is computed in *strips* of columns. A
matrix product covers a *chunk* of a strip's columns. Between products, a *unit* of columns is modulated.

A *part* is 128 channels. A *share* is the output channels that a chunk's products compute together. A *word*
is two bfloat16 numbers of one channel: two frames of a pixel. Winograd's filtering convolves a *tile* of 2 or
4 frames by products of its *components*, combinations of its frames. A word holds a component of a pixel's
two tiles. `step` has the other terms.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_kernels.common import tiles
from jax_kernels.common.tiles import SUBLANES, fills_tiles, pallas_mode, vmem_limit
from jax_kernels.common.transforms import TAPS, TRANSFORMS

ROWS = 2
"""Rows of pixels of a block, which a grid step computes."""

LAG = 2
"""Grid steps from the modulation of a block to its results."""

UNIT_ENTRIES = 64
"""Entries (columns times frames) of a unit in direct convolution: eight registers for each part."""

UNITS = 3
"""Units of a chunk, in direct convolution."""

MARGIN = SUBLANES
"""Columns of zeros on both sides of a row in Winograd's buffers: a whole register, to keep slices aligned."""

TILES = 2
"""Number of tiles that the frames of a pixel make: their components fill the two halves of a word."""

MOST_STRIPS = 8
"""Most strips of a frame that is too wide for the chip's VMEM."""


class ConvSizes(NamedTuple):
    """The sizes that a kernel is compiled for.

    Attributes:
        input_frames: frames that the kernel gets.
        columns: number of columns of the frame, or of a shard.
        strips: number of strips; the last one may be narrower.
        chunk_columns: number of columns of a chunk.
        chunks: number of chunks in a row of a strip; the last one may reach beyond the frame.
        cell_columns, cell_rows: numbers of columns and rows of a cell.
        blocks: number of blocks of the frame.
        channels, outputs: numbers of channels into the convolution, and out of it; the latter is padded to a
            multiple of 128.
        tile: number of frames of a tile in Winograd's filtering, 2 or 4; 0 for direct convolution.
    """

    input_frames: int
    columns: int
    strips: int
    chunk_columns: int
    chunks: int
    cell_columns: int
    cell_rows: int
    blocks: int
    channels: int
    outputs: int
    tile: int

    @property
    def multiplied_frames(self) -> int:
        """Number of frames that products get: a single frame comes twice, because a word holds two."""
        return max(self.input_frames, 2)

    @property
    def words(self) -> int:
        """Number of words of a pixel and channel."""
        return self.multiplied_frames // 2

    @property
    def parts(self) -> int:
        return self.channels // tiles.LANES

    @property
    def shares(self) -> int:
        """Number of shares: each has two parts of the outputs, or all parts if their number is odd."""
        # A share is an iteration of a loop, whose body is compiled once. With two shares instead of one, 512
        # channels take 8 % longer, and compile in 5 s instead of 11.
        parts = self.outputs // tiles.LANES
        return 1 if parts % 2 else parts // 2

    @property
    def unit_columns(self) -> int:
        return SUBLANES if self.tile else UNIT_ENTRIES // self.multiplied_frames

    @property
    def units(self) -> int:
        return self.chunk_columns // self.unit_columns

    @property
    def components(self) -> int:
        """Number of components of a tile, each with its own products; 1 in direct convolution."""
        return len(TRANSFORMS[self.tile].taps) if self.tile else 1  # `taps` has a row for each component

    @property
    def rows_together(self) -> bool:
        """Whether, in Winograd's filtering, one product computes both rows of results, by the same matrix."""
        # Not for 128 output channels, which fill half of the matrix unit's width: there a matrix has the
        # weights to two results side by side (`winograd_products`).
        return self.outputs > tiles.LANES

    @property
    def products(self) -> "list[Product]":
        """Matrix products for a chunk of a block of results; in Winograd's filtering, for each component."""
        return winograd_products(self.outputs) if self.tile else direct_products(self.channels, self.outputs)

    @property
    def strip_columns(self) -> int:
        """Number of columns of a strip, with all columns of its last chunk."""
        return self.chunk_columns * self.chunks

    @property
    def last_strip_columns(self) -> int:
        """Number of the frame's columns in the last strip."""
        return self.columns - (self.strips - 1) * self.strip_columns


class Product(NamedTuple):
    """One matrix product of a chunk of columns.

    The channels of its inputs are side by side, and so are those of its results, to which its sums are added.
    A block of results needs four rows of inputs: row 0 is above the block, rows 1 and 2 are the block, and
    row 3 is below it.

    Attributes:
        inputs: of each, (row, time tap) in direct convolution; in Winograd's filtering (row, shift), where
            the input is the chunk, shifted by -1, 0 or 1 columns.
        results: of each, (row of the block, column tap) in direct convolution; in Winograd's filtering (row
            of the block, column), where column 0 stands for the chunk's columns, and column 1 for those one
            to the right.
    """

    inputs: list[tuple[int, int]]
    results: list[tuple[int, int]]


def direct_products(channels: int, outputs: int) -> list[Product]:
    """Return the products for a block of results by direct convolution."""
    # The inputs (row, time tap) in each of the four rows.
    above, row_1, row_2, below = ([(row, time) for time in range(TAPS)] for row in range(TAPS + 1))
    # The inputs that the block's upper row of results sees, those that its lower row sees, and all inputs.
    upper, lower, both = above + row_1 + row_2, row_1 + row_2 + below, above + row_1 + row_2 + below
    if channels == tiles.LANES:
        # Two adjacent inputs of 128 channels make a pair, which fills the depth of a matrix unit. The inputs
        # are in an order in which all products can load the same pairs. For that, both rows of results take
        # all of `shared`, although the upper row does not see (3, 2), nor the lower row (0, 2): its weights
        # for that input are zeros.
        shared = [(1, 0), (1, 1), (2, 0), (2, 1), (1, 2), (2, 2), (0, 2), (3, 2)]
        rest_above = [(0, 0), (0, 1)]  # the inputs of row 0 that are not in `shared`
        rest_below = [(3, 0), (3, 1)]  # and those of row 3
        upper, lower, both = shared + rest_above, shared + rest_below, shared + rest_above + rest_below
    # In each row of results, column tap 0 comes first: it sets the sums, to which the products of the other
    # column taps are added.
    if outputs == tiles.LANES:  # 128 outputs fill half of a matrix unit's width, so a product has two results
        return [
            Product(upper, [(0, 0), (0, 1)]),
            Product(lower, [(1, 0), (1, 1)]),
            Product(both, [(0, 2), (1, 2)]),
        ]
    return [
        Product(inputs, [(row, column_tap)])
        for row, inputs in enumerate((upper, lower))
        for column_tap in range(TAPS)
    ]


def winograd_products(outputs: int) -> list[Product]:
    """Return the products for a block of results in one component; they are the same in each component."""
    # Inputs are (row, shift of the columns), results (row of the block, column). `WinogradStep` adds the sums
    # of adjacent products with the same results.
    if outputs == tiles.LANES:  # 128 outputs fill half of a matrix unit's width, so a product has two results
        return [
            # Row 0 is seen by one row of results only, so the two results are two columns of that row: for
            # pixel p, "column 0" is the result of pixel p, and "column 1" that of pixel p + 1. The result of
            # a pixel is left * x[p - 1] + middle * x[p] + right * x[p + 1]. Its column 0 has the last two
            # terms, and column 1 of the pixel before it has the first one; `WinogradStep` adds the two. So
            # for column 1 the weights of shift 1, which would be the middle tap, are zeros.
            Product([(0, 0), (0, 1)], [(0, 0), (0, 1)]),
            # The same for row 3.
            Product([(3, 0), (3, 1)], [(1, 0), (1, 1)]),
            # Rows 1 and 2 are seen by both rows of results.
            *(Product([(1, shift), (2, shift)], [(0, 0), (1, 0)]) for shift in (-1, 0, 1)),
        ]
    # Here `rows_together` holds: each input has the entries of its row, then those of the row below. So the
    # same matrices compute the upper row of results, and then the lower row.
    return [Product([(row, shift) for shift in (-1, 0, 1)], [(0, 0)]) for row in range(TAPS)]


def is_supported(
    x: Float[Array | jax.ShapeDtypeStruct, "N T H W I"],
    coefficient_grid: tuple[int, ...],
    kernel: Float[Array, "kt kh kw I O"],
    *,
    residual: bool,
    at_start: bool,
    pixels: int,
) -> bool:
    """Return whether the Pallas kernel supports these frames; only shapes and the dtype of `x` are read.

    The kernel supports two, four or eight frames of bfloat16, or the first frame of a video. Frames must have
    an even number of rows, and `tiles.SMALLEST_FRAME` pixels or more. The number of input channels must be a
    multiple of 128, and so must that of output channels if there are more than 128. VMEM must hold
    a strip of the frame, when the frame is cut into as many strips as needed, but at most `MOST_STRIPS`.

    Args:
        x: frames, or a shard of frames.
        coefficient_grid: numbers of frames, rows and columns of the norm's coefficients for `x`; each of them
            covers an equal number of the frames, rows and columns of `x`.
        kernel: it must be (3, 3, 3, I, O).
        residual: whether a residual is added.
        at_start: whether the video starts with these frames: there is no cache.
        pixels: number of pixels of a whole frame, of which `x` may be a shard.
    """
    frames, height, columns = x.shape[1:4]
    coefficient_frames, coefficient_rows, coefficient_columns = coefficient_grid
    outputs = kernel.shape[4]
    if not (
        fills_tiles(x)
        and x.dtype == jnp.bfloat16
        and pixels >= tiles.SMALLEST_FRAME
        and kernel.shape[:3] == (TAPS, TAPS, TAPS)
        and (outputs <= tiles.LANES or outputs % tiles.LANES == 0)
        and frames in ((1, 2, 4, 8) if at_start else (2, 4, 8))
        and height % ROWS == 0
        # A coefficient covers a whole number of frames, rows and columns: no remainder is left.
        and frames % coefficient_frames == height % coefficient_rows == columns % coefficient_columns == 0
    ):
        return False
    # Number of registers for a row of coefficients, as `tpu.to_registers` makes them. If a coefficient covers
    # all columns, or columns that fill whole registers, it has one register for all of them, in all
    # sublanes. Otherwise a register serves several columns, as an array does: a sublane is for one frame of
    # one column, and has a copy of the coefficient of that column.
    has_own_register = coefficient_columns == 1 or fills_registers(columns // coefficient_columns, frames)
    registers = coefficient_columns if has_own_register else _register_count(columns, frames)
    sizes = sizes_of(x, coefficient_rows, registers, outputs, residual)
    return (
        # The two rows of a block have a row of coefficients each, or they share one.
        (sizes.cell_rows == 1 or sizes.cell_rows % ROWS == 0)
        # A unit has whole cells.
        and (coefficient_columns == 1 or sizes.unit_columns % sizes.cell_columns == 0)
        and _vmem_bytes(sizes, residual) <= vmem_limit()
    )


def fills_registers(columns: int, frames: int) -> bool:
    """Return whether so many columns, with a sublane for each frame of each, fill whole registers."""
    return columns * frames % SUBLANES == 0


def _register_count(columns: int, frames: int) -> int:
    """Return the number of registers for a row of pixels, with a sublane for each frame of each column."""
    return -(-columns * frames // SUBLANES)


def columns_of_register(columns: int, frames: int, registers: int) -> int:
    """Return the number of columns that one register serves, if so many serve a row of `columns` columns."""
    # `tpu.to_registers` makes registers of two kinds, which their number tells apart.
    return (
        SUBLANES // frames  # a register has a value for each frame of each column
        if registers == _register_count(columns, frames)
        else columns // registers  # fewer registers: each serves an equal number of columns
    )


def sizes_of(
    x: Array | jax.ShapeDtypeStruct, coefficient_rows: int, registers: int, outputs: int, residual: bool
) -> ConvSizes:
    """Choose the sizes that the kernel is compiled for.

    Four and eight frames are convolved by Winograd's filtering, unless it is turned off (`pallas_mode`) or
    does not fit; other numbers of frames are convolved directly. There are as few strips as VMEM allows, at
    most `MOST_STRIPS`. The norm has `coefficient_rows` rows of coefficients, of `registers` registers each
    (`tpu.to_registers`). `residual` says whether there is one, which takes VMEM too.
    """
    input_frames, height, columns, channels = x.shape[1:]
    outputs += -outputs % tiles.LANES  # padded to a multiple of 128
    cell_columns = columns_of_register(columns, input_frames, registers)
    direct = ConvSizes(
        input_frames=input_frames,
        columns=columns,
        strips=1,
        chunk_columns=0,  # `_cut_into_strips` sets the columns of a chunk, and the chunks
        chunks=0,
        cell_columns=cell_columns,
        cell_rows=height // coefficient_rows,
        blocks=height // ROWS,
        channels=channels,
        outputs=outputs,
        tile=0,  # no tiles of Winograd's filtering
    )
    # `TILES` tiles of 2 or 4 frames, the keys of `TRANSFORMS`, are 4 or 8 frames.
    if input_frames in (TILES * tile for tile in TRANSFORMS) and pallas_mode() != "direct":
        winograd = _cut_into_strips(direct._replace(tile=input_frames // TILES), residual)
        # Number of the frame's columns in the last chunk.
        last_chunk_columns = winograd.last_strip_columns - (winograd.chunks - 1) * winograd.chunk_columns
        if (
            _vmem_bytes(winograd, residual) <= vmem_limit()
            # A unit must have whole cells, unless a single register serves all columns.
            and (registers == 1 or winograd.unit_columns % cell_columns == 0)
            # From the first register of a chunk's sums, `step.zeros_after` computes zeros, by which other
            # work waits for the sums. The register has a sublane for each of the `TILES` tiles of a column.
            # All of its columns must be in the frame: beyond it sums may be NaN, from which no zeros can be
            # computed.
            and last_chunk_columns * TILES >= SUBLANES
        ):
            return winograd
    return _cut_into_strips(direct, residual)


def _cut_into_strips(sizes: ConvSizes, residual: bool) -> ConvSizes:
    """Return the sizes with the fewest strips that fit VMEM; if none fit, with as many as are allowed."""
    # The loop tries one strip first, then more. If even the last sizes do not fit, `is_supported` refuses.
    chunk_columns = _chunk_columns(sizes)
    frame_chunks = -(-sizes.columns // chunk_columns)  # in a row of the frame; -(-a // b) rounds a / b up
    for most_strips in range(1, min(MOST_STRIPS, frame_chunks) + 1):
        strip_chunks = -(-frame_chunks // most_strips)
        sizes = sizes._replace(
            chunk_columns=chunk_columns,
            chunks=strip_chunks,
            # `strip_chunks` is rounded up, so that fewer strips than `most_strips` may cover the frame.
            strips=-(-frame_chunks // strip_chunks),
        )
        if _vmem_bytes(sizes, residual) <= vmem_limit():
            break
    return sizes


def _chunk_columns(sizes: ConvSizes) -> int:
    # Returns the number of columns that a matrix product covers.
    if not sizes.tile:
        # In direct convolution a chunk is `UNITS` units of `UNIT_ENTRIES` entries. An entry is one column in
        # one frame, and products multiply `multiplied_frames` frames of each column.
        return UNIT_ENTRIES * UNITS // sizes.multiplied_frames
    # A chunk of fewer than `least` columns would leave the matrix unit idle, and the sums of more than `most`
    # would not fit into registers. If a product computes both rows of results, a column has sums for each of
    # them, so the limits are about half.
    least, most = (24, 48) if sizes.rows_together else (48, 80)
    # Between the products for a share of the output channels, the kernel modulates columns of the next block,
    # and writes results of the chunk before: of an equal number of whole units for each share.
    multiple = sizes.unit_columns * sizes.shares
    candidates = range(-(-least // multiple) * multiple, most + 1, multiple)
    # The width with which the last chunk reaches least beyond the frame's (`sizes.columns`); of several, the
    # largest.
    return min(candidates, key=lambda columns: (-sizes.columns % columns, -columns))


def scratch_shapes(sizes: ConvSizes) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Return (shape, dtype) of each scratch buffer by name; the kernel adds a last axis of 128 lanes.

    The last axis of a shape has an *entry* for each frame, word or tile of each column. Buffers of int32 hold
    words.
    """
    width, result_parts = sizes.strip_columns, sizes.outputs // tiles.LANES
    # While a chunk is multiplied, the results of the chunk left of it are written, and direct convolution
    # also modulates that chunk. The buffers for this begin a chunk left of column 0, because the first chunk
    # too needs one left of it.
    width_and_chunk = width + sizes.chunk_columns
    # Of each column: its first result, then the sum and the sum of squares of the differences from it.
    moments = {"moments": ((3, result_parts, width_and_chunk * sizes.input_frames), jnp.float32)}
    if not sizes.tile:  # direct convolution
        block_shape = (TAPS, ROWS, sizes.parts)  # a copy of the block's two rows for each tap of time
        return moments | {
            # Modulated rows that the products load, of two blocks.
            "ring": ((2, *block_shape, width * sizes.words), jnp.int32),
            # The block that this step modulates.
            "stage": ((*block_shape, width_and_chunk * sizes.words), jnp.int32),
            # For each unit of a chunk, the two frames before its frames, and then its last two: the next
            # call's cache. In direct convolution a chunk always has `UNITS` units.
            "past": ((UNITS, ROWS, sizes.unit_columns * sizes.parts), jnp.int32),
            # Sums of the products, with a chunk on the right too: column taps reach beyond the strip.
            "sums": (
                (ROWS, result_parts, (width_and_chunk + sizes.chunk_columns) * sizes.multiplied_frames),
                jnp.float32,
            ),
        }
    row_shape = (sizes.components, sizes.parts, width + 2 * MARGIN)  # with padding on both sides
    unit_frames = sizes.unit_columns * sizes.input_frames  # of all pixels in a row of a unit
    shapes = moments | {
        # Transformed rows that the products load. The inputs are four rows: the lower row of the block above
        # the results, the two rows of the results' block, and the upper row of the block below, which this
        # step moves here from the stage. The lower row of that block is moved too, for the next step: so
        # there are three lower rows and two upper ones.
        "lower": ((3, *row_shape), jnp.int32),
        "upper": ((2, *row_shape), jnp.int32),
        # The block that this step modulates, transformed.
        "stage": ((ROWS, *row_shape), jnp.int32),
        # The two frames before those of each unit, and then its last two: the next call's cache.
        "past": ((sizes.units, ROWS, sizes.unit_columns * sizes.parts), jnp.int32),
        # A unit's activated frames, to be read frame by frame.
        "pixels": ((sizes.units, ROWS, sizes.parts, unit_frames // 2), jnp.int32),
        # Sums of the products, until they are transformed back: one for each of a pixel's `TILES` tiles.
        "components": ((sizes.components, ROWS, result_parts, width_and_chunk * TILES), jnp.float32),
        # A unit's sums, transformed back.
        "frames": ((sizes.units, ROWS, result_parts, unit_frames), jnp.float32),
    }
    if not sizes.rows_together:
        # If one matrix does not compute both rows of results, some products give two columns of results
        # (`winograd_products`). This buffer has the second one: what each column of a chunk adds to the
        # column right of it. Before these are the `TILES` sums that the last column of the previous chunk
        # adds, for which the buffer has a whole register.
        shapes["shifted"] = ((sizes.components, ROWS, sizes.chunk_columns * TILES + SUBLANES), jnp.float32)
    return shapes


def _vmem_bytes(sizes: ConvSizes, residual: bool) -> int:
    """Return the bytes of VMEM that the kernel takes, for operands, results, weights and scratch buffers."""
    row_frames = sizes.strip_columns * sizes.input_frames  # of all pixels in a row of a strip
    cells = -(-sizes.strip_columns // sizes.cell_columns)
    # At the end of each product of numbers are the bytes of an element: 2 of bfloat16, or 4 of float32.
    operands_and_results = (
        ROWS * row_frames * sizes.channels * 2
        # The results, and the residual.
        + (2 if residual else 1) * ROWS * row_frames * sizes.outputs * 2
        # Multiplier and offset (the first 2); a cell has a register of each for every part.
        + 2 * ROWS * cells * SUBLANES * sizes.channels * 4
        # The last cache and the next (the first 2), each of two frames (the second 2).
        + 2 * ROWS * sizes.strip_columns * 2 * sizes.channels * 2
        # The edges: what is added to the results of the first and of the last column (2).
        + 2 * ROWS * sizes.multiplied_frames * sizes.outputs * 4
        # The moments: mean and M2 (2) of each column.
        + 2 * row_frames * sizes.outputs * 4
    )
    # A product's matrix has (I, O) weights for each of its inputs and results.
    pairs = sum(len(product.inputs) * len(product.results) for product in sizes.products)
    weights = sizes.components * pairs * sizes.channels * sizes.outputs * 2
    # Elements of scratch buffers have 4 bytes, int32 too. The last axis of 128 lanes is not in `shape`.
    scratch = sum(4 * math.prod(shape) * tiles.LANES for shape, _dtype in scratch_shapes(sizes).values())
    # Operands and results have two buffers, because the next step's are fetched during a step. The weights,
    # which are the same in every step, have one.
    return 2 * operands_and_results + weights + scratch
