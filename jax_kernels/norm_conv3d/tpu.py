"""Modulation, SiLU, a causal 3 x 3 x 3 convolution, bias and residual in one Pallas kernel, for TPUs.

Nothing but the frames before and after it lies in HBM. A step takes two rows of all columns. A row of a
matrix product is a frame of a pixel.

- Rows are modulated once and kept in VMEM, in a ring, as words of two frames. Beside them lie copies,
  shifted by a frame (half a word) and by two (a word): what is under the taps of time.
- The taps of rows and of time are contracted by a product. Those of columns are added where results are:
  sums of a pixel of eight frames fill registers there, so that a shift by a column costs nothing. Two
  columns' taps of 128 output channels fill a matrix unit that is 256 wide.
- The next rows are modulated, and the last columns' results finished, while the matrix unit multiplies.
- A video's first frame by itself is two equal ones to the products, and one to all that comes before and
  after them: so its words are of equal halves, and every second sum is a result.

Rows lag: step g modulates the rows of block g, those of block g - 1 move from the stage into the ring, and
the results are those of block g - 2. Stores go to a stage because the compiler would have loads of the ring
wait for those to it. What a step stores lies some columns behind what it loads.

A v6e schedules 3.7 ms for 128 channels of 8 x 480 x 720, of which 2.7 are its matrix units' peak; XLA's
convolution alone takes 5.4.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, Shaped

from jax_kernels.common import tiles
from jax_kernels.common.columns import add_columns
from jax_kernels.common.frames import repeat_nearest
from jax_kernels.common.tiles import fills_tiles, words_of_twice
from jax_kernels.conv3d import xla
from jax_kernels.group_norm.xla import column_moments

MIB = 2**20

SMALLEST = 4096
"""Pixels of a frame that are worth it."""

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

UNROLLED = 18
"""Products in a loop's body, at most. Cycles of a chunk of 128 to 128 channels, and seconds to compile it:
883 and 10 with 15 of them, 950 and 5 with 6, 1076 and 4 with 3."""

RAGGED_IN_PLACE = True
"""Whether a shard's next cache takes the memory of the one before where its columns are no whole chunks, as
they seldom are. JAX's interpreters run no blocks that reach beyond such an argument."""

SUBLANES = 8
"""Rows of a register of float32."""

LOW_HALF = 0xFFFF
"""Of a word: the earlier of its two frames."""


class Sizes(NamedTuple):
    """What a kernel is compiled for.

    Attributes:
        held: frames of a chunk.
        columns: of the picture, or a shard's own.
        chunk: columns of a product.
        chunks: of these in a row, the last one may be part of it only.
        cell: columns under a register of coefficients: under the same ones, or as many as it has rows for.
        tall: rows under the same coefficients.
        blocks: of two rows.
        channels, outputs: into the convolution and out of it.
    """

    held: int
    columns: int
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
    def width(self) -> int:
        """Columns of whole chunks."""
        return self.chunk * self.chunks


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


def _weights(kernel: Array, product: Product) -> Array:
    """The matrix of a product: zeros where a row of inputs is under no tap of a row of results."""

    def tap(row: int, time: int, result: int, column: int) -> Array:
        inside = 0 <= row - result < TAPS
        return kernel[time, row - result, column] if inside else jnp.zeros_like(kernel[0, 0, 0])

    return jnp.concatenate(
        [jnp.concatenate([tap(*part, *result) for result in product.results], 1) for part in product.inputs]
    )


def _lanes(part: int) -> slice:
    return slice(part * tiles.LANES, (part + 1) * tiles.LANES)


