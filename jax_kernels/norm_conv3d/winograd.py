"""A step by Winograd's minimal filtering along time: 7 products instead of 12, or 4 instead of 6.

`transforms` has the transforms, and `step` the terms. A tile is half of a pixel's frames, which are filtered
together; its transform has several components, each with products of its own. A row of a matrix product is a
component of a tile. A word holds one component of both tiles of a pixel.

- Activated frames, rounded as a cache keeps them, are transformed in float32 and rounded for the products;
  so are the taps, outside of the kernel. Products are summed and transformed back in float32.
- Rows are in VMEM as words, one component after the other. A shift by a column is a shift by a word, so that
  products contract the taps of columns and of rows.
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

from jax_kernels.norm_conv3d.sizes import MARGIN, ROWS, SUBLANES, TAPS, TILES, ConvSizes
from jax_kernels.norm_conv3d.step import ConvStep, fill_zeros, lanes_of, repeat_earlier_frame
from jax_kernels.norm_conv3d.transforms import TRANSFORMS


def tap(
    transformed: Float[Array, "components 3 3 I O"], row: int, shift: int, result_row: int, beside: int
) -> Array:
    """Return the weights (components, I, O) by which one input of a `Product` counts in one of its results.

    They are zeros where no tap connects the two. A result right of the input's column takes only the
    unshifted input, by the left tap; its other taps take the inputs of its own column.

    Args:
        transformed: a kernel whose taps of time are combined to components (`transformed_taps`).
        row, shift: the input: its row, 0 to 3 (the row above the block of results is 0), and the number of
            columns that it is shifted by.
        result_row, beside: the result: its row, 0 or 1, of the block; 1 for the column right of the input's
            own, else 0.
    """
    row_tap, column_tap = row - result_row, shift - beside + 1
    connected = 0 <= row_tap < TAPS and 0 <= column_tap < TAPS and (beside == 0 or shift == 0)
    return transformed[:, row_tap, column_tap] if connected else jnp.zeros_like(transformed[:, 0, 0])


class WinogradStep(ConvStep):
    """A step that multiplies transformed frames."""

    def __init__(self, sizes: ConvSizes, weights: tuple[Any, ...], refs: dict[str, Any]):
        """Choose the slots of memory that this step's products load, and the slots that its moves store to.

        `self.rows` has (name of the memory, slot) of each of the four input rows, from the row above the
        block of results to the row below it; a block is two rows. `self.moved` has (name, slot) for the two
        rows that are moved from the stage, where the previous grid step stored them.

        Args:
            sizes: the sizes that the kernel is compiled for.
            weights: references to the matrices of each product.
            refs: references to operands, results and scratch memory, by name.
        """
        super().__init__(sizes, weights, refs)
        self.transform = TRANSFORMS[sizes.tile]
        step = self.step
        # "lower" has three slots for blocks' lower rows, "upper" two; each step loads from the next slots.
        self.rows = _, _, _, below = (
            ("lower", jax.lax.rem(step, 3)),  # of the block above
            ("upper", jax.lax.rem(step, 2)),
            ("lower", jax.lax.rem(step + 1, 3)),
            ("upper", jax.lax.rem(step + 1, 2)),  # of the block below
        )
        # The moved block is the one below the results. Its upper row is an input, and moved before products
        # load it; its lower row gets the third slot, which no product of this step loads.
        self.moved = below, ("lower", jax.lax.rem(step + 2, 3))

    def _padding(self) -> dict[str, list[Any]]:
        """Return references to the memory of the convolution's padding, by its place.

        "stage" holds the rows that the previous grid step modulated, "upper" and "lower" the blocks' upper
        and lower rows as products load them. Axes: slot (in "stage" row of the block), component, part (128
        channels), column. Beside a strip (columns that the grid computes together) the padding is `MARGIN`
        columns wide.
        """
        # `self.rows` has (memory's name, slot) of each input row; the first is above the block of results.
        (above, slot), *_ = self.rows
        # Of each memory, the first column of the padding left of the strip, and of the padding right of it.
        sides = itertools.product(("stage", "upper", "lower"), (0, MARGIN + self.sizes.width))
        return {
            "beside": [self.refs[name].at[:, :, :, pl.ds(start, MARGIN)] for name, start in sides],
            "above": [self.refs[above].at[slot]],
            "below": [self.refs["stage"].at[0]],  # the upper row of the block below
            # A single column: products of the frame's last column see no further one.
            "right": [self.refs["stage"].at[:, :, :, pl.ds(MARGIN + self.sizes.last_columns, 1)]],
        }

    def _convolve(self) -> None:
        """Multiply a strip's chunks; finish each chunk during the products of the next, the last at the end.

        A strip is the columns that the grid computes together, a chunk the columns of one matrix product.
        """
        sizes = self.sizes
        # A product loads a column right of its chunk: so columns are moved `MARGIN` columns ahead of it.
        self._move(0, MARGIN)
        # These `TILES` entries of "shifted" are what a chunk's last column adds to the next chunk. Nothing is
        # added to the first chunk.
        if "shifted" in self.refs:
            fill_zeros([self.refs["shifted"].at[:, :, pl.ds(sizes.chunk * TILES, TILES)]])

        def multiply_chunk(index: Array, carry: None) -> None:
            """Multiply one chunk in turns, each with other work between its products."""
            column = index * sizes.chunk
            self._move(column + MARGIN, sizes.chunk)
            jax.lax.fori_loop(0, sizes.turns, lambda turn, _: self._multiply_turn(turn, column), None)

        jax.lax.fori_loop(0, sizes.chunks, multiply_chunk, None)
        last_chunk = sizes.width - sizes.chunk  # its first column
        # A unit is the columns that are finished together.
        jax.lax.fori_loop(0, sizes.units, lambda unit, _: self._finish(last_chunk + unit * sizes.unit), None)

    def _multiply_turn(self, turn: Any, column: Any) -> None:
        """Compute the products of a chunk for a share of the output channels, and other work between them.

        A chunk is the columns that one matrix product covers. The other work modulates a share of the chunk's
        columns, for a later step, and finishes a share of the results of the previous chunk.

        Args:
            turn: index of the share.
            column: the chunk's first column.
        """
        sizes = self.sizes
        work = self._other_work(turn, column)
        pieces = len(work)  # of other work, functions that are called in order
        total, multiplied = sizes.components * len(self.weights), 0  # numbers of products
        pairs = list(zip(sizes.products, self.weights, strict=True))  # each product with its matrices
        for component in range(sizes.components):
            # Adjacent products that contribute to the same results are a group: their sums are added.
            for results, group in itertools.groupby(pairs, lambda pair: pair[0].results):
                sums: Any = None
                for product, matrices_of_turns in group:
                    inputs = [  # `shift` is a number of columns; a part has 128 input channels
                        self._input_rows(component, row, shift, part, column)
                        for row, shift in product.inputs
                        for part in range(sizes.parts)
                    ]
                    product_sums = jnp.dot(
                        jnp.concatenate(inputs, axis=1),
                        matrices_of_turns[turn, component],
                        preferred_element_type=jnp.float32,
                    )
                    sums = product_sums if sums is None else sums + product_sums
                    multiplied += 1
                    # Other work keeps pace with the products: of both, the same fraction is left. A piece
                    # waits for these sums, so that it overlaps with the next product.
                    while len(work) * total > (total - multiplied) * pieces:
                        work.pop(0)(after=sums)
                self._store_components(turn, component, results, sums, column)

    def _other_work(self, turn: Any, column: Any) -> list[Callable[..., None]]:
        """Return the work of a turn besides its products, in pieces to run between them.

        A turn is a pass over a chunk's products for a share of the output channels. A piece is a function of
        `after`, the sums of the product to wait for. It modulates a unit (a few columns) of the chunk that
        begins at `column`, or finishes a unit of the previous chunk. Each turn has an equal share of units.
        """
        sizes = self.sizes
        share = sizes.units // sizes.turns
        work = []
        for unit in range(share):
            at = column + (turn * share + unit) * sizes.unit
            work += [partial(self._modulate, at, unit), partial(self._finish, at - sizes.chunk, unit)]
        return work

    def _input_rows(self, component: int, row: int, shift: int, part: int, column: Any) -> Array:
        """Return one component of the transformed frames, for a chunk of columns in one of four input rows.

        `row` is 0 (above the block of results) to 3 (below it). The columns begin `shift` columns after
        `column`, the chunk's first; `part` is the index of 128 input channels. If one matrix serves both rows
        of results (`rows_together`), `row` and the row below it are returned, joined.
        """
        sizes = self.sizes
        columns = self._word_columns(column, sizes.chunk, shift)
        # `self.rows` has (name of a buffer, slot in it) of each input row.
        rows = self.rows[row : row + (ROWS if sizes.rows_together else 1)]
        # A word is two bfloat16 numbers: the component of each of a pixel's two tiles (halves of its frames).
        words = jnp.concatenate([self.refs[name][slot, component, part, columns] for name, slot in rows])
        return pltpu.bitcast(words, jnp.bfloat16)

    def _store_components(
        self, turn: Any, component: int, results: list[tuple[int, int]], sums: Array, column: Any
    ) -> None:
        """Store a product's sums as a component of the results, or add them to it.

        Args:
            turn: index of the share of the output channels.
            component: index of the component of Winograd's transform.
            results: (row, column) of each result in the sums; column 0 is the input's, 1 the one right of it.
                Not used with `rows_together`.
            sums: float32 (tiles of the chunk's pixels, channels), 128 channels for each result. With
                `rows_together`: row 0's tiles, then row 1's, and 128 channels for each part of the outputs.
            column: first column of the chunk, the columns that the product covers.
        """
        sizes, refs = self.sizes, self.refs
        count = sizes.chunk * TILES  # tiles in a row of the chunk
        at = self._memory_rows(column, sizes.chunk, TILES, before=sizes.chunk)
        if sizes.rows_together:
            parts = self.result_parts // sizes.turns
            for row, part in itertools.product(range(ROWS), range(parts)):
                row_sums = sums[row * count : (row + 1) * count, lanes_of(part)]
                refs["components"][component, row, turn * parts + part, at] = row_sums
            return
        # Here there are 128 output channels: the results have a single part, 0.
        for index, (row, is_right) in enumerate(results):
            part_sums = sums[:, lanes_of(index)]
            if is_right:
                # Sums for the columns right of the inputs' columns, so shifted by one column. Before them is
                # what the last column of the previous chunk adds to this chunk's first.
                shifted = refs["shifted"].at[component, row]
                shifted[pl.ds(0, TILES)] = shifted[pl.ds(count, TILES)]
                shifted[pl.ds(TILES, count)] = part_sums
                component_sums = refs["components"].at[component, row, 0]
                component_sums[at] = component_sums[at] + shifted[pl.ds(0, count)]
            elif len({row for row, _ in results}) == 1:
                # Both results are in one row: the inputs are a row above or below the block. These products
                # come first: they set the sums, to which later products add.
                refs["components"][component, row, 0, at] = part_sums
            else:
                component_sums = refs["components"].at[component, row, 0]
                component_sums[at] = component_sums[at] + part_sums

    def _move(self, column: Any, count: int) -> None:
        """Move `count` columns, from `column` on, from the memory "stage" to the memory that products load.

        They are columns of the block (two rows) that the previous grid step modulated.
        """
        at = self._word_columns(column, count)
        # The memory, and the slot in it, that each of the block's two rows is moved to.
        for row, (name, slot) in enumerate(self.moved):
            self.refs[name][slot, :, :, at] = self.refs["stage"][row, :, :, at]

    def _store_activated(
        self,
        row: int,
        part: int,
        unit: int,
        column: Any,
        x: Array,
        before: Any | None,
    ) -> Array:
        """Store the transform of a unit's activated frames, and of the two frames before them.

        A unit is a few columns of pixels. Its transform is stored in "stage", memory that the next step moves
        rows from. A word is two bfloat16 frames of a pixel and channel. The result is the words of the last
        two frames.

        Args:
            row, part: index of the row in the block of two rows, and of the 128 channels.
            unit: index of the memory in which the unit's words are sorted by frame.
            column: the unit's first column.
            x: the activated frames, (columns times frames, 128): the frames of a pixel are neighbours.
            before: reference to the words of the two frames before `x`. None at a video's start, where the
                first frame of `x` takes their place, twice.
        """
        sizes = self.sizes
        pixels = self.refs["pixels"].at[unit, row, part]
        pixels[...] = pltpu.bitcast(x, jnp.int32)
        # For each word of a pixel, that word of all pixels; then each frame, from the two before `x` on.
        words = [pixels[pl.ds(index, sizes.unit, stride=sizes.words), :] for index in range(sizes.words)]
        words_before = repeat_earlier_frame(words[0]) if before is None else before[...]
        frames = [frame for word in (words_before, *words) for frame in _unpacked(word)]
        tile_inputs = [  # of both tiles (halves of a pixel's frames), for each a list of its components
            self.transform.inputs(frames[start : start + sizes.tile + TAPS - 1])
            for start in range(0, sizes.input_frames, sizes.tile)
        ]
        at = self._word_columns(column, sizes.unit)
        for component, of_both_tiles in enumerate(zip(*tile_inputs, strict=True)):
            self.refs["stage"][row, component, part, at] = _packed(*of_both_tiles)
        return words[-1]

    def _finish(self, column: Any, unit: int = 0, after: Array | None = None) -> None:
        """Transform the sums of a unit (a few columns) back to frames, and write these results.

        `column` is the unit's first column, `unit` the index of its place in the memory "frames". The work
        waits for `after`, the sums of a product, if given.
        """
        self._write_results(column, self.sizes.unit, partial(self._frames, column, unit), after)

    def _frames(self, column: Any, unit: int, row: int, part: int) -> Array:
        """Transform a unit's components back to frames; return them with edges added.

        A unit is a few columns, a tile half of a pixel's frames. A tile's components are the products' sums,
        before they are transformed back. Edges are what columns outside the strip add.

        Args:
            column: the first of the unit's columns.
            unit: index of the unit's place in "frames", which has a row for each frame of a pixel.
            row, part: index of the row in the block of two rows, and of the 128 output channels.
        """
        sizes = self.sizes
        tiles_at = self._memory_rows(column, sizes.unit, TILES, before=sizes.chunk)
        components = [
            self.refs["components"][component, row, part, tiles_at] for component in range(sizes.components)
        ]
        frames = self.refs["frames"].at[unit, row, part]
        # `result` is one frame of every tile; the tiles of a pixel follow each other.
        for frame, result in enumerate(self.transform.results(components)):
            frames[pl.ds(frame, sizes.unit * TILES, stride=sizes.tile), :] = result
        if "edges" in self.refs:
            self._add_edges(frames, column, row, part)
        return frames[...]

    def _add_edges(self, frames: Any, column: Any, row: int, part: int) -> None:
        """Add the edges to the results of the strip's first and last column.

        A strip is columns that the grid computes together. An edge is what the columns outside the strip add
        to its first or to its last column.

        Args:
            frames: reference to the results of a unit (a few columns), a row for each frame of a pixel.
            column: the unit's first column.
            row, part: index of the row in the block of two rows, and of the part: 128 output channels.
        """
        sizes = self.sizes
        for side, edge_column in enumerate((0, self._last_column())):
            # `column` is traced: to a unit without the edge's column, zeros are added.
            inside = (edge_column >= column) & (edge_column < column + sizes.unit)
            at = self._memory_rows(edge_column % sizes.unit, 1, sizes.input_frames)
            # "edges" has one video (index 0): the frames of the left edge, then those of the right edge.
            edge = self.refs["edges"][
                0, row, side * sizes.input_frames : (side + 1) * sizes.input_frames, lanes_of(part)
            ]
            frames[at, :] = frames[at, :] + jnp.where(inside, edge, 0.0)

    def _word_columns(self, column: Any, count: int, shift: int = 0) -> Any:
        """Return the slice of `count` columns, from `column + shift` on, in the memory that products read.

        `column` is a multiple of 8, a register's rows. The first `MARGIN` columns of the memory are padding.
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
