"""The work of every kernel step around its products: modulation, results, moments of columns.

Rows are modulated once and kept in VMEM, transformed as the products take them. The next rows are modulated,
and the last columns' results finished, while the matrix unit multiplies. Rows lag: step g modulates the rows
of block g, moves the rows of block g - 1 from the stage to the products' memory, and finishes the results of
block g - 2. Stores go to a stage because the compiler would make loads of the products' inputs wait for them.

A video's first frame by itself is one frame to everything before and after its products.
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from jax_kernels.common import tiles
from jax_kernels.norm_conv3d.sizes import LAG, ROWS, SUBLANES, ConvSizes, Product

LOW_HALF = 0xFFFF
"""Mask of a word's earlier frame."""


def lanes_of(part: int) -> slice:
    """Return the lanes of a part of the channels."""
    return slice(part * tiles.LANES, (part + 1) * tiles.LANES)


def matrices(kernel: Array, product: Product, turns: int, tap: Callable[..., Array]) -> Array:
    """Return a product's weights, one matrix for each turn's share of the output channels.

    `tap(outputs, *input, *result)` returns the weights (..., I, O) that connect an input of the product to a
    result, from `outputs`, the kernel of the share.
    """

    def of_turn(outputs: Array) -> Array:
        rows = [[tap(outputs, *part, *result) for result in product.results] for part in product.inputs]
        return jnp.concatenate([jnp.concatenate(row, axis=-1) for row in rows], axis=-2)

    return jnp.stack([of_turn(outputs) for outputs in jnp.split(kernel, turns, axis=-1)])


def clear(memory: Iterable[Any]) -> None:
    """Fill references with zeros."""
    for ref in memory:
        ref[...] = jnp.zeros(ref.shape, ref.dtype)


