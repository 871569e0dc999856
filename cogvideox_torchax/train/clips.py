"""Training samples: parts of videos and pictures, cut, panned and zoomed into short clips.

Axes: C channels, T frames, S the side of a square crop. A function that takes `rng` draws all that is random
from it; `frames` and `size` are the T and the S of the clip that it returns.
"""

import functools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from cogvideox_torchax.files import video
from cogvideox_torchax.vae import chunks
from cogvideox_torchax.vae.pixels import from_uint8

RANGE = re.compile(r"(.*)#(\d*)-(\d*)", re.DOTALL)
PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")

LEVELS = ((2.0, 0.85), (2.5, 1.0), (3.4, 1.0), (4.5, 1.0))
"""The sizes, or levels, that a source is kept in.

Each is the source's shorter side over a crop's side, and a factor of the source's width.
"""

LARGEST_CROP = 1.5
"""Largest crop, as a multiple of the requested side; the last part of a training has it, see `Plan.shape`."""

VIDEO_SHARE = 0.65
"""Share of samples from videos, if there are both videos and pictures."""

CUT_SHARE = 0.1
"""Share of crops that cut to another scene at any frame, if cuts are requested."""

EVENT_SHARE = 0.5
"""Share of a video's windows of frames that hold an event (a fast change), if cuts are requested."""

ALIGNED_SHARE = 0.5
"""Share of windows of whole frames that begin at a multiple of 8 frames, the length of the VAE's chunks.

Except for the first, the chunks of such a window are chunks of the whole video, too.
"""


@dataclass(frozen=True)
class Part:
    """Frames `start` to `end` (not included; None: to the last) of a file, written `path#start-end`."""

    path: Path
    start: int = 0
    end: int | None = None

    @property
    def name(self) -> str:
        """The file's name without its directory, and the range if it is not the whole file."""
        if not self.start and self.end is None:
            return self.path.name
        return f"{self.path.name}#{self.start}-{'' if self.end is None else self.end}"

    def __str__(self) -> str:
        """Return the path with the range of frames, as a user writes it."""
        return str(self.path.with_name(self.name))


def parts(texts: Sequence[str], without: Path | None = None) -> list[Part]:
    """Return the parts of files, ranges of frames, that a user's texts name.

    Args:
        texts: paths of files, `file#start-end` for frames of one, or directories for all files in them.
        without: a directory, such as the training's output, whose files are left out where a text names a
            directory above it.

    Raises:
        ValueError: no video or picture, or a range of frames that is not valid.
    """
    found = [part for text in texts for part in _parts(text, without)]
    if not found:
        raise ValueError(
            f"no videos or pictures in {', '.join(texts)}: they end in {', '.join(video.SUFFIXES + PICTURES)}"
        )
    return found


def _parts(text: str, without: Path | None) -> Iterator[Part]:
    """Yield the parts that a text names: one of a file, or one for each file below a directory.

    Args:
        text: path of a file or a directory, or `file#start-end` for frames of a file.
        without: a directory below `text` whose files are left out; None for none.
    """
    is_range = "#" in text and not Path(text).exists()  # a file's name may have a "#"
    found = RANGE.fullmatch(text) if is_range else None  # its groups: path, start, end; the numbers may be ""
    path = Path(found[1] if found else text)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix.lower() in video.SUFFIXES + PICTURES)
        # A user who names `without` itself wants its files: only a directory above it leaves them out.
        inner = without if without is not None and _is_below(without, path) else None
        yield from (Part(file) for file in files if inner is None or not _is_below(file, inner))
        return
    part = Part(path, int(found[2] or 0), int(found[3]) if found[3] else None) if found else Part(path)
    if (is_range and not found) or (part.end is not None and part.end <= part.start):
        span = text.rpartition("#")[2]
        raise ValueError(f"{text}: #{span} is no range of frames; write #start-end, as #0-120 or #120-")
    yield part


def _is_below(file: Path, directory: Path) -> bool:
    """Return whether a file is in a directory, or in one below it."""
    return directory.resolve() in file.resolve().parents


@dataclass(frozen=True)
class Source:
    """A part of a video, or a picture, which has one frame, in memory.

    Attributes:
        part: the file and the range of its frames.
        levels: the frames in each size of `LEVELS`, uint8 (T, H, W, C).
        whole: the frames in the size in which whole frames are trained on, uint8 (T, H, W, C); None if they
            are not.
    """

    part: Part
    levels: tuple[np.ndarray, ...]
    whole: np.ndarray | None = None

    @property
    def frames(self) -> int:
        """The number of frames, equal in all levels (the sizes in which the frames are kept)."""
        return len(self.levels[0])

    @functools.cached_property
    def event_probabilities(self) -> np.ndarray:
        """Probabilities to draw each frame but the first, (T - 1,), by the square of the frame's change."""
        # The frames in their first size; every second pixel is enough.
        frames = self.levels[0][:, ::2, ::2].astype(np.float32)
        # A video of one still picture has no change: adding 0.1 (bytes go to 255) keeps the sum above 0.
        change = np.square(np.abs(np.diff(frames, axis=0)).mean((1, 2, 3)) + 0.1)
        return change / change.sum()


