"""The batches of a training: stills first, then clips, larger ones at the end."""

from dataclasses import dataclass, replace

import numpy as np

from cogvideox_torchax.train.clips import LARGEST_CROP


@dataclass(frozen=True)
class Shape:
    """The clips of a batch, their frames, and the side of a square crop; None for whole frames."""

    clips: int
    frames: int
    size: int | None


STILLS_END, SMALL_END = 0.12, 0.75
"""The parts of a training in which stills, and clips of the size asked for, prevail."""

WHOLE_SHARE = 0.5
"""Share of batches of clips with whole frames, if they are requested."""


def shape_of(
    step: int,
    steps: int,
    *,
    seed: int,
    clips: int,
    frames: int,
    size: int,
    stills: bool = True,
    whole: bool = False,
) -> Shape:
    """Return the shape of a step's batch, drawn by its number.

    Args:
        step: from 0 on.
        steps: of the whole training.
        seed: of the training.
        clips: in a batch of the longest.
        frames: of the longest, 8 n + 1: other clips come back with more frames than they have.
        size: the crops' side in the first stages, a multiple of 16.
        stills: whether there is a first stage, of stills.
        whole: whether some batches are of whole frames.
    """
    half = (frames - 1) // 16 * 8 + 1
    large = int(size * LARGEST_CROP)
    still, some, long = Shape(4 * clips, 1, size), Shape(clips, half, size), Shape(clips, frames, size)
    if stills and step < STILLS_END * steps:
        odds = ((still, 0.85), (some, 0.15))
    elif step < SMALL_END * steps:
        odds = ((still, 0.1), (some, 0.55), (long, 0.35))
    else:
        odds = ((Shape(2 * clips, 1, large), 0.1), (Shape(clips, half, large), 0.4), (long, 0.5))
    rng = np.random.default_rng((seed, step, 1))
    shape = odds[rng.choice(len(odds), p=[odd for _, odd in odds])][0]
    if whole and shape.frames > 1 and rng.random() < WHOLE_SHARE:
        return replace(shape, size=None)
    return shape
