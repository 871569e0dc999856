"""A step by Winograd's minimal filtering along time: 7 products instead of 12, or 4 instead of 6.

The transforms are in `transforms`. A row of a matrix product is a tile, half of a pixel's frames. A word
holds both tiles of a pixel.

- Activated frames, rounded as a cache keeps them, are transformed in float32 and rounded for the products;
  so are the taps, outside of the kernel. Products are summed and transformed back in float32.
- Rows lie in VMEM as transformed words, a component of the transform after the other. A column's shift is a
  word's, so products contract columns and rows.
- With 128 output channels, two columns' results of the outer rows fill a matrix unit that is 256 wide, both
  rows' results fill it for the inner ones. With more, both rows' results have the same weights.
- Components' sums of a chunk are kept until the next one is multiplied: it hides their transform.
"""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from jax_kernels.norm_conv3d.sizes import MARGIN, ROWS, SUBLANES, TAPS, TILES, ConvSizes, Product
from jax_kernels.norm_conv3d.step import ConvStep, clear, lanes_of, matrices
from jax_kernels.norm_conv3d.transforms import TRANSFORMS

HIGH_HALF = -(2**16)
"""Mask of a word's later frame."""


def weights(transformed: Float[Array, "components 3 3 I O"], product: Product, turns: int) -> Array:
    """Return the matrices of a product, one for each turn and component.

    They are zero where an input is under no tap of a result, or under one that another input has.
    """

    def tap(outputs: Array, row: int, column: int, result: int, beside: int) -> Array:
        """Return the weights from input (row, column) to result (row, column), for all components."""
        under, along = row - result, column - beside + 1
        inside = 0 <= under < TAPS and 0 <= along < TAPS and (beside == 0 or column == 0)
        return outputs[:, under, along] if inside else jnp.zeros_like(outputs[:, 0, 0])

    return matrices(transformed, product, turns, tap)