def load(part: Part, *, frames: int, size: int, whole: tuple[int, ...] | None = None) -> Source:
    """Read a video or a picture in each of the sizes (levels) that crops are cut from.

    Args:
        part: the file, and the range of its frames.
        frames: length of the longest clips.
        size: side of the crops, in pixels.
        whole: (height, width) of one more size of a video, for clips of whole frames; None for none.

    Raises:
        ValueError: a file that cannot be read, with fewer frames than `frames`, or too small.
    """
    if part.path.suffix.lower() in PICTURES:
        return Source(part, _read_picture(part, size))  # a picture has no size of whole frames
    info = video.probe(part.path)
    end = min(part.end or info.num_frames, info.num_frames)
    if end - part.start < frames:
        raise ValueError(f"has {max(end - part.start, 0)} frames from its start on, {frames} are needed")
    levels = tuple(read(part, video.Framing(*level), end) for level in _sizes(info.height, info.width, size))
    return Source(part, levels, read(part, video.Framing(whole[0], whole[1]), end) if whole else None)


def load_all(
    found: Sequence[Part],
    say: Callable[[str], None],
    *,
    frames: int,
    size: int,
    whole: tuple[int, ...] | None,
) -> list[Source]:
    """Load the parts that can be trained on.

    Args:
        found: the parts: a picture, or a range of a video's frames.
        say: called with a message for each part that is left out, and the reason.
        frames: length of the longest clips.
        size: side of the crops, in pixels.
        whole: (height, width) in which videos are kept too, to train on whole frames; None for crops alone.

    Raises:
        ValueError: no part can be trained on, or, with `whole`, no video.
    """
    sources = []
    for part in found:
        try:
            sources.append(load(part, frames=frames, size=size, whole=whole))
        except ValueError as error:
            say(f"left out: {part}: {error}")
    if not sources:
        raise ValueError("none of the clips can be trained on")
    if whole and all(source.whole is None for source in sources):
        raise ValueError("whole frames need a video, and none of the clips is one: add a video")
    return sources


def _sizes(height: int, width: int, size: int) -> list[tuple[int, int]]:
    """Return the sizes (height, width) to keep a source in: those of `LEVELS` that are no larger than it.

    At a level the shorter side is a multiple of `size`, and the width is then multiplied by the level's
    factor. A source smaller than all levels is kept in its own size.

    Args:
        height, width: of the source.
        size: the side of a usual crop.

    Raises:
        ValueError: a source whose shorter side is below that of the largest crop.
    """
    short, needed = min(height, width), math.ceil(size * LARGEST_CROP)
    if short < needed:
        raise ValueError(f"is {height} x {width}, at least {needed} are needed")
    # Factors of both sides, and further factors of the width.
    scales = [
        (multiple * size / short, width_factor)
        for multiple, width_factor in LEVELS
        if multiple * size <= short
    ]
    return [
        (round(height * scale), max(round(width * scale * width_factor), needed))
        for scale, width_factor in scales or [(1.0, 1.0)]
    ]


def read(part: Part, framing: video.Framing, end: int) -> np.ndarray:
    """Read the frames `part.start` to `end` (not included) of the part's file, uint8 (T, H, W, C)."""
    frames = enumerate(video.read_frames(part.path, framing, end))
    # A frame is (1, C, H, W).
    return np.stack([frame[0].permute(1, 2, 0).numpy() for i, frame in frames if i >= part.start])


def _read_picture(part: Part, size: int) -> tuple[np.ndarray, ...]:
    """Read a picture in each size that crops are cut from (`_sizes`), uint8 (1, H, W, C).

    Args:
        part: the picture.
        size: side, in pixels, of a usual crop.

    Raises:
        VideoError: a file that cannot be read.
        ValueError: a picture that is too small.
    """
    from PIL import Image

    picture = video.read_image(part.path)
    return tuple(
        np.asarray(picture.resize((width, height), Image.Resampling.LANCZOS))[None]
        for height, width in _sizes(picture.height, picture.width, size)
    )


@dataclass(frozen=True)
class Shape:
    """The shape of a batch: the number of clips, their frames, and the side of a square crop in pixels.

    A `size` of None is a batch of whole frames.
    """

    clips: int
    frames: int
    size: int | None