class ConvStep:
    """A step of the kernel, on its references by name. Its subclasses know the products.

    Attributes:
        above, below, beyond: functions that return the memory of the row above the first, of the row below
            the last, and right of the frame's last column, all of which is cleared.
    """

    above: Callable[[], Iterable[Any]]
    below: Callable[[], Iterable[Any]]
    beyond: Callable[[], Iterable[Any]]

    def __init__(self, sizes: ConvSizes, weights: tuple[Any, ...], refs: dict[str, Any]):
        self.sizes, self.weights, self.refs = sizes, weights, refs
        self.result_parts = sizes.outputs // tiles.LANES
        self.axes = 2 if sizes.strips == 1 else 3
        _, self.strip, self.step = of_grid(tuple(map(pl.program_id, range(self.axes))))

    def run(self) -> None:
        """Modulate a block of rows and, once `LAG` blocks are there, convolve and finish an earlier one.

        The first step prepares the memory, and the last one writes the moments of columns.
        """
        last = pl.num_programs(self.axes - 1) - 1
        pl.when(self.step == 0)(self._begin)
        pl.when(self.step == LAG)(lambda: clear(self.above()))
        pl.when(self.step == last)(lambda: clear(self.below()))
        pl.when(self.step < LAG)(self._fill)
        pl.when(self.step >= LAG)(self._convolve)
        if self.sizes.width > self.sizes.last_columns:
            pl.when(self.strip == self.sizes.strips - 1)(lambda: clear(self.beyond()))
        pl.when(self.step == last)(self._give_moments)

    def _begin(self) -> None:
        """Prepare memory before a strip's first rows; by default nothing."""

    def _convolve(self) -> None:
        """Compute all columns' products, and the work beside them."""
        raise NotImplementedError

    def _move(self, column: Any, count: int) -> None:
        """Move the block before this step's from the stage to the products' memory."""
        raise NotImplementedError

    def _keep(
        self,
        row: int,
        part: int,
        unit: int,
        column: Any,
        x: Array,
        before: Callable[[Callable[[], Array]], Array],
    ) -> Array:
        """Keep activated frames of a unit's columns in the stage; return the words of their last two.

        `before` returns the words before them, from a function that returns their first words.
        """
        raise NotImplementedError

    def _fill(self) -> None:
        """Modulate a block of rows without products, in the first `LAG` steps."""

        def unit(index: Array, carry: None) -> None:
            """Move and modulate one unit of columns."""
            column = index * self.sizes.unit
            self._move(column, self.sizes.unit)
            self._modulate(column)

        lax.fori_loop(0, self.sizes.width // self.sizes.unit, unit, None)

    def _modulate(self, column: Any, unit: int = 0, after: Array | None = None) -> None:
        """Modulate a unit of columns into the stage; after the product that gave `after`, if given.

        `unit` is the index of the memory for the unit's last two frames, which become the next cache.
        """
        sizes, refs = self.sizes, self.refs
        past_at = self._rows(_from_left(column), sizes.unit, 2 * sizes.parts)
        for row in range(ROWS):
            x = self._activated(row, _from_left(column), after)
            past = refs["past"].at[unit, row]
            if "cache" in refs:
                past[...] = pltpu.bitcast(refs["cache"][0, row, past_at], jnp.int32)
            for part in range(sizes.parts):
                pixels_at = pl.ds(part, sizes.unit, stride=sizes.parts)

                def before(first: Callable[[], Array], past: Any = past, pixels_at: Any = pixels_at) -> Array:
                    """Return the two frames before the unit's: the cache's, or the first one twice."""
                    return past[pixels_at, :] if "cache" in refs else twice(first())

                past[pixels_at, :] = self._keep(row, part, unit, column, x[:, lanes_of(part)], before)
            refs["latest"][0, row, past_at] = pltpu.bitcast(past[...], jnp.bfloat16)

    def _activated(self, row: int, column: Any, after: Array | None) -> Array:
        """Return a unit's activated frames in a row, pixel by pixel."""
        sizes, refs = self.sizes, self.refs
        cells = max(1, sizes.unit // sizes.cell)
        cells_at = pl.ds(lax.div(column, sizes.cell), cells)
        coefficient_row = row if sizes.cell_rows == 1 else 0
        half, offset = (
            refs["half"][0, coefficient_row, cells_at],
            refs["half_offset"][0, coefficient_row, cells_at],
        )
        if after is not None:
            offset = offset + jnp.concatenate([zeros_after(after)] * sizes.parts, 1)
        x = refs["x"][0, row, self._rows(column, sizes.unit, sizes.input_frames)].astype(jnp.float32)
        x = x.reshape(cells, -1, SUBLANES, sizes.channels) * half[:, None] + offset[:, None]
        return (x + x * jnp.tanh(x)).reshape(-1, sizes.channels).astype(jnp.bfloat16)

    def _give(
        self, column: Any, count: int, sums: Callable[[int, int], Array], after: Array | None = None
    ) -> None:
        """Write the results of `count` columns, and add them to the columns' moments.

        `sums(row, part)` returns a row for each frame of a pixel. Results before the first column are
        overwritten by the first column's.
        """
        sizes, refs = self.sizes, self.refs
        at = self._rows(_from_left(column), count, sizes.input_frames)
        moments_at = self._rows(column, count, sizes.input_frames, before=sizes.chunk)
        start = self.step == LAG
        in_frame = self._rows_in_frame(_from_left(column), count) if "true_width" in refs else None
        for part in range(self.result_parts):
            lanes = lanes_of(part)
            rounded = []
            for row in range(ROWS):
                bias = refs["bias"][:, lanes]
                if after is not None:
                    bias = bias + zeros_after(after)[:1]
                y = sums(row, part) + bias
                if "residual" in refs:
                    y = y + refs["residual"][0, row, at, lanes].astype(jnp.float32)
                if in_frame is not None:
                    y = jnp.where(in_frame, y, 0.0)
                y = y.astype(jnp.bfloat16)
                refs["y"][0, row, at, lanes] = y
                rounded.append(y.astype(jnp.float32))
            origin, total, squares = (refs["moments"].at[index, part] for index in range(3))
            shared_origin = jnp.where(start, rounded[0], origin[moments_at])
            one, other = (y - shared_origin for y in rounded)
            origin[moments_at] = shared_origin
            total[moments_at] = jnp.where(start, 0.0, total[moments_at]) + (one + other)
            squares[moments_at] = jnp.where(start, 0.0, squares[moments_at]) + (one * one + other * other)

    def _rows_in_frame(self, column: Any, count: int) -> Array:
        """Return for `count` columns, a row for each frame of a pixel, whether it is no padding."""
        shape = (count * self.sizes.input_frames, tiles.LANES)
        row = lax.broadcasted_iota(jnp.int32, shape, 0)
        true_width = self.refs["true_width"][0] - self.strip * self.sizes.width
        return row < (true_width - column) * self.sizes.input_frames

    def _give_moments(self) -> None:
        """Write mean and M2 of the strip's columns, from the sums of differences from their origins."""
        sizes, refs = self.sizes, self.refs
        share = 1 / (ROWS * sizes.blocks)

        def chunk(index: Array, carry: None) -> None:
            """Write the moments of one chunk of columns."""
            to = self._rows(index * sizes.chunk, sizes.chunk, sizes.input_frames)
            moments_at = self._rows(index * sizes.chunk, sizes.chunk, sizes.input_frames, before=sizes.chunk)
            for part in range(self.result_parts):
                origin, total, squares = (refs["moments"][index, part, moments_at] for index in range(3))
                refs["mean"][0, to, lanes_of(part)] = origin + total * share
                refs["m2"][0, to, lanes_of(part)] = jnp.maximum(squares - total * total * share, 0.0)

        lax.fori_loop(0, sizes.chunks, chunk, None)

    def _last_column(self) -> Any:
        """Return the last column of the strip."""
        sizes = self.sizes
        if sizes.strips == 1:
            return sizes.last_columns - 1
        return jnp.where(self.strip == sizes.strips - 1, sizes.last_columns, sizes.width) - 1

    def _rows(self, column: Any, count: int, each: int, before: int = 0, shift: int = 0) -> Any:
        """Return the slice of memory that holds `count` columns with `each` rows a column.

        The memory begins with `before` columns more. `column` is a multiple of `count`; the slice begins
        `shift` columns after it.
        """
        start = (column + before) * each
        if isinstance(start, jax.Array):
            start = pl.multiple_of(start, count * each)
        return pl.ds(start + shift * each, count * each)


def of_grid(indices: tuple[Any, ...]) -> tuple[Any, Any, Any]:
    """Return video, strip and step of the grid's indices, which leave a single strip out."""
    return indices if len(indices) == 3 else (indices[0], 0, indices[1])


def _from_left(column: Any) -> Any:
    """Return `column`, or 0 if it is negative."""
    return lax.max(column, 0) if isinstance(column, jax.Array) else max(column, 0)


def twice(words: Array) -> Array:
    """Return words whose halves both are the earlier frame of `words`."""
    return (words & LOW_HALF) | (words << 16)


def zeros_after(sums: Array) -> Array:
    """Return zeros that wait for a register of a product's sums.

    Without them the compiler would do the vector unit's work before all products.
    """
    return jnp.minimum(jnp.abs(sums[:SUBLANES, : tiles.LANES]), 0.0)
