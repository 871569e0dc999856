"""A grid step of the Pallas kernel by Winograd's minimal filtering along time.

For a *tile* of four frames it multiplies 7 *components* (`common.transforms`), where direct convolution has
12 products; for a tile of two frames 4, instead of 6. Each component has its own matrix products. A *word*
holds one component of a pixel's two (`TILES`) tiles, in one channel.

A step finishes a *block* of two rows of results, and meanwhile modulates another block into the *stage*. The
columns are those of one *strip*: a matrix product covers a *chunk* of them, and a *unit* of a chunk is
modulated at a time. A *part* is 128 channels, a *share* the output channels that a chunk's products compute
together. An *entry* is a frame, tile or word of a column. *Edges* are what the columns beside a strip add to
its first and last column. `step` has the other terms.

- Activated frames, rounded as a cache keeps them, are transformed in float32 and rounded for the products; so
  are the taps, outside of the kernel. Products are summed and transformed back in float32.
- Rows of pixels are in VMEM as words, one component after the other. A shift by a column is a shift by one
  word, so products contract the taps of columns and of rows.
- With 128 output channels a product gives two results, to fill a matrix unit that is 256 wide: two columns of
  the outer rows, or both rows of the inner ones. With more channels both rows are multiplied by one matrix.
- The buffer "components" keeps the sums of a chunk while the next one is multiplied. In this time they are
  transformed back to frames. The first chunk too needs one before it, so the buffer begins a chunk left of
  column 0. `left_columns` is that chunk's width.
- The buffers "lower" and "upper" hold the lower and the upper rows of blocks as products load them. They and
  the stage have one word of each column, between `MARGIN` columns of padding. Axes: slot (row in the stage),
  component, part, column.
"""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from jax_kernels.common.transforms import TRANSFORMS
from jax_kernels.norm_conv3d.sizes import MARGIN, ROWS, SUBLANES, TAPS, TILES, ConvSizes
from jax_kernels.norm_conv3d.step import ConvStep, fill_zeros, lanes_of, repeat_earlier_frame


def weights_between(
    transformed: Float[Array, "components 3 3 I O"],
    row: int,
    shift: int,
    result_row: int,
    result_column: int,
) -> Array:
    """Return the weights (components, I, O) from an input to a result; zeros if it does not take that."""
    # Input row 0 is above the results: for result row 0 it is under row tap 0. An input is the chunk, shifted
    # by -1, 0 or 1 columns, or only by 0 or 1 if results are in two columns. A result in column 0 is in the
    # chunk's columns. One in column 1 is a column to the right of them, and takes only the unshifted input,
    # by its left tap. `_store_components` adds it to the same pixel's result in column 0, which has the other
    # two taps.
    row_tap, column_tap = row - result_row, shift - result_column + 1
    connected = 0 <= row_tap < TAPS and 0 <= column_tap < TAPS and (result_column == 0 or shift == 0)
    return transformed[:, row_tap, column_tap] if connected else jnp.zeros_like(transformed[:, 0, 0])


