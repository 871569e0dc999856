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
        under, along = row - result, column - beside + 1
        inside = 0 <= under < TAPS and 0 <= along < TAPS and (beside == 0 or column == 0)
        return outputs[:, under, along] if inside else jnp.zeros_like(outputs[:, 0, 0])

    return matrices(transformed, product, turns, tap)


class WinogradStep(ConvStep):
    """A step that multiplies transformed frames."""

    def __init__(self, sizes: ConvSizes, weights: tuple[Any, ...], refs: dict[str, Any]):
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
        """Clear both sides."""
        sides = itertools.product(("stage", "upper", "lower"), (0, MARGIN + self.sizes.width))
        clear(self.refs[name].at[:, :, :, pl.ds(start, MARGIN)] for name, start in sides)

    def _convolve(self) -> None:
        sizes = self.sizes
        self._move(0, MARGIN)
        if "shifted" in self.refs:
            clear([self.refs["shifted"].at[:, :, pl.ds(sizes.chunk * TILES, TILES)]])

        def chunk(index: Array, carry: None) -> None:
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
                for product, of_turns in group:
                    inputs = [
                        self._input(component, *place, part, column)
                        for place in product.inputs
                        for part in range(sizes.parts)
                    ]
                    found = jnp.dot(
                        jnp.concatenate(inputs, axis=1),
                        of_turns[turn, component],
                        preferred_element_type=jnp.float32,
                    )
                    sums = found if sums is None else sums + found
                    multiplied += 1
                    while len(work) * total > (total - multiplied) * 2 * (sizes.units // sizes.turns):
                        work.pop(0)(after=sums)
                self._collect(turn, component, results, sums, column)

    def _work_beside(self, turn: Any, column: Any) -> list[Callable[..., None]]:
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
        """Add a product's sums to its component's."""
        sizes, refs = self.sizes, self.refs
        count = sizes.chunk * TILES
        at = self._rows(column, sizes.chunk, TILES, before=sizes.chunk)
        if sizes.rows_together:
            parts = self.result_parts // sizes.turns
            for row, part in itertools.product(range(ROWS), range(parts)):
                of_row = sums[row * count : (row + 1) * count, lanes_of(part)]
                refs["components"][component, row, turn * parts + part, at] = of_row
            return
        for place, (row, beside) in enumerate(results):
            found = sums[:, lanes_of(place)]
            if beside:  # in the next column; the last of the chunk before it is this one's first
                shifted = refs["shifted"].at[component, row]
                shifted[pl.ds(0, TILES)] = shifted[pl.ds(count, TILES)]
                shifted[pl.ds(TILES, count)] = found
                kept = refs["components"].at[component, row, 0]
                kept[at] = kept[at] + shifted[pl.ds(0, count)]
            elif len({row for row, _ in results}) == 1:
                refs["components"][component, row, 0, at] = found
            else:
                kept = refs["components"].at[component, row, 0]
                kept[at] = kept[at] + found

    def _move(self, column: Any, count: int) -> None:
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
        sizes = self.sizes
        pixels = self.refs["pixels"].at[unit, row, part]
        pixels[...] = pltpu.bitcast(x, jnp.int32)
        words = [pixels[pl.ds(place, sizes.unit, stride=sizes.words), :] for place in range(sizes.words)]
        frames = [frame for pair in (before(lambda: words[0]), *words) for frame in _unpacked(pair)]
        of_tiles = [
            self.transform.inputs(frames[start : start + sizes.tile + TAPS - 1])
            for start in range(0, sizes.held, sizes.tile)
        ]
        at = self._words(column, sizes.unit)
        for component, pair in enumerate(zip(*of_tiles, strict=True)):
            self.refs["stage"][row, component, part, at] = _packed(*pair)
        return words[-1]

    def _finish(self, column: Any, unit: int = 0, after: Array | None = None) -> None:
        """Finish a unit's results."""
        self._give(column, self.sizes.unit, partial(self._frames, column, unit), after)

    def _frames(self, column: Any, unit: int, row: int, part: int) -> Array:
        """Return the sums of a unit's frames from its tiles' components."""
        sizes = self.sizes
        of_tiles = self._rows(column, sizes.unit, TILES, before=sizes.chunk)
        components = [
            self.refs["components"][component, row, part, of_tiles] for component in range(sizes.components)
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
            at = self._rows(edge % sizes.unit, 1, sizes.held)
            added = self.refs["edges"][0, row, side * sizes.held : (side + 1) * sizes.held, lanes_of(part)]
            frames[at, :] = frames[at, :] + jnp.where(inside, added, 0.0)

    def _words(self, column: Any, count: int, shift: int = 0) -> Any:
        """Return the place of so many columns in the products' memory, from a multiple of a register's on."""
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
