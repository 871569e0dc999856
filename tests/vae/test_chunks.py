import hypothesis
import pytest
from hypothesis import strategies

from cogvideox_torchax.vae import chunks


@pytest.mark.parametrize("frames", range(1, 30))
def test_decoded_frames_are_1_for_1_and_4n_minus_3_for_odd_and_4n_for_even(frames):
    total = sum(
        chunks.decoded_length(len(chunk)) for chunk in chunks.plan(frames, chunks.LATENT_FRAMES_A_CHUNK)
    )
    assert total == (1 if frames == 1 else 4 * frames - 3 if frames % 2 else 4 * frames)


@pytest.mark.parametrize(
    ("frames", "latents"), [(1, 1), (2, 1), (4, 1), (5, 2), (8, 2), (9, 3), (10, 3), (49, 13)]
)
def test_encoded_frames(frames, latents):
    plan = chunks.plan(frames, chunks.SAMPLE_FRAMES_A_CHUNK)
    assert sum(chunks.encoded_length(len(chunk)) for chunk in plan) == latents


def test_no_frames_is_an_error():
    with pytest.raises(ValueError, match="0 frames"):
        chunks.plan(0, 2)


@pytest.mark.parametrize(("ratio", "steps"), [(1, 0), (2, 1), (4, 2), (8, 3), (4.0, 2)])
def test_a_ratio_is_so_many_halvings(ratio, steps):
    assert chunks.temporal_steps(ratio) == steps


@hypothesis.given(frames=strategies.integers(1, 3000), a_chunk=strategies.integers(1, 16))
def test_every_frame_is_in_one_chunk_and_what_does_not_fill_a_chunk_joins_the_first(frames, a_chunk):
    plan = chunks.plan(frames, a_chunk)
    assert [frame for chunk in plan for frame in range(chunk.start, chunk.stop)] == list(range(frames))
    assert all(len(chunk) == a_chunk for chunk in plan[1:])
    assert len(plan[0]) < 2 * a_chunk
    assert len(plan) == 1 or len(plan[0]) >= a_chunk
