"""The chunks of a video: which frames go through the network together, and how many frames result.

GroupNorm's statistics span the frames of a chunk, so the chunks are part of the function that the VAE
computes (diffusers' `AutoencoderKLCogVideoX._encode` and `_decode`); only this file knows them. It also has
the rule of the first frame for up- and downsampling in time.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

Step = Callable[[Any, Any], tuple[Any, Any]]
"""A step of a video: (chunk, cache) -> (result, next cache). The first chunk has the cache None."""

LATENT_FRAMES_A_CHUNK = 2
SAMPLE_FRAMES_A_CHUNK = 8


def plan(num_frames: int, frames_a_chunk: int) -> list[range]:
    """Return the range of frames of each chunk of a video; the remainder joins the first chunk.

    Args:
        num_frames: length of the whole video: latent frames to decode or sample frames to encode.
        frames_a_chunk: number of frames in a chunk: usually the model's, by default `LATENT_FRAMES_A_CHUNK`
            to decode and `SAMPLE_FRAMES_A_CHUNK` to encode; 1 to decode frame by frame.

    Raises:
        ValueError: no frames.
    """
    if num_frames < 1:
        raise ValueError(f"got a video of {num_frames} frames: at least one is needed")
    count = max(num_frames // frames_a_chunk, 1)
    first_length = num_frames - frames_a_chunk * (count - 1)
    bounds = [0, *range(first_length, num_frames, frames_a_chunk), num_frames]
    return [range(start, stop) for start, stop in itertools.pairwise(bounds)]


def run(step: Step, chunks: Iterable[Any]) -> Iterator[Any]:
    """Yield the result of each of a video's chunks, which are in order."""
    cache = None
    for chunk in chunks:
        result, cache = step(chunk, cache)
        yield result
        del result  # so that only its taker holds it while the next one is computed


def first_frame_is_alone(frames: int) -> bool:
    """Return whether the first of a chunk's `frames` frames stays single in temporal resampling.

    CogVideoX compresses 4k + 1 frames to k + 1: a chunk of odd length starts with the video's first frame,
    which is kept single (diffusers: `CogVideoXUpsample3D`, `CogVideoXDownsample3D`,
    `CogVideoXSpatialNorm3D`).
    """
    return frames % 2 == 1


def temporal_steps(compression_ratio: float) -> int:
    """Return the number of times that a model of this temporal compression ratio halves or doubles frames."""
    return max(int(compression_ratio), 1).bit_length() - 1


def decoded_length(latent_frames: int, doublings: int = 2) -> int:
    """Return the number of sample frames of a decoded chunk; the first of an odd number is not doubled."""
    length = latent_frames
    for _ in range(doublings):
        length = 2 * length - first_frame_is_alone(length)
    return length


def encoded_length(sample_frames: int, halvings: int = 2) -> int:
    """Return the number of latent frames of an encoded chunk.

    Each of the `halvings` averages frames in pairs; the first of an odd number of frames stays as it is.
    """
    length = sample_frames
    for _ in range(halvings):
        length = (length + first_frame_is_alone(length)) // 2
    return length