class _Step:
    """A step of the kernel, on its references by name."""

    def __init__(self, sizes: Sizes, weights: tuple[Any, ...], refs: dict[str, Any]):
        self.sizes, self.weights, self.refs = sizes, weights, refs
        self.products = products(sizes.channels, sizes.outputs)
        self.result_parts = sizes.outputs // tiles.LANES
        self.unit = UNIT // sizes.frames
        self.step = pl.program_id(1)
        self.old, self.new = lax.rem(self.step + 1, 2), lax.rem(self.step, 2)

    def run(self) -> None:
        refs, last = self.refs, pl.num_programs(1) - 1

        @pl.when(self.step == LAG)
        def _():  # above the first row
            above = refs["ring"].at[self.old, :, 1]
            above[...] = jnp.zeros(above.shape, above.dtype)

        @pl.when(self.step == last)
        def _():  # below the last
            below = refs["stage"].at[:, 0]
            below[...] = jnp.zeros(below.shape, below.dtype)

        pl.when(self.step < LAG)(self._fill)
        pl.when(self.step >= LAG)(self._convolve)
        if self.sizes.width > self.sizes.columns:
            self._clear_beyond()

        @pl.when(self.step == last)
        def _():
            self._give_moments()

    def _fill(self) -> None:
        def unit(index: Array, carry: None) -> None:
            column = index * self.unit
            self._move(column, self.unit)
            self._modulate(column)

        lax.fori_loop(0, self.sizes.width // self.unit, unit, None)

    def _convolve(self) -> None:
        sizes = self.sizes
        chunk, chunks = sizes.chunk, sizes.chunks
        self._begin_left()
        most = min(UNROLLED // len(self.products), chunks)
        together = next(n for n in range(most, 0, -1) if chunks % n == 0)

        def several(index: Array, carry: None) -> None:
            for offset in range(together):
                column = (index * together + offset) * chunk
                self._multiply(column)
                self._move(column, chunk)
                self._finish(column - chunk)

        lax.fori_loop(0, chunks // together, several, None)
        self._end_right()
        self._finish(sizes.width - chunk)
        for unit in range(UNITS):
            self._modulate(sizes.width - chunk + unit * self.unit, unit)

    def _begin_left(self) -> None:
        """What the first column has from beyond: what a neighbour adds, or nothing."""
        frames, refs = self.sizes.frames, self.refs
        first = pl.ds(self.sizes.chunk * frames, frames)
        if "edges" not in refs:
            edge = refs["sums"].at[:, :, first]
            edge[...] = jnp.zeros(edge.shape, edge.dtype)
            return
        for row in range(ROWS):
            for part in range(self.result_parts):
                refs["sums"][row, part, first] = refs["edges"][0, row, :frames, _lanes(part)]

    def _end_right(self) -> None:
        """What a neighbour adds to the last column."""
        frames, refs = self.sizes.frames, self.refs
        if "edges" not in refs:
            return
        last = pl.ds((self.sizes.chunk + self.sizes.columns - 1) * frames, frames)
        for row in range(ROWS):
            for part in range(self.result_parts):
                sums = refs["sums"].at[row, part]
                sums[last] = sums[last] + refs["edges"][0, row, frames:, _lanes(part)]

    def _multiply(self, column: Any) -> None:
        """A chunk's products, and beside them the modulation of the chunk before it."""
        sizes = self.sizes
        for index, (product, weights) in enumerate(zip(self.products, self.weights, strict=True)):
            inputs = [
                self._input(row, time, part, column)
                for row, time in product.inputs
                for part in range(sizes.parts)
            ]
            sums = jnp.dot(jnp.concatenate(inputs, axis=1), weights[...], preferred_element_type=jnp.float32)
            for place, (row, tap) in enumerate(product.results):
                at = self._rows(column, sizes.chunk, sizes.frames, before=sizes.chunk, shift=1 - tap)
                for part in range(self.result_parts):
                    found = sums[:, _lanes(place * self.result_parts + part)]
                    if tap:
                        found = found + self.refs["sums"][row, part, at]
                    self.refs["sums"][row, part, at] = found
            if index * UNITS % len(self.products) == 0:
                unit = index * UNITS // len(self.products)
                self._modulate(column - sizes.chunk + unit * self.unit, unit, after=sums)

    def _input(self, row: int, time: int, part: int, column: Any) -> Array:
        """The words of a chunk in one of four rows."""
        sizes = self.sizes
        if row == ROWS + 1:
            at = self._rows(column, sizes.chunk, sizes.words, before=sizes.chunk)
            words = self.refs["stage"][time, 0, part, at]
        else:
            slot, of_block = (self.old, 1) if row == 0 else (self.new, row - 1)
            at = self._rows(column, sizes.chunk, sizes.words)
            words = self.refs["ring"][slot, time, of_block, part, at]
        return pltpu.bitcast(words, jnp.bfloat16)

    def _move(self, column: Any, count: int) -> None:
        """From the stage, of the block before, into the ring."""
        sizes = self.sizes
        to = self._rows(column, count, sizes.words)
        at = self._rows(column, count, sizes.words, before=sizes.chunk)
        self.refs["ring"][self.old, :, :, :, to] = self.refs["stage"][:, :, :, at]

    def _modulate(self, column: Any, unit: int = 0, after: Array | None = None) -> None:
        """A unit of columns into the stage. Those before the picture's first are written in vain."""
        sizes, refs = self.sizes, self.refs
        words = sizes.words
        inside = _from_left(column)
        at = self._rows(inside, self.unit, sizes.held)
        to = self._rows(column, self.unit, words, before=sizes.chunk)
        count = self.unit * words
        cells = max(1, self.unit // sizes.cell)
        of_cells = pl.ds(lax.div(inside, sizes.cell), cells)
        of_past = self._rows(inside, self.unit, 2 * sizes.parts)
        at_start = "cache" not in refs
        zero = None if after is None else jnp.minimum(jnp.abs(after[:SUBLANES, : tiles.LANES]), 0.0)
        for row in range(ROWS):
            under = row if sizes.tall == 1 else 0
            half, offset = refs["half"][0, under, of_cells], refs["half_offset"][0, under, of_cells]
            if zero is not None:
                offset = offset + jnp.concatenate([zero] * sizes.parts, 1)
            x = refs["x"][0, row, at].astype(jnp.float32)
            x = x.reshape(cells, -1, SUBLANES, sizes.channels) * half[:, None] + offset[:, None]
            x = (x + x * jnp.tanh(x)).reshape(-1, sizes.channels).astype(jnp.bfloat16)
            past = refs["past"].at[unit, row]
            if not at_start:
                past[...] = pltpu.bitcast(refs["cache"][0, row, of_past], jnp.int32)
            for part in range(sizes.parts):
                lanes = x[:, _lanes(part)]
                now = pltpu.bitcast(lanes, jnp.int32) if sizes.held > 1 else words_of_twice(lanes)
                earlier, shifted, same = (refs["stage"].at[time, row, part] for time in range(TAPS))
                of_pixels = pl.ds(part, self.unit, stride=sizes.parts)
                same[to, :] = now
                if at_start:
                    first = same[pl.ds(to.start, self.unit, stride=words), :]
                    past[of_pixels, :] = (first & LOW_HALF) | (first << 16)
                if words > 1:
                    earlier[pl.ds(to.start + 1, count - 1), :] = now[:-1]
                earlier[pl.ds(to.start, self.unit, stride=words), :] = past[of_pixels, :]
                shifted[to, :] = lax.shift_right_logical(earlier[to, :], 16) | (now << 16)
                past[of_pixels, :] = same[pl.ds(to.start + words - 1, self.unit, stride=words), :]
            refs["latest"][0, row, of_past] = pltpu.bitcast(past[...], jnp.bfloat16)

    def _finish(self, column: Any) -> None:
        """A chunk's results; those before the picture's first column are overwritten by it."""
        sizes, refs = self.sizes, self.refs
        at = self._rows(_from_left(column), sizes.chunk, sizes.held)
        beside = self._rows(column, sizes.chunk, sizes.held, before=sizes.chunk)
        of_sums = self._rows(column, sizes.chunk, sizes.frames, before=sizes.chunk)
        if sizes.held == 1:
            of_sums = pl.ds(of_sums.start, sizes.chunk, stride=sizes.frames)
        start = self.step == LAG
        real = self._real_rows(_from_left(column)) if "real" in refs else None
        for part in range(self.result_parts):
            lanes = _lanes(part)
            rounded = []
            for row in range(ROWS):
                y = refs["sums"].at[row, part][of_sums, :] + refs["bias"][:, lanes]
                if "residual" in refs:
                    y = y + refs["residual"][0, row, at, lanes].astype(jnp.float32)
                if real is not None:
                    y = jnp.where(real, y, 0.0)
                y = y.astype(jnp.bfloat16)
                refs["y"][0, row, at, lanes] = y
                rounded.append(y.astype(jnp.float32))
            origin, total, squares = (refs["moments"].at[index, part] for index in range(3))
            of_first = jnp.where(start, rounded[0], origin[beside])
            one, other = (y - of_first for y in rounded)
            origin[beside] = of_first
            total[beside] = jnp.where(start, 0.0, total[beside]) + (one + other)
            squares[beside] = jnp.where(start, 0.0, squares[beside]) + (one * one + other * other)

    def _real_rows(self, column: Any) -> Array:
        """Which of a chunk's rows are the picture's."""
        shape = (self.sizes.chunk * self.sizes.held, tiles.LANES)
        row = lax.broadcasted_iota(jnp.int32, shape, 0)
        return row < (self.refs["real"][0] - column) * self.sizes.held

    def _give_moments(self) -> None:
        sizes, refs = self.sizes, self.refs
        share = 1 / (ROWS * sizes.blocks)

        def chunk(index: Array, carry: None) -> None:
            to = self._rows(index * sizes.chunk, sizes.chunk, sizes.held)
            at = self._rows(index * sizes.chunk, sizes.chunk, sizes.held, before=sizes.chunk)
            for part in range(self.result_parts):
                origin, total, squares = (refs["moments"][index, part, at] for index in range(3))
                refs["mean"][0, to, _lanes(part)] = origin + total * share
                refs["m2"][0, to, _lanes(part)] = jnp.maximum(squares - total * total * share, 0.0)

        lax.fori_loop(0, sizes.chunks, chunk, None)

    def _clear_beyond(self) -> None:
        """Zeros right of the picture's last column."""
        sizes = self.sizes
        at = pl.ds((sizes.columns + sizes.chunk) * sizes.words, sizes.words)
        for part in range(sizes.parts):
            beyond = self.refs["stage"].at[:, :, part, at]
            beyond[...] = jnp.zeros(beyond.shape, beyond.dtype)

    def _rows(self, column: Any, count: int, each: int, before: int = 0, shift: int = 0) -> Any:
        """Where `count` columns lie, from a multiple of them on and `shift` further, each in so many rows, in
        memory that holds others before them."""
        start = (column + before) * each
        if isinstance(start, jax.Array):
            start = pl.multiple_of(start, count * each)
        return pl.ds(start + shift * each, count * each)


def _from_left(column: Any) -> Any:
    """A column, or the first where it is before that."""
    return lax.max(column, 0) if isinstance(column, jax.Array) else max(column, 0)


def takes(
    x: Float[Array | jax.ShapeDtypeStruct, "N T H W I"],
    grid: tuple[int, ...],
    kernel: Float[Array, "kt kh kw I O"],
    *,
    residual: bool,
    at_start: bool,
    pixels: int | None = None,
) -> bool:
    """Whether the kernel takes these frames: two, four or eight of bfloat16, or a video's first, not small,
    with an even number of rows, whole tiles of channels in and out, and no more of a row than fits into VMEM.

    Args:
        x: frames; of it and of the kernel only shape and dtype are looked at.
        grid: frames, rows and columns of the coefficients.
        kernel: (3, 3, 3, I, O).
        residual: whether there is one.
        at_start: whether the first of the frames is the video's.
        pixels: of a whole frame, where `x` is of a shard.
    """
    if not fills_tiles(x) or x.dtype != jnp.bfloat16:
        return False
    frames, height, columns = x.shape[1:4]
    if (pixels or height * columns) < SMALLEST:
        return False
    if kernel.shape[:3] != (TAPS,) * 3 or kernel.shape[4] % tiles.LANES:
        return False
    if frames not in ((1, 2, 4, 8) if at_start else (2, 4, 8)) or height % ROWS:
        return False
    times, rows, wide = grid
    if frames % times or height % rows or columns % wide:
        return False
    registers = wide if wide == 1 or _is_shared(columns // wide, frames) else _registers(columns, frames)
    sizes = _sizes(x, rows, registers, kernel.shape[4])
    if (sizes.tall > 1 and sizes.tall % ROWS) or (wide > 1 and (UNIT // sizes.frames) % sizes.cell):
        return False
    return _vmem_bytes(sizes, residual) <= vmem_limit()


def _is_shared(cell: int, frames: int) -> bool:
    """Whether so many columns under the same coefficients fill whole registers."""
    return cell * frames % SUBLANES == 0


def _registers(columns: int, frames: int) -> int:
    """How many registers the frames of so many columns take."""
    return -(-columns * frames // SUBLANES)


def _columns_of_register(columns: int, frames: int, registers: int) -> int:
    """How many columns lie under a register of coefficients, of so many of them `in_registers`."""
    return SUBLANES // frames if registers == _registers(columns, frames) else columns // registers


def _sizes(x: Array | jax.ShapeDtypeStruct, rows: int, registers: int, outputs: int) -> Sizes:
    held, height, columns, channels = x.shape[1:]
    chunk = UNIT * UNITS // max(held, 2)
    cell = _columns_of_register(columns, held, registers)
    blocks, chunks = height // ROWS, -(-columns // chunk)
    return Sizes(held, columns, chunk, chunks, cell, height // rows, blocks, channels, outputs)


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


def vmem_limit() -> int:
    """What a kernel may hold on the chip that is compiled for, as far as it is known."""
    try:
        capacity = pltpu.get_tpu_info().vmem_capacity_bytes
    except ValueError:  # traced on another platform
        capacity = 128 * MIB
    return capacity - MIB


def in_registers(z: Shaped[Array, "N t h w Z"], frames: int, columns: int) -> Shaped[Array, "N h v S Z"]:
    """What lies over pixels of so many frames and columns, in the rows that registers of them have: each
    frame of a pixel, of as many pixels as fit. v is w, or, where fewer pixels lie under one of `z`, as many
    registers as the columns take.
    """
    of_register, cell = SUBLANES // frames, columns // z.shape[3]
    z = repeat_nearest(z.transpose(0, 2, 3, 1, 4), {3: frames // z.shape[1]})
    if z.shape[2] == 1 or _is_shared(cell, frames):
        return jnp.concatenate([z] * of_register, axis=3)
    z = repeat_nearest(z, {2: cell})
    z = jnp.pad(z, [(0, 0), (0, 0), (0, -columns % of_register), (0, 0), (0, 0)])
    return z.reshape(*z.shape[:2], -1, SUBLANES, z.shape[-1])


def _over_pixels(part: Float[Array, "N h v S C"], x: Float[Array, "N T H W C"]) -> Float[Array, "N T H W C"]:
    """The inverse of `in_registers`, at the pixels' own rows and columns."""
    frames, height, columns, channels = x.shape[1:]
    videos, rows, registers = part.shape[:3]
    of_register, cell = SUBLANES // frames, _columns_of_register(columns, frames, registers)
    pixels = part.reshape(videos, rows, registers * of_register, frames, channels)
    if cell != of_register:  # they are the same for all of its pixels
        pixels = repeat_nearest(pixels[:, :, ::of_register], {2: cell})
    pixels = repeat_nearest(pixels[:, :, :columns], {1: height // rows})
    return pixels.transpose(0, 3, 1, 2, 4)


def activated(x: Array, multiplier: Array, offset: Array) -> Array:
    """`silu(x * multiplier + offset)` in float32, rounded to the dtype of `x`."""
    return jax.nn.silu(x.astype(jnp.float32) * multiplier + offset).astype(x.dtype)


def _plain(
    x: Array,
    multiplier: Array,
    offset: Array,
    cache: Array | None,
    residual: Array | None,
    kernel: Array,
    bias: Array,
    edges: tuple[Array, Array] | None = None,
    real: Array | None = None,
) -> Any:
    hidden = activated(x, _over_pixels(multiplier, x), _over_pixels(offset, x))
    if cache is None:
        cache = jnp.concatenate([hidden[:, :1]] * 2, axis=1)
    frames = jnp.concatenate([cache, hidden], axis=1)
    sums = xla.summed(frames, kernel, xla.same_columns(kernel))
    if edges is not None:
        left, right = (jnp.expand_dims(edge, 3) for edge in edges)
        sums = add_columns(add_columns(sums, left, at=0), right, at=x.shape[3] - 1)
    sums = xla.completed(sums, bias, residual)
    if real is not None:
        sums = jnp.where(lax.iota(jnp.int32, x.shape[3])[:, None] < real, sums, 0.0)
    y = sums.astype(x.dtype)
    latest = frames[:, frames.shape[1] - cache.shape[1] :]
    mean, m2 = column_moments(y)
    return y, latest, (jnp.squeeze(mean, 2), jnp.squeeze(m2, 2))


@jax.custom_jvp
def convolved(
    x: Float[Array, "N T H W I"],
    multiplier: Float[Array, "N h v S I"],
    offset: Float[Array, "N h v S I"],
    cache: Float[Array, "N 2 H W I"] | None,
    residual: Float[Array, "N T H W O"] | None,
    kernel: Float[Array, "3 3 3 I O"],
    bias: Float[Array, " O"],
    edges: tuple[Float[Array, "N T H O"], Float[Array, "N T H O"]] | None = None,
    real: Int[Array, ""] | None = None,
) -> tuple[
    Float[Array, "N T H W O"],
    Float[Array, "N 2 H W I"],
    tuple[Float[Array, "N T W O"], Float[Array, "N T W O"]],
]:
    """The causal convolution of `silu(x * multiplier + offset)`, and what comes after it.

    Args:
        x: frames that the kernel `takes`, as all of these.
        multiplier, offset: float32, `in_registers`; each the same for H / h rows.
        cache: the two activated frames before those of `x`, and the next ones take its memory; None at the
            start of a video, whose first frame then stands before itself.
        residual: added to the sums before they are rounded, or None.
        kernel, bias: the convolution's.
        edges: what neighbours add to the sums of the first and of the last column, float32, or None.
        real: columns from this one on get zeros, as they only pad a width; None where there are none.

    Returns:
        The convolved frames; the next cache; mean and M2 of each of their columns of pixels.
    """
    _, rows, registers, *_ = multiplier.shape
    sizes = _sizes(x, rows, registers, kernel.shape[-1])
    operands, weights = _operands(sizes, x, multiplier, offset, cache, residual, kernel, bias, edges, real)
    results, scratch = _results(sizes, operands), _scratch(sizes)
    names = [*operands, *results, *scratch]

    def run(*refs: Any) -> None:
        last = len(refs) - len(names)  # weights come first
        _Step(sizes, refs[:last], dict(zip(names, refs[last:], strict=True))).run()

    in_place = sizes.width == sizes.columns or (edges is not None and RAGGED_IN_PLACE)
    y_bytes = x.nbytes // sizes.channels * sizes.outputs * (1 if residual is None else 2)
    cache_bytes = x.nbytes // sizes.held * (TAPS - 1)
    taken_over = {}
    if cache is not None and in_place:
        taken_over = {len(weights) + names.index("cache"): [*results].index("latest")}
    cache_shape = (x.shape[0], TAPS - 1, *x.shape[2:])
    y, latest, *moments = pl.pallas_call(
        run,
        grid=(x.shape[0], sizes.blocks + LAG),
        in_specs=[*map(_whole, weights), *(spec for _, spec in operands.values())],
        out_specs=[spec for _, spec in results.values()],
        # Said to be in HBM: XLA else brings small ones into VMEM and back.
        out_shape=[pltpu.HBM(struct.shape, struct.dtype) for struct, _ in results.values()],
        scratch_shapes=[*scratch.values()],
        input_output_aliases=taken_over,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=vmem_limit()
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * kernel.size * x.size // sizes.channels,
            bytes_accessed=x.nbytes + kernel.nbytes + y_bytes + (2 if cache is not None else 1) * cache_bytes,
            transcendentals=x.size,
        ),
        name="norm_conv3d",
    )(*weights, *(array for array, _ in operands.values()))
    mean, m2 = (part.reshape(x.shape[0], sizes.columns, sizes.held, -1).swapaxes(1, 2) for part in moments)
    return _frames_first(y, sizes), _frames_of_cache(latest, cache_shape), (mean, m2)


def _operands(
    sizes: Sizes,
    x: Array,
    multiplier: Array,
    offset: Array,
    cache: Array | None,
    residual: Array | None,
    kernel: Array,
    bias: Array,
    edges: tuple[Array, Array] | None,
    real: Array | None,
) -> tuple[dict[str, tuple[Any, pl.BlockSpec]], list[Array]]:
    """What the kernel takes, by name, each with its blocks; and the products' weights."""
    cells = -(-sizes.width // sizes.cell)
    row = sizes.width * sizes.held
    rows = ROWS if sizes.tall == 1 else 1

    def under(video: Array, step: Array) -> tuple[Any, ...]:
        return video, lax.div(_now(sizes, step) * ROWS, max(ROWS, sizes.tall)), 0, 0, 0

    of_cells = pl.BlockSpec((1, rows, cells, SUBLANES, sizes.channels), under)
    bias = bias.astype(jnp.float32)[None]
    operands = {"x": (_pixels_first(x), _rows_now(sizes, row, sizes.channels))}
    if cache is not None:
        operands["cache"] = _pixels_of_cache(cache), _rows_of_cache(sizes)
    operands |= {
        "half": (multiplier / 2, of_cells),  # for SiLU by a hyperbolic tangent
        "half_offset": (offset / 2, of_cells),
        "bias": (bias, _whole(bias)),
    }
    if residual is not None:
        operands["residual"] = _pixels_first(residual), _rows_later(row, sizes.outputs)
    if edges is not None:
        of_frames = (jnp.repeat(edge, sizes.frames // sizes.held, axis=1) for edge in edges)
        both = jnp.concatenate([edge.transpose(0, 2, 1, 3) for edge in of_frames], axis=2)
        operands["edges"] = both, _rows_later(2 * sizes.frames, sizes.outputs)
    if real is not None:
        operands["real"] = real[None], pl.BlockSpec(memory_space=pltpu.SMEM)
    return operands, [_weights(kernel, product) for product in products(sizes.channels, sizes.outputs)]


def _results(
    sizes: Sizes, operands: dict[str, tuple[Any, pl.BlockSpec]]
) -> dict[str, tuple[Any, pl.BlockSpec]]:
    """What the kernel gives, by name, each with its blocks."""
    x, _ = operands["x"]
    row, videos, height = sizes.width * sizes.held, *x.shape[:2]
    latest = (videos, height, sizes.columns * sizes.parts * (TAPS - 1), tiles.LANES)
    moments = jax.ShapeDtypeStruct((videos, x.shape[2], sizes.outputs), jnp.float32)
    of_video = pl.BlockSpec((1, row, sizes.outputs), lambda video, step: (video, 0, 0))
    y = jax.ShapeDtypeStruct((*x.shape[:3], sizes.outputs), x.dtype)
    return {
        "y": (y, _rows_later(row, sizes.outputs)),
        "latest": (jax.ShapeDtypeStruct(latest, x.dtype), _rows_of_cache(sizes)),
        "mean": (moments, of_video),
        "m2": (moments, of_video),
    }


def _scratch(sizes: Sizes) -> dict[str, Any]:
    """What the kernel keeps between steps, by name; a chunk of columns before the picture's own in some."""
    width, beside, given = sizes.width, sizes.width + sizes.chunk, sizes.outputs // tiles.LANES
    words = (TAPS, ROWS, sizes.parts)
    shapes = {
        "ring": ((2, *words, width * sizes.words), jnp.int32),
        "stage": ((*words, beside * sizes.words), jnp.int32),
        "past": ((UNITS, ROWS, UNIT // sizes.frames * sizes.parts), jnp.int32),
        "sums": ((ROWS, given, (beside + sizes.chunk) * sizes.frames), jnp.float32),
        "moments": ((3, given, beside * sizes.held), jnp.float32),
    }
    return {name: pltpu.VMEM((*shape, tiles.LANES), dtype) for name, (shape, dtype) in shapes.items()}


def _now(sizes: Sizes, step: Array) -> Array:
    return lax.min(step, sizes.blocks - 1)


def _rows_now(sizes: Sizes, length: int, lanes: int) -> pl.BlockSpec:
    """The rows that a step modulates."""
    return pl.BlockSpec((1, ROWS, length, lanes), lambda video, step: (video, _now(sizes, step), 0, 0))


def _rows_of_cache(sizes: Sizes) -> pl.BlockSpec:
    """The rows of a cache that a step takes and gives."""
    return _rows_now(sizes, sizes.width * sizes.parts * (TAPS - 1), tiles.LANES)


def _rows_later(length: int, lanes: int) -> pl.BlockSpec:
    """The rows that a step finishes."""
    return pl.BlockSpec((1, ROWS, length, lanes), lambda video, step: (video, lax.max(step - LAG, 0), 0, 0))


def _whole(array: Array) -> pl.BlockSpec:
    return pl.BlockSpec(array.shape, lambda video, step: (0,) * array.ndim, pipeline_mode=pl.Buffered(1))


def _pixels_first(x_NTHWC: Array) -> Array:
    """N, H, W T, C: a row for each frame of a pixel."""
    x = x_NTHWC.transpose(0, 2, 3, 1, 4)
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


def _frames_first(y: Array, sizes: Sizes) -> Array:
    """The inverse of `_pixels_first`."""
    return y.reshape(*y.shape[:2], sizes.columns, sizes.held, -1).transpose(0, 3, 1, 2, 4)


def _pixels_of_cache(cache_NTHWC: Array) -> Array:
    """N, H, W P T, lanes of the P parts of channels: as the bytes of two frames lie in memory."""
    cache = cache_NTHWC.transpose(0, 2, 3, 1, 4)
    videos, height, columns, frames, channels = cache.shape
    cache = cache.reshape(videos, height, columns, frames, channels // tiles.LANES, tiles.LANES)
    return cache.transpose(0, 1, 2, 4, 3, 5).reshape(videos, height, -1, tiles.LANES)


def _frames_of_cache(latest: Array, shape: tuple[int, ...]) -> Array:
    """The inverse of `_pixels_of_cache`, step by step: one after the other XLA leaves both out."""
    videos, frames, height, columns, channels = shape
    latest = latest.reshape(videos, height, columns, -1, frames, tiles.LANES).transpose(0, 1, 2, 4, 3, 5)
    return latest.reshape(videos, height, columns, frames, channels).transpose(0, 3, 1, 2, 4)


@convolved.defjvp
def _(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> Any:
    return convolved(*primals), jax.jvp(_plain, primals, tangents)[1]