class Sampler:
    """Batches of clips; a batch depends on its number and the seed alone, not on batches drawn before it.

    Args:
        sources: the videos and pictures that clips are cut from.
        seed: seed of all that is drawn.
        cuts: whether some clips cut to another scene, and more clips are taken where a video changes fast.
    """

    def __init__(self, sources: Sequence[Source], *, seed: int, cuts: bool = False):
        """Keep the sources, videos and pictures apart.

        With `cuts`, some clips cut to another scene, and more clips are taken where a video changes fast.
        """
        self._videos = [source for source in sources if source.frames > 1]
        self._pictures = [source for source in sources if source.frames == 1]
        self._seed = seed
        self._cuts = cuts

    def batch(self, number: int, shape: Shape) -> torch.Tensor:
        """Return the batch of step `number`, the same at every call: float32 in [-1, 1].

        Returns:
            Crops (N, C, T, S, S) of `shape.size`; if the size is None, whole frames (N, C, T, H, W).

        Raises:
            ValueError: `shape` asks for whole frames, which `load` did not keep of a video.
        """
        rng = np.random.default_rng((self._seed, number))
        cut = (
            self._whole_frames_clip
            if shape.size is None
            else functools.partial(self._crop_clip, size=shape.size)
        )
        return torch.stack([cut(rng, shape.frames) for _ in range(shape.clips)])

    def _whole_frames_clip(self, rng: np.random.Generator, frames: int) -> torch.Tensor:
        """Return a clip (C, T, H, W) of T = `frames` whole frames, not crops, of a video drawn by `rng`.

        A share of the clips (`ALIGNED_SHARE`) begins at a multiple of 8 frames.
        """
        source = self._videos[rng.integers(len(self._videos))]
        if source.whole is None:
            raise ValueError(f"{source.part} was loaded without whole frames: give load() their size")
        start = _start(rng, source, frames, events=self._cuts)  # events: a share of clips has fast changes
        if rng.random() < ALIGNED_SHARE:
            start -= start % chunks.SAMPLE_FRAMES_A_CHUNK  # 8, the length of the VAE's chunks
        return _as_clip(source.whole[start : start + frames])

    def _crop_clip(self, rng: np.random.Generator, frames: int, size: int) -> torch.Tensor:
        """Draw a clip (C, T, S, S), which now and then cuts to another scene if cuts are requested.

        Args:
            rng: draws all that is random.
            frames: T of the clip.
            size: S of the clip.
        """
        clip = self._scene_clip(rng, frames, size)
        if self._cuts and frames > 1 and rng.random() < CUT_SHARE:
            cut = rng.integers(1, frames)
            clip = torch.cat([clip[:, :cut], self._scene_clip(rng, frames, size)[:, cut:]], 1)
        return clip

    def _scene_clip(self, rng: np.random.Generator, frames: int, size: int) -> torch.Tensor:
        """Draw a clip (C, T, S, S) of a video, or of a picture under a moving camera; flip and tint it.

        Args:
            rng: draws all that is random.
            frames: T of the clip.
            size: S of the clip.
        """
        # The probability of a video: with sources of one kind only it is 1 or 0.
        share = VIDEO_SHARE if self._videos and self._pictures else float(bool(self._videos))
        if rng.random() < share:
            source = self._videos[rng.integers(len(self._videos))]
            clip = _crop(rng, source, frames, size, self._cuts)
        else:
            clip = _moving_camera(rng, self._pictures[rng.integers(len(self._pictures))], frames, size)
        return _tinted(rng, _flipped(rng, clip))


def _crop(rng: np.random.Generator, source: Source, frames: int, size: int, events: bool) -> torch.Tensor:
    """Draw a clip (C, T, S, S) of a video, in a fixed square window of one of its levels (sizes).

    The clip has successive frames or every second one, forwards or backwards.

    Args:
        rng: draws all that is random.
        source: the video.
        frames: T of the clip.
        size: S of the clip.
        events: whether a share of the clips is to hold a frame at which the video changes fast (`_start`).
    """
    level = source.levels[rng.integers(len(source.levels))]
    stride = int(rng.choice([1, 1, 1, 2]))  # every second frame in a quarter of the clips
    if (frames - 1) * stride >= len(level):  # the video is too short for every second frame
        stride = 1
    span = (frames - 1) * stride + 1
    t = _start(rng, source, span, events)
    y, x = (rng.integers(side - size + 1) for side in level.shape[1:3])  # the level is (T, H, W, C)
    window = level[t : t + span : stride, y : y + size, x : x + size]
    if rng.random() < 0.5:
        window = window[::-1]
    return _as_clip(window)


