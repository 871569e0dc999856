"""A step by direct convolution, which multiplies by every tap.

- Modulated rows are kept as words, in three copies for the three taps of time: as they are, shifted by one
  frame (half a word) and shifted by two frames (a word).
- A product contracts the taps of rows and of time. The taps of columns are added in the buffer "sums", where
  eight frames of a pixel fill a register, so that a shift by a column costs nothing. Two column taps of 128
  output channels fill a matrix unit that is 256 wide.
- A video's first frame is multiplied as two equal frames: its words hold it twice, and every second sum is a
  result.
- The buffer "ring" has a slot for the block of results and one for the block above it. The slots swap roles
  at each grid step. As soon as a chunk of the old block is multiplied, the same columns of the block below
  replace it. Axes of the ring: slot, tap of time, row of the block, part, word.
- A step stores columns left of those that it still loads, so buffers are used again behind the products.
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from jax_kernels.common.tiles import duplicated_in_words, largest_divisor
from jax_kernels.norm_conv3d.sizes import ROWS, TAPS, UNITS, ConvSizes
from jax_kernels.norm_conv3d.step import ConvStep, fill_zeros, lanes_of, repeat_earlier_frame

UNROLLED = 9
"""Most products in a loop's body.

With 18 of them 128 to 128 channels of 8 x 480 x 720 take 3.69 ms, and 7.5 s to compile; with 9, 3.85 and 3.1;
with 6, 4.00 and 2.2.
"""


def tap(
    kernel: Float[Array, "3 3 3 I O"], row: int, time_tap: int, result_row: int, column_tap: int
) -> Array:
    """Return the weights (I, O) between an input (row, time tap) and a result (row, column tap), or zeros."""
    row_tap = row - result_row
    connected = 0 <= row_tap < TAPS
    return kernel[time_tap, row_tap, column_tap] if connected else jnp.zeros_like(kernel[0, 0, 0])


class DirectStep(ConvStep):
    """A step that multiplies by every tap; `new` and `old` are the ring's slots of its two blocks."""

    def __init__(self, sizes: ConvSizes, weights: tuple[Any, ...], refs: dict[str, Any]):
        super().__init__(sizes, weights, refs)
        # The slots swap roles at each step of the grid.
        self.old, self.new = jax.lax.rem(self.step + 1, 2), jax.lax.rem(self.step, 2)

    def _padding(self) -> dict[str, list[Any]]:
        sizes, stage = self.sizes, self.refs["stage"]
        is_incomplete = sizes.width > sizes.last_columns  # the last chunk reaches beyond the frame
        # The words of the column right of the frame's last one.
        right = pl.ds((sizes.last_columns + sizes.chunk) * sizes.words, sizes.words)
        return {
            "beside": [],  # no product loads columns beside a strip
            "above": [self.refs["ring"].at[self.old, :, 1]],  # the lower row of the block above
            "below": [stage.at[:, 0]],  # the upper row of the block below
            # The buffer ends with the last chunk: if that is complete, it has no column right of the frame.
            "right": [stage.at[:, :, part, right] for part in range(sizes.parts) if is_incomplete],
        }

    def _convolve(self) -> None:
        sizes = self.sizes
        chunk, chunks = sizes.chunk, sizes.chunks
        self._begin_left()
        # The chunks of a loop's body: with at most `UNROLLED` products it compiles in seconds.
        together = largest_divisor(chunks, UNROLLED // len(self.weights))

        def multiply_chunks(index: Array, carry: None) -> None:
            for offset in range(together):
                column = (index * together + offset) * chunk
                self._multiply(column)  # also modulates the chunk left of it
                self._move(column, chunk)
                self._finish(column - chunk)  # left of column 0: no results, overwritten later

        jax.lax.fori_loop(0, chunks // together, multiply_chunks, None)
        if "edges" in self.refs:
            self._end_right()
        # The last chunk, which is left of no other.
        self._finish(sizes.width - chunk)
        self._modulate_chunk(sizes.width - chunk)

    def _begin_left(self) -> None:
        """Set the sums of a strip's first column, which no product sets, to the left edge or to zeros."""
        frames, refs = self.sizes.frames, self.refs
        # The entries of column 0.
        first = pl.ds(self.sizes.chunk * frames, frames)
        if "edges" not in refs:
            fill_zeros([refs["sums"].at[:, :, first]])
            return
        for row, part in itertools.product(range(ROWS), range(self.result_parts)):
            # "edges" has one video (index 0): the frames of the left edge, then those of the right edge.
            refs["sums"][row, part, first] = refs["edges"][0, row, :frames, lanes_of(part)]

    def _end_right(self) -> None:
        frames, refs = self.sizes.frames, self.refs
        last = self._entries(self._last_column(), 1, frames, before=self.sizes.chunk)
        for row, part in itertools.product(range(ROWS), range(self.result_parts)):
            sums = refs["sums"].at[row, part]
            sums[last] = sums[last] + refs["edges"][0, row, frames : 2 * frames, lanes_of(part)]

    def _multiply(self, column: Any) -> None:
        """Compute the products of the chunk at `column`, and modulate the chunk left of it."""
        previous, turns = column - self.sizes.chunk, self.sizes.turns
        if turns == 1:  # one piece of code, in which the compiler overlaps both
            self._multiply_turn(0, column, modulated=previous)
        else:
            self._modulate_chunk(previous)
            jax.lax.fori_loop(0, turns, lambda turn, _: self._multiply_turn(turn, column), None)

    def _multiply_turn(self, turn: Any, column: Any, modulated: Any = None) -> None:
        """Compute a chunk's products for one turn; meanwhile modulate the chunk at `modulated`, if any."""
        sizes = self.sizes
        for index, (product, weights) in enumerate(zip(sizes.products, self.weights, strict=True)):
            inputs = [
                self._input(row, time_tap, part, column)
                for row, time_tap in product.inputs
                for part in range(sizes.parts)
            ]
            sums = jnp.dot(jnp.concatenate(inputs, axis=1), weights[turn], preferred_element_type=jnp.float32)
            self._add_sums(turn, product.results, sums, column)
            # The `UNITS` units of the chunk to modulate are spread evenly over the products.
            if modulated is not None and index * UNITS % len(self.weights) == 0:
                unit = index * UNITS // len(self.weights)
                self._modulate(modulated + unit * sizes.unit, unit, after=sums)

    def _add_sums(self, turn: Any, results: list[tuple[int, int]], sums: Array, column: Any) -> None:
        """Add a product's sums to the buffer "sums", each at its result's columns; column tap 0 sets them."""
        sizes, refs = self.sizes, self.refs
        turn_parts = self.result_parts // sizes.turns  # parts of a turn
        for result, (row, column_tap) in enumerate(results):
            # By tap 0 a column counts in the result on its right, by tap 1 in its own, by tap 2 in the result
            # on its left.
            at = self._entries(column, sizes.chunk, sizes.frames, before=sizes.chunk, shift=1 - column_tap)
            for part in range(turn_parts):
                part_sums = sums[:, lanes_of(result * turn_parts + part)]
                out_part = turn * turn_parts + part  # its index in all output channels
                if column_tap:  # tap 0, whose products come first, sets the sums
                    part_sums = part_sums + refs["sums"][row, out_part, at]
                refs["sums"][row, out_part, at] = part_sums

    def _input(self, row: int, time_tap: int, part: int, column: Any) -> Array:
        """Return an input of a product, (entries, 128): a chunk of one row, as a tap of time sees it."""
        sizes = self.sizes
        if row == ROWS + 1:  # the row below is not in the ring yet, but in the upper row (0) of the stage
            at = self._entries(column, sizes.chunk, sizes.words, before=sizes.chunk)
            words = self.refs["stage"][time_tap, 0, part, at]
        else:  # the ring has the block of results in its slot `new`, and the block above in `old`
            slot, block_row = (self.old, 1) if row == 0 else (self.new, row - 1)
            at = self._entries(column, sizes.chunk, sizes.words)
            words = self.refs["ring"][slot, time_tap, block_row, part, at]
        return pltpu.bitcast(words, jnp.bfloat16)

    def _move(self, column: Any, count: int) -> None:
        """Move `count` columns from the stage to the ring, where they replace those of the old block."""
        ring_at = self._entries(column, count, self.sizes.words)
        stage_at = self._entries(column, count, self.sizes.words, before=self.sizes.chunk)
        # The stage has the axes of the ring without that of slots.
        self.refs["ring"][self.old, :, :, :, ring_at] = self.refs["stage"][:, :, :, stage_at]

    def _modulate_chunk(self, column: Any) -> None:
        jax.lax.fori_loop(0, UNITS, lambda unit, _: self._modulate(column + unit * self.sizes.unit), None)

    def _store_activated(
        self,
        row: int,
        part: int,
        slot: int,
        column: Any,
        x: Array,
        before: Any | None,
    ) -> Array:
        sizes, words = self.sizes, self.sizes.words  # words of a pixel
        unit_at = self._entries(column, sizes.unit, words, before=sizes.chunk)
        x_words = pltpu.bitcast(x, jnp.int32) if sizes.input_frames > 1 else duplicated_in_words(x)
        # The frames under the three taps of time: those two frames before `x`, one frame before it, and `x`.
        two_before, one_before, same = (
            self.refs["stage"].at[time_tap, row, part] for time_tap in range(TAPS)
        )
        firsts = pl.ds(unit_at.start, sizes.unit, stride=words)  # the first word of each pixel
        same[unit_at, :] = x_words
        if words > 1:  # two frames are one word: all words move by one; each pixel's first is replaced below
            two_before[pl.ds(unit_at.start + 1, sizes.unit * words - 1), :] = x_words[:-1]
        two_before[firsts, :] = repeat_earlier_frame(same[firsts, :]) if before is None else before[...]
        # The later frame of the word before this one, then the earlier frame of this word.
        later_of_word_before = jax.lax.shift_right_logical(two_before[unit_at, :], 16)
        one_before[unit_at, :] = later_of_word_before | (x_words << 16)
        return same[pl.ds(unit_at.start + words - 1, sizes.unit, stride=words), :]

    def _finish(self, column: Any) -> None:
        sizes = self.sizes
        sums_at = self._entries(column, sizes.chunk, sizes.frames, before=sizes.chunk)
        if sizes.input_frames == 1:  # multiplied as two equal frames: every second sum is a result
            sums_at = pl.ds(sums_at.start, sizes.chunk, stride=sizes.frames)
        self._write_results(
            column, sizes.chunk, lambda row, part: self.refs["sums"].at[row, part][sums_at, :]
        )
