"""The frames that the kernel for TPUs supports, and the sizes that it is compiled for.

`step` defines the terms: block, strip, chunk, unit, turn, part, word. A cell is the columns with the same
coefficients (the norm's scale and shift) in one register; a tile the frames that Winograd filters together.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_kernels.common import tiles
from jax_kernels.common.tiles import SUBLANES, fills_tiles, pallas_mode, vmem_limit
from jax_kernels.norm_conv3d.transforms import TAPS, TRANSFORMS

ROWS = 2
"""Rows of pixels of a block, which a grid step computes."""

LAG = 2
"""Grid steps from the modulation of a block to its results."""

UNIT = 64
"""Pixels times frames of a unit, in direct convolution."""

UNITS = 3
"""Units of a chunk, in direct convolution."""

MARGIN = SUBLANES
"""Columns of zeros on both sides of a row in Winograd's memory; whole registers, to keep slices aligned."""

TILES = 2
"""Tiles of a pixel's frames."""

MOST_STRIPS = 8
"""Most strips of a frame that is too wide for the chip's VMEM."""


class ConvSizes(NamedTuple):
    """The sizes that a kernel is compiled for.

    Attributes:
        input_frames: frames that the kernel gets.
        columns: columns of the frame, or of a shard.
        strips: number of parts of the frame's width that are computed separately; the last one may be
            narrower.
        chunk: columns of a chunk, which one matrix product covers.
        chunks: chunks of a strip's row; the last one may be incomplete.
        cell: columns of a cell: those with the same coefficients, or as many as a register has rows for.
        cell_rows: rows of pixels that have the same coefficients.
        blocks: blocks of the frame, of two rows each.
        channels, outputs: channels into the convolution and out of it, in whole tiles.
        tile: frames of a tile, 2 or 4; 0 for direct convolution.
    """

    input_frames: int
    columns: int
    strips: int
    chunk: int
    chunks: int
    cell: int
    cell_rows: int
    blocks: int
    channels: int
    outputs: int
    tile: int

    @property
    def frames(self) -> int:
        """Rows of a product for each pixel: one for each frame, but at least the two of a 32-bit word."""
        return max(self.input_frames, 2)

    @property
    def words(self) -> int:
        """Number of words (32 bits: two frames each) of a pixel and channel."""
        return self.frames // 2

    @property
    def parts(self) -> int:
        """Number of parts of the input channels, 128 each."""
        return self.channels // tiles.LANES

    @property
    def turns(self) -> int:
        """Number of turns (passes over a chunk of columns), each for two parts (of 128 output channels).

        If the number of parts is odd, one turn computes all. With two turns instead of one, 512 channels take
        8 % longer, and compile in 5 s instead of 11.
        """
        parts = self.outputs // tiles.LANES
        return 1 if parts % 2 else parts // 2

    @property
    def unit(self) -> int:
        """Columns of a unit: those that are modulated (normed and activated) together.

        In Winograd's convolution, whose `tile` is not 0, it has as many columns as a register has rows. In
        direct convolution its columns times frames are `UNIT`.
        """
        return SUBLANES if self.tile else UNIT // self.frames

    @property
    def units(self) -> int:
        """Number of units of a chunk; a unit's columns are modulated together."""
        return self.chunk // self.unit

    @property
    def components(self) -> int:
        """Number of components of a tile's transform, each with its own products; 1 in direct convolution."""
        return len(TRANSFORMS[self.tile].taps) if self.tile else 1

    @property
    def rows_together(self) -> bool:
        """True if each of Winograd's products multiplies the inputs of both rows of a block by one matrix.

        This holds with more than 128 output channels. With 128, which fill half of the matrix unit, a product
        has a matrix of 256 columns instead: the weights of two results side by side.
        """
        return self.outputs > tiles.LANES

    @property
    def products(self) -> "list[Product]":
        """Matrix products of a chunk of columns: in Winograd's convolution, of each component the same ones.

        `tile`, the number of frames that Winograd's filtering computes together, is 0 for direct convolution.
        """
        return winograd_products(self.outputs) if self.tile else direct_products(self.channels, self.outputs)

    @property
    def width(self) -> int:
        """Number of columns of a strip, as if its last chunk were complete."""
        return self.chunk * self.chunks

    @property
    def last_columns(self) -> int:
        """Number of the frame's columns in the last strip; a strip is columns that are computed together."""
        return self.columns - (self.strips - 1) * self.width