class WinogradStep(ConvStep):
    """A step that multiplies transformed frames.

    Attributes:
        transform: the transform for tiles of this length.
        rows: (buffer, slot) of each of the four input rows, from the row above the block to that below it.
        moved: (buffer, slot) that the upper and the lower row of the stage are moved to.
    """

    def __init__(self, sizes: ConvSizes, weights: tuple[Any, ...], memory: dict[str, Any]):
        super().__init__(sizes, weights, memory)
        self.transform = TRANSFORMS[sizes.tile]
        step = self.step
        # Each step moves a new lower row to the next of the three slots of "lower", and a new upper row to
        # the other one of the two slots of "upper".
        above = "lower", jax.lax.rem(step, 3)  # the lower row of the block above the results
        upper = "upper", jax.lax.rem(step, 2)  # the two rows of the block of results
        lower = "lower", jax.lax.rem(step + 1, 3)
        below = "upper", jax.lax.rem(step + 1, 2)  # the upper row of the block below the results
        self.rows = above, upper, lower, below
        # The stage has the block below the results. Its upper row is an input of this step: a chunk of it is
        # moved before products load that chunk. Its lower row is no input yet: it goes to the third slot.
        self.moved = below, ("lower", jax.lax.rem(step + 2, 3))

    def _padding(self) -> dict[str, list[Any]]:
        """Return references to the rows and columns around a strip or frame that are set to zeros."""
        above_name, above_slot = self.rows[0]  # the input row above the block of results
        # Each buffer with the first column of its padding on the left, and with that on the right.
        sides = itertools.product(("stage", "upper", "lower"), (0, MARGIN + self.sizes.strip_columns))
        return {
            "beside": [self.memory[name].at[:, :, :, pl.ds(start, MARGIN)] for name, start in sides],
            "above": [self.memory[above_name].at[above_slot]],
            "below": [self.memory["stage"].at[0]],  # the upper row of the block below
            # A single column, as products of the frame's last column see only one column right of it.
            "right": [self.memory["stage"].at[:, :, :, pl.ds(MARGIN + self.sizes.last_strip_columns, 1)]],
        }

    def _convolve(self) -> None:
        """Compute and write a block of results, chunk by chunk; meanwhile modulate the next block."""
        sizes = self.sizes
        # A product loads one column right of its chunk. So columns are moved before they are multiplied, and
        # `MARGIN` columns ahead: a slice that begins at such a multiple of 8 is aligned.
        self._move(0, MARGIN)
        # From entry `chunk_columns * TILES` on, the buffer "shifted" has what the last column of a chunk adds
        # to the first column of the next one (`_store_components`). No chunk is before the first one.
        if "shifted" in self.memory:
            fill_zeros([self.memory["shifted"].at[:, :, pl.ds(sizes.chunk_columns * TILES, TILES)]])

        def multiply_chunk(index: Array, carry: None) -> None:
            column = index * sizes.chunk_columns
            self._move(column + MARGIN, sizes.chunk_columns)
            jax.lax.fori_loop(0, sizes.shares, lambda share, _: self._multiply_share(share, column), None)

        jax.lax.fori_loop(0, sizes.chunks, multiply_chunk, None)
        # A chunk is finished while the next one is multiplied; the last one is finished after all products.
        last_chunk = sizes.strip_columns - sizes.chunk_columns  # its first column
        jax.lax.fori_loop(
            0, sizes.units, lambda unit, _: self._finish(last_chunk + unit * sizes.unit_columns), None
        )

    def _multiply_share(self, share: Any, column: Any) -> None:
        """Compute a chunk's products for one share of the outputs, with other work between the products."""
        sizes = self.sizes
        tasks = self._other_work(share, column)
        task_count = len(tasks)
        product_count = sizes.components * len(self.weights)
        products_left = product_count
        pairs = list(zip(sizes.products, self.weights, strict=True))  # each product with its matrices
        for component in range(sizes.components):
            # Adjacent products that contribute to the same results are a group: their sums are added.
            for results, group in itertools.groupby(pairs, lambda pair: pair[0].results):
                sums: Any = None
                for product, weights in group:
                    product_sums = self._component_product(component, product.inputs, weights, share, column)
                    sums = product_sums if sums is None else sums + product_sums
                    products_left -= 1
                    # Other work keeps pace with the products: the fraction of tasks that is left is at most
                    # the fraction of products that is left. A task waits for these sums, so that it overlaps
                    # with the next product.
                    while len(tasks) / task_count > products_left / product_count:
                        tasks.pop(0)(after=sums)
                self._store_components(share, component, results, sums, column)

    def _other_work(self, share: Any, column: Any) -> list[Callable[..., None]]:
        """Return the work between a share's products: functions of `after`, the sums that they wait for."""
        sizes = self.sizes
        # Each share does an equal number of a chunk's units: it modulates those of the chunk at `column`, and
        # finishes those of the chunk left of it.
        share_units = sizes.units // sizes.shares
        first_columns = (
            column + (share * share_units + unit) * sizes.unit_columns for unit in range(share_units)
        )
        return [
            task
            for unit, first_column in enumerate(first_columns)
            for task in (
                partial(self._modulate, first_column, unit),
                partial(self._finish, first_column - sizes.chunk_columns, unit),
            )
        ]

    def _component_product(
        self, component: int, inputs: list[tuple[int, int]], weights: Any, share: Any, column: Any
    ) -> Array:
        """Return the product of a component's inputs, side by side, with the weights of a share."""
        operands = [
            self._input(component, row, shift, part, column)
            for row, shift in inputs
            for part in range(self.sizes.parts)
        ]
        return jnp.dot(
            jnp.concatenate(operands, axis=1), weights[share, component], preferred_element_type=jnp.float32
        )

    def _input(self, component: int, row: int, shift: int, part: int, column: Any) -> Array:
        """Return a product's input, (entries, 128): a component and part of a chunk at `column + shift`."""
        sizes = self.sizes
        columns = self._word_columns(column, sizes.chunk_columns, shift)
        # With `rows_together` the entries of `row` are followed by those of the row below it.
        rows = self.rows[row : row + (ROWS if sizes.rows_together else 1)]  # (buffer, slot) of each
        # A word becomes two entries: the component in both tiles of a pixel.
        words = [self.memory[name][slot, component, part, columns] for name, slot in rows]
        return pltpu.bitcast(jnp.concatenate(words), jnp.bfloat16)

    def _store_components(
        self, share: Any, component: int, results: list[tuple[int, int]], sums: Array, column: Any
    ) -> None:
        """Store a product's sums as a component of the results, or add them to what is stored."""
        sizes, memory = self.sizes, self.memory
        count = sizes.chunk_columns * TILES  # number of tiles in a row of the chunk
        at = self._entries(column, sizes.chunk_columns, TILES, left_columns=sizes.chunk_columns)
        if sizes.rows_together:
            # The sums have the entries of the upper and then those of the lower row of results, and the
            # channels of a share. All products of a component were added: the sums are complete.
            parts = self.result_parts // sizes.shares  # number of parts of a share
            for row, part in itertools.product(range(ROWS), range(parts)):
                memory["components"][component, row, share * parts + part, at] = sums[
                    row * count : (row + 1) * count, lanes_of(part)
                ]
            return
        # There are 128 output channels, so the results have a single part, 0. The sums have the 128 channels
        # of each of two `results`, side by side. The first products of a component have the row above or
        # below the block as their input: their results are two columns (0 and 1) of one row. The last ones
        # have both rows of the block as inputs: their results are both rows, in column 0.
        first_row, second_row = (row for row, _ in results)
        for index, (row, result_column) in enumerate(results):
            result_sums = sums[:, lanes_of(index)]
            component_sums = memory["components"].at[component, row, 0]
            if result_column == 1:
                # These sums are for the columns right of the inputs' columns. In "shifted" they are stored
                # one column (`TILES` entries) later. Before them comes what the last column of the previous
                # chunk adds to this chunk's first one: until now it was at the end of "shifted". For a row's
                # first chunk `_convolve` has put zeros there.
                shifted = memory["shifted"].at[component, row]
                shifted[pl.ds(0, TILES)] = shifted[pl.ds(count, TILES)]
                shifted[pl.ds(TILES, count)] = result_sums
                component_sums[at] = component_sums[at] + shifted[pl.ds(0, count)]
            elif first_row == second_row:  # the first product of this row sets its sums
                memory["components"][component, row, 0, at] = result_sums
            else:
                component_sums[at] = component_sums[at] + result_sums

    def _move(self, column: Any, count: int) -> None:
        """Move `count` columns, from `column` on, from the stage to the buffers that products load."""
        at = self._word_columns(column, count)
        # For each row of the stage, the buffer and the slot that it is moved to.
        for row, (name, slot) in enumerate(self.moved):
            self.memory[name][slot, :, :, at] = self.memory["stage"][row, :, :, at]

    def _store_activated(
        self,
        row: int,
        part: int,
        slot: int,
        column: Any,
        x: Array,
        past_words: Any | None,
    ) -> Array:
        """Transform a unit's frames `x`, of a row and a part, into the stage; return their last words.

        `past_words` refers to the words of the two frames before `x`; at a video's start it is None.
        """
        sizes = self.sizes
        # The buffer "pixels" rearranges a unit's frames. `slot` is the unit's place in it: units whose work
        # may overlap have different ones.
        # Here a word holds two successive frames of a pixel. The words are stored pixel by pixel, and loaded
        # by strides: first word 0 of all pixels, then word 1, and so on.
        pixels = self.memory["pixels"].at[slot, row, part]
        pixels[...] = pltpu.bitcast(x, jnp.int32)
        words = [
            pixels[pl.ds(index, sizes.unit_columns, stride=sizes.words), :] for index in range(sizes.words)
        ]
        # At a video's start, its first frame stands for the two before it.
        words_before = repeat_earlier_frame(words[0]) if past_words is None else past_words[...]
        # A list of frames, each of all pixels: the two before `x`, then those of `x`. A tile sees its own
        # frames and the two before them. The second tile begins `tile` frames after the first.
        frames = [frame for word in (words_before, *words) for frame in _unpacked(word)]
        first_tile, second_tile = (  # the components of each
            self.transform.inputs(frames[start : start + sizes.tile + TAPS - 1]) for start in (0, sizes.tile)
        )
        at = self._word_columns(column, sizes.unit_columns)
        for component, of_both_tiles in enumerate(zip(first_tile, second_tile, strict=True)):
            # Rounded to bfloat16, two in a word.
            packed = pltpu.pack_elementwise([*of_both_tiles], packed_dtype=jnp.bfloat16)
            self.memory["stage"][row, component, part, at] = pltpu.bitcast(packed, jnp.int32)
        return words[-1]

    def _finish(self, column: Any, slot: int = 0, after: Array | None = None) -> None:
        """Transform a unit's sums back to frames, and write them once the sums `after` are computed."""
        # `slot` is the unit's slot in the buffer "frames": units whose work may overlap have different slots.
        self._write_results(column, self.sizes.unit_columns, partial(self._frames, column, slot), after)

    def _frames(self, column: Any, slot: int, row: int, part: int) -> Array:
        """Return a unit's frames, (entries, 128): its components, transformed back, plus the edges."""
        sizes = self.sizes
        tiles_at = self._entries(column, sizes.unit_columns, TILES, left_columns=sizes.chunk_columns)
        components = [
            self.memory["components"][component, row, part, tiles_at] for component in range(sizes.components)
        ]
        frames = self.memory["frames"].at[slot, row, part]
        # The transform returns a list of frames, each of all tiles. They are stored by strides, so that a
        # pixel's frames are next to each other.
        for index, frame_of_tiles in enumerate(self.transform.results(components)):
            frames[pl.ds(index, sizes.unit_columns * TILES, stride=sizes.tile), :] = frame_of_tiles
        if "edges" in self.memory:
            self._add_edges(frames, column, row, part)
        return frames[...]

    def _add_edges(self, frames: Any, column: Any, row: int, part: int) -> None:
        """Add the edges of the strip's first and last column to a unit's results, the reference `frames`."""
        sizes = self.sizes
        count = sizes.input_frames  # number of results of a pixel
        for side, edge_column in enumerate((0, self._last_column())):  # the left side, then the right one
            # `column` is traced, so there is no `if`: a unit without the edge's column adds zeros.
            inside = (edge_column >= column) & (edge_column < column + sizes.unit_columns)
            # The edge's column, counted from the unit's first one.
            at = self._entries(edge_column % sizes.unit_columns, 1, count)
            # "edges" has one video (index 0): the frames of the left edge, then those of the right edge.
            edge = self.memory["edges"][0, row, side * count : (side + 1) * count, lanes_of(part)]
            frames[at, :] = frames[at, :] + jnp.where(inside, edge, 0.0)

    def _word_columns(self, column: Any, count: int, shift: int = 0) -> Any:
        """Return the slice of the words of `count` columns, from `column + shift` on."""
        # `column` is a multiple of 8, so that without a shift the slice is aligned.
        start = column + MARGIN
        if isinstance(start, jax.Array):  # traced: the compiler needs to know that it is aligned
            start = pl.multiple_of(start, SUBLANES)
        return pl.ds(start + shift, count)


def _unpacked(words: Array) -> tuple[Array, Array]:
    """Return the two bfloat16 numbers of each word as float32: the low 16 bits, then the high ones."""
    # A bfloat16 is the high half of a float32 whose low half is zero.
    return pltpu.bitcast(words << 16, jnp.float32), pltpu.bitcast(words & -(2**16), jnp.float32)
