"""The chunks of a video: which frames go through the network together, and how many frames result.

GroupNorm's statistics span the frames of a chunk, so the chunks affect the result. The chunks are those of
diffusers' `AutoencoderKLCogVideoX._encode` and `_decode`. Only this file knows how a video is divided into
chunks, and whether a chunk's first frame stays single where a model halves or doubles the number of frames.
A step runs a chunk: (chunk, cache) -> (result, next cache).
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

Step = Callable[[Any, Any], tuple[Any, Any]]
"""A function that runs a chunk: (chunk, cache) -> (result, next cache). The first cache is None."""


def plan(num_frames: int, frames_a_chunk: int) -> list[range]:
    """Return the range of frames of each chunk of a video.

    All chunks have `frames_a_chunk` frames, and the first chunk also takes the remainder. A shorter video is
    one chunk.

    Raises:
        ValueError: there are no frames.
    """
    if num_frames < 1:
        raise ValueError(f"got a video of {num_frames} frames: at least one is needed")
    count = max(num_frames // frames_a_chunk, 1)
    first_length = num_frames - frames_a_chunk * (count - 1)
    bounds = [0, *range(first_length, num_frames, frames_a_chunk), num_frames]
    return [range(start, stop) for start, stop in itertools.pairwise(bounds)]


def run(step: Step, chunks: Iterable[Any]) -> Iterator[Any]:
    """Yield the result of each chunk of a video; each step takes the cache of the step before it."""
    cache = None  # at the start of a video
    for chunk in chunks:
        result, cache = step(chunk, cache)
        yield result
        del result  # so that the caller may free it while the next result is computed


def first_frame_is_alone(frames: int) -> bool:
    """Return whether a chunk's first frame stays single where the number of frames is halved or doubled.

    CogVideoX compresses 4k + 1 frames to k + 1 latent frames, the first of which stands for the first frame
    alone. Steady chunks have an even length, so a chunk of odd length begins with the video's first frame.
    """
    return frames % 2 == 1


def temporal_steps(compression_ratio: float) -> int:
    """Return how often a model of this temporal compression ratio halves or doubles the number of frames."""
    return max(int(compression_ratio), 1).bit_length() - 1  # the logarithm to the base 2, rounded down


def decoded_length(latent_frames: int, doublings: int = 2) -> int:
    """Return the number of frames of a decoded chunk."""
    # A doubling makes two frames of each, but for a first frame that stays single. `True` is 1.
    single_frames = first_frame_is_alone(latent_frames)
    return single_frames + (latent_frames - single_frames) * 2**doublings


def encoded_length(sample_frames: int, halvings: int = 2) -> int:
    """Return the number of latent frames of an encoded chunk."""
    # A halving makes one frame of each two, and also one of a first frame that stays single: it rounds up.
    return math.ceil(sample_frames / 2**halvings)
