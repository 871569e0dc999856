"""A step of the kernel for TPUs: two rows of all columns modulated, the results of two before them.

A row of a matrix product is a frame of a pixel.

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
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from jax_kernels.common import tiles
from jax_kernels.common.tiles import words_of_twice
from jax_kernels.norm_conv3d.sizes import LAG, ROWS, SUBLANES, TAPS, UNIT, UNITS, Sizes, products

UNROLLED = 9
"""Products in a loop's body, at most. With 18 of them 128 to 128 channels of 8 x 480 x 720 take 3.69 ms, and
7.5 s to compile; with 9, 3.85 and 3.1; with 6, 4.00 and 2.2."""

LOW_HALF = 0xFFFF
"""Of a word: the earlier of its two frames."""


def _lanes(part: int) -> slice:
    return slice(part * tiles.LANES, (part + 1) * tiles.LANES)


class Step:
    """A step of the kernel, on its references by name."""

    def __init__(self, sizes: Sizes, weights: tuple[Any, ...], refs: dict[str, Any]):
        self.sizes, self.weights, self.refs = sizes, weights, refs
        self.products = products(sizes.channels, sizes.outputs)
        self.result_parts = sizes.outputs // tiles.LANES
        self.unit = UNIT // sizes.frames
        self.axes = 2 if sizes.strips == 1 else 3
        _, self.strip, self.step = of_grid(tuple(map(pl.program_id, range(self.axes))))
        self.old, self.new = lax.rem(self.step + 1, 2), lax.rem(self.step, 2)

    def run(self) -> None:
        refs, last = self.refs, pl.num_programs(self.axes - 1) - 1

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
        if self.sizes.width > self.sizes.last_columns:
            self._in_last_strip(self._clear_beyond)

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
        self._modulate_chunk(sizes.width - chunk)

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
        sizes = self.sizes
        columns: Any = sizes.last_columns
        if sizes.strips > 1:
            columns = jnp.where(self.strip == sizes.strips - 1, sizes.last_columns, sizes.width)
        last = self._rows(columns - 1, 1, frames, before=sizes.chunk)
        for row in range(ROWS):
            for part in range(self.result_parts):
                sums = refs["sums"].at[row, part]
                sums[last] = sums[last] + refs["edges"][0, row, frames:, _lanes(part)]

    def _multiply(self, column: Any) -> None:
        """A chunk's products, and beside them the modulation of the chunk before it."""
        before, turns = column - self.sizes.chunk, self.sizes.turns
        if turns == 1:
            self._take_turn(0, column, modulated=before)
        else:
            self._modulate_chunk(before)
            lax.fori_loop(0, turns, lambda turn, _: self._take_turn(turn, column), None)

    def _take_turn(self, turn: Any, column: Any, modulated: Any = None) -> None:
        """A chunk's products that give a turn's share of the results; beside them one may be modulated."""
        sizes, refs = self.sizes, self.refs
        parts = self.result_parts // sizes.turns
        for index, (product, weights) in enumerate(zip(self.products, self.weights, strict=True)):
            inputs = [
                self._input(row, time, part, column)
                for row, time in product.inputs
                for part in range(sizes.parts)
            ]
            sums = jnp.dot(jnp.concatenate(inputs, axis=1), weights[turn], preferred_element_type=jnp.float32)
            for place, (row, tap) in enumerate(product.results):
                at = self._rows(column, sizes.chunk, sizes.frames, before=sizes.chunk, shift=1 - tap)
                for part in range(parts):
                    found, given = sums[:, _lanes(place * parts + part)], turn * parts + part
                    if tap:
                        found = found + refs["sums"][row, given, at]
                    refs["sums"][row, given, at] = found
            if modulated is not None and index * UNITS % len(self.products) == 0:
                unit = index * UNITS // len(self.products)
                self._modulate(modulated + unit * self.unit, unit, after=sums)

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

    def _modulate_chunk(self, column: Any) -> None:
        lax.fori_loop(0, UNITS, lambda unit, _: self._modulate(column + unit * self.unit), None)

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
        real = self.refs["real"][0] - self.strip * self.sizes.width
        return row < (real - column) * self.sizes.held

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

    def _in_last_strip(self, work: Callable[[], None]) -> None:
        if self.sizes.strips == 1:
            work()
        else:
            pl.when(self.strip == self.sizes.strips - 1)(work)

    def _clear_beyond(self) -> None:
        """Zeros right of the picture's last column."""
        sizes = self.sizes
        at = pl.ds((sizes.last_columns + sizes.chunk) * sizes.words, sizes.words)
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


def of_grid(place: tuple[Any, ...]) -> tuple[Any, Any, Any]:
    """Video, strip and step of a place in the grid, whose second axis is left out for a single strip."""
    return place if len(place) == 3 else (place[0], 0, place[1])


def _from_left(column: Any) -> Any:
    """A column, or the first where it is before that."""
    return lax.max(column, 0) if isinstance(column, jax.Array) else max(column, 0)
