"""The plan and the blending; that a tiled model equals diffusers' is tested in test_autoencoder.py."""

from types import SimpleNamespace

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies

from cogvideox_torchax.vae import tiling


def test_published_sizes_give_diffusers_numbers():
    rows = tiling.plan_axis(60, tile=30, overlap=1 / 6, scale_out=8)
    columns = tiling.plan_axis(90, tile=45, overlap=1 / 5, scale_out=8)
    assert (rows.spans, rows.keep, rows.blend) == (((0, 30), (25, 55), (50, 60)), 200, 40)
    assert (columns.spans, columns.keep, columns.blend) == (((0, 45), (36, 81), (72, 90)), 288, 72)


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


def test_a_tile_fades_in_from_the_one_before():
    plan = tiling.TilePlan(tiling.plan_axis(1, tile=1, overlap=0), tiling.plan_axis(6, tile=4, overlap=0.5))
    left, right = np.zeros((1, 1, 1, 1, 4), np.float32), np.ones((1, 1, 1, 1, 4), np.float32)
    last = np.ones((1, 1, 1, 1, 2), np.float32)
    joined = tiling.join([[left, right, last]], plan, 3)
    np.testing.assert_allclose(joined.ravel(), [0, 0, 0, 0.5, 1, 1])


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


@hypothesis.given(overlap=strategies.floats(0, 0.99), tile=strategies.integers(1, 200))
def test_the_tile_that_an_error_names_is_good(overlap, tile):
    try:
        tiling.plan_axis(10, tile=tile, overlap=overlap)
    except ValueError as error:
        named = int(str(error).split("a tile of ")[-1].split()[0])
        tiling.plan_axis(10, tile=named, overlap=overlap)
        assert named > tile


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
    together=strategies.integers(1, 5),
)
def test_groups_have_every_tile_once_and_tiles_of_one_size_alone(sizes, tile, together):
    plan = tiling.TilePlan(*(tiling.plan_axis(size, tile=tile, overlap=0.2) for size in sizes))
    groups = tiling.tile_groups_of(plan, together)
    size = lambda at: tuple(  # noqa: E731
        axis.spans[i][1] - axis.spans[i][0] for axis, i in zip((plan.rows, plan.columns), at, strict=True)
    )
    assert all(len(group) in (1, together) and len(set(map(size, group))) == 1 for group in groups)
    every = [
        (row, column) for row in range(len(plan.rows.spans)) for column in range(len(plan.columns.spans))
    ]
    assert sorted(at for group in groups for at in group) == every
    left = [size(group[0]) for group in groups if len(group) == 1]
    assert together == 1 or all(left.count(shape) < together for shape in left)


@pytest.mark.parametrize(
    ("videos", "dp", "batches"), [(1, 1, {1}), (1, 2, {1, 2}), (2, 2, {2}), (3, 2, {3, 6})]
)
def test_tiles_of_a_size_run_together_where_a_mesh_splits_batches(videos, dp, batches):
    chunks = np.random.default_rng(0).normal(size=(2, videos, 5, 9)).astype(np.float32)
    plan = tiling.TilePlan(*(tiling.plan_axis(size, tile=4, overlap=0.25) for size in (5, 9)))

    def double(tile, shapes):
        return 2 * tile, [*(shapes or []), tile.shape]

    placement = SimpleNamespace(
        mesh=SimpleNamespace(shape={"dp": dp}), result_without_padding=lambda frames: frames
    )
    step, caches, results = tiling.tiled_step(double, plan, "NTHW", placement), None, []
    for chunk in chunks:
        result, caches = step(chunk[:, None], caches)
        results.append(result)
    assert {shape[0] for shapes in caches for shape in shapes} == batches
    assert all(len(shapes) == 2 and len(set(shapes)) == 1 for shapes in caches), "a group keeps its cache"
    np.testing.assert_allclose(results, 2 * chunks[:, :, None], rtol=1e-6)
