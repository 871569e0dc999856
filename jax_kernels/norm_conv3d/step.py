"""The work of every kernel step around its products: modulation, results, moments of columns.

Terms of this package:

    coefficients  the norm's multiplier and offset
    modulate      apply the norm's multiplier and offset, then SiLU
    block         two rows of pixels; each grid step modulates one
    strip         the columns that the grid computes together; a frame too wide for VMEM has several
    chunk         the columns of a strip that one matrix product covers
    unit          the columns of a chunk that are modulated together
    cell          the rectangle of pixels that share one register of coefficients
    turn          a pass over a chunk's products, for a share of the output channels
    part          128 channels, which fill the lanes of a register
    word          32 bits, which hold two bfloat16 frames of one pixel and channel
    tile          the frames that Winograd's filtering computes together; a pixel has two tiles
    component     one of the combinations of a tile's frames that Winograd's filtering multiplies
    edges         what the columns beside a strip add to its first and last column
    moments       the mean and M2, the sum of squared deviations, of a column of pixels
    buffer        scratch memory in VMEM, by its name
    slot          one index of a buffer's first axis, for one of several blocks or units
    entry         one index of the axis before the lanes: a frame, word or tile of a pixel or part
    stage         the buffer of modulated rows; the next step moves them to where products load them
    latest        the next call's cache: the last two activated frames

On the first axis of a product's inputs and sums, the entries of a pixel are neighbours. A buffer that is
written one chunk behind the products begins one chunk left of column 0.

The kernel modulates each row once, and keeps it in VMEM in the form that the products load. While the matrix
unit multiplies, the vector unit modulates the next rows and finishes the results of the columns before. Rows
lag: step g modulates block g, moves block g - 1 from the stage to the buffers that products load, and
finishes the results of block g - 2. The stage exists because the compiler makes loads from a buffer wait for
stores to it.

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


def matrices(kernel: Array, product: Product, turns: int, weights_between: Callable[..., Array]) -> Array:
    """Return the matrices that multiply a product's inputs: one for each turn, stacked.

    `weights_between(share, *input, *result)` returns the weights (..., I, O) between an input and a result,
    where `share` is the part of `kernel`, or of its transform, for the output channels of one turn.
    """
    turn_matrices = []
    for share in jnp.split(kernel, turns, axis=-1):
        weights = [
            [weights_between(share, *source, *result) for result in product.results]
            for source in product.inputs
        ]
        # The weights of all results side by side, and those of all inputs one below the other.
        of_inputs = [jnp.concatenate(of_results, axis=-1) for of_results in weights]
        turn_matrices.append(jnp.concatenate(of_inputs, axis=-2))
    return jnp.stack(turn_matrices)


def fill_zeros(refs: Iterable[Any]) -> None:
    for ref in refs:
        ref[...] = jnp.zeros(ref.shape, ref.dtype)


class ConvStep(ABC):
    """A grid step of the kernel; its subclasses multiply.

    Attributes:
        sizes: the sizes that the kernel is compiled for.
        weights: references to the matrices of each product.
        refs: references to memory by name: operands ("x", "cache", "half", "half_offset", "bias", "residual",
            "edges", "true_width"; the optional ones if present), results ("y", "latest", "mean", "m2") and
            scratch buffers (`scratch_shapes`).
        result_parts: number of parts of the outputs.
        strip, step: index of the strip, and of this step in it.
    """

    def __init__(self, sizes: ConvSizes, weights: tuple[Any, ...], refs: dict[str, Any]):
        self.sizes, self.weights, self.refs = sizes, weights, refs
        self.result_parts = sizes.outputs // tiles.LANES
        # The grid's axes are videos, strips if there are several, and steps.
        axes = 2 if sizes.strips == 1 else 3
        _video, self.strip, self.step = grid_position(tuple(map(pl.program_id, range(axes))))

    def run(self) -> None:
        """Modulate one block and convolve another; the last step of a strip also writes its moments."""
        last = self.sizes.blocks + LAG - 1  # a strip's last step
        # Padding is cleared before it is loaded: on both sides of the strip, above its first block of results
        # and below its last block.
        pl.when(self.step == 0)(partial(self._clear, "beside"))
        pl.when(self.step == LAG)(partial(self._clear, "above"))
        pl.when(self.step == last)(partial(self._clear, "below"))
        pl.when(self.step < LAG)(self._modulate_block)
        pl.when(self.step >= LAG)(self._convolve)  # modulates a block between its products
        if self.sizes.width > self.sizes.last_columns:  # the last strip reaches beyond the frame
            # At every step, as modulation overwrites the padding right of the frame.
            pl.when(self.strip == self.sizes.strips - 1)(partial(self._clear, "right"))
        pl.when(self.step == last)(self._write_moments)

    def _clear(self, place: str) -> None:
        fill_zeros(self._padding()[place])

    @abstractmethod
    def _padding(self) -> dict[str, list[Any]]:
        """Return the zero padding "beside" a strip, and "above", "below" and "right" of the frame."""

    @abstractmethod
    def _convolve(self) -> None:
        """Compute the products of a block of results, a chunk at a time, with the other work between them."""

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
        before: Any | None,
    ) -> Array:
        """Store a unit's activated frames in the stage; return the words of their last two frames.

        `slot` is the unit's among those of a chunk. Nothing reads a negative `column`. `before` refers to the
        words of the two frames before `x`; at a video's start it is None, and the first frame of `x` takes
        their place.
        """

    def _modulate_block(self) -> None:
        """Modulate a block and move the one above it: all that the first `LAG` steps of a strip do."""

        def modulate_unit(index: Array, carry: None) -> None:
            column = index * self.sizes.unit
            self._move(column, self.sizes.unit)
            self._modulate(column)

        jax.lax.fori_loop(0, self.sizes.width // self.sizes.unit, modulate_unit, None)

    def _modulate(self, column: Any, slot: int = 0, after: Array | None = None) -> None:
        """Modulate one unit of a block into the stage, and write its part of the next cache.

        A negative `column` is left of the frame, where column 0 is read instead. The work waits for the
        product's sums `after`, so that it overlaps with the next product.
        """
        sizes, refs = self.sizes, self.refs
        # The unit in "cache" and "latest", whose first index is the video's: two frames of each part.
        cache_at = self._entries(_at_least_zero(column), sizes.unit, 2 * sizes.parts)
        for row in range(ROWS):
            x = self._activated(row, _at_least_zero(column), after)
            # The words of the two frames before the unit's, and then those of its last two.
            past = refs["past"].at[slot, row]
            if "cache" in refs:
                past[...] = pltpu.bitcast(refs["cache"][0, row, cache_at], jnp.int32)
            for part in range(sizes.parts):
                words_at = pl.ds(part, sizes.unit, stride=sizes.parts)  # this part of each pixel
                before = past.at[words_at, :] if "cache" in refs else None
                past[words_at, :] = self._store_activated(
                    row, part, slot, column, x[:, lanes_of(part)], before
                )
            refs["latest"][0, row, cache_at] = pltpu.bitcast(past[...], jnp.bfloat16)

    def _activated(self, row: int, column: Any, after: Array | None) -> Array:
        """Return `silu(x * multiplier + offset)` of one row of a unit, (entries, channels), in bfloat16.

        SiLU is `h + h tanh(h)` of half its argument h, so the kernel gets half of each coefficient.
        """
        sizes, refs = self.sizes, self.refs
        # A unit has one cell if the cell has all columns, which may be fewer than the unit's.
        cells = 1 if sizes.cell >= sizes.columns else max(1, sizes.unit // sizes.cell)
        cells_at = pl.ds(jax.lax.div(column, sizes.cell), cells)
        # The two rows of a block have a row of coefficients each, or they share one.
        coefficient_row = row if sizes.cell_rows == 1 else 0
        half = refs["half"][0, coefficient_row, cells_at]
        offset = refs["half_offset"][0, coefficient_row, cells_at]
        if after is not None:
            # Zeros that depend on `after`, for each part.
            offset = offset + jnp.concatenate([zeros_after(after)] * sizes.parts, 1)
        x = refs["x"][0, row, self._entries(column, sizes.unit, sizes.input_frames)].astype(jnp.float32)
        # Axes: cell, register of the cell, sublane, channel. A cell's registers share one of coefficients.
        h = x.reshape(cells, -1, SUBLANES, sizes.channels) * half[:, None] + offset[:, None]
        return (h + h * jnp.tanh(h)).reshape(-1, sizes.channels).astype(jnp.bfloat16)

    def _write_results(
        self, column: Any, count: int, sums: Callable[[int, int], Array], after: Array | None = None
    ) -> None:
        """Add bias and residual to the sums of `count` columns, round, write, and update the moments.

        A chunk is written while the next one is multiplied. What is written at the first chunk, where
        `column` is negative, has no meaning and is overwritten.
        """
        sizes, refs = self.sizes, self.refs
        at = self._entries(_at_least_zero(column), count, sizes.input_frames)
        moments_at = self._entries(column, count, sizes.input_frames, before=sizes.chunk)
        is_first = self.step == LAG  # the first block of results, which sets the running moments
        in_frame = self._mask_of_columns(_at_least_zero(column), count) if "true_width" in refs else None
        for part in range(self.result_parts):
            lanes = lanes_of(part)
            rounded = []  # the results of each row
            for row in range(ROWS):
                bias = refs["bias"][:, lanes]
                if after is not None:
                    bias = bias + zeros_after(after)[:1]  # zeros that depend on `after`
                y = sums(row, part) + bias
                if "residual" in refs:
                    y = y + refs["residual"][0, row, at, lanes].astype(jnp.float32)
                if in_frame is not None:
                    y = jnp.where(in_frame, y, 0.0)
                y = y.astype(jnp.bfloat16)
                refs["y"][0, row, at, lanes] = y
                rounded.append(y.astype(jnp.float32))
            self._add_to_running_moments(part, moments_at, is_first, *rounded)

    def _add_to_running_moments(
        self, part: int, at: Any, is_first: Array, upper: Array, lower: Array
    ) -> None:
        """Add the rounded results of a block's two rows to each column's origin, sum and sum of squares.

        The origin is the column's first result. The sums are of differences from it, against cancellation.
        """
        origin, total, squares = (self.refs["moments"].at[index, part] for index in range(3))
        shared_origin = jnp.where(is_first, upper, origin[at])
        upper, lower = upper - shared_origin, lower - shared_origin
        origin[at] = shared_origin
        total[at] = jnp.where(is_first, 0.0, total[at]) + (upper + lower)
        squares[at] = jnp.where(is_first, 0.0, squares[at]) + (upper * upper + lower * lower)

    def _mask_of_columns(self, column: Any, count: int) -> Array:
        """Return a mask, (entries, 128), of `count` columns from `column` on: false in padding columns."""
        frames = self.sizes.input_frames
        index = jax.lax.broadcasted_iota(jnp.int32, (count * frames, tiles.LANES), 0)  # on axis 0
        # Counted from the first column of the strip, as `column` is.
        true_width = self.refs["true_width"][0] - self.strip * self.sizes.width
        return index < (true_width - column) * frames

    def _write_moments(self) -> None:
        """Write a strip's moments: mean = origin + total / n and M2 = squares - total^2 / n for n rows."""
        sizes, refs = self.sizes, self.refs
        inverse_count = 1 / (ROWS * sizes.blocks)  # 1 / n, for the n pixels of a column

        def write_chunk(chunk: Array, carry: None) -> None:
            # In "mean" and "m2", as in "moments", a column has an entry for each input frame.
            results_at = self._entries(chunk * sizes.chunk, sizes.chunk, sizes.input_frames)
            moments_at = self._entries(
                chunk * sizes.chunk, sizes.chunk, sizes.input_frames, before=sizes.chunk
            )
            for part in range(self.result_parts):
                origin, total, squares = (refs["moments"][index, part, moments_at] for index in range(3))
                refs["mean"][0, results_at, lanes_of(part)] = origin + total * inverse_count
                # Rounding may make the M2 of nearly equal results negative.
                m2 = squares - total * total * inverse_count
                refs["m2"][0, results_at, lanes_of(part)] = jnp.maximum(m2, 0.0)

        jax.lax.fori_loop(0, sizes.chunks, write_chunk, None)

    def _last_column(self) -> Any:
        """Return the index of the strip's last column; the last strip may be narrower than the others."""
        sizes = self.sizes
        if sizes.strips == 1:  # known when the kernel is compiled
            return sizes.last_columns - 1
        return jnp.where(self.strip == sizes.strips - 1, sizes.last_columns, sizes.width) - 1

    def _entries(self, column: Any, count: int, per_column: int, before: int = 0, shift: int = 0) -> Any:
        """Return the slice of `count` columns, from `column + shift` on, on an axis of entries.

        The axis begins `before` columns left of column 0. The compiler can align the slice because `column`
        and `before` are multiples of `count`.
        """
        start = (column + before) * per_column
        if isinstance(start, jax.Array):  # traced: the compiler does not know its value
            start = pl.multiple_of(start, count * per_column)
        return pl.ds(start + shift * per_column, count * per_column)


def grid_position(indices: tuple[Any, ...]) -> tuple[Any, Any, Any]:
    """Return (video, strip, step) of a position in the grid, which has no axis for a single strip."""
    return indices if len(indices) == 3 else (indices[0], 0, indices[1])


def _at_least_zero(column: Any) -> Any:
    return jax.lax.max(column, 0) if isinstance(column, jax.Array) else max(column, 0)


def repeat_earlier_frame(words: Array) -> Array:
    """Return words that hold the earlier frame of `words`, their low 16 bits, in both halves."""
    return (words & 0xFFFF) | (words << 16)


def zeros_after(sums: Array) -> Array:
    """Return a register of zeros computed from `sums`: an operation that adds them waits for the sums.

    Otherwise the compiler would schedule the vector unit's work before all products instead of between them.
    """
    return jnp.minimum(jnp.abs(sums[:SUBLANES, : tiles.LANES]), 0.0)
