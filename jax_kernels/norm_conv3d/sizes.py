"""The frames that the kernel for TPUs supports, and the sizes that it is compiled for."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_kernels.common import tiles
from jax_kernels.common.tiles import fills_tiles, pallas_mode, vmem_limit
from jax_kernels.norm_conv3d.transforms import TAPS, TRANSFORMS

ROWS = 2
"""Rows of a step."""

LAG = 2
"""Steps between the modulation of rows and their results."""

UNIT = 64
"""Frames of pixels that are modulated together by a step of direct convolution."""

UNITS = 3
"""Units of columns in a product."""

SUBLANES = 8
"""Rows of a register of float32, and columns that are modulated together by a step of Winograd's."""

MARGIN = SUBLANES
"""Columns of zeros on both sides of what a step of Winograd's multiplies."""

TILES = 2
"""Tiles of a pixel's frames, in a step of Winograd's."""

MOST_STRIPS = 8
"""Most strips of columns, into which a frame is cut that is too wide for the chip's VMEM."""


class ConvSizes(NamedTuple):
    """The sizes that a kernel is compiled for.

    Attributes:
        input_frames: frames that the kernel gets.
        columns: columns of the frame, or of a shard.
        strips: strips of columns, one after the other; the last one may be narrower.
        chunk: columns of a product.
        chunks: chunks in a row of a strip; the last one may be incomplete.
        cell: columns that one register of coefficients covers: those with the same coefficients, or as many
            as it has rows for.
        cell_rows: rows of pixels that have the same coefficients.
        blocks: blocks of two rows.
        channels, outputs: channels into the convolution and out of it, in whole tiles.
        tile: frames that are transformed together, by a step of Winograd's; 0 for direct convolution.
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
        """Rows of a product for a pixel."""
        return max(self.input_frames, 2)

    @property
    def words(self) -> int:
        """Words, of two frames each, for a pixel."""
        return self.frames // 2

    @property
    def parts(self) -> int:
        """Parts of the channels, of a tile's lanes each."""
        return self.channels // tiles.LANES

    @property
    def turns(self) -> int:
        """Passes over a product, in a loop, for two parts of the outputs each; an odd number is not cut.

        With two turns 512 channels take 8 % longer, and compile for 5 s instead of 11.
        """
        parts = self.outputs // tiles.LANES
        return 1 if parts % 2 else parts // 2

    @property
    def unit(self) -> int:
        """Columns that are modulated together."""
        return SUBLANES if self.tile else UNIT // self.frames

    @property
    def units(self) -> int:
        """Units of columns in a chunk."""
        return self.chunk // self.unit

    @property
    def components(self) -> int:
        """Components of a tile's transform, each with products of its own."""
        return len(TRANSFORMS[self.tile].taps) if self.tile else 1

    @property
    def rows_together(self) -> bool:
        """True if one product gives both rows of results, in a step of Winograd's."""
        return self.outputs > tiles.LANES

    @property
    def products(self) -> "list[Product]":
        """Products of a chunk and a component."""
        if self.tile:
            return winograd_products(self.outputs)
        return direct_products(self.channels, self.outputs)

    @property
    def width(self) -> int:
        """Columns of a strip's whole chunks."""
        return self.chunk * self.chunks

    @property
    def last_columns(self) -> int:
        """The picture's columns in the last strip."""
        return self.columns - (self.strips - 1) * self.width

    @property
    def starts(self) -> range:
        """The first column of each strip."""
        return range(0, self.columns, self.width)


class Product(NamedTuple):
    """One matrix product of a chunk: which of its inputs it contracts, and which results it adds to.

    Attributes:
        inputs: (row, time tap) of four rows, the results' rows in the middle; to Winograd's, which has no
            taps of time, (row, column).
        results: (row, column tap); to Winograd's (row, column).
    """

    inputs: list[tuple[int, int]]
    results: list[tuple[int, int]]


