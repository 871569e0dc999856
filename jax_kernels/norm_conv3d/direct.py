"""A grid step of the Pallas kernel by direct convolution, which multiplies by every tap.

A step finishes a *block* of two rows of results, and meanwhile modulates another block. The columns are those
of one *strip*: a matrix product covers a *chunk* of them, and a *unit* of a chunk is modulated at a time. A
*part* is 128 channels, a *share* the output channels that a chunk's products compute together. A *word* holds
two frames of a pixel and channel, the earlier one in its low half. An *entry* is a frame or word of a column.
*Edges* are what the columns beside a strip add to its first and last column. `step` has the other terms.

- Modulated rows are kept as words, in three copies for the three taps of time: as they are, shifted by one
  frame (half a word) and shifted by two frames (a word).
- A product contracts the taps of rows and of time. The taps of columns are added in the buffer "sums", where
  eight frames of a pixel fill a register, so that a shift by a column costs nothing. Two column taps of 128
  output channels fill a matrix unit that is 256 wide.
- A video's first frame is multiplied as two equal frames: its words hold it twice, and every second sum is a
  result.
- The buffer "stage" has the block below the results, modulated by the step before. This step modulates the
  next block into it, one chunk behind the products. So the stage begins a chunk left of column 0. The buffer
  "sums" does too, because results are also written one chunk behind. `left_columns` is that chunk's width.
- The buffer "ring" has a slot for the block of results and one, `old`, for the block above it. As soon as a
  chunk of the old block is multiplied, the same columns of the stage replace it: the block below is the next
  step's block of results, and the slots swap roles. Axes: slot (not in the stage), tap of time, row of the
  block, part, word.
- Each step stores columns left of those that it still loads, so one set of buffers is enough.
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
"""Most products in a loop's body: more are faster, but compile longer.