def _start(rng: np.random.Generator, source: Source, span: int, events: bool) -> int:
    """Draw the index of the first frame of a window of `span` successive frames of a source.

    If `events` is true, a share of the windows (`EVENT_SHARE`) holds an event: a frame drawn with a
    probability that grows with its difference from the frame before. All other windows are drawn evenly.
    """
    last = source.frames - span  # the last index at which a window can begin
    if events and rng.random() < EVENT_SHARE and span > 1:
        probabilities = source.event_probabilities  # from frame 1 on: frame 0 has no frame before it
        event = 1 + rng.choice(len(probabilities), p=probabilities)
        return int(min(max(event - rng.integers(span), 0), last))  # the event at any place in the window
    return int(rng.integers(last + 1))


def _as_clip(frames: np.ndarray) -> torch.Tensor:
    """Return uint8 frames (T, H, W, C) as a clip (C, T, H, W), float32 in [-1, 1]."""
    return from_uint8(torch.from_numpy(frames.transpose(3, 0, 1, 2).copy()), "float32")


def _moving_camera(rng: np.random.Generator, source: Source, frames: int, size: int) -> torch.Tensor:
    """Draw a clip (C, T, S, S) of a picture, seen by a camera that drifts, turns and zooms a little.

    All that is random is drawn from `rng`; `frames` and `size` are T and S of the clip. The camera sees S x
    S points around a center, in pixels: a grid that is turned, scaled and moved for each frame, at whose
    points the picture is sampled.
    """
    # A level is the picture in one size, (1, H, W, C).
    picture = source.levels[rng.integers(len(source.levels))][0]
    height, width = picture.shape[:2]
    speed = rng.choice([0.0, 0.7, 2.0], p=[0.2, 0.5, 0.3])  # pixels a frame; 0 for a camera without drift
    # A drifting camera's velocity (T, 2) is (x, y) in pixels a frame, and changes a little with each frame.
    velocity = rng.normal(0, speed, 2) + np.cumsum(rng.normal(0, 0.1, (frames, 2)), 0) * (speed > 0)
    path = np.cumsum(velocity, 0)
    zoom = rng.uniform(0.75, 1.15) * np.exp(np.arange(frames) * rng.normal(0, 0.006))
    angle = rng.normal(0, 0.1) + np.arange(frames) * rng.normal(0, 0.004)
    # Least distance of the center from the edges: more than half a crop. In a picture too small for it the
    # center is drawn from [margin, margin + 1].
    margin = 0.6 * size
    center_x, center_y = (rng.uniform(margin, max(side - margin, margin + 1)) for side in (width, height))
    drift = path - path[frames // 2]  # in the middle frame the camera looks at the center
    cosine, sine = np.cos(angle) * zoom * size, np.sin(angle) * zoom * size
    # The rows of `affine_grid`'s matrices, from points of the crop to points of the picture, both of whose
    # sides span [-1, 1] there: hence the factors of 2.
    across = np.stack([cosine, -sine, 2 * (center_x + drift[:, 0]) - width], -1) / width
    down = np.stack([sine, cosine, 2 * (center_y + drift[:, 1]) - height], -1) / height
    seen = functional.grid_sample(
        _as_clip(picture[None]).transpose(0, 1).expand(frames, -1, -1, -1),  # (T, C, H, W)
        functional.affine_grid(
            torch.from_numpy(np.stack([across, down], 1)).float(),
            [frames, 3, size, size],
            align_corners=False,
        ),
        mode="bicubic",
        padding_mode="reflection",
        align_corners=False,
    )
    return seen.clamp(-1, 1).transpose(0, 1)


def _flipped(rng: np.random.Generator, clip: torch.Tensor) -> torch.Tensor:
    """Return a clip (C, T, S, S), mirrored, turned upside down and transposed, each by chance."""
    if rng.random() < 0.5:
        clip = clip.flip(-1)
    if rng.random() < 0.15:
        clip = clip.flip(-2)
    return clip.transpose(-1, -2) if rng.random() < 0.15 else clip


def _tinted(rng: np.random.Generator, clip: torch.Tensor) -> torch.Tensor:
    """Return a clip in [-1, 1]; half of the clips, by chance, become brighter or darker and get a tint."""
    if rng.random() < 0.5:
        return clip
    # One gain of the brightness, and one of each channel, the tint.
    gain = rng.uniform(0.7, 1.15) * rng.uniform(0.92, 1.08, (3, 1, 1, 1))
    return (clip * torch.from_numpy(gain).float() + rng.normal(0, 0.08)).clamp(-1, 1)
