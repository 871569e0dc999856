"""How a video is cut into chunks and tiles; test_autoencoder.py tests that a tiled model is diffusers'."""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies

from cogvideox_torchax.vae import chunks, tiling


@hypothesis.given(frames=strategies.integers(1, 3000), a_chunk=strategies.integers(1, 16))
def test_every_frame_is_in_one_chunk_and_what_does_not_fill_a_chunk_joins_the_first(frames, a_chunk):
    plan = chunks.plan(frames, a_chunk)
    assert [frame for chunk in plan for frame in range(chunk.start, chunk.stop)] == list(range(frames))
    assert all(len(chunk) == a_chunk for chunk in plan[1:])
    assert len(plan[0]) < 2 * a_chunk
    assert len(plan) == 1 or len(plan[0]) >= a_chunk


@pytest.mark.parametrize("size", [7, 12, 13, 31])
@pytest.mark.parametrize("tile", [4, 5, 6, 7])
@pytest.mark.parametrize("overlap", [0.0, 1 / 6, 1 / 5, 0.4])
@pytest.mark.parametrize("layout", ["NCTHW", "NTHWC"])
def test_any_tile_size_gives_the_right_output_size_and_equal_tiles_blend_to_themselves(
    size, tile, overlap, layout
):
    def upscale(tile):
        return tile.repeat(8, axis).repeat(8, axis + 1)

    axis = layout.index("H")
    shape = [size if name in "HW" else 1 for name in layout]
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    plan = tiling.TilePlan(*[tiling.plan_axis(size, tile=tile, overlap=overlap, scale_out=8)] * 2)
    tiles = [[upscale(tile) for tile in row] for row in tiling.cut(x, plan, axis)]
    np.testing.assert_allclose(tiling.join(tiles, plan, axis), upscale(x), rtol=1e-6)


BAD = {
    "at least one latent pixel": ((0, 0.1), (1, 0.5), (4, 0.9)),
    "at least 0 and less than 1": ((4, -0.1), (4, 1.0), (4, 1.5)),
}


@pytest.mark.parametrize(
    ("words", "tile", "overlap"), [(words, *case) for words, cases in BAD.items() for case in cases]
)
def test_a_tile_that_does_not_advance_or_an_overlap_that_is_none_is_an_error(words, tile, overlap):
    with pytest.raises(ValueError, match=words):
        tiling.plan_axis(10, tile=tile, overlap=overlap)


@hypothesis.given(
    size=strategies.integers(1, 400),
    tile=strategies.integers(1, 100),
    overlap=strategies.floats(0, 0.9),
    scale=strategies.sampled_from([(1, 8), (8, 1), (1, 4), (1, 1)]),
)
def test_every_pixel_is_given_once_by_a_tile_that_has_it(size, tile, overlap, scale):
    scale_in, scale_out = scale
    hypothesis.assume(int(tile * (1 - overlap) + 1e-6) >= 1)
    size *= scale_in
    plan = tiling.plan_axis(size, tile=tile, overlap=overlap, scale_in=scale_in, scale_out=scale_out)
    given = []
    for start, stop in plan.spans:
        out = (stop - start) * scale_out // scale_in
        first = start * scale_out // scale_in
        given += range(first, first + min(plan.keep, out))
        assert plan.keep + plan.blend == tile * scale_out
    assert given == list(range(size * scale_out // scale_in))


@hypothesis.given(
    sizes=strategies.tuples(strategies.integers(1, 40), strategies.integers(1, 40)),
    tile=strategies.integers(2, 12),
    group_size=strategies.integers(1, 5),
)
def test_groups_have_every_tile_once_and_tiles_of_one_size_alone(sizes, tile, group_size):
    plan = tiling.TilePlan(*(tiling.plan_axis(size, tile=tile, overlap=0.2) for size in sizes))
    groups = tiling.tile_groups_of(plan, group_size)
    size = lambda at: tuple(  # noqa: E731
        axis.spans[i][1] - axis.spans[i][0] for axis, i in zip((plan.rows, plan.columns), at, strict=True)
    )
    assert all(len(group) in (1, group_size) and len(set(map(size, group))) == 1 for group in groups)
    every = [
        (row, column) for row in range(len(plan.rows.spans)) for column in range(len(plan.columns.spans))
    ]
    assert sorted(at for group in groups for at in group) == every
    left = [size(group[0]) for group in groups if len(group) == 1]
    assert group_size == 1 or all(left.count(shape) < group_size for shape in left)
