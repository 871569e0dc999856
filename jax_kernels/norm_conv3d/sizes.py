"""Which frames the kernel for TPUs takes, and what it is compiled for."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_kernels.common import tiles
from jax_kernels.common.tiles import fills_tiles, vmem_limit

ROWS = 2
"""Rows of a step."""

LAG = 2
"""Steps between the modulation of rows and their results."""

TAPS = 3
"""Of the kernel, along each axis."""

UNIT = 64
"""Frames of pixels that are modulated together."""

UNITS = 3
"""Of these in a product."""

SUBLANES = 8
"""Rows of a register of float32."""

MOST_STRIPS = 8
"""Of columns, into which a picture is cut that is too wide for the chip's VMEM."""


class Sizes(NamedTuple):
    """What a kernel is compiled for.

    Attributes:
        held: frames of a chunk.
        columns: of the picture, or a shard's own.
        strips: of columns, one after the other; the last one may be narrower.
        chunk: columns of a product.
        chunks: of these in a row of a strip, the last one may be part of it only.
        cell: columns under a register of coefficients: under the same ones, or as many as it has rows for.
        tall: rows under the same coefficients.
        blocks: of two rows.
        channels, outputs: into the convolution and out of it, whole tiles of them.
    """

    held: int
    columns: int
    strips: int
    chunk: int
    chunks: int
    cell: int
    tall: int
    blocks: int
    channels: int
    outputs: int

    @property
    def frames(self) -> int:
        """Rows of a product for a pixel."""
        return max(self.held, 2)

    @property
    def words(self) -> int:
        """Of two frames, for a pixel."""
        return self.frames // 2

    @property
    def parts(self) -> int:
        """Of the channels, a tile's lanes each."""
        return self.channels // tiles.LANES

    @property
    def turns(self) -> int:
        """How often a product is taken, in a loop, for two parts of the outputs each; an odd number is not
        cut. With two turns 512 channels take 8 % longer, and compile for 5 s instead of 11."""
        parts = self.outputs // tiles.LANES
        return 1 if parts % 2 else parts // 2

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
        inputs: (row, time tap) of four rows, those of the results in the middle.
        results: (row, column tap).
    """

    inputs: list[tuple[int, int]]
    results: list[tuple[int, int]]


def products(channels: int, outputs: int) -> list[Product]:
    """The products of two rows of results, taps to the left first: those set sums, the others add to them."""
    rows = [range(TAPS), range(1, TAPS + 1), range(TAPS + 1)]
    of_rows = [[(row, time) for row in several for time in range(TAPS)] for several in rows]
    if channels == tiles.LANES:  # two inputs fill the depth of a matrix unit: the same two in each product
        both = [(1, 0), (1, 1), (2, 0), (2, 1), (1, 2), (2, 2), (0, 2), (3, 2)]
        upper, lower = [(0, 0), (0, 1)], [(3, 0), (3, 1)]
        of_rows = [both + upper, both + lower, both + upper + lower]
    first, second, all_rows = of_rows
    if outputs == tiles.LANES:
        return [
            Product(first, [(0, 0), (0, 1)]),
            Product(second, [(1, 0), (1, 1)]),
            Product(all_rows, [(0, 2), (1, 2)]),
        ]
    return [Product(of_rows[row], [(row, column)]) for row in range(ROWS) for column in range(TAPS)]


def takes(
    x: Float[Array | jax.ShapeDtypeStruct, "N T H W I"],
    grid: tuple[int, ...],
    kernel: Float[Array, "kt kh kw I O"],
    *,
    residual: bool,
    at_start: bool,
    pixels: int,
) -> bool:
    """Whether the kernel takes these frames: two, four or eight of bfloat16, or a video's first, not small,
    with an even number of rows, whole tiles of channels in, and out where they are more than one, and
    `MOST_STRIPS` that fit into VMEM.

    Args:
        x: frames; of it and of the kernel only shape and dtype are looked at.
        grid: frames, rows and columns of the coefficients.
        kernel: (3, 3, 3, I, O).
        residual: whether there is one.
        at_start: whether the first of the frames is the video's.
        pixels: of a whole frame, of which `x` may be a shard's.
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
    times, rows, wide = grid
    if frames % times or height % rows or columns % wide:
        return False
    registers = wide if wide == 1 or is_shared(columns // wide, frames) else _registers(columns, frames)
    sizes = sizes_of(x, rows, registers, outputs, residual)
    if (sizes.tall > 1 and sizes.tall % ROWS) or (wide > 1 and (UNIT // sizes.frames) % sizes.cell):
        return False
    return _vmem_bytes(sizes, residual) <= vmem_limit()


def is_shared(cell: int, frames: int) -> bool:
    """Whether so many columns under the same coefficients fill whole registers."""
    return cell * frames % SUBLANES == 0


def _registers(columns: int, frames: int) -> int:
    """How many registers the frames of so many columns take."""
    return -(-columns * frames // SUBLANES)


def columns_of_register(columns: int, frames: int, registers: int) -> int:
    """How many columns lie under a register of coefficients, of so many of them as
    `tpu.in_registers` gives."""
    return SUBLANES // frames if registers == _registers(columns, frames) else columns // registers


def sizes_of(
    x: Array | jax.ShapeDtypeStruct, rows: int, registers: int, outputs: int, residual: bool
) -> Sizes:
    """What the kernel is compiled for: as few strips as fit into VMEM, or the most there may be.

    Args:
        x: frames.
        rows, registers: of the coefficients.
        outputs: channels.
        residual: whether there is one.
    """
    held, height, columns, channels = x.shape[1:]
    outputs += -outputs % tiles.LANES
    chunk = UNIT * UNITS // max(held, 2)
    cell = columns_of_register(columns, held, registers)
    blocks, chunks = height // ROWS, -(-columns // chunk)
    found = Sizes(held, columns, 1, chunk, chunks, cell, height // rows, blocks, channels, outputs)
    for strips in range(1, min(MOST_STRIPS, chunks) + 1):
        of_strip = -(-chunks // strips)
        found = found._replace(strips=-(-chunks // of_strip), chunks=of_strip)
        if _vmem_bytes(found, residual) <= vmem_limit():
            break
    return found


def _vmem_bytes(sizes: Sizes, residual: bool) -> int:
    """What the kernel holds: blocks twice, as the next is fetched meanwhile."""
    row, rows = sizes.width * sizes.held, sizes.width * sizes.frames
    taken, given = row * sizes.channels * 2, row * sizes.outputs * 2
    cells = 2 * ROWS * -(-sizes.width // sizes.cell) * SUBLANES * sizes.channels * 4
    caches = 2 * ROWS * sizes.width * 2 * sizes.channels * 2
    edges = 2 * ROWS * sizes.frames * sizes.outputs * 4
    blocks = ROWS * (taken + given * (1 + residual)) + cells + caches + edges + 2 * row * sizes.outputs * 4
    weights = sum(
        len(product.inputs) * sizes.channels * len(product.results) * sizes.outputs * 2
        for product in products(sizes.channels, sizes.outputs)
    )
    shifted = TAPS * ROWS * rows * sizes.channels * 2
    beside = sizes.chunk * sizes.frames
    stage = shifted + TAPS * ROWS * beside * sizes.channels * 2
    sums = ROWS * (rows + 2 * beside) * sizes.outputs * 4 + 3 * (row + beside) * sizes.outputs * 4
    return 2 * blocks + weights + 2 * shifted + stage + sums
