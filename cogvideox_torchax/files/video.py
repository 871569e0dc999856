"""Clips in; mp4, gif and frames out. The only module that imports PyAV."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Protocol

import torch

from cogvideox_torchax.files.whole import OutputError, whole_file


class VideoError(ValueError):
    """A video that cannot be read, or not in the size wanted; the message says what to do."""


@dataclass(frozen=True)
class VideoInfo:
    """What a video holds: pixels, frames a second, and the number of frames that are really in the file."""

    path: Path
    height: int
    width: int
    fps: Fraction
    num_frames: int


def _av() -> Any:
    try:
        import av
    except ImportError as error:
        raise VideoError(
            "reading and writing video needs PyAV: pip install 'cogvideox-torchax[video]'"
        ) from error
    return av


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """The open container, its first video stream; PyAV's errors as one line."""
    av = _av()
    if not path.exists():
        raise VideoError(f"there is no file {path}")
    if path.is_dir():
        raise VideoError(f"{path} is a directory: give a video file")
    try:
        with av.open(str(path)) as container:
            if not container.streams.video:
                raise VideoError(f"{path} has no video stream")
            yield container
    except av.error.FFmpegError as error:
        reason = error.strerror or type(error).__name__
        raise VideoError(
            f"{path} cannot be read as a video ({reason}): it is truncated or not a video"
        ) from error


def probe(path: str | Path) -> VideoInfo:
    """Reads a video's size, rate and frame count; packets are counted, so a header that promises more is
    caught.

    Raises:
        VideoError: no file, no video, no frames, or fewer frames than the header announces.
    """
    path = Path(path)
    with _opened(path) as container:
        stream = container.streams.video[0]
        count = sum(1 for packet in container.demux(stream) if packet.size)
        if count == 0:
            raise VideoError(f"{path} has no frames")
        if stream.frames > count:
            raise VideoError(f"{path} is truncated: {stream.frames} frames are announced, {count} are there")
        return VideoInfo(path, stream.height, stream.width, stream.average_rate or Fraction(25), count)


@dataclass(frozen=True)
class Framing:
    """The size in which frames are wanted.

    Attributes:
        height, width: what frames are resized to.
        crop: whether the middle is cut out instead of resizing.
    """

    height: int
    width: int
    crop: bool = False