def direct_products(channels: int, outputs: int) -> list[Product]:
    """Return the products of two rows of results; taps to the left come first and set sums, others add."""
    rows = [range(TAPS), range(1, TAPS + 1), range(TAPS + 1)]
    row_inputs = [[(row, time) for row in several for time in range(TAPS)] for several in rows]
    if channels == tiles.LANES:  # two inputs fill the depth of a matrix unit: the same two in each product
        both = [(1, 0), (1, 1), (2, 0), (2, 1), (1, 2), (2, 2), (0, 2), (3, 2)]
        upper, lower = [(0, 0), (0, 1)], [(3, 0), (3, 1)]
        row_inputs = [both + upper, both + lower, both + upper + lower]
    first, second, all_rows = row_inputs
    if outputs == tiles.LANES:
        return [
            Product(first, [(0, 0), (0, 1)]),
            Product(second, [(1, 0), (1, 1)]),
            Product(all_rows, [(0, 2), (1, 2)]),
        ]
    return [Product(row_inputs[row], [(row, column)]) for row in range(ROWS) for column in range(TAPS)]


def winograd_products(outputs: int) -> list[Product]:
    """Return the products of two rows of results, or of one row if both have the same weights.

    Adjacent products with the same results are summed.
    """
    if outputs == tiles.LANES:
        return [
            Product([(0, 0), (0, 1)], [(0, 0), (0, 1)]),
            Product([(3, 0), (3, 1)], [(1, 0), (1, 1)]),
            *(Product([(1, column), (2, column)], [(0, 0), (1, 0)]) for column in (-1, 0, 1)),
        ]
    return [Product([(row, column) for column in (-1, 0, 1)], [(0, 0)]) for row in range(TAPS)]


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

    It supports two, four or eight frames of bfloat16, or a video's first, not small, with an even number of
    rows, whole tiles of channels in, and out if they are more than one, and `MOST_STRIPS` that fit into VMEM.

    Args:
        x: frames; only their shape and dtype are read, and the kernel's.
        grid: frames, rows and columns of the coefficients.
        kernel: (3, 3, 3, I, O).
        residual: whether there is one.
        at_start: whether the first of the frames is the video's.
        pixels: pixels of a whole frame, of which `x` may be a shard.
    """
    if not fills_tiles(x) or x.dtype != jnp.bfloat16:
        return False
    frames, height, columns = x.shape[1:4]
    if pixels < tiles.SMALLEST:
        return False
    outputs = kernel.shape[4]
    if kernel.shape[:3] != (TAPS,) * 3 or (outputs > tiles.LANES and outputs % tiles.LANES):
        return False
    if frames not in ((1, 2, 4, 8) if at_start else (2, 4, 8)) or height % ROWS:
        return False
    grid_frames, grid_rows, grid_columns = grid
    if frames % grid_frames or height % grid_rows or columns % grid_columns:
        return False
    registers = (
        grid_columns
        if grid_columns == 1 or is_shared(columns // grid_columns, frames)
        else _registers(columns, frames)
    )
    sizes = sizes_of(x, grid_rows, registers, outputs, residual)
    if (sizes.cell_rows > 1 and sizes.cell_rows % ROWS) or (grid_columns > 1 and sizes.unit % sizes.cell):
        return False
    return _vmem_bytes(sizes, residual) <= vmem_limit()


def is_shared(cell: int, frames: int) -> bool:
    """Return whether so many columns under the same coefficients fill whole registers."""
    return cell * frames % SUBLANES == 0


def _registers(columns: int, frames: int) -> int:
    """Return the registers that the frames of so many columns use."""
    return -(-columns * frames // SUBLANES)


def columns_of_register(columns: int, frames: int, registers: int) -> int:
    """Return the columns that a register of coefficients covers, one of `registers` from `to_registers`."""
    return SUBLANES // frames if registers == _registers(columns, frames) else columns // registers


def sizes_of(
    x: Array | jax.ShapeDtypeStruct, rows: int, registers: int, outputs: int, residual: bool
) -> ConvSizes:
    """Choose the sizes that the kernel is compiled for.

    Four and eight frames take Winograd's filtering if it is on and fits into VMEM, others direct convolution;
    strips are as few as fit, or the most there may be.

    Args:
        x: frames.
        rows, registers: rows and registers of the coefficients.
        outputs: output channels.
        residual: whether there is one.
    """
    input_frames, height, columns, channels = x.shape[1:]
    outputs += -outputs % tiles.LANES
    cell = columns_of_register(columns, input_frames, registers)
    by_taps = ConvSizes(
        input_frames, columns, 1, 0, 0, cell, height // rows, height // ROWS, channels, outputs, 0
    )
    if input_frames in (TILES * tile for tile in TRANSFORMS) and pallas_mode() != "direct":
        by_winograd = _in_strips(by_taps._replace(tile=input_frames // TILES), residual)
        fits = _vmem_bytes(by_winograd, residual) <= vmem_limit()
        if fits and (registers == 1 or by_winograd.unit % cell == 0):
            return by_winograd
    return _in_strips(by_taps, residual)


def _in_strips(sizes: ConvSizes, residual: bool) -> ConvSizes:
    """Cut the columns into as few strips as fit into VMEM, or into the most there may be."""
    chunk = _chunk(sizes)
    chunks = -(-sizes.columns // chunk)
    for strips in range(1, min(MOST_STRIPS, chunks) + 1):
        strip_chunks = -(-chunks // strips)
        sizes = sizes._replace(chunk=chunk, strips=-(-chunks // strip_chunks), chunks=strip_chunks)
        if _vmem_bytes(sizes, residual) <= vmem_limit():
            break
    return sizes


def _chunk(sizes: ConvSizes) -> int:
    """Return the columns of a product.

    For Winograd's they pad a row least, keep the matrix unit busy, and have sums that fit into registers.
    """
    if not sizes.tile:
        return UNIT * UNITS // sizes.frames
    least, most = (24, 48) if sizes.rows_together else (48, 80)
    step = sizes.unit * sizes.turns
    lengths = range(-(-least // step) * step, most + 1, step)
    return min(lengths, key=lambda chunk: (-sizes.columns % chunk, -chunk))


def scratch_shapes(sizes: ConvSizes) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Return shape and dtype of the kernel's scratch memory, by name, without the last axis of lanes.

    Memory for results has one chunk of columns more than a strip: results lag behind by a chunk.
    """
    width, chunk_more, result_parts = sizes.width, sizes.width + sizes.chunk, sizes.outputs // tiles.LANES
    moments = {"moments": ((3, result_parts, chunk_more * sizes.input_frames), jnp.float32)}
    if not sizes.tile:
        words = (TAPS, ROWS, sizes.parts)
        return moments | {
            "ring": ((2, *words, width * sizes.words), jnp.int32),
            "stage": ((*words, chunk_more * sizes.words), jnp.int32),
            "past": ((UNITS, ROWS, sizes.unit * sizes.parts), jnp.int32),
            "sums": ((ROWS, result_parts, (chunk_more + sizes.chunk) * sizes.frames), jnp.float32),
        }
    words = (sizes.components, sizes.parts, width + 2 * MARGIN)
    unit_shape, unit_rows = (sizes.units, ROWS), sizes.unit * sizes.input_frames
    shapes = moments | {
        "lower": ((3, *words), jnp.int32),
        "upper": ((2, *words), jnp.int32),
        "stage": ((ROWS, *words), jnp.int32),
        "past": ((*unit_shape, sizes.unit * sizes.parts), jnp.int32),
        "pixels": ((*unit_shape, sizes.parts, unit_rows // 2), jnp.int32),
        "components": ((sizes.components, ROWS, result_parts, chunk_more * TILES), jnp.float32),
        "frames": ((*unit_shape, result_parts, unit_rows), jnp.float32),
    }
    if not sizes.rows_together:
        shapes["shifted"] = ((sizes.components, ROWS, sizes.chunk * TILES + SUBLANES), jnp.float32)
    return shapes


def _vmem_bytes(sizes: ConvSizes, residual: bool) -> int:
    """Return the kernel's VMEM: blocks twice, as the next is fetched meanwhile."""
    row = sizes.width * sizes.input_frames
    input_bytes, output_bytes = row * sizes.channels * 2, row * sizes.outputs * 2
    cells = 2 * ROWS * -(-sizes.width // sizes.cell) * SUBLANES * sizes.channels * 4
    caches = 2 * ROWS * sizes.width * 2 * sizes.channels * 2
    edges = 2 * ROWS * sizes.frames * sizes.outputs * 4
    blocks = (
        ROWS * (input_bytes + output_bytes * (1 + residual))
        + cells
        + caches
        + edges
        + 2 * row * sizes.outputs * 4
    )
    blocks_of_weights = sum(len(product.inputs) * len(product.results) for product in sizes.products)
    weights = sizes.components * blocks_of_weights * sizes.channels * sizes.outputs * 2
    scratch = sum(4 * math.prod(shape) * tiles.LANES for shape, _ in scratch_shapes(sizes).values())
    return 2 * blocks + weights + scratch