For 128 to 128 channels of 8 x 480 x 720, a v6e's schedule takes 3.69 ms with 18 products, and 7.5 s to
compile; with 9 products 3.85 ms and 3.1 s; with 6 products 4.00 ms and 2.2 s.
"""


def weights_between(
    kernel: Float[Array, "3 3 3 I O"], row: int, time_tap: int, result_row: int, column_tap: int
) -> Array:
    """Return the weights (I, O) from an input to a result; zeros if the result does not see that row."""
    row_tap = row - result_row  # input row 0 is above the results: for result row 0 it is under tap 0
    return kernel[time_tap, row_tap, column_tap] if 0 <= row_tap < TAPS else jnp.zeros_like(kernel[0, 0, 0])


class DirectStep(ConvStep):
    """A step that multiplies by every tap.

    Attributes:
        new, old: slots of the buffer "ring" for the block of results and for the block above it.
    """

    def __init__(self, sizes: ConvSizes, weights: tuple[Any, ...], memory: dict[str, Any]):
        super().__init__(sizes, weights, memory)
        # The slots swap roles at each step.
        self.old, self.new = jax.lax.rem(self.step + 1, 2), jax.lax.rem(self.step, 2)

    def _padding(self) -> dict[str, list[Any]]:
        """Return references to the rows and columns around a strip or frame that are set to zeros."""
        sizes, stage = self.sizes, self.memory["stage"]
        # A strip has whole chunks. `last_strip_columns` are those columns of the last strip that are in the
        # frame: if they are fewer, the last chunk reaches beyond the frame.
        is_incomplete = sizes.strip_columns > sizes.last_strip_columns
        # The words of the column right of the frame's last one.
        right = pl.ds((sizes.last_strip_columns + sizes.chunk_columns) * sizes.words, sizes.words)
        return {
            "beside": [],  # no product loads columns beside a strip: edges add what these contribute
            "above": [self.memory["ring"].at[self.old, :, 1]],  # the lower row, 1, of the block above
            "below": [stage.at[:, 0]],  # the upper row, 0, of the block below
            # The stage ends with the last chunk: if that is complete, it has no column right of the frame.
            "right": [stage.at[:, :, part, right] for part in range(sizes.parts) if is_incomplete],
        }

    def _convolve(self) -> None:
        """Compute and write a block of results, chunk by chunk; meanwhile modulate the next block."""
        sizes = self.sizes
        chunk, chunks = sizes.chunk_columns, sizes.chunks
        self._set_sums_of_first_column()  # to the left edge, or to zeros
        # Number of chunks in a loop's body, which has at most `UNROLLED` products; of these each chunk has as
        # many as there are weights.
        together = largest_divisor(chunks, UNROLLED // len(self.weights))

        def multiply_chunks(index: Array, carry: None) -> None:
            for offset in range(together):
                column = (index * together + offset) * chunk
                self._multiply(column)  # also modulates the chunk left of this one
                self._move(column, chunk)
                # This chunk's products complete the sums of the chunk left of it. Left of column 0 nothing is
                # complete: what is written is overwritten later.
                self._finish(column - chunk)

        jax.lax.fori_loop(0, chunks // together, multiply_chunks, None)
        if "edges" in self.memory:  # without edges there are zeros right of the strip, which add nothing
            self._add_right_edge()
        # The loop does this to a chunk when it multiplies the next one; the last chunk has no next one.
        self._finish(sizes.strip_columns - chunk)
        self._modulate_chunk(sizes.strip_columns - chunk)

    def _set_sums_of_first_column(self) -> None:
        """Set the sums of a strip's first column to the left edge, or to zeros without edges."""
        # In all other columns the first product sets the sums: by column tap 0, the pixels of a column set
        # the sums of the column right of it. Left of the first column the strip has no pixels.
        frames, memory = self.sizes.multiplied_frames, self.memory
        # The entries of column 0: the buffer "sums" begins a chunk left of it.
        first = pl.ds(self.sizes.chunk_columns * frames, frames)
        if "edges" not in memory:
            fill_zeros([memory["sums"].at[:, :, first]])
            return
        for row, part in itertools.product(range(ROWS), range(self.result_parts)):
            # "edges" has one video (index 0): the frames of the left edge, then those of the right edge.
            memory["sums"][row, part, first] = memory["edges"][0, row, :frames, lanes_of(part)]

    def _add_right_edge(self) -> None:
        """Add the right edge to the sums of a strip's last column."""
        frames, memory = self.sizes.multiplied_frames, self.memory
        last = self._entries(self._last_column(), 1, frames, left_columns=self.sizes.chunk_columns)
        for row, part in itertools.product(range(ROWS), range(self.result_parts)):
            sums = memory["sums"].at[row, part]
            # "edges" has one video (index 0): the frames of the left edge, then those of the right edge.
            sums[last] = sums[last] + memory["edges"][0, row, frames : 2 * frames, lanes_of(part)]

    def _multiply(self, column: Any) -> None:
        """Compute the products of the chunk at `column`, and modulate the chunk left of it."""
        previous = column - self.sizes.chunk_columns  # the chunk on the left
        shares = self.sizes.shares
        # In straight code the compiler overlaps modulation and products; with a loop of shares it cannot.
        if shares == 1:
            self._multiply_share(0, column, also_modulate=previous)
        else:
            self._modulate_chunk(previous)
            jax.lax.fori_loop(0, shares, lambda share, _: self._multiply_share(share, column), None)

    def _multiply_share(self, share: Any, column: Any, also_modulate: Any = None) -> None:
        """Compute a chunk's products for one share; modulate the chunk at `also_modulate`, if any."""
        sizes = self.sizes
        # A chunk has 3 or 6 products (`direct_products`), so one or two for each of its `UNITS` = 3 units.
        products_per_unit = len(sizes.products) // UNITS
        for index, (product, weights) in enumerate(zip(sizes.products, self.weights, strict=True)):
            inputs = [
                self._input(row, time_tap, part, column)
                for row, time_tap in product.inputs
                for part in range(sizes.parts)
            ]
            sums = jnp.dot(
                jnp.concatenate(inputs, axis=1), weights[share], preferred_element_type=jnp.float32
            )
            self._add_sums(share, product.results, sums, column)
            # The units of the chunk to modulate are spread evenly: one after the first product, and one after
            # every `products_per_unit` products more. The work waits for the sums of a product (`after`), so
            # that it overlaps with the next product, and not all of it with the first one.
            if also_modulate is not None and index % products_per_unit == 0:
                unit = index // products_per_unit
                self._modulate(also_modulate + unit * sizes.unit_columns, unit, after=sums)

    def _add_sums(self, share: Any, results: list[tuple[int, int]], sums: Array, column: Any) -> None:
        """Add a product's sums, side by side for its `results`, to "sums" at the columns of each result."""
        sizes, memory = self.sizes, self.memory
        share_parts = self.result_parts // sizes.shares  # number of parts of a share
        for result, (row, column_tap) in enumerate(results):
            # By column tap 0 an input contributes to the result right of it, by tap 1 to that of its own
            # column, by tap 2 to the result left of it. "sums" begins a chunk left of column 0.
            at = self._entries(
                column,
                sizes.chunk_columns,
                sizes.multiplied_frames,
                left_columns=sizes.chunk_columns,
                shift=1 - column_tap,
            )
            for part in range(share_parts):
                part_sums = sums[:, lanes_of(result * share_parts + part)]
                out_part = share * share_parts + part  # its index in all output channels
                if column_tap:  # tap 0 comes first, and sets the sums instead
                    part_sums = part_sums + memory["sums"][row, out_part, at]
                memory["sums"][row, out_part, at] = part_sums

    def _input(self, row: int, time_tap: int, part: int, column: Any) -> Array:
        """Return an input of a product, (entries, 128): a chunk of one row, as a tap of time sees it."""
        sizes = self.sizes
        # The row below the block is not in the ring yet: it is the upper row, 0, of the stage.
        if row == ROWS + 1:
            at = self._entries(column, sizes.chunk_columns, sizes.words, left_columns=sizes.chunk_columns)
            words = self.memory["stage"][time_tap, 0, part, at]
        else:  # the ring has the block of results in its slot `new`, and the block above in `old`
            slot, block_row = (self.old, 1) if row == 0 else (self.new, row - 1)
            at = self._entries(column, sizes.chunk_columns, sizes.words)
            words = self.memory["ring"][slot, time_tap, block_row, part, at]
        return pltpu.bitcast(words, jnp.bfloat16)

    def _move(self, column: Any, count: int) -> None:
        """Move `count` columns from the stage to the ring, where they replace those of the old block."""
        ring_at = self._entries(column, count, self.sizes.words)
        stage_at = self._entries(column, count, self.sizes.words, left_columns=self.sizes.chunk_columns)
        # The stage has the axes of the ring, but for that of slots.
        self.memory["ring"][self.old, :, :, :, ring_at] = self.memory["stage"][:, :, :, stage_at]

    def _modulate_chunk(self, column: Any) -> None:
        # The iterations of a loop do not overlap, so all units use the buffers of the first one, slot 0.
        jax.lax.fori_loop(
            0, UNITS, lambda unit, _: self._modulate(column + unit * self.sizes.unit_columns), None
        )

    def _store_activated(
        self,
        row: int,
        part: int,
        slot: int,
        column: Any,
        x: Array,
        past_words: Any | None,
    ) -> Array:
        """Store a unit's frames `x` in the stage for each tap of time; return the last word of each pixel."""
        # `slot` is not used: only `WinogradStep` needs a buffer of units here.
        sizes = self.sizes
        words = sizes.words  # number of words of a pixel
        unit_at = self._entries(column, sizes.unit_columns, words, left_columns=sizes.chunk_columns)
        x_words = pltpu.bitcast(x, jnp.int32) if sizes.input_frames > 1 else duplicated_in_words(x)
        # The stage has the frames that each of the three taps of time sees. For a pixel's frames a b c d, and
        # y z before them, the words are (y z) (a b) for the first tap, (z a) (b c) for the second, and (a b)
        # (c d) for the third.
        two_before, one_before, same = (
            self.memory["stage"].at[time_tap, row, part] for time_tap in range(TAPS)
        )
        first_words = pl.ds(unit_at.start, sizes.unit_columns, stride=words)  # the first word of each pixel
        same[unit_at, :] = x_words
        # `two_before` is `same`, moved by a word. A pixel's first word gets the last one of the pixel before,
        # which the word of the two frames before `x` then replaces. At a video's start, `past_words` is None,
        # and both of these frames are the first frame of `x`.
        if words > 1:
            two_before[pl.ds(unit_at.start + 1, sizes.unit_columns * words - 1), :] = x_words[:-1]
        two_before[first_words, :] = (
            repeat_earlier_frame(same[first_words, :]) if past_words is None else past_words[...]
        )
        # A word's later frame is its upper half: it moves to the lower half, before the earlier frame of the
        # same word of `x`.
        later_of_word_before = jax.lax.shift_right_logical(two_before[unit_at, :], 16)
        one_before[unit_at, :] = later_of_word_before | (x_words << 16)
        return same[pl.ds(unit_at.start + words - 1, sizes.unit_columns, stride=words), :]

    def _finish(self, column: Any) -> None:
        """Write the results of the chunk at `column`, whose sums are complete."""
        sizes = self.sizes
        sums_at = self._entries(
            column, sizes.chunk_columns, sizes.multiplied_frames, left_columns=sizes.chunk_columns
        )
        if sizes.input_frames == 1:  # multiplied as two equal frames: every second sum is a result
            sums_at = pl.ds(sums_at.start, sizes.chunk_columns, stride=sizes.multiplied_frames)
        self._write_results(
            column, sizes.chunk_columns, lambda row, part: self.memory["sums"].at[row, part][sums_at, :]
        )
