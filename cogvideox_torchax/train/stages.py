"""The settings of a training, and its batches: stills first, then clips, larger ones at the end."""

import math
import tomllib
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np

from cogvideox_torchax.train.clips import LARGEST_CROP, Shape
from cogvideox_torchax.vae.sizes import check_sides, parse_size

STILLS_END, SMALL_END = 0.12, 0.75
"""The parts of a training in which stills, and clips of the size asked for, prevail."""

WHOLE_SHARE = 0.5
"""Share of batches of clips with whole frames, if they are requested."""


@dataclass(frozen=True)
class TrainingRecipe:
    """The differences of a training from the plain one; a file of it is TOML with these fields.

    Attributes:
        cuts: whether a tenth of the crops cut to another scene, and half of a video's windows lie where it
            changes fast.
        colour: how much the errors of frames' means count, beside L1's 1.
        rate: of the learning rates, of which the usual is 1.
        whole: height and width of whole frames that half of the batches of clips are of, multiples of 16;
            in a file a text such as "128x192".
    """

    cuts: bool = False
    colour: float = 0.0
    rate: float = 1.0
    whole: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Raise `ValueError` for a field of another type or outside its range."""
        if not isinstance(self.cuts, bool):
            raise ValueError(f"got cuts = {self.cuts!r}: give true or false")
        for name, wanted in (("colour", "0 or more"), ("rate", "a number above 0")):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (number and 0 <= value < math.inf and (value or name == "colour")):
                raise ValueError(f"got {name} = {value!r}: give {wanted}")
        if self.whole:
            check_sides("whole frames", *self.whole, multiple=16)

    @classmethod
    def load(cls, path: Path) -> "TrainingRecipe":
        """Return the recipe of a TOML file; `ValueError` for one that is none, or a field that is wrong."""
        try:
            given = tomllib.loads(path.read_text("utf-8"))
            unknown = sorted(given.keys() - {field.name for field in fields(cls)})
            if unknown:
                raise ValueError(f"got {', '.join(unknown)}: a recipe has {', '.join(vars(cls()))}")
            if "whole" in given:
                given["whole"] = parse_size(str(given["whole"]), "whole frames")
            return cls(**given)
        except (OSError, RecursionError, ValueError) as error:
            raise ValueError(f"{path} is no recipe: {error}") from error


@dataclass(frozen=True)
class Plan:
    """The settings of a training, but for its clips.

    Attributes:
        steps: of the whole training; the learning rate's course is stretched over them.
        clips: in a batch.
        frames: of the longest clips, 8 n + 1.
        size: of the square crops in pixels, a multiple of 16.
        seed: of the first weights, the batches and the noise.
        mixed: whether layers compute in bfloat16, around float32 weights.
        stills: whether most of the first batches are stills, for weights that know nothing yet.
        recipe: how it differs from the plain one.
    """

    steps: int
    clips: int = 1
    frames: int = 17
    size: int = 64
    seed: int = 0
    mixed: bool = False
    stills: bool = True
    recipe: TrainingRecipe = TrainingRecipe()

    def __post_init__(self) -> None:
        """Raise `ValueError` for a size, a length or settings together that cannot be trained."""
        if self.size % 16:
            raise ValueError(f"got crops of {self.size} pixels: give a multiple of 16")
        if self.recipe.whole and self.frames == 1:
            raise ValueError(
                "got whole frames with clips of 1 frame: they are of longer clips, give 9 or more"
            )
        if self.frames % 8 != 1:
            raise ValueError(f"got clips of {self.frames} frames: give 8 n + 1, as 1, 9, 17 or 49")

    def shape(self, step: int) -> Shape:
        """Return the shape of a step's batch, drawn by its number, from 0 on."""
        clips, half_frames, large = self.clips, (self.frames - 1) // 16 * 8 + 1, int(self.size * LARGEST_CROP)
        still, short = Shape(4 * clips, 1, self.size), Shape(clips, half_frames, self.size)
        long = Shape(clips, self.frames, self.size)
        if self.stills and step < STILLS_END * self.steps:
            odds = ((still, 0.85), (short, 0.15))
        elif step < SMALL_END * self.steps:
            odds = ((still, 0.1), (short, 0.55), (long, 0.35))
        else:
            odds = ((Shape(2 * clips, 1, large), 0.1), (Shape(clips, half_frames, large), 0.4), (long, 0.5))
        rng = np.random.default_rng((self.seed, step, 1))
        shape = odds[rng.choice(len(odds), p=[odd for _, odd in odds])][0]
        if self.recipe.whole and shape.frames > 1 and rng.random() < WHOLE_SHARE:
            return replace(shape, size=None)
        return shape
