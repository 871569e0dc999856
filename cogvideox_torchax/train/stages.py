"""The settings of a training, and its batches: stills first, then clips, larger ones at the end."""

import math
import tomllib
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np

from cogvideox_torchax.train.clips import LARGEST_CROP, Shape
from cogvideox_torchax.vae.sizes import check_sides, parse_size

STILLS_END, SMALL_END = 0.12, 0.75
"""Fractions of a training's steps at which the part of mostly stills ends, and the part of smaller clips."""

WHOLE_SHARE = 0.5
"""Share of batches of clips with whole frames, if they are requested."""


@dataclass(frozen=True)
class TrainingSettings:
    """Settings of a training that `--settings` reads from a TOML file with these fields.

    Attributes:
        cuts: whether a tenth of the crops cut to another scene, and half of a video's windows lie where it
            changes fast.
        mean_color_weight: weight of the loss on frames' mean colors; L1 has 1.
        learning_rate_factor: factor of the learning rates.
        whole: height and width, multiples of 16, of whole frames for half of the batches of clips; in a file
            a text such as "128x192".
    """

    cuts: bool = False
    mean_color_weight: float = 0.0
    learning_rate_factor: float = 1.0
    whole: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Raise `ValueError` for a field of another type or outside its range."""
        if not isinstance(self.cuts, bool):
            raise ValueError(f"got cuts = {self.cuts!r}: give true or false")
        for name, wanted in (  # (field, its range in words)
            ("mean_color_weight", "0 or more"),
            ("learning_rate_factor", "a number above 0"),
        ):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)  # True is an int
            # Of the two only the weight may be 0.
            if not (is_number and 0 <= value < math.inf and (value or name == "mean_color_weight")):
                raise ValueError(f"got {name} = {value!r}: give {wanted}")
        if self.whole:  # (height, width) of whole frames, for some of the batches
            check_sides("whole frames", *self.whole, multiple=16)

    @classmethod
    def load(cls, path: Path) -> "TrainingSettings":
        """Return the settings of a TOML file; raise `ValueError` for another file, or a wrong field."""
        try:
            given = tomllib.loads(path.read_text("utf-8"))
            unknown = sorted(given.keys() - {field.name for field in fields(cls)})
            if unknown:
                raise ValueError(f"got {', '.join(unknown)}: the fields are {', '.join(vars(cls()))}")
            if "whole" in given:  # a text such as "128x192"
                given["whole"] = parse_size(str(given["whole"]), "whole frames")
            return cls(**given)
        except (OSError, RecursionError, ValueError) as error:
            raise ValueError(f"{path} has no training settings: {error}") from error


@dataclass(frozen=True)
class Plan:
    """The settings of a training, except for its clips.

    Attributes:
        steps: number of steps of the whole training, which its learning rate's schedule covers.
        clips: number of clips in a batch.
        frames: length of the longest clips, 8 n + 1.
        size: side of the square crops in pixels, a multiple of 16.
        seed: seed of the first weights, the batches and the noise.
        mixed: whether layers compute in bfloat16, around float32 weights.
        stills: whether most of the first batches are stills, for weights that know nothing yet.
        settings: further settings, of a file.
    """

    steps: int
    clips: int = 1
    frames: int = 17
    size: int = 64
    seed: int = 0
    mixed: bool = False
    stills: bool = True
    settings: TrainingSettings = TrainingSettings()

    def __post_init__(self) -> None:
        """Raise `ValueError` for a crop size, a clip length or settings that cannot be trained."""
        if self.size % 16:
            raise ValueError(f"got crops of {self.size} pixels: give a multiple of 16")
        if self.settings.whole and self.frames == 1:
            raise ValueError(
                "got whole frames with clips of 1 frame: whole frames need longer clips, give 9 or more"
            )
        if self.frames % 8 != 1:
            raise ValueError(f"got clips of {self.frames} frames: give 8 n + 1, as 1, 9, 17 or 49")

    def shape(self, step: int) -> Shape:
        """Return the shape (clips, frames, size of the crops) of the batch of step number `step`, from 0 on.

        It is drawn, by the seed and the step, from a few shapes; their probabilities depend on the part of
        the training: stills (single frames) and short clips come first, long clips and large crops last.
        """
        # `half_frames`, about half of `frames`, is 8 n + 1 too, as the VAE needs. A still costs less than a
        # clip: a batch has several for each clip.
        clips, half_frames, large = self.clips, (self.frames - 1) // 16 * 8 + 1, int(self.size * LARGEST_CROP)
        still, short = Shape(4 * clips, 1, self.size), Shape(clips, half_frames, self.size)
        long = Shape(clips, self.frames, self.size)
        # Pairs of a shape and its probability.
        if self.stills and step < STILLS_END * self.steps:
            odds = ((still, 0.85), (short, 0.15))
        elif step < SMALL_END * self.steps:
            odds = ((still, 0.1), (short, 0.55), (long, 0.35))
        else:
            odds = ((Shape(2 * clips, 1, large), 0.1), (Shape(clips, half_frames, large), 0.4), (long, 0.5))
        rng = np.random.default_rng((self.seed, step, 1))  # with 1, as (seed, step) draws the batch's clips
        shapes, probabilities = zip(*odds, strict=True)
        shape = shapes[rng.choice(len(shapes), p=probabilities)]
        # A size of None is a batch of whole frames.
        if self.settings.whole and shape.frames > 1 and rng.random() < WHOLE_SHARE:
            return replace(shape, size=None)
        return shape
