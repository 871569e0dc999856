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
    assert len(plan[0]) in range(a_chunk if len(plan) > 1 else 1, 2 * a_chunk)


@hypothesis.settings(deadline=None)
@hypothesis.given(
    sizes=strategies.tuples(strategies.integers(1, 16), strategies.integers(1, 16)),
    tile=strategies.integers(1, 10),
    overlap=strategies.sampled_from([0.0, 1 / 6, 1 / 5, 0.4, 0.75]),
    scales=strategies.sampled_from([(1, 8), (8, 1), (1, 1)]),
    layout=strategies.sampled_from(["NCTHW", "NTHWC"]),
)
def test_any_tile_size_gives_the_right_output_size_and_equal_tiles_blend_to_themselves(
    sizes, tile, overlap, scales, layout
):
    hypothesis.assume(int(tile * (1 - overlap) + 1e-6) >= 1)
    (scale_in, scale_out), axis = scales, layout.index("H")

    def rescaled(x):
        x = x[(slice(None),) * axis + (slice(None, None, scale_in),) * 2]
        return x.repeat(scale_out, axis).repeat(scale_out, axis + 1)

    height, width = (size * scale_in for size in sizes)
    shape = [{"H": height, "W": width}.get(name, 1) for name in layout]
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    options = {"tile": tile, "overlap": overlap, "scale_in": scale_in, "scale_out": scale_out}
    plan = tiling.TilePlan(*(tiling.plan_axis(size, **options) for size in (height, width)))
    tiles = [[rescaled(tile) for tile in row] for row in tiling.cut(x, plan, axis)]
    np.testing.assert_allclose(tiling.join(tiles, plan, axis), rescaled(x), rtol=1e-6)


@pytest.mark.parametrize(
    ("tile", "overlap", "words"),
    [
        *((tile, overlap, "at least one latent pixel") for tile, overlap in ((0, 0.1), (1, 0.5), (4, 0.9))),
        *((4, overlap, "at least 0 and less than 1") for overlap in (-0.1, 1.0, 1.5)),
    ],
)
def test_a_tile_that_does_not_advance_or_an_overlap_that_is_none_is_an_error(tile, overlap, words):
    with pytest.raises(ValueError, match=words):
        tiling.plan_axis(10, tile=tile, overlap=overlap)