class WinogradStep(ConvStep):
    """A step that multiplies transformed frames."""

    def __init__(self, sizes: ConvSizes, weights: tuple[Any, ...], refs: dict[str, Any]):
        """Choose the memory that this step's products load and that its moves store to."""
        super().__init__(sizes, weights, refs)
        self.transform = TRANSFORMS[sizes.tile]
        step = self.step
        # Three slots for blocks' lower rows, two for their upper ones: nothing is stored where a step loads.
        self.rows = (
            ("lower", lax.rem(step, 3)),
            ("upper", lax.rem(step, 2)),
            ("lower", lax.rem(step + 1, 3)),
            ("upper", lax.rem(step + 1, 2)),
        )
        self.moved = self.rows[ROWS + 1], ("lower", lax.rem(step + 2, 3))
        above, slot = self.rows[0]
        self.above = lambda: [refs[above].at[slot]]
        self.below = lambda: [refs["stage"].at[0]]
        self.beyond = lambda: [refs["stage"].at[:, :, :, pl.ds(MARGIN + sizes.last_columns, 1)]]

    def _begin(self) -> None:
        """Clear the columns of zeros on both sides of a strip."""
        sides = itertools.product(("stage", "upper", "lower"), (0, MARGIN + self.sizes.width))
        clear(self.refs[name].at[:, :, :, pl.ds(start, MARGIN)] for name, start in sides)

    def _convolve(self) -> None:
        """Multiply a strip's chunks of columns, finish each during the next, and the last one at the end."""
        sizes = self.sizes
        self._move(0, MARGIN)
        if "shifted" in self.refs:
            clear([self.refs["shifted"].at[:, :, pl.ds(sizes.chunk * TILES, TILES)]])

        def chunk(index: Array, carry: None) -> None:
            """Multiply one chunk in turns, each with other work between its products."""
            column = index * sizes.chunk
            self._move(column + MARGIN, sizes.chunk)
            lax.fori_loop(0, sizes.turns, lambda turn, _: self._take_turn(turn, column), None)

        lax.fori_loop(0, sizes.chunks, chunk, None)
        rest, units = sizes.width - sizes.chunk, sizes.chunk // sizes.unit
        lax.fori_loop(0, units, lambda unit, _: self._finish(rest + unit * sizes.unit), None)

    def _take_turn(self, turn: Any, column: Any) -> None:
        """Compute the products for a turn's share of a chunk's results, and other work between them.

        Between them a share of the chunk's columns is modulated for a later step, and a share of the results
        of the chunk before it is finished.
        """
        sizes = self.sizes
        work = self._work_beside(turn, column)
        total, multiplied = sizes.components * len(self.weights), 0
        for component in range(sizes.components):
            products = itertools.groupby(
                zip(sizes.products, self.weights, strict=True), lambda pair: pair[0].results
            )
            for results, group in products:
                sums: Any = None
                for product, matrices_of_turns in group:
                    inputs = [
                        self._input(component, *position, part, column)
                        for position in product.inputs
                        for part in range(sizes.parts)
                    ]
                    product_sums = jnp.dot(
                        jnp.concatenate(inputs, axis=1),
                        matrices_of_turns[turn, component],
                        preferred_element_type=jnp.float32,
                    )
                    sums = product_sums if sums is None else sums + product_sums
                    multiplied += 1
                    while len(work) * total > (total - multiplied) * 2 * (sizes.units // sizes.turns):
                        work.pop(0)(after=sums)
                self._collect(turn, component, results, sums, column)

    def _work_beside(self, turn: Any, column: Any) -> list[Callable[..., None]]:
        """Return the work of a turn besides its products: functions that wait for their argument `after`.

        They modulate a share of the units from `column` on, and finish as many of the chunk before.
        """
        sizes = self.sizes
        share = sizes.units // sizes.turns
        work = []
        for unit in range(share):
            at = column + (turn * share + unit) * sizes.unit
            work += [partial(self._modulate, at, unit), partial(self._finish, at - sizes.chunk, unit)]
        return work

    def _input(self, component: int, row: int, shift: int, part: int, column: Any) -> Array:
        """Return a chunk's words in one of four rows, or in two if both rows' results share weights."""
        sizes = self.sizes
        at = self._words(column, sizes.chunk, shift)
        rows = [self.rows[row + result] for result in range(ROWS if sizes.rows_together else 1)]
        words = [self.refs[name][slot, component, part, at] for name, slot in rows]
        return pltpu.bitcast(jnp.concatenate(words), jnp.bfloat16)

    def _collect(
        self, turn: Any, component: int, results: list[tuple[int, int]], sums: Array, column: Any
    ) -> None:
        """Store a product's sums as a component of the results, or add them to it.

        `results` are the (row, column) of the sums' parts.
        """
        sizes, refs = self.sizes, self.refs
        count = sizes.chunk * TILES
        at = self._rows(column, sizes.chunk, TILES, before=sizes.chunk)
        if sizes.rows_together:
            parts = self.result_parts // sizes.turns
            for row, part in itertools.product(range(ROWS), range(parts)):
                row_sums = sums[row * count : (row + 1) * count, lanes_of(part)]
                refs["components"][component, row, turn * parts + part, at] = row_sums
            return
        for index, (row, beside) in enumerate(results):
            part_sums = sums[:, lanes_of(index)]
            if beside:  # in the next column; the last of the chunk before it is this one's first
                shifted = refs["shifted"].at[component, row]
                shifted[pl.ds(0, TILES)] = shifted[pl.ds(count, TILES)]
                shifted[pl.ds(TILES, count)] = part_sums
                component_sums = refs["components"].at[component, row, 0]
                component_sums[at] = component_sums[at] + shifted[pl.ds(0, count)]
            elif len({row for row, _ in results}) == 1:
                refs["components"][component, row, 0, at] = part_sums
            else:
                component_sums = refs["components"].at[component, row, 0]
                component_sums[at] = component_sums[at] + part_sums

    def _move(self, column: Any, count: int) -> None:
        """Move columns of the block before this step's from the stage to the products' memory."""
        at = self._words(column, count)
        for row, (name, slot) in enumerate(self.moved):
            self.refs[name][slot, :, :, at] = self.refs["stage"][row, :, :, at]

    def _keep(
        self,
        row: int,
        part: int,
        unit: int,
        column: Any,
        x: Array,
        before: Callable[[Callable[[], Array]], Array],
    ) -> Array:
        """Keep the transforms of activated frames, and of the two before them, in the stage."""
        sizes = self.sizes
        pixels = self.refs["pixels"].at[unit, row, part]
        pixels[...] = pltpu.bitcast(x, jnp.int32)
        words = [pixels[pl.ds(index, sizes.unit, stride=sizes.words), :] for index in range(sizes.words)]
        frames = [frame for pair in (before(lambda: words[0]), *words) for frame in _unpacked(pair)]
        tile_inputs = [
            self.transform.inputs(frames[start : start + sizes.tile + TAPS - 1])
            for start in range(0, sizes.input_frames, sizes.tile)
        ]
        at = self._words(column, sizes.unit)
        for component, pair in enumerate(zip(*tile_inputs, strict=True)):
            self.refs["stage"][row, component, part, at] = _packed(*pair)
        return words[-1]

    def _finish(self, column: Any, unit: int = 0, after: Array | None = None) -> None:
        """Finish the results of the unit from `column` on; `unit` is the index of its memory."""
        self._give(column, self.sizes.unit, partial(self._frames, column, unit), after)

    def _frames(self, column: Any, unit: int, row: int, part: int) -> Array:
        """Return the sums of a unit's frames from its tiles' components."""
        sizes = self.sizes
        tiles_at = self._rows(column, sizes.unit, TILES, before=sizes.chunk)
        components = [
            self.refs["components"][component, row, part, tiles_at] for component in range(sizes.components)
        ]
        frames = self.refs["frames"].at[unit, row, part]
        for frame, sums in enumerate(self.transform.results(components)):
            frames[pl.ds(frame, sizes.unit * TILES, stride=sizes.tile), :] = sums
        if "edges" in self.refs:
            self._add_edges(frames, column, row, part)
        return frames[...]

    def _add_edges(self, frames: Any, column: Any, row: int, part: int) -> None:
        """Add the contribution of columns beside the strip to its first and last column.

        Only the unit from `column` on is changed.
        """
        sizes = self.sizes
        for side, edge in enumerate((0, self._last_column())):
            inside = (edge >= column) & (edge < column + sizes.unit)
            at = self._rows(edge % sizes.unit, 1, sizes.input_frames)
            added = self.refs["edges"][
                0, row, side * sizes.input_frames : (side + 1) * sizes.input_frames, lanes_of(part)
            ]
            frames[at, :] = frames[at, :] + jnp.where(inside, added, 0.0)

    def _words(self, column: Any, count: int, shift: int = 0) -> Any:
        """Return the slice of so many columns in the products' memory, from a multiple of a register's on."""
        start = column + MARGIN
        if isinstance(start, jax.Array):
            start = pl.multiple_of(start, SUBLANES)
        return pl.ds(start + shift, count)


def _unpacked(words: Array) -> tuple[Array, Array]:
    """Return both halves of words of bfloat16, as float32."""
    return pltpu.bitcast(words << 16, jnp.float32), pltpu.bitcast(words & HIGH_HALF, jnp.float32)


def _packed(low: Array, high: Array) -> Array:
    """Pack two halves into words of bfloat16."""
    return pltpu.bitcast(pltpu.pack_elementwise([low, high], packed_dtype=jnp.bfloat16), jnp.int32)
