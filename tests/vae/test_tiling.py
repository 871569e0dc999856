"""The plan and the blending; that a tiled model equals diffusers' is tested in test_autoencoder.py."""

import numpy as np
import pytest

from cogvideox_torchax.vae import tiling

NUMPY = tiling.ArrayLibrary(lambda parts, axis: np.concatenate(parts, axis), lambda array, like: array)


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
    axis = layout.index("H")
    shape = [1, 1, 1, 1, 1]
    shape[axis] = shape[axis + 1] = size
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    plan = tiling.plan_axis(size, tile=tile, overlap=overlap, scale_out=8)
    plan = tiling.TilePlan(plan, plan)
    upscale = lambda tile: tile.repeat(8, axis).repeat(8, axis + 1)  # noqa: E731
    tiles = [[upscale(tile) for tile in row] for row in tiling.cut(x, plan, row_axis=axis)]
    joined = tiling.join(tiles, plan, NUMPY, row_axis=axis)
    np.testing.assert_allclose(joined, upscale(x), rtol=1e-6)


def test_a_tile_fades_in_from_the_one_before():
    plan = tiling.TilePlan(tiling.plan_axis(1, tile=1, overlap=0), tiling.plan_axis(6, tile=4, overlap=0.5))
    left, right = np.zeros((1, 1, 1, 1, 4), np.float32), np.ones((1, 1, 1, 1, 4), np.float32)
    last = np.ones((1, 1, 1, 1, 2), np.float32)
    joined = tiling.join([[left, right, last]], plan, NUMPY, row_axis=3)
    np.testing.assert_allclose(joined.ravel(), [0, 0, 0, 0.5, 1, 1])


@pytest.mark.parametrize(("tile", "overlap"), [(0, 0.1), (1, 0.5), (4, 0.9)])
def test_a_tile_that_does_not_advance_is_an_error(tile, overlap):
    with pytest.raises(ValueError, match="at least one latent pixel"):
        tiling.plan_axis(10, tile=tile, overlap=overlap)
