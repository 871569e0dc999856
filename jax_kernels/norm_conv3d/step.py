"""A grid step of the Pallas kernel, but for its matrix products: modulation, results, moments of columns.

Terms of this package:

    coefficients  the norm's multiplier and offset
    modulate      compute activated frames, `silu(x * multiplier + offset)`, from frames `x`
    block         two (`ROWS`) adjacent rows of pixels; each grid step modulates one block
    strip         the columns that the grid goes down together; a frame too wide for VMEM has several
    chunk         the columns of a strip that one matrix product covers
    unit          the columns of a chunk that are modulated together
    register      8 sublanes of 128 lanes
    cell          the rectangle of pixels that share one register of coefficients
    share         the output channels that a chunk's products compute together; a loop runs over the shares
    part          128 channels, which fill the lanes of a register
    word          32 bits, which hold two bfloat16 frames of one pixel and channel
    tile          the frames that Winograd's filtering computes together; a pixel has two tiles
    component     one of the combinations of a tile's frames that Winograd's filtering multiplies
    edges         what the columns beside a strip add to the results of its first and last column
    moments       the mean and M2, the sum of squared deviations, of a column of pixels
    cache         the last two activated frames of a call, which the next call reads
    buffer        scratch memory in VMEM, by its name
    slot          one index of a buffer's first axis, for one of several blocks or units
    entry         one index of the axis before the lanes. This axis has the columns of a row of pixels, and
                  for each column its frames (or words, tiles, parts) next to each other
    stage         the buffer of modulated rows; the next step moves them to where products load them

The kernel modulates each row once, and keeps it in VMEM in the form that the products load. While the matrix
unit multiplies, the vector unit modulates the next rows and finishes the results of the columns before. Rows
lag: step g modulates block g, moves block g - 1 from the stage to the buffers that products load, and
finishes the results of block g - 2, as `LAG` is 2. The stage exists because the compiler makes loads from a
buffer wait for stores to it.

A `column` is the index of a unit's or chunk's first column in the strip. While a chunk is multiplied, the
results of the chunk left of it are written. For a strip's first chunk that is left of column 0, so buffers
which are written in this way begin a chunk left of it.

The first frame of a video is stored and read as one frame, but multiplied as two equal ones.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from jax_kernels.common import tiles
from jax_kernels.norm_conv3d.sizes import LAG, ROWS, SUBLANES, ConvSizes, Product


def lanes_of(part: int) -> slice:
    return slice(part * tiles.LANES, (part + 1) * tiles.LANES)


def matrices(kernel: Array, product: Product, shares: int, weights_between: Callable[..., Array]) -> Array:
    """Return the matrices that multiply a product's inputs: one for each share, stacked.

    `kernel` is the convolution's kernel or its transform. `weights_between(share_kernel, *input, *result)`
    returns the weights (..., I, O) between an input and a result, for the output channels of one share.
    Inputs and results are pairs of numbers, which `sizes.Product` describes.
    """
    share_matrices = []
    for share_kernel in jnp.split(kernel, shares, axis=-1):
        weights = [  # a list for each input, with the weights to each result
            [weights_between(share_kernel, *source, *result) for result in product.results]
            for source in product.inputs
        ]
        # In the matrix, the weights to all results are side by side, and those of all inputs one below the
        # other.
        matrix_rows = [jnp.concatenate(to_results, axis=-1) for to_results in weights]
        share_matrices.append(jnp.concatenate(matrix_rows, axis=-2))
    return jnp.stack(share_matrices)


def fill_zeros(memory: Iterable[Any]) -> None:
    for ref in memory:
        ref[...] = jnp.zeros(ref.shape, ref.dtype)


class ConvStep(ABC):
    """A grid step of the Pallas kernel; its two subclasses have the products and the buffers around them.

    Attributes:
        sizes: the sizes that the kernel is compiled for.
        weights: for each product, a reference to its matrices, one for each share.
        memory: Pallas references by name. Operands are "x", "cache", "half" and "half_offset" (half of the
            multiplier and of the offset), "bias", "residual", "edges" and "true_width"; an operand that the
            call lacks has no reference. Results are "y", "next_cache", "mean" and "m2". The others are
            scratch buffers (`sizes.scratch_shapes`). Axes of frames in operands and results: video (one, so
            index 0), row of the block, entry, channel.
        result_parts: number of parts of the output channels.
        strip, step: index of the strip, and of this step in the strip.
    """

    def __init__(self, sizes: ConvSizes, weights: tuple[Any, ...], memory: dict[str, Any]):
        self.sizes, self.weights, self.memory = sizes, weights, memory
        self.result_parts = sizes.outputs // tiles.LANES
        # The grid's axes are videos, strips if there are several, and steps.
        axes = 2 if sizes.strips == 1 else 3
        _video, self.strip, self.step = grid_position(tuple(map(pl.program_id, range(axes))))

    def run(self) -> None:
        """Modulate one block and convolve another; the last step of a strip also writes its moments."""
        # There are `LAG` more steps than blocks, because results are finished so many steps later.
        last = self.sizes.blocks + LAG - 1
        # The zero padding around a strip is set just before products load it: that on both sides in the first
        # step, that above the frame with the first block of results, that below it with the last one. The
        # last row must be cleared, as the step before the last one had no block below the frame to modulate,
        # and modulated the frame's last block once more.
        pl.when(self.step == 0)(partial(self._clear, "beside"))
        pl.when(self.step == LAG)(partial(self._clear, "above"))
        pl.when(self.step == last)(partial(self._clear, "below"))
        pl.when(self.step < LAG)(self._modulate_block)
        pl.when(self.step >= LAG)(self._convolve)  # modulates a block between its products
        # If the last strip reaches beyond the frame, every step also modulates columns beyond it. Of these,
        # products for columns of the frame load only the first one: it is cleared again.
        if self.sizes.strip_columns > self.sizes.last_strip_columns:
            pl.when(self.strip == self.sizes.strips - 1)(partial(self._clear, "right"))
        pl.when(self.step == last)(self._write_moments)

    def _clear(self, place: str) -> None:
        fill_zeros(self._padding()[place])

    @abstractmethod
    def _padding(self) -> dict[str, list[Any]]:
        """Return references to the padding "beside" a strip, and "above", "below", "right" of the frame."""

    @abstractmethod
    def _convolve(self) -> None:
        """Compute a block of results by chunks and finish it; meanwhile modulate and move other blocks."""

    @abstractmethod
    def _move(self, column: Any, count: int) -> None:
        """Move `count` columns, from `column` on, from the stage to the buffers that products load."""

    @abstractmethod
    def _store_activated(
        self,
        row: int,
        part: int,
        slot: int,
        column: Any,
        x: Array,
        past_words: Any | None,
    ) -> Array:
        """Store activated frames `x`, of one row and part of a unit, in the stage; return their last words.

        The last word of a pixel has its last two frames. `slot` is the unit's slot in buffers of units. What
        is stored at a negative `column` is never loaded. `past_words` is a reference to the words of the two
        frames before `x`. At a video's start it is None, and the first frame of `x` stands for both.
        """

    def _modulate_block(self) -> None:
        """Modulate a block and move the one above it, which is all that a strip's first `LAG` steps do."""

        def modulate_unit(index: Array, carry: None) -> None:
            column = index * self.sizes.unit_columns
            self._move(column, self.sizes.unit_columns)  # before the stage's columns are overwritten
            self._modulate(column)

        jax.lax.fori_loop(0, self.sizes.strip_columns // self.sizes.unit_columns, modulate_unit, None)

    def _modulate(self, column: Any, slot: int = 0, after: Array | None = None) -> None:
        """Modulate the unit at `column` of a block into the stage, and write its columns of the next cache.

        `slot` is the unit's slot in buffers of units: units whose work may overlap have different slots. A
        negative `column` is left of the strip; column 0 is read instead, and the result is overwritten later.
        The work waits for `after`, the sums of a product, so that it overlaps with the next product.
        """
        sizes, memory = self.sizes, self.memory
        # The unit's entries in "cache" and "next_cache": two frames for each part of a column.
        cache_at = self._entries(_at_least_zero(column), sizes.unit_columns, 2 * sizes.parts)
        for row in range(ROWS):
            x = self._activated(row, _at_least_zero(column), after)
            # "past" has a word, two frames, for each part of each pixel. At first these are the two frames
            # before the unit's, if there is a cache. Part by part, the unit's last two frames replace them.
            past = memory["past"].at[slot, row]
            if "cache" in memory:
                past[...] = pltpu.bitcast(memory["cache"][0, row, cache_at], jnp.int32)
            for part in range(sizes.parts):
                words_at = pl.ds(part, sizes.unit_columns, stride=sizes.parts)  # this part of each pixel
                past_words = past.at[words_at, :] if "cache" in memory else None
                past[words_at, :] = self._store_activated(
                    row, part, slot, column, x[:, lanes_of(part)], past_words
                )
            memory["next_cache"][0, row, cache_at] = pltpu.bitcast(past[...], jnp.bfloat16)

    def _activated(self, row: int, column: Any, after: Array | None) -> Array:
        """Return `silu(x * multiplier + offset)` of one row of a unit, (entries, channels), in bfloat16."""
        sizes, memory = self.sizes, self.memory
        # Number of cells of the unit: one if a cell has all columns of the frame. It serves the whole unit
        # then, which may reach beyond the frame.
        cells = 1 if sizes.cell_columns >= sizes.columns else max(1, sizes.unit_columns // sizes.cell_columns)
        cells_at = pl.ds(jax.lax.div(column, sizes.cell_columns), cells)
        # The two rows of a block have a row of coefficients each, or they share one.
        coefficient_row = row if sizes.cell_rows == 1 else 0
        # SiLU is `h + h tanh(h)` of half its argument h, so half of the coefficients are the operands.
        half = memory["half"][0, coefficient_row, cells_at]
        offset = memory["half_offset"][0, coefficient_row, cells_at]
        if after is not None:
            # Zeros that depend on `after`, so that what is computed from `offset` waits for it. They have 128
            # lanes, and are repeated for every part.
            offset = offset + jnp.concatenate([zeros_after(after)] * sizes.parts, 1)
        x = memory["x"][0, row, self._entries(column, sizes.unit_columns, sizes.input_frames)]
        # Axes: cell, register of the cell, sublane, channel. All registers of a cell have the coefficients of
        # one register.
        x = x.astype(jnp.float32).reshape(cells, -1, SUBLANES, sizes.channels)
        h = x * half[:, None] + offset[:, None]
        return (h + h * jnp.tanh(h)).reshape(-1, sizes.channels).astype(jnp.bfloat16)

    def _write_results(
        self, column: Any, count: int, sums: Callable[[int, int], Array], after: Array | None = None
    ) -> None:
        """Add bias and residual to the sums of `count` columns, round, write, and update the moments.

        `sums(row, part)` returns the float32 sums of a part of one row. The work waits for `after`, the sums
        of a later product. While a strip's first chunk is multiplied, `column` is negative: what is written
        then has no meaning. It goes to column 0, and is overwritten later.
        """
        sizes, memory = self.sizes, self.memory
        at = self._entries(_at_least_zero(column), count, sizes.input_frames)
        # The buffer "moments" begins a chunk left of column 0: sums without meaning must not be added there.
        moments_at = self._entries(column, count, sizes.input_frames, left_columns=sizes.chunk_columns)
        is_first = self.step == LAG  # the first block of results, which sets the running moments
        in_frame = self._mask_of_columns(_at_least_zero(column), count) if "true_width" in memory else None
        for part in range(self.result_parts):
            lanes = lanes_of(part)
            rounded = []  # the results of the upper and of the lower row
            for row in range(ROWS):
                bias = memory["bias"][:, lanes]
                if after is not None:
                    bias = bias + zeros_after(after)[:1]  # zeros that depend on `after`
                y = sums(row, part) + bias
                if "residual" in memory:
                    y = y + memory["residual"][0, row, at, lanes].astype(jnp.float32)
                if in_frame is not None:
                    y = jnp.where(in_frame, y, 0.0)
                y = y.astype(jnp.bfloat16)
                memory["y"][0, row, at, lanes] = y
                rounded.append(y.astype(jnp.float32))
            self._add_to_running_moments(part, moments_at, is_first, *rounded)

    def _add_to_running_moments(
        self, part: int, at: Any, is_first: Array, upper: Array, lower: Array
    ) -> None:
        """Add the rounded results of a block's two rows to the running moments of each column and frame."""
        # These are an origin, which is the column's first result, and the sums of the results' differences
        # from it and of the squares of the differences. Sums of the results themselves would lose digits.
        origin, total, squares = (self.memory["moments"].at[index, part] for index in range(3))
        shared_origin = jnp.where(is_first, upper, origin[at])
        upper, lower = upper - shared_origin, lower - shared_origin
        origin[at] = shared_origin
        total[at] = jnp.where(is_first, 0.0, total[at]) + (upper + lower)
        squares[at] = jnp.where(is_first, 0.0, squares[at]) + (upper * upper + lower * lower)

    def _mask_of_columns(self, column: Any, count: int) -> Array:
        """Return a mask, (entries, 128), of `count` columns from `column` on: false in padding columns."""
        frames = self.sizes.input_frames
        # On a mesh, padding columns complete the width of the last shards.
        index = jax.lax.broadcasted_iota(jnp.int32, (count * frames, tiles.LANES), 0)  # of each entry
        # The operand counts columns from the frame's first one; this counts them from the strip's.
        true_width = self.memory["true_width"][0] - self.strip * self.sizes.strip_columns
        return index < (true_width - column) * frames

    def _write_moments(self) -> None:
        """Write a strip's moments, from the running moments of n rows (`_add_to_running_moments`)."""
        sizes, memory = self.sizes, self.memory
        inverse_count = 1 / (ROWS * sizes.blocks)  # 1 / n, for the n pixels of a column

        def write_chunk(chunk: Array, carry: None) -> None:
            count = sizes.chunk_columns
            # In the results, as in the buffer "moments", a column has an entry for each input frame. The
            # buffer begins a chunk left of column 0 (`_write_results`).
            results_at = self._entries(chunk * count, count, sizes.input_frames)
            moments_at = self._entries(chunk * count, count, sizes.input_frames, left_columns=count)
            for part in range(self.result_parts):
                origin, total, squares = (memory["moments"][index, part, moments_at] for index in range(3))
                memory["mean"][0, results_at, lanes_of(part)] = origin + total * inverse_count
                # M2 is the sum of squared differences from the origin, less n times the square of their mean.
                # Rounding may make it negative for nearly equal results.
                memory["m2"][0, results_at, lanes_of(part)] = jnp.maximum(
                    squares - total * total * inverse_count, 0.0
                )

        jax.lax.fori_loop(0, sizes.chunks, write_chunk, None)

    def _last_column(self) -> Any:
        """Return the index of the strip's last column in the frame; the last strip may reach beyond it."""
        sizes = self.sizes
        if sizes.strips == 1:  # known when the kernel is compiled
            return sizes.last_strip_columns - 1
        return jnp.where(self.strip == sizes.strips - 1, sizes.last_strip_columns, sizes.strip_columns) - 1

    def _entries(
        self, column: Any, count: int, per_column: int, left_columns: int = 0, shift: int = 0
    ) -> Any:
        """Return the slice of `count` columns, from `column + shift` on, on an axis of entries.

        A column has `per_column` entries, and the axis begins `left_columns` columns left of column 0. The
        compiler can align the slice because `column` and `left_columns` are multiples of `count`.
        """
        start = (column + left_columns) * per_column
        if isinstance(start, jax.Array):  # traced: the compiler does not know its value
            start = pl.multiple_of(start, count * per_column)
        return pl.ds(start + shift * per_column, count * per_column)


def grid_position(indices: tuple[Any, ...]) -> tuple[Any, Any, Any]:
    """Return (video, strip, step) of a position in the grid; a grid of one strip has no axis of strips."""
    return indices if len(indices) == 3 else (indices[0], 0, indices[1])


def _at_least_zero(column: Any) -> Any:
    return jax.lax.max(column, 0) if isinstance(column, jax.Array) else max(column, 0)


def repeat_earlier_frame(words: Array) -> Array:
    """Return words whose two halves both hold the earlier frame of `words`, which is their low 16 bits."""
    return (words & 0xFFFF) | (words << 16)


def zeros_after(sums: Array) -> Array:
    """Return a register of zeros computed from `sums`: an operation that adds them waits for the sums.

    Without such waits the compiler would schedule the vector unit's work before all products instead of
    between them. The first register of `sums` must not be NaN.
    """
    return jnp.minimum(jnp.abs(sums[:SUBLANES, : tiles.LANES]), 0.0)
