"""The tile plan and the blending of tiles, for any array library and either layout.

Tiles are cut, run and blended as in diffusers. There, overlap and crop are rounded each for itself, so a tile
size whose overlap is not a whole number of latent pixels gives an output of the wrong size. Here all sizes
follow from one number of latent pixels: equal to diffusers wherever diffusers is right, and of the right
size everywhere.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cogvideox_torchax.vae.directions import Direction


@dataclass(frozen=True)
class AxisPlan:
    """Where the tiles of one spatial axis start and end in the input, and how their outputs overlap.

    Attributes:
        spans: (start, stop) of each tile, in input pixels.
        keep: output pixels that each tile contributes (the last one contributes all it has).
        blend: output pixels over which a tile fades in from the one before.
    """

    spans: tuple[tuple[int, int], ...]
    keep: int
    blend: int


@dataclass(frozen=True)
class TilePlan:
    rows: AxisPlan
    columns: AxisPlan


def groups(plan: TilePlan, together: int) -> list[list[tuple[int, int]]]:
    """The tiles of a plan, those of one size `together` at a time, what is left over one by one.

    Returns:
        Groups of (row, column), each of `together` tiles or of one.
    """
    by_size: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for row, (top, bottom) in enumerate(plan.rows.spans):
        for column, (left, right) in enumerate(plan.columns.spans):
            by_size.setdefault((bottom - top, right - left), []).append((row, column))
    found = []
    for tiles in by_size.values():
        full = len(tiles) // together * together
        found += [tiles[start : start + together] for start in range(0, full, together)]
        found += [[tile] for tile in tiles[full:]]
    return found


def plan_axis(size: int, *, tile: int, overlap: float, scale_in: int = 1, scale_out: int = 1) -> AxisPlan:
    """Plans one axis.

    Args:
        size: the input's pixels along the axis.
        tile: a tile's size in latent pixels.
        overlap: the share of a tile that overlaps the next, 0 <= overlap < 1.
        scale_in, scale_out: pixels of the input and of the output to one latent pixel (1 and 8 to decode, 8
            and 1 to encode).

    Raises:
        ValueError: a tile without pixels, or an overlap that leaves no step or a gap; it names good values.
    """
    if not 0 <= overlap < 1:
        raise ValueError(
            f"got tiles that overlap by {overlap:.3f} of their size: at least 0 and less than 1 is wanted; "
            "diffusers takes 1/6 of the height and 1/5 of the width"
        )
    step = int(tile * (1 - overlap) + 1e-6)
    if tile < 1 or step < 1:
        wanted = math.ceil(1 / (1 - overlap) - 1e-6)
        raise ValueError(
            f"got a tile of {tile} latent pixels with overlap {overlap:.3f}: a tile must advance by at least "
            f"one latent pixel; with this overlap use a tile of {wanted} at least, or a smaller overlap"
        )
    spans = tuple((start, min(start + tile * scale_in, size)) for start in range(0, size, step * scale_in))
    return AxisPlan(spans, keep=step * scale_out, blend=(tile - step) * scale_out)


@dataclass(frozen=True)
class TileSettings:
    """When and how a picture is cut: a tile's size in latent pixels, and the share that overlaps the next."""

    latent_height: int
    latent_width: int
    overlap_height: float = 1 / 6
    overlap_width: float = 1 / 5

    def plan(self, direction: Direction, size: tuple[int, ...], scale: int) -> TilePlan:
        """Return the tiles of a picture.

        Args:
            direction: what is done with it.
            size: the rows and columns of the input.
            scale: sample pixels to a latent pixel.
        """
        scale_in = direction.scale(scale)
        scale_out = scale // scale_in
        plan = functools.partial(plan_axis, scale_in=scale_in, scale_out=scale_out)
        return TilePlan(
            plan(size[0], tile=self.latent_height, overlap=self.overlap_height),
            plan(size[1], tile=self.latent_width, overlap=self.overlap_width),
        )

    def cuts(self, direction: Direction, size: tuple[int, ...], scale: int) -> bool:
        """Return whether a picture is larger than one tile; the arguments are those of `plan`."""
        scale_in = direction.scale(scale)
        return size[0] > self.latent_height * scale_in or size[1] > self.latent_width * scale_in


