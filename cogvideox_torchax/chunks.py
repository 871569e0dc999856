"""The frame-batch plan: which frames go through the network together, and how many come out.

GroupNorm's statistics span the frames of a batch, so the batching is part of the function (diffusers'
`AutoencoderKLCogVideoX._encode` and `_decode`), and this file is the only place that knows it.
"""

from dataclasses import dataclass

LATENT_FRAMES_A_CHUNK = 2
SAMPLE_FRAMES_A_CHUNK = 8


@dataclass(frozen=True)
class Chunk:
    """Frames `start` to `stop` (exclusive) of the input."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start


def plan(num_frames: int, frames_a_chunk: int) -> list[Chunk]:
    """Splits a video into chunks; what does not fill a chunk joins the first one.

    Args:
        num_frames: of the whole video, latent frames to decode or sample frames to encode.
        frames_a_chunk: `LATENT_FRAMES_A_CHUNK` or `SAMPLE_FRAMES_A_CHUNK`, unless the model's attributes say
            otherwise.

    Raises:
        ValueError: no frames.
    """
    if num_frames < 1:
        raise ValueError(f"got a video of {num_frames} frames: at least one is needed")
    count = max(num_frames // frames_a_chunk, 1)
    first = num_frames - frames_a_chunk * (count - 1)
    starts = [0, *(first + frames_a_chunk * i for i in range(count - 1))]
    return [Chunk(start, stop) for start, stop in zip(starts, [*starts[1:], num_frames], strict=True)]


def decoded_length(latent_frames: int, doublings: int = 2) -> int:
    """Sample frames that one chunk of `latent_frames` decodes to: an odd chunk's first frame is not
    doubled."""
    length = latent_frames
    for _ in range(doublings):
        length = 1 if length == 1 else 2 * length - length % 2
    return length


def encoded_length(sample_frames: int, halvings: int = 2) -> int:
    """Latent frames that one chunk of `sample_frames` encodes to: an odd chunk's first frame stays by
    itself."""
    length = sample_frames
    for _ in range(halvings):
        length = (length + 1) // 2
    return length