class Product(NamedTuple):
    """One matrix product of a chunk: which of its inputs it contracts, and which results it adds to.

    Attributes:
        inputs: in direct convolution (row, time tap); in Winograd's, which has no taps of time, (row, shift
            by columns). Input rows are 0 to 3: above the block of results, its two rows, and below it.
        results: in direct convolution (row of the block, column tap); in Winograd's (row of the block,
            column): 0 for the inputs' own column, 1 for the column right of it.
    """

    inputs: list[tuple[int, int]]
    results: list[tuple[int, int]]


def direct_products(channels: int, outputs: int) -> list[Product]:
    """Return the products of a block of results by direct convolution.

    An input is (row, time tap), with rows 0 to 3: the row above the block, its two rows, the row below it. A
    result is (row of the block, column tap).

    With 128 output channels a product gives two results, to fill the width of a matrix unit. The results of
    column tap 0 come first: they set the sums, to which the results of other column taps are added.

    Args:
        channels: input channels.
        outputs: output channels.
    """
    # (row, time tap) of the inputs of the upper row of results, of the lower row, and of both.
    upper, lower, both = (
        [(row, time) for row in rows for time in range(TAPS)]
        for rows in (range(TAPS), range(1, TAPS + 1), range(TAPS + 1))
    )
    if channels == tiles.LANES:
        # Two inputs of 128 channels fill the depth of a matrix unit. All products have the same pairs of
        # inputs: so both rows of results take all of `shared`. Inputs out of a row's reach have zero weights.
        shared = [(1, 0), (1, 1), (2, 0), (2, 1), (1, 2), (2, 2), (0, 2), (3, 2)]
        above, below = [(0, 0), (0, 1)], [(3, 0), (3, 1)]
        upper, lower, both = shared + above, shared + below, shared + above + below
    if outputs == tiles.LANES:
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
    """Return the products of a block (two rows) for each component of Winograd's transform along time.

    An input is (row, shift by columns), with rows 0 to 3: the row above the block, its two rows, the row
    below it. A result is (row of the block, column): column 0 is the unshifted input's, 1 is right of it.

    With 128 output channels a product gives two results: by inputs above or below the block in two columns,
    by inputs in the block in both of its rows. With more output channels only the upper row's products are
    returned: their matrices multiply the inputs of the lower row too. Sums of adjacent products with the same
    results are added.
    """
    if outputs == tiles.LANES:
        return [
            # A result in column 0 takes shift 0 by its middle tap and shift 1 by its right tap. A result in
            # column 1 takes shift 0 by its left tap; for shift 1 it has weights of zero.
            Product([(0, 0), (0, 1)], [(0, 0), (0, 1)]),
            Product([(3, 0), (3, 1)], [(1, 0), (1, 1)]),
            *(Product([(1, shift), (2, shift)], [(0, 0), (1, 0)]) for shift in (-1, 0, 1)),
        ]
    return [Product([(row, shift) for shift in (-1, 0, 1)], [(0, 0)]) for row in range(TAPS)]


