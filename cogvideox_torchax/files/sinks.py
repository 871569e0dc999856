"""Sinks of frames: the animated GIF and the numbered pictures, which Pillow writes."""

import itertools
from collections.abc import Iterable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch


class Sink:
    """A sink of frames; this one drops them."""

    def write(self, frames: torch.Tensor) -> None:
        """Write uint8 frames (1, 3, t, H, W)."""

    def finish(self) -> None:
        """Write the end of the output, after the last frame."""

    def close(self) -> None:
        """Close the files that are open, whatever was written."""


def write_all(sink: Sink, pieces: Iterable[torch.Tensor]) -> int:
    """Write all pieces (1, 3, t, H, W) into a sink as they come; return the number of frames."""
    written = 0
    for frames in pieces:
        sink.write(frames)
        written += frames.shape[2]
    return written


def frames_NHWC(frames: torch.Tensor) -> Iterator[np.ndarray]:
    """Yield the frames of (1, 3, t, H, W), each (H, W, 3)."""
    yield from frames[0].permute(1, 2, 3, 0).contiguous().numpy()


class GifSink(Sink):
    """An animated GIF, each frame with a palette of its own, shown for whole hundredths of a second."""

    SHORTEST = 20
    """Fewest milliseconds of a frame: browsers show a shorter frame for a tenth of a second."""

    def __init__(self, path: Path, fps: Fraction):
        self._path = path
        self._hundredths = Fraction(100) / fps  # of a second, the duration of a frame
        self._images: list[Any] = []

    def write(self, frames: torch.Tensor) -> None:
        from PIL import Image

        # A GIF's frames are held as palette bytes, a third of their pixels: Pillow writes them all at once.
        self._images += [Image.fromarray(pixels).quantize() for pixels in frames_NHWC(frames)]

    def finish(self) -> None:
        """Write the file, which needs all frames."""
        if self._images:
            first, *rest = self._images
            # Times are rounded, not durations: errors of rounding do not add up.
            starts = [round(i * self._hundredths) for i in range(len(self._images) + 1)]
            durations = [max(10 * (end - start), self.SHORTEST) for start, end in itertools.pairwise(starts)]
            first.save(self._path, "GIF", save_all=True, append_images=rest, duration=durations, loop=0)


class FrameSink(Sink):
    """Numbered pictures: frame_00000.png and so on."""

    def __init__(self, path: Path):
        self._path = path
        self._count = 0

    def write(self, frames: torch.Tensor) -> None:
        from PIL import Image

        for pixels in frames_NHWC(frames):
            Image.fromarray(pixels).save(self._path / f"frame_{self._count:05d}.png")
            self._count += 1
