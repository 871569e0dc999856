"""The scenes that the small pipeline knows: their prompts, their clips, and a judge that reads a clip.

A scene is one shape that moves on a background of one color. `render` and `caption` draw what a scene leaves
open, such as the place and the order of the words, from `rng`. Clips are (T, H, W, 3) in [0, 1].
"""

import itertools
import re
from typing import Any, NamedTuple

import numpy as np
import torch

FRAMES, HEIGHT, WIDTH = 9, 64, 96
TOKENS = 16
"""Tokens of a prompt, with its padding."""
COLORS = {  # those that the bundled VAE reconstructs within about 10 of 255
    **{"red": (195, 30, 30), "orange": (235, 130, 40), "yellow": (235, 220, 70), "green": (60, 125, 45)},
    **{"blue": (25, 105, 215), "gray": (128, 128, 128), "white": (240, 240, 240), "black": (20, 20, 20)},
}
SHAPES = ("circle", "square", "triangle")
MOTIONS = {  # how a prompt says each
    **{side: (f"moves to the {side}", f"moving {side}", f"moves {side}") for side in ("left", "right")},
    **{way: (f"moves {way}", f"moving {way}", f"moves {way}wards") for way in ("up", "down")},
    **{"grows": ("grows", "growing", "gets bigger"), "shrinks": ("shrinks", "shrinking", "gets smaller")},
    "still": ("stays still", "standing still", "does not move"),
}
STEPS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
"""Directions (x, y) of the motions that have one; y points down."""

TEMPLATES = (
    "a {0} {1} {2} on a {3} background",
    "on a {3} background, a {0} {1} {2}",
)
HELD_PAIRS = {("gray", "circle"), ("orange", "square"), ("green", "triangle")}


class Scene(NamedTuple):
    """The four words of a scene."""

    color: str
    shape: str
    motion: str
    background: str


SCENES = [
    Scene(*words) for words in itertools.product(COLORS, SHAPES, MOTIONS, COLORS) if words[0] != words[3]
]
GROUPS = ("seen", "unseen scene", "unseen pair")


def group(scene: Scene) -> str:
    """Return "seen" for a scene that is trained on, or how it is new.

    No training clip of an "unseen pair" has the shape in this color; one eighth of the other scenes are each
    left out as an "unseen scene", all of whose pairs of words are seen.
    """
    if scene[:2] in HELD_PAIRS:
        return "unseen pair"
    color, shape, motion, back = (
        list(values).index(word)
        for values, word in zip((COLORS, SHAPES, MOTIONS, COLORS), scene, strict=True)
    )
    return "unseen scene" if (2 * color + shape + 3 * motion + back) % 8 == 0 else "seen"


def caption(scene: Scene, rng: np.random.Generator) -> str:
    """Return a prompt of the scene."""
    motion = rng.choice(MOTIONS[scene.motion])
    text = str(rng.choice(TEMPLATES)).format(scene.color, scene.shape, motion, scene.background)
    text = re.sub(r"\ba (?=o)", "an ", text)
    return text if rng.random() < 0.5 else f"{text[0].upper()}{text[1:]}."


def render(scene: Scene, rng: np.random.Generator) -> np.ndarray:
    """Return a clip of the scene, in float64."""
    time = np.linspace(-0.5, 0.5, FRAMES)[:, None, None]
    radius = rng.uniform(12.2, 12.8) if scene.motion in ("up", "down") else rng.uniform(13.5, 14.5)
    if scene.motion in ("grows", "shrinks"):
        radius = 14.5 + time * rng.uniform(10.5, 11.5) * (1 if scene.motion == "grows" else -1)
    step_x, step_y = STEPS.get(scene.motion, (0, 0))
    # The middle of the path varies little: a scene's mean clip then shows the scene, which is learned easily.
    x = np.arange(WIDTH) + 0.5 - WIDTH / 2 - rng.uniform(-3, 3) - step_x * rng.uniform(24, 26) * time
    y = (
        np.arange(HEIGHT)[:, None]
        + 0.5
        - HEIGHT / 2
        - rng.uniform(-3, 3)
        - step_y * rng.uniform(18, 20) * time
    )
    inside = {  # the distance to the edge in pixels
        "circle": radius - np.hypot(x, y),
        "square": 1.1 * radius - np.maximum(abs(x), abs(y)),
        "triangle": np.minimum(0.95 * radius - y, 0.86 * (0.6 * (y + 1.15 * radius) - abs(x))),
    }[scene.shape]
    cover = np.clip(inside + 0.5, 0, 1)[..., None]
    front, back = (np.array(COLORS[name]) / 255 for name in (scene.color, scene.background))
    return cover * front + (1 - cover) * back