def is_supported(
    x: Float[Array | jax.ShapeDtypeStruct, "N T H W I"],
    grid: tuple[int, ...],
    kernel: Float[Array, "kt kh kw I O"],
    *,
    residual: bool,
    at_start: bool,
    pixels: int,
) -> bool:
    """Return whether the kernel supports these frames.

    It supports two, four or eight frames of bfloat16, or a video's first frame. They must not be small, and
    must have an even number of rows. Input channels must be whole tiles, output channels too if they are more
    than one tile. VMEM must hold a frame, or a strip of a frame that is cut into at most `MOST_STRIPS`.

    Args:
        x: frames; only their shape and dtype are read, and the kernel's shape.
        grid: numbers of frames, rows and columns of the norm's coefficients, its scale and shift.
        kernel: (3, 3, 3, I, O).
        residual: whether a residual is added.
        at_start: whether the video starts with these frames: there is no cache.
        pixels: pixels of a whole frame, of which `x` may be a shard.
    """
    frames, height, columns = x.shape[1:4]
    grid_frames, grid_rows, grid_columns = grid
    outputs = kernel.shape[4]
    is_suitable = (
        fills_tiles(x)
        and x.dtype == jnp.bfloat16
        and pixels >= tiles.SMALLEST
        and kernel.shape[:3] == (TAPS, TAPS, TAPS)
        and (outputs <= tiles.LANES or outputs % tiles.LANES == 0)
        and frames in ((1, 2, 4, 8) if at_start else (2, 4, 8))
        and height % ROWS == 0
        and frames % grid_frames == height % grid_rows == columns % grid_columns == 0
    )
    if not is_suitable:
        return False
    # Number of vector registers for a row of coefficients (`tpu.to_registers`): one for each coefficient, or
    # as many as hold a copy for each frame of each pixel.
    registers = (
        grid_columns
        if grid_columns == 1 or fills_registers(columns // grid_columns, frames)
        else _register_count(columns, frames)
    )
    sizes = sizes_of(x, grid_rows, registers, outputs, residual)
    return (
        # The two rows of a block have a row of coefficients each, or one for both. A unit (columns modulated
        # together) has whole cells (columns that share coefficients).
        (sizes.cell_rows == 1 or sizes.cell_rows % ROWS == 0)
        and (grid_columns == 1 or sizes.unit % sizes.cell == 0)
        and _vmem_bytes(sizes, residual) <= vmem_limit()
    )


def fills_registers(cell: int, frames: int) -> bool:
    """Return whether `cell` columns, with a register's row for each of their frames, fill whole registers."""
    return cell * frames % SUBLANES == 0


def _register_count(columns: int, frames: int) -> int:
    """Return the number of registers for a row of pixels, where each frame of a column takes a sublane."""
    return -(-columns * frames // SUBLANES)


def columns_of_register(columns: int, frames: int, registers: int) -> int:
    """Return the number of columns that one register of the norm's coefficients covers.

    A row of pixels has `columns` columns of `frames` frames each. Its coefficients are in `registers`
    registers of `SUBLANES` values.
    """
    return (
        SUBLANES // frames  # a register has a value for each frame of each column
        if registers == _register_count(columns, frames)
        else columns // registers  # fewer registers: a register's columns share its values
    )


def sizes_of(
    x: Array | jax.ShapeDtypeStruct, coefficient_rows: int, registers: int, outputs: int, residual: bool
) -> ConvSizes:
    """Choose the sizes that the kernel is compiled for.

    Four and eight frames are convolved by Winograd's filtering, unless it is off (`pallas_mode`), does not
    fit into VMEM, or cannot use the registers of coefficients. Other numbers of frames are convolved
    directly. Strips (columns that are computed together) are the fewest that fit into VMEM, or `MOST_STRIPS`.

    Args:
        x: frames N T H W C.
        coefficient_rows: number of rows of the norm's coefficients, which are a coarser grid than the frames.
        registers: number of vector registers that hold one of these rows (`tpu.to_registers`).
        outputs: output channels.
        residual: whether a residual is added.
    """
    input_frames, height, columns, channels = x.shape[1:]
    outputs += -outputs % tiles.LANES  # padded to whole tiles
    cell = columns_of_register(columns, input_frames, registers)  # columns that a register covers
    direct = ConvSizes(
        input_frames=input_frames,
        columns=columns,
        strips=1,
        chunk=0,  # `_cut_into_strips` sets chunk and chunks
        chunks=0,
        cell=cell,
        cell_rows=height // coefficient_rows,
        blocks=height // ROWS,
        channels=channels,
        outputs=outputs,
        tile=0,  # no tiles of Winograd's filtering
    )
    # `TILES` tiles of 2 or 4 frames are 4 or 8 frames.
    if input_frames in (TILES * tile for tile in TRANSFORMS) and pallas_mode() != "direct":
        winograd = _cut_into_strips(direct._replace(tile=input_frames // TILES), residual)
        fits = _vmem_bytes(winograd, residual) <= vmem_limit()
        # A single register covers all columns. Of several, a unit (columns modulated together) needs whole
        # cells.
        has_cells = registers == 1 or winograd.unit % cell == 0
        # The first register of a chunk's sums, a row for each of a column's `TILES` tiles, must hold no
        # padding, which may be NaN (`step.zeros_after`).
        last_chunk = winograd.last_columns - (winograd.chunks - 1) * winograd.chunk  # its columns
        if fits and has_cells and last_chunk * TILES >= SUBLANES:
            return winograd
    return _cut_into_strips(direct, residual)


def _cut_into_strips(sizes: ConvSizes, residual: bool) -> ConvSizes:
    """Return the sizes with a chunk, and the fewest strips of which each fits into VMEM, or the most allowed.

    The frame's width is cut into strips, and a strip into chunks: columns that one matrix product covers.
    `residual` is whether the kernel adds one, which takes memory too.
    """
    chunk = _chunk(sizes)  # number of columns
    frame_chunks = -(-sizes.columns // chunk)
    for strips in range(1, min(MOST_STRIPS, frame_chunks) + 1):
        chunks = -(-frame_chunks // strips)  # of a strip; rounded up, so fewer strips may do
        sizes = sizes._replace(chunk=chunk, strips=-(-frame_chunks // chunks), chunks=chunks)
        if _vmem_bytes(sizes, residual) <= vmem_limit():
            break
    return sizes


def _chunk(sizes: ConvSizes) -> int:
    """Return the number of columns of a chunk, which one matrix product covers.

    In direct convolution the product's left matrix has `UNIT * UNITS` rows: one for each column and frame of
    the chunk. In Winograd's convolution the number is from a range that keeps the matrix unit busy and whose
    sums fit into registers: the number that pads the frame's width least, and of equally good numbers the
    largest.
    """
    if not sizes.tile:  # direct convolution
        return UNIT * UNITS // sizes.frames
    # A product of both rows of a block has two rows for each of one row's: its chunk has fewer columns.
    least, most = (24, 48) if sizes.rows_together else (48, 80)
    # A unit is the columns modulated together. Each turn (a pass for a share of the output channels) has
    # an equal number of units.
    step = sizes.unit * sizes.turns
    lengths = range(-(-least // step) * step, most + 1, step)
    return min(lengths, key=lambda chunk: (-sizes.columns % chunk, -chunk))


def scratch_shapes(sizes: ConvSizes) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Return (shape, dtype) of each scratch buffer by name; the kernel adds a last axis of 128 lanes.

    Direct convolution (`tile` is 0) and Winograd's have different buffers. Both work on a strip of columns,
    in chunks: a chunk's columns are multiplied together, a unit's columns are modulated together. Channels
    are in parts of 128. A buffer of int32 holds words of two bfloat16 frames.

    Writing results, and in direct convolution modulating inputs, is one chunk behind the products. It begins
    left of column 0: so `result_width` has one chunk of columns more.
    """
    width, result_width, result_parts = sizes.width, sizes.width + sizes.chunk, sizes.outputs // tiles.LANES
    # Of each column: its first result, then the sum and the sum of squares of the differences from it.
    moments = {"moments": ((3, result_parts, result_width * sizes.input_frames), jnp.float32)}
    if not sizes.tile:  # direct convolution
        block_shape = (TAPS, ROWS, sizes.parts)  # a copy for each tap of time
        return moments | {
            # Modulated rows that the products load: two blocks, in turn.
            "ring": ((2, *block_shape, width * sizes.words), jnp.int32),
            # The block that this step modulates.
            "stage": ((*block_shape, result_width * sizes.words), jnp.int32),
            # The last two activated frames of each unit: the next call's cache.
            "past": ((UNITS, ROWS, sizes.unit * sizes.parts), jnp.int32),
            # Sums of the products, a chunk more on both sides: column taps reach beyond the strip.
            "sums": ((ROWS, result_parts, (result_width + sizes.chunk) * sizes.frames), jnp.float32),
        }
    row_shape = (sizes.components, sizes.parts, width + 2 * MARGIN)  # with padding on both sides
    unit_shape, unit_rows = (sizes.units, ROWS), sizes.unit * sizes.input_frames
    shapes = moments | {
        # Transformed rows that the products load: lower rows of three blocks, upper rows of two.
        "lower": ((3, *row_shape), jnp.int32),
        "upper": ((2, *row_shape), jnp.int32),
        # The block that this step modulates, transformed.
        "stage": ((ROWS, *row_shape), jnp.int32),
        # The last two activated frames of each unit: the next call's cache.
        "past": ((*unit_shape, sizes.unit * sizes.parts), jnp.int32),
        # A unit's activated frames, to be read frame by frame.
        "pixels": ((*unit_shape, sizes.parts, unit_rows // 2), jnp.int32),
        # Sums of the products, until they are transformed back: a row for each of a pixel's `TILES` tiles
        # (frames that are filtered together).
        "components": ((sizes.components, ROWS, result_parts, result_width * TILES), jnp.float32),
        # A unit's sums, transformed back.
        "frames": ((*unit_shape, result_parts, unit_rows), jnp.float32),
    }
    if not sizes.rows_together:
        # What each column of a chunk adds to the column right of it. The first `TILES` rows, for which the
        # memory has a whole register, are what the last column of the previous chunk adds.
        shapes["shifted"] = ((sizes.components, ROWS, sizes.chunk * TILES + SUBLANES), jnp.float32)
    return shapes


def _vmem_bytes(sizes: ConvSizes, residual: bool) -> int:
    """Return the bytes of VMEM that the kernel uses, with a residual or without one.

    Blocks of operands and results count twice: the next step's blocks are fetched during a step.
    """
    row = sizes.width * sizes.input_frames
    input_bytes, output_bytes = row * sizes.channels * 2, row * sizes.outputs * 2  # of a row, in bfloat16
    # Multiplier and offset (2), in float32 (4 bytes). A cell, the columns that share them, has a register for
    # each 128 channels.
    cells = 2 * ROWS * -(-sizes.width // sizes.cell) * SUBLANES * sizes.channels * 4
    # The last cache and the next (2), each of two frames, in bfloat16 (2 bytes).
    caches = 2 * ROWS * sizes.width * 2 * sizes.channels * 2
    # Sums to add to the first and to the last column (2), in float32.
    edges = 2 * ROWS * sizes.frames * sizes.outputs * 4
    # Mean and M2 (2), in float32.
    moments = 2 * row * sizes.outputs * 4
    # A residual has the size of the result.
    blocks = ROWS * (input_bytes + output_bytes * (1 + residual)) + cells + caches + edges + moments
    # Matrices have a block of (I, O) weights for each input and result of a product.
    blocks_of_weights = sum(len(product.inputs) * len(product.results) for product in sizes.products)
    weights = sizes.components * blocks_of_weights * sizes.channels * sizes.outputs * 2
    # Scratch buffers have 4 bytes an element, and a last axis of 128 lanes that is not in `shape`.
    scratch = sum(4 * math.prod(shape) * tiles.LANES for shape, _ in scratch_shapes(sizes).values())
    return 2 * blocks + weights + scratch