def framing(info: VideoInfo, *, multiple: int, height: int | None, width: int | None, crop: bool) -> Framing:
    """The size to read a video in, every side a multiple of `multiple`.

    Raises:
        VideoError: a size that is no such multiple; the message offers the crop.
    """
    chosen_height, chosen_width = height or info.height, width or info.width
    fitting = [max(side // multiple * multiple, multiple) for side in (chosen_height, chosen_width)]
    if crop:
        if fitting[0] > info.height or fitting[1] > info.width:
            raise VideoError(
                f"cannot crop {info.height} x {info.width} pixels to {fitting[0]} x {fitting[1]}"
            )
        return Framing(fitting[0], fitting[1], crop=True)
    if (chosen_height, chosen_width) != tuple(fitting):
        raise VideoError(
            f"{info.path.name} in {chosen_height} x {chosen_width} pixels (height x width): both must be "
            f"multiples of {multiple}; pass --crop for {fitting[0]} x {fitting[1]}, "
            "or --height and --width to resize"
        )
    return Framing(chosen_height, chosen_width)


def read_frames(path: str | Path, size: Framing, num_frames: int) -> Iterator[torch.Tensor]:
    """Yields the first `num_frames` frames as uint8 (1, 3, H, W), one at a time.

    Raises:
        VideoError: a file that cannot be read, or that ends before `num_frames`.
    """
    path = Path(path)
    given = 0
    with _opened(path) as container:
        container.streams.video[0].thread_type = "AUTO"
        for frame in container.decode(video=0):
            if given == num_frames:
                break
            yield torch.from_numpy(_pixels(frame, size)).permute(2, 0, 1)[None].contiguous()
            given += 1
    if given < num_frames:
        raise VideoError(f"{path} is truncated: {num_frames} frames were expected, {given} could be decoded")


def _pixels(frame: Any, size: Framing) -> Any:
    """A frame's RGB bytes (H, W, 3) in the wanted size."""
    if not size.crop:
        return frame.to_ndarray(format="rgb24", width=size.width, height=size.height, interpolation="BICUBIC")
    top, left = (frame.height - size.height) // 2, (frame.width - size.width) // 2
    return frame.to_ndarray(format="rgb24")[top : top + size.height, left : left + size.width]


class Sink(Protocol):
    """Where frames go: `write` takes uint8 frames (1, 3, t, H, W)."""

    def write(self, frames: torch.Tensor) -> None: ...

    def close(self) -> None: ...


@contextlib.contextmanager
def writing(path: str | Path, fps: Fraction | float) -> Iterator[Sink]:
    """A sink for an .mp4 or .gif file, or for a directory of numbered PNG frames; whole or not there at all.

    Raises:
        OutputError: another suffix, an output that cannot be written, a directory that has files in it, or a
            rate that is not above 0.
    """
    path = Path(path)
    if not fps > 0:
        raise OutputError(f"cannot write {path} with {fps} frames a second: give a rate above 0")
    kind = path.suffix.lower()
    if kind not in (".mp4", ".gif", ""):
        raise OutputError(f"cannot write {path}: give a name in .mp4 or .gif, or a directory for frames")
    if path.is_dir() and (kind or any(path.iterdir())):
        raise OutputError(
            f"cannot write {path}: it is a directory" + (" that is not empty" if not kind else "")
        )
    if path.is_file() and not kind:
        raise OutputError(f"cannot write frames to {path}: it is a file")
    sinks = {".mp4": _Mp4Sink, ".gif": _GifSink, "": _FrameSink}
    with whole_file(path) as temporary:
        sink = sinks[kind](temporary, Fraction(fps).limit_denominator(100_000))
        try:
            yield sink
        finally:
            sink.close()


def _frames_NHWC(frames: torch.Tensor) -> Iterator[Any]:
    yield from frames[0].permute(1, 2, 3, 0).contiguous().numpy()


class _Mp4Sink:
    """H.264 in yuv420p, which every player shows; quality high enough not to be what one sees."""

    def __init__(self, path: Path, fps: Fraction):
        self._container = _av().open(str(path), "w", format="mp4")
        self._fps = fps
        self._stream: Any = None

    def write(self, frames: torch.Tensor) -> None:
        av = _av()
        for pixels in _frames_NHWC(frames):
            if self._stream is None:
                self._stream = self._container.add_stream("libx264", rate=self._fps, options={"crf": "16"})
                self._stream.height, self._stream.width = pixels.shape[:2]
                self._stream.pix_fmt = "yuv420p"
            self._container.mux(self._stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))

    def close(self) -> None:
        if self._stream is not None:
            self._container.mux(self._stream.encode(None))
        self._container.close()


class _GifSink:
    """An animated GIF, each frame with a palette of its own."""

    def __init__(self, path: Path, fps: Fraction):
        self._path = path
        self._milliseconds = round(1000 / fps)
        self._images: list[Any] = []

    def write(self, frames: torch.Tensor) -> None:
        from PIL import Image

        # A GIF's frames are held as palette bytes, a third of their pixels: Pillow writes them all at once.
        self._images += [Image.fromarray(pixels).quantize() for pixels in _frames_NHWC(frames)]

    def close(self) -> None:
        if self._images:
            first, *rest = self._images
            first.save(self._path, save_all=True, append_images=rest, duration=self._milliseconds, loop=0)


class _FrameSink:
    """frame_00000.png and so on."""

    def __init__(self, path: Path, fps: Fraction):
        self._path = path
        self._count = 0
        path.mkdir()

    def write(self, frames: torch.Tensor) -> None:
        from PIL import Image

        for pixels in _frames_NHWC(frames):
            Image.fromarray(pixels).save(self._path / f"frame_{self._count:05d}.png")
            self._count += 1

    def close(self) -> None:
        pass