@dataclass(frozen=True)
class ArrayLibrary:
    """What cutting, running and blending tiles asks of torch or of jax.numpy.

    Attributes:
        row_axis: of the arrays' rows; columns follow.
        asarray: a float32 array of the library, on the device of the second argument.
        concatenate, take: join arrays along an axis, and give `count` videos from `start` on.
        cut: `cut`, compiled where that pays.
    """

    row_axis: int
    asarray: Callable[[np.ndarray, Any], Any]
    concatenate: Callable[[Sequence[Any], int], Any]
    take: Callable[[Any, int, int], Any]
    cut: Callable[[TilePlan, Any], list[list[Any]]]


def run_tiles(
    pieces: Iterable[Any],
    plan: TilePlan,
    start: Callable[[], Callable[[Any], Any]],
    library: ArrayLibrary,
    join: Callable[[list[list[Any]]], Any],
    *,
    dp: int = 1,
) -> Iterator[Any]:
    """Yield the result of each chunk, run in tiles that are blended by `join`.

    Args:
        pieces: the chunks, videos on axis 0.
        plan: how they are cut.
        start: begins a run, which keeps the cache of the convolutions from a chunk of a tile to its next.
        library: of the chunks' arrays.
        join: blends the tiles' outputs, in rows of columns.
        dp: over how many devices of a mesh a batch is split; as many tiles of one size are run together.
    """
    pieces = iter(pieces)
    first = next(pieces)
    videos = first.shape[0]
    together = groups(plan, 1 if videos % dp == 0 else dp)  # else "dp" has the videos to split
    runs = [start() for _ in together]
    for piece in itertools.chain([first], pieces):
        tiles = library.cut(plan, piece)
        outputs: list[list[Any]] = [[None] * len(row) for row in tiles]
        for group, run in zip(together, runs, strict=True):
            given = [tiles[row][column] for row, column in group]
            batch = run(given[0] if len(given) == 1 else library.concatenate(given, 0))
            for place, (row, column) in enumerate(group):
                alone = len(group) == 1
                outputs[row][column] = batch if alone else library.take(batch, place * videos, videos)
        yield join(outputs)


def cut(x: Any, plan: TilePlan, *, row_axis: int) -> list[list[Any]]:
    """The tiles of `x` as rows of columns; the column axis follows `row_axis`."""
    before = (slice(None),) * row_axis
    return [
        [x[(*before, slice(*row), slice(*column))] for column in plan.columns.spans]
        for row in plan.rows.spans
    ]


def join(tiles: Sequence[Sequence[Any]], plan: TilePlan, library: ArrayLibrary) -> Any:
    """Blend the tiles' outputs, crop each to its share and put them together."""
    row_axis, column_axis = library.row_axis, library.row_axis + 1
    blended: list[list[Any]] = []
    for i, row in enumerate(tiles):
        blended.append([])
        for j, tile in enumerate(row):
            if i > 0:
                tile = _fade(blended[i - 1][j], tile, plan.rows.blend, row_axis, library)
            if j > 0:
                tile = _fade(blended[i][j - 1], tile, plan.columns.blend, column_axis, library)
            blended[i].append(tile)
    rows = [
        library.concatenate(
            [
                _part(_part(tile, row_axis, 0, plan.rows.keep), column_axis, 0, plan.columns.keep)
                for tile in row
            ],
            column_axis,
        )
        for row in blended
    ]
    return library.concatenate(rows, row_axis)


def _fade(before: Any, tile: Any, extent: int, axis: int, library: ArrayLibrary) -> Any:
    """`tile`, its first `extent` pixels a linear blend from the last ones of `before`."""
    extent = min(before.shape[axis], tile.shape[axis], extent)
    if extent == 0:
        return tile
    shape = [1] * len(tile.shape)
    shape[axis] = extent
    weight = library.asarray(np.linspace(0, 1, extent, endpoint=False, dtype=np.float32).reshape(shape), tile)
    old = _part(before, axis, before.shape[axis] - extent, before.shape[axis])
    new = _part(tile, axis, 0, extent)
    # The library's own promotion makes this float32 for bfloat16 tiles; `+ 0 * new` style casts differ by
    # library, so the result is brought back to the tile's dtype by concatenating it in that dtype.
    mixed = _as(old * (1 - weight) + new * weight, tile)
    return library.concatenate([mixed, _part(tile, axis, extent, tile.shape[axis])], axis)


def _as(x: Any, like: Any) -> Any:
    return x.to(like.dtype) if hasattr(x, "to") else x.astype(like.dtype)


def _part(x: Any, axis: int, start: int, stop: int) -> Any:
    return x[(slice(None),) * axis + (slice(start, stop),)]