def judge(clip: np.ndarray) -> Scene:
    """Read a clip by plain measures of its pixels; "none" stands for what is not there.

    The border has the background's color. The shape is where a pixel is farther from this color than half as
    far as the shape's color. Its motion is read from its center and area in the first and the last frames;
    its shape is the one that, put at its centers and with its areas, overlaps most.
    """
    border = np.concatenate([part.reshape(-1, 3) for part in (clip[:, :2], clip[:, :, :2], clip[:, :, -2:])])
    back = np.median(border, axis=0)
    away = np.linalg.norm(clip - back, axis=-1)
    front = np.median(clip[away > 0.75 * np.quantile(away, 0.98)], axis=0)
    mask = away > 0.5 * np.linalg.norm(front - back)
    area = mask.sum((1, 2)).astype(float)
    if area.min() < 20:
        return Scene(_color(front), "none", "none", _color(back))
    return Scene(_color(front), _shape(mask), _motion(mask, area), _color(back))


def _color(color: np.ndarray) -> str:
    return min(COLORS, key=lambda name: np.linalg.norm(color - np.array(COLORS[name]) / 255))


def _motion(mask: np.ndarray, area: np.ndarray) -> str:
    y, x = ((mask * grid).sum((1, 2)) / area for grid in np.mgrid[: mask.shape[1], : mask.shape[2]])
    change_x, change_y = (center[-2:].mean() - center[:2].mean() for center in (x, y))
    ratio = area[-2:].mean() / area[:2].mean()
    if max(ratio, 1 / ratio) > 1.8:
        return "grows" if ratio > 1 else "shrinks"
    if max(abs(change_x), abs(change_y)) < 6:
        return "still"
    if abs(change_x) > abs(change_y):
        return "right" if change_x > 0 else "left"
    return "down" if change_y > 0 else "up"


def _shape(mask: np.ndarray) -> str:
    """Return the shape that overlaps a video's masks (T, H, W) most, if it has their areas and centers."""
    t, y, x = np.nonzero(mask)
    area = mask.sum((1, 2)).clip(1)
    center_y, center_x = (np.bincount(t, at, len(mask)) / area for at in (y, x))
    # In units of the radius of a circle of this area, from the center.
    scale = np.sqrt(area / np.pi)[:, None, None]
    v = (np.arange(mask.shape[1])[:, None] - center_y[:, None, None]) / scale
    u = (np.arange(mask.shape[2]) - center_x[:, None, None]) / scale
    like = {
        "circle": np.hypot(u, v) < 1,
        "square": np.maximum(abs(u), abs(v)) < 0.886,  # half the root of pi
        "triangle": (v < 0.763) & (abs(u) < 0.6 * (v + 1.525)),  # its proportions are those of `render`
    }
    return max(SHAPES, key=lambda name: (mask & like[name]).sum() / (mask | like[name]).sum())


@torch.inference_mode()
def sample(
    pipe: Any, scenes: list[Scene], seed: int, *, steps: int = 20, guidance: float = 1.5, batch: int = 16
) -> list[np.ndarray]:
    """Return a pipeline's clips of prompts of the scenes, in order; `seed` is of prompts and noise."""
    rng, clips = np.random.default_rng(seed), []
    for start in range(0, len(scenes), batch):
        result = pipe(
            [caption(scene, rng) for scene in scenes[start : start + batch]],
            num_frames=FRAMES,
            max_sequence_length=TOKENS,
            num_inference_steps=steps,
            guidance_scale=guidance,
            output_type="np",
            generator=torch.Generator().manual_seed(seed + start),
        )
        clips.extend(np.asarray(result.frames))
    return clips


def shares(scenes: list[Scene], clips: list[np.ndarray]) -> dict[str, float]:
    """Return the shares of clips whose color, shape, motion and background are right, and all four."""
    pairs = zip(scenes, map(judge, clips), strict=True)
    right = np.array([[said == shown for said, shown in zip(*pair, strict=True)] for pair in pairs])
    return {
        **dict(zip(Scene._fields, right.mean(0).tolist(), strict=True)),
        "all": right.all(1).mean().item(),
    }


def drawn(name: str, count: int) -> list[Scene]:
    """Return `count` scenes of a group, the same in every run; all if it has fewer."""
    known = [scene for scene in SCENES if group(scene) == name]
    return [known[i] for i in np.random.default_rng(0).permutation(len(known))[:count]]
