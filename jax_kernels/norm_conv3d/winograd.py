"""A step by Winograd's minimal filtering along time: 7 products instead of 12, or 4 instead of 6.

`transforms` has the transforms, and `step` the terms. A tile is half of a pixel's frames, which are filtered
together; its transform has several components, each with products of its own. On axis 0 of a product's inputs
and sums are both tiles of each pixel. A word holds one component of both tiles of a pixel.

- Activated frames, rounded as a cache keeps them, are transformed in float32 and rounded for the products;
  so are the taps, outside of the kernel. Products are summed and transformed back in float32.
- Rows of pixels are in VMEM as words, one component after the other. A shift by a column is a shift by one
  word, so that products contract the taps of columns and of rows.
- With 128 output channels a product gives two results, to fill a matrix unit that is 256 wide: two columns of
  the outer rows, or both rows of the inner ones. With more channels both rows are multiplied by one matrix.
- The sums of a chunk are kept until the next one is multiplied, and transformed back meanwhile.
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


def tap(
    transformed: Float[Array, "components 3 3 I O"],
    row: int,
    shift: int,
    result_row: int,
    result_column: int,
) -> Array:
    """Return the weights (components, I, O) by which one input of a `Product` counts in one of its results.

    They are zeros where no tap connects the two. A result right of the input's column takes only the
    unshifted input, by the left tap; its other taps take the inputs of its own column.

    Args:
        transformed: a kernel whose taps of time are combined to components (`transformed_taps`).
        row: row of the input, 0 to 3; row 0 is above the block of results.
        shift: number of columns that the input is shifted by.
        result_row: row of the result in the block, 0 or 1.
        result_column: 0 for a result in the unshifted input's column, 1 for one in the column right of it.
    """
    row_tap, column_tap = row - result_row, shift - result_column + 1
    connected = 0 <= row_tap < TAPS and 0 <= column_tap < TAPS and (result_column == 0 or shift == 0)
    return transformed[:, row_tap, column_tap] if connected else jnp.zeros_like(transformed[:, 0, 0])


class WinogradStep(ConvStep):
    """A step that multiplies transformed frames."""

    def __init__(self, sizes: ConvSizes, weights: tuple[Any, ...], refs: dict[str, Any]):
        """Choose the slots of buffers that this step's products load, and the slots that its moves store to.

        The buffers "lower" and "upper" have the lower and the upper rows of blocks: two rows of pixels each.
        `self.rows` has (buffer, slot) for each of the four input rows, from top to bottom. `self.moved` has
        (buffer, slot) for the upper and the lower row that are moved from the buffer "stage", where the
        previous grid step stored them.

        Args:
            sizes: the sizes that the kernel is compiled for.
            weights: references to the matrices of each product.
            refs: references to operands, results and scratch buffers, by name.
        """
        super().__init__(sizes, weights, refs)
        self.transform = TRANSFORMS[sizes.tile]
        step = self.step
        # "lower" has three slots, "upper" two; each step loads from the next ones.
        above = "lower", jax.lax.rem(step, 3)  # of the block above the results
        upper = "upper", jax.lax.rem(step, 2)
        lower = "lower", jax.lax.rem(step + 1, 3)
        below = "upper", jax.lax.rem(step + 1, 2)  # of the block below the results
        self.rows = above, upper, lower, below
        # The moved block is the one below the results. Its upper row is an input, and moved before products
        # load it; its lower row gets the third slot, which no product of this step loads.
        self.moved = below, ("lower", jax.lax.rem(step + 2, 3))

    def _padding(self) -> dict[str, list[Any]]:
        """Return references to the convolution's padding in buffers, by its place.

        The buffer "stage" has the block (two rows) that the previous grid step modulated, "upper" and "lower"
        have the blocks' upper and lower rows as products load them. Axes: slot (in "stage" row of the block),
        component, part (128 channels), column. Beside a strip (columns that the grid computes together) the
        padding is `MARGIN` columns wide.
        """
        above_name, above_slot = self.rows[0]  # the input row above the block of results
        # Of each buffer, the first column of the padding left of the strip, and of the padding right of it.
        sides = itertools.product(("stage", "upper", "lower"), (0, MARGIN + self.sizes.width))
        return {
            "beside": [self.refs[name].at[:, :, :, pl.ds(start, MARGIN)] for name, start in sides],
            "above": [self.refs[above_name].at[above_slot]],
            "below": [self.refs["stage"].at[0]],  # the upper row of the block below
            # A single column: products of the frame's last column see no further one.
            "right": [self.refs["stage"].at[:, :, :, pl.ds(MARGIN + self.sizes.last_columns, 1)]],
        }

    def _convolve(self) -> None:
        """Multiply a strip's chunks; between products, modulate columns and finish the previous chunk.

        A strip is the columns that the grid computes together, a chunk the columns of one matrix product. To
        modulate is to apply the norm's scale and shift, then SiLU. The last chunk is finished at the end.
        """
        sizes = self.sizes
        # A product loads a column right of its chunk: so columns are moved to where it loads them `MARGIN`
        # columns ahead.
        self._move(0, MARGIN)
        # These `TILES` entries of the buffer "shifted" are what a chunk's last column adds to the next chunk.
        # Nothing is added to the first chunk.
        if "shifted" in self.refs:
            fill_zeros([self.refs["shifted"].at[:, :, pl.ds(sizes.chunk * TILES, TILES)]])

        def multiply_chunk(index: Array, carry: None) -> None:
            """Multiply one chunk in turns: passes for a share of the output channels each."""
            column = index * sizes.chunk
            self._move(column + MARGIN, sizes.chunk)
            jax.lax.fori_loop(0, sizes.turns, lambda turn, _: self._multiply_turn(turn, column), None)

        jax.lax.fori_loop(0, sizes.chunks, multiply_chunk, None)
        last_chunk = sizes.width - sizes.chunk  # its first column
        # A unit is the columns that are finished together.
        jax.lax.fori_loop(0, sizes.units, lambda unit, _: self._finish(last_chunk + unit * sizes.unit), None)

    def _multiply_turn(self, turn: Any, column: Any) -> None:
        """Compute the products of a chunk for a share of the output channels, and other work between them.

        A chunk is the columns that one matrix product covers. Its tiles, halves of a pixel's frames, are
        transformed to components, each with products of its own. The other work modulates a share of the
        chunk's columns, for a later step, and finishes a share of the results of the previous chunk.

        Args:
            turn: index of the share.
            column: the chunk's first column.
        """
        sizes = self.sizes
        work = self._other_work(turn, column)  # pieces: functions to call in this order
        pieces, products = len(work), sizes.components * len(self.weights)  # how many there are in all
        products_left = products
        pairs = list(zip(sizes.products, self.weights, strict=True))  # each product with its matrices
        for component in range(sizes.components):
            # Adjacent products that contribute to the same results are a group: their sums are added.
            for results, group in itertools.groupby(pairs, lambda pair: pair[0].results):
                sums: Any = None
                for product, weights in group:
                    product_sums = self._multiplied(component, product.inputs, weights, turn, column)
                    sums = product_sums if sums is None else sums + product_sums
                    products_left -= 1
                    # Other work keeps pace: pieces are done until the fraction of them that is left is at
                    # most that of the products. A piece waits for these sums, so that it overlaps with the
                    # next product.
                    while len(work) / pieces > products_left / products:
                        work.pop(0)(after=sums)
                self._store_components(turn, component, results, sums, column)

    def _other_work(self, turn: Any, column: Any) -> list[Callable[..., None]]:
        """Return the work of a turn besides its products, in pieces to run between them.

        A turn is a pass over a chunk's products for a share of the output channels. A piece is a function of
        `after`, the sums of the product to wait for. It modulates a unit (a few columns) of the chunk that
        begins at `column`, or finishes a unit of the previous chunk. Each turn has equally many units.
        """
        sizes = self.sizes
        turn_units = sizes.units // sizes.turns
        work = []
        for unit in range(turn_units):
            unit_column = column + (turn * turn_units + unit) * sizes.unit  # its first
            work += [
                partial(self._modulate, unit_column, unit),
                partial(self._finish, unit_column - sizes.chunk, unit),
            ]
        return work

    def _multiplied(
        self, component: int, inputs: list[tuple[int, int]], weights: Any, turn: Any, column: Any
    ) -> Array:
        """Return the sums of one matrix product, float32.

        Args:
            component: index of the component of Winograd's transform.
            inputs: (row, number of columns that the row is shifted by) of each of the product's inputs.
            weights: reference to the product's matrices, one for each turn and component.
            turn: index of the share of the output channels.
            column: first column of the chunk, the columns that the product covers.
        """
        chunks = [
            self._input(component, row, shift, part, column)
            for row, shift in inputs
            for part in range(self.sizes.parts)
        ]
        return jnp.dot(
            jnp.concatenate(chunks, axis=1), weights[turn, component], preferred_element_type=jnp.float32
        )

    def _input(self, component: int, row: int, shift: int, part: int, column: Any) -> Array:
        """Return one input of a product: one component of a chunk of columns of an input row.

        If one matrix serves both rows of results (`rows_together`), the chunk of the row below `row` follows.

        Args:
            component: index of the component of the transformed frames.
            row: index of the input row, from 0 (above the block of results) to 3 (below it).
            shift: the columns begin `shift` columns after `column`.
            part: index of 128 input channels.
            column: the chunk's first column.

        Returns:
            (columns times tiles, 128): the two tiles of a pixel, halves of its frames, are neighbours.
        """
        sizes = self.sizes
        columns = self._word_columns(column, sizes.chunk, shift)
        rows = self.rows[row : row + (ROWS if sizes.rows_together else 1)]  # (buffer, slot) of each
        # A word is two bfloat16 numbers: the component of each of a pixel's two tiles.
        words = jnp.concatenate([self.refs[name][slot, component, part, columns] for name, slot in rows])
        return pltpu.bitcast(words, jnp.bfloat16)

    def _store_components(
        self, turn: Any, component: int, results: list[tuple[int, int]], sums: Array, column: Any
    ) -> None:
        """Store a product's sums as a component of the results, or add them to what is stored.

        A tile is half of a pixel's frames. The buffer "components" has sums for each component of a tile.

        Args:
            turn: index of the share of the output channels.
            component: index of the component of Winograd's transform.
            results: (row, column) of each result in the sums; column 0 is the input's, 1 the one right of it.
                Not used with `rows_together`.
            sums: float32 (tiles of the chunk's pixels, channels), 128 channels for each result. With
                `rows_together`: row 0's tiles, then row 1's, and 128 channels for each part of the turn.
            column: first column of the chunk, the columns that the product covers.
        """
        sizes, refs = self.sizes, self.refs
        count = sizes.chunk * TILES  # tiles in a row of the chunk
        at = self._entries(column, sizes.chunk, TILES, before=sizes.chunk)
        if sizes.rows_together:
            parts = self.result_parts // sizes.turns  # of a turn
            for row, part in itertools.product(range(ROWS), range(parts)):
                row_sums = sums[row * count : (row + 1) * count, lanes_of(part)]
                refs["components"][component, row, turn * parts + part, at] = row_sums
            return
        # The inputs are either one row, above or below the block, with two results in one row of the block;
        # or the block's rows, with a result in each of them.
        first_row, second_row = (row for row, _ in results)
        # Here there are 128 output channels: the results have a single part, 0.
        for index, (row, result_column) in enumerate(results):
            result_sums = sums[:, lanes_of(index)]
            if result_column == 1:
                # Sums for the columns right of the inputs' columns, so stored one column (`TILES` entries)
                # later. Before them goes what the previous chunk's last column, still stored, adds to this
                # chunk's first.
                shifted = refs["shifted"].at[component, row]
                shifted[pl.ds(0, TILES)] = shifted[pl.ds(count, TILES)]
                shifted[pl.ds(TILES, count)] = result_sums
                component_sums = refs["components"].at[component, row, 0]
                component_sums[at] = component_sums[at] + shifted[pl.ds(0, count)]
            elif first_row == second_row:  # these products come first: they set the sums
                refs["components"][component, row, 0, at] = result_sums
            else:
                component_sums = refs["components"].at[component, row, 0]
                component_sums[at] = component_sums[at] + result_sums

    def _move(self, column: Any, count: int) -> None:
        """Move `count` columns, from `column` on, from the buffer "stage" to the buffers that products load.

        They are columns of the block (two rows) that the previous grid step modulated.
        """
        at = self._word_columns(column, count)
        # The buffer, and the slot in it, that each of the block's two rows is moved to.
        for row, (name, slot) in enumerate(self.moved):
            self.refs[name][slot, :, :, at] = self.refs["stage"][row, :, :, at]

    def _store_activated(
        self,
        row: int,
        part: int,
        slot: int,
        column: Any,
        x: Array,
        before: Any | None,
    ) -> Array:
        """Store the transform of activated frames of a few columns (a unit), and of the two frames before.

        It is stored in the buffer "stage", from which the next grid step moves it. Winograd's filtering
        transforms tiles, halves of a pixel's frames, to components.

        Args:
            row, part: index of the row in the block of two rows, and of the 128 channels.
            slot: the unit's index in the buffer "pixels", which has a slot for each unit of a chunk.
            column: the unit's first column.
            x: the activated frames, (columns times frames, 128): the frames of a pixel are neighbours.
            before: reference to the words of the two frames before `x`; a word is two bfloat16 frames of a
                pixel and channel. None at a video's start, where the first frame of `x` takes their place,
                twice.

        Returns:
            The words of the last two frames.
        """
        sizes = self.sizes
        # Words are stored to be loaded by strides: for each word of a pixel, that word of all pixels.
        pixels = self.refs["pixels"].at[slot, row, part]
        pixels[...] = pltpu.bitcast(x, jnp.int32)
        words = [pixels[pl.ds(index, sizes.unit, stride=sizes.words), :] for index in range(sizes.words)]
        words_before = repeat_earlier_frame(words[0]) if before is None else before[...]
        # Each frame of all pixels, from the two before `x` on; then the components of each of the two tiles.
        frames = [frame for word in (words_before, *words) for frame in _unpacked(word)]
        earlier, later = (
            self.transform.inputs(frames[start : start + sizes.tile + TAPS - 1]) for start in (0, sizes.tile)
        )
        at = self._word_columns(column, sizes.unit)
        for component, of_both_tiles in enumerate(zip(earlier, later, strict=True)):
            self.refs["stage"][row, component, part, at] = _packed(*of_both_tiles)
        return words[-1]

    def _finish(self, column: Any, slot: int = 0, after: Array | None = None) -> None:
        """Transform the sums of a unit (a few columns) back to frames, and write these results.

        Args:
            column: the unit's first column.
            slot: the unit's index in the buffer "frames", which has a slot for each unit of a chunk.
            after: sums of a product that the work waits for, or None.
        """
        self._write_results(column, self.sizes.unit, partial(self._frames, column, slot), after)

    def _frames(self, column: Any, slot: int, row: int, part: int) -> Array:
        """Transform a unit's components back to frames; return them with edges added.

        A unit is a few columns, a tile half of a pixel's frames. A tile's components are the products' sums,
        before they are transformed back. Edges are what the columns outside the strip add to it; a strip is
        the columns that the grid computes together.

        Args:
            column: the first of the unit's columns.
            slot: the unit's index in the buffer "frames", which has a slot for each unit of a chunk.
            row, part: index of the row in the block of two rows, and of the 128 output channels.

        Returns:
            (columns times frames, 128): the frames of a pixel are neighbours.
        """
        sizes = self.sizes
        tiles_at = self._entries(column, sizes.unit, TILES, before=sizes.chunk)
        components = [
            self.refs["components"][component, row, part, tiles_at] for component in range(sizes.components)
        ]
        frames = self.refs["frames"].at[slot, row, part]
        # The transform returns each frame of all tiles; the tiles of a pixel follow each other.
        for index, frame_of_tiles in enumerate(self.transform.results(components)):
            frames[pl.ds(index, sizes.unit * TILES, stride=sizes.tile), :] = frame_of_tiles
        if "edges" in self.refs:
            self._add_edges(frames, column, row, part)
        return frames[...]

    def _add_edges(self, frames: Any, column: Any, row: int, part: int) -> None:
        """Add the edges to the results of the strip's first and last column.

        A strip is columns that the grid computes together. An edge is what the columns outside the strip add
        to its first or to its last column.

        Args:
            frames: reference to the results of a unit (a few columns): (columns times frames, 128), where the
                frames of a pixel are neighbours.
            column: the unit's first column, counted from the strip's first.
            row, part: index of the row in the block of two rows, and of the part: 128 output channels.
        """
        sizes, count = self.sizes, self.sizes.input_frames  # frames of a pixel
        for side, edge_column in enumerate((0, self._last_column())):
            # `column` is traced: to a unit without the edge's column, zeros are added.
            inside = (edge_column >= column) & (edge_column < column + sizes.unit)
            at = self._entries(edge_column % sizes.unit, 1, count)  # counted from the unit's first column
            # "edges" has one video (index 0): the frames of the left edge, then those of the right edge.
            edge = self.refs["edges"][0, row, side * count : (side + 1) * count, lanes_of(part)]
            frames[at, :] = frames[at, :] + jnp.where(inside, edge, 0.0)

    def _word_columns(self, column: Any, count: int, shift: int = 0) -> Any:
        """Return the slice of `count` columns, from `column + shift` on, in a buffer of transformed frames.

        The buffers "stage", "upper" and "lower" have one word of each column, and begin with `MARGIN` columns
        of padding. `column` is a multiple of 8, the sublanes of a register.
        """
        start = column + MARGIN
        if isinstance(start, jax.Array):  # traced: the compiler needs to know that it is aligned
            start = pl.multiple_of(start, SUBLANES)
        return pl.ds(start + shift, count)


def _unpacked(words: Array) -> tuple[Array, Array]:
    """Return the two bfloat16 numbers of each word as float32: the low 16 bits, then the high ones.

    A bfloat16 is the high half of a float32, whose low half is zeros: -(2**16) keeps the high 16 bits.
    """
    return pltpu.bitcast(words << 16, jnp.float32), pltpu.bitcast(words & -(2**16), jnp.float32)


def _packed(low: Array, high: Array) -> Array:
    """Pack two arrays, rounded to bfloat16, into the low and the high 16 bits of words."""
    return pltpu.bitcast(pltpu.pack_elementwise([low, high], packed_dtype=jnp.bfloat16), jnp.int32)
