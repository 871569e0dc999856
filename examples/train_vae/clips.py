"""Clips to train on: videos and pictures, kept in memory, and random crops of them.

Axes: T frames, C channels, H rows, W columns. A function that takes `rng` draws all that is random from it.
"""

import itertools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import av
import numpy as np
import torch
from PIL import Image, ImageOps
from torch.nn import functional

PICTURES = (".avif", ".bmp", ".jpeg", ".jpg", ".png", ".webp")
VIDEOS = (".avi", ".gif", ".mkv", ".mov", ".mp4", ".webm")
RANGE = re.compile(r"(.+)#(\d*)-(\d*)")

LARGEST_SCALE = 4.0
"""Largest side of the window that a crop is resized from, over the side of the crop."""

VIDEO_SHARE = 0.65
"""Share of the crops that come from videos, where there are both videos and pictures."""

CUT_SHARE = 0.1
"""Share of the crops that cut to another scene, if they are augmented."""


def files(texts: Iterable[str]) -> Iterator[str]:
    """Yield each text; for a directory, the paths of all videos and pictures below it that are not hidden."""
    for text in texts:
        if not Path(text).is_dir():
            yield text
            continue
        for path in sorted(Path(text).rglob("*")):
            is_hidden = any(part.startswith(".") for part in path.relative_to(text).parts)
            if path.suffix.lower() in PICTURES + VIDEOS and not is_hidden:
                yield str(path)


def frames_of(path: str, at_most: int | None) -> list[np.ndarray]:
    """Return the first frames of a video, or a picture, upright (H, W, C) in bytes."""
    if Path(path).suffix.lower() in PICTURES:
        return [np.array(ImageOps.exif_transpose(Image.open(path)).convert("RGB"))]
    with av.open(path) as container:
        decoded = itertools.islice(container.decode(video=0), at_most)
        return [np.rot90(frame.to_ndarray(format="rgb24"), frame.rotation // 90) for frame in decoded]


def scaled(frames: torch.Tensor) -> torch.Tensor:
    """Return bytes as floats in [-1, 1]."""
    return frames / 127.5 - 1


def load(text: str, frames: int, size: tuple[int, int]) -> torch.Tensor:
    """Return the frames of a video, or a picture as a video of one frame, uint8 (T, C, H, W).

    Args:
        text: the path of a file, or `path#start-end` for the frames from `start` up to `end`, not included.
        frames: least number of frames of a video.
        size: (height, width) of the crops that will be taken.

    Raises:
        OSError, ValueError: a file that cannot be read, with too few frames, or smaller than the crops.
    """
    path, start, end = match.groups() if (match := RANGE.fullmatch(text)) else (text, "", "")
    found = frames_of(path, int(end) if end else None)[int(start or 0) :]
    if len(found) < frames and Path(path).suffix.lower() not in PICTURES:
        raise ValueError(f"the clip {text} has {len(found)} frames: at least {frames} are needed")
    clip = torch.from_numpy(np.stack(found)).permute(0, 3, 1, 2)
    if clip.shape[2] < size[0] or clip.shape[3] < size[1]:
        raise ValueError(
            f"the clip {text} is {clip.shape[2]} x {clip.shape[3]}: crops of {size[0]} x {size[1]} need "
            "at least as many rows and columns"
        )
    return clip


class Sampler:
    """Random crops of videos and pictures.

    Args:
        sources: the videos and the pictures, uint8 (T, C, H, W); a picture has one frame.
        size: (height, width) of the crops.
        augment: whether crops are also mirrored, reversed in time and tinted, and now and then cut to another
            scene.
    """

    def __init__(self, sources: list[torch.Tensor], size: tuple[int, int], *, augment: bool = False):
        self.videos = [source for source in sources if len(source) > 1]
        self.pictures = [source for source in sources if len(source) == 1]
        self.size, self.augment = size, augment

    def batch(self, rng: np.random.Generator, count: int, frames: int) -> torch.Tensor:
        """Return `count` crops of `frames` frames, float32 (N, C, T, H, W) in [-1, 1]."""
        return torch.stack([self._clip(rng, frames).transpose(0, 1) for _ in range(count)])

    def _clip(self, rng: np.random.Generator, frames: int) -> torch.Tensor:
        clip = self._scene(rng, frames)
        if not self.augment:
            return clip
        if frames > 1 and rng.random() < CUT_SHARE:
            cut = rng.integers(1, frames)
            clip = torch.cat([clip[:cut], self._scene(rng, frames)[cut:]])
        clip = clip.flip([axis for axis in (0, 3) if rng.random() < 0.5])  # time, and left and right
        if rng.random() < 0.5:  # a gain of the brightness, and one of each channel
            gain = rng.uniform(0.7, 1.15) * rng.uniform(0.92, 1.08, (3, 1, 1))
            clip = (clip * torch.from_numpy(gain).float() + rng.normal(0, 0.08)).clamp(-1, 1)
        return clip

    def _scene(self, rng: np.random.Generator, frames: int) -> torch.Tensor:
        """Return a crop without a cut, (T, C, H, W)."""
        if self.videos and (not self.pictures or rng.random() < VIDEO_SHARE):
            source = self.videos[rng.integers(len(self.videos))]
            start = rng.integers(len(source) - frames + 1)
            return crop(rng, source[start : start + frames], *self.size)
        return moving_camera(rng, self.pictures[rng.integers(len(self.pictures))], frames, *self.size)


def crop(rng: np.random.Generator, frames: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Cut a window of random place and size out of frames (T, C, H, W), and resize it to height x width."""
    rows, columns = frames.shape[2:]
    scale = min(rows / height, columns / width, LARGEST_SCALE) ** rng.random()
    window_height, window_width = int(height * scale), int(width * scale)
    y, x = rng.integers(rows - window_height + 1), rng.integers(columns - window_width + 1)
    window = scaled(frames[:, :, y : y + window_height, x : x + window_width])
    return functional.interpolate(window, (height, width), mode="bilinear", antialias=True)


def moving_camera(
    rng: np.random.Generator, picture: torch.Tensor, frames: int, height: int, width: int
) -> torch.Tensor:
    """Return a clip (T, C, H, W) of a picture, over which a camera drifts, turns and zooms a little."""
    margin = min(1.5, picture.shape[2] / height, picture.shape[3] / width)  # of the window around a view
    window = crop(rng, picture, int(height * margin), int(width * margin))
    begin, end = rng.uniform(-1, 1, (2, 2)) * (1 - 1 / margin)  # centers of views; the window is [-1, 1]
    time = np.linspace(0, 1, frames)
    x, y = (begin + (end - begin) * time[:, None]).T
    angle = rng.normal(0, 0.1) + rng.normal(0, 0.05) * time
    zoom = np.exp(rng.normal(0, 0.1) * time) / margin
    cos, sin = zoom * np.cos(angle), zoom * np.sin(angle)
    rows = [[cos, -sin * height / width, x], [sin * width / height, cos, y]]  # of a matrix for each frame
    grid = functional.affine_grid(
        torch.from_numpy(np.array(rows)).permute(2, 0, 1).float(),
        [frames, 3, height, width],
        align_corners=False,
    )
    views = functional.grid_sample(
        window.expand(frames, -1, -1, -1),
        grid,
        mode="bicubic",
        padding_mode="reflection",
        align_corners=False,
    )
    return views.clamp(-1, 1)
