"""Read videos and images; write .mp4, .gif and PNG frames. The only module that imports PyAV.

PyAV binds FFmpeg. A *packet* is a frame, or some sound, as it is stored; `pts` is its time, in ticks of its
stream's clock, which are `time_base` seconds long.
"""

import collections
import contextlib
import io
import itertools
import logging
import math
import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from PIL import Image, ImageOps

from cogvideox_torchax import upstream
from cogvideox_torchax.files import faults
from cogvideox_torchax.files.extras import needing
from cogvideox_torchax.files.whole import check_output, refuse, resolved, whole_file

logger = logging.getLogger("cogvideox_torchax")

Source = str | Path | bytes
"""A video file: its path, or its bytes."""

SUFFIXES = (
    *(".3g2", ".3gp", ".apng", ".asf", ".avi", ".avif", ".flv", ".gif", ".m2ts", ".m4v", ".mkv", ".mov"),
    *(".mp4", ".mpeg", ".mpg", ".mts", ".mxf", ".ogv", ".ts", ".vob", ".webm", ".webp", ".wmv", ".y4m"),
)
"""Suffixes by which the videos in a directory are found; see `is_video`."""
MOVING = {".avif": b"avis", ".webp": b"ANIM"}
"""By a suffix that still pictures have too: what is among the first bytes of a file that moves."""

# FFmpeg's names of the formats of pictures. A file in one of them is one frame, whatever follows in it.
PICTURE = re.compile(r"image2|\w+_pipe")
# Suffixes of a JPEG, and the number of first bytes among which its headers are.
JPEG, HEAD = (".jfif", ".jpe", ".jpeg", ".jpg"), 1 << 17
# FFmpeg's names of formats that announce how long a video is, and not how many frames it has.
DURATION_IN_HEADER = ("flv", "matroska,webm", "mxf")
# By its number in ITU-T H.273: the transfer function of a video of high dynamic range.
HDR = {16: "PQ", 18: "HLG"}

LONGEST = 600
"""Most seconds that a frame may last: .gif and .mp4 cannot store many more."""
LARGEST = 16_384
"""Most pixels along a side of a frame in H.264."""
BT709, BT601 = 1, 6
"""The numbers in ITU-T H.273 of two color standards: of HD television, and of television in 525 lines."""
HD_ROWS = 720
"""Fewest rows of a frame whose colors are written in BT.709; players suppose BT.601 for fewer."""
LIMITED_RANGE = 1
"""FFmpeg's number for luma of 16 to 235."""


class VideoError(ValueError):
    """A video or an image that cannot be read, or not in the size wanted; the message says what to do."""


# Reading


def is_video(path: Path) -> bool:
    """Return whether a file in a directory counts as a video, by its suffix; a still picture does not."""
    suffix = path.suffix.lower()
    return (
        suffix in SUFFIXES
        and path.is_file()
        and (suffix not in MOVING or MOVING[suffix] in _first_bytes(path, 64))
    )


def _first_bytes(source: Source, count: int) -> bytes:
    if isinstance(source, bytes):
        return source[:count]
    with open(source, "rb") as file:
        return file.read(count)


def _av() -> Any:
    """Return the package PyAV; `VideoError` if it is not installed."""
    with needing("video", "reading and writing video needs PyAV", VideoError):
        import av
        from av.sidedata.sidedata import Type
    upstream.accept_unknown_members(Type)  # else no side data of a picture with EXIF could be read
    return av


@dataclass
class Video:
    """A video file, which is read once, as a stream: what it is, is known when `frames` has ended.

    Attributes:
        source: its path, or its bytes.
        height, width: of a frame, upright, in pixels as they are stored; known from the first frame on.
        pixel: the width over the height of a pixel as it is shown, which need not be square.
        times: seconds after the first frame at which each frame that was decoded is shown. A frame for which
            the file does not say so, or says an earlier time than that of the frame before, follows that one
            at the header's rate.
        num_frames: number of frames that are shown, or of packets if the rest was not decoded. An edit list
            may hide others.
        tick: period of the clock of `times`, in seconds.
        announced: frames a second that the header names, if it does.
    """

    source: Source
    height: int = 0
    width: int = 0
    pixel: Fraction = Fraction(1)
    times: list[Fraction] = field(default_factory=list)
    num_frames: int = 0
    tick: Fraction = Fraction(0)
    announced: tuple[Fraction, ...] = (Fraction(25),)  # FFmpeg's default

    @property
    def path(self) -> Path:
        """The path of the file; for a video in bytes, words for messages."""
        return Path("the video") if isinstance(self.source, bytes) else Path(self.source)

    @property
    def shape(self) -> Fraction:
        """A frame's width over its height, as it is shown."""
        return self.width * self.pixel / self.height

    @property
    def variable(self) -> bool:
        """True if the frame rate varies among the decoded frames."""
        gaps = [b - a for a, b in itertools.pairwise(self.times)] or [Fraction(0)]
        # Times are whole ticks, so at a steady rate the gaps may differ by one tick. Where a gap is four
        # ticks or shorter, one tick is a large part of it, and any difference counts as varying.
        return max(gaps) - min(gaps) > (self.tick if 4 * self.tick < min(gaps) else 0)

    @property
    def fps(self) -> Fraction:
        """Frames a second, on average: the first announced rate that fits the times, or that of the times."""
        if len(self.times) < 2:
            return self.announced[0]
        frames, seconds = len(self.times) - 1, self.times[-1]
        # FFmpeg's integers have 32 bits.
        of_times = (frames / seconds).limit_denominator(100_000) or Fraction(1, 100_000)
        rounding = math.inf if self.variable else 2 * self.tick  # seconds, but at most half a frame's
        fitting = (
            rate
            for rate in (*self.announced, Fraction(round(of_times)))  # as times are rounded to milliseconds
            if rate and abs(rate * seconds - frames) <= min(rate * rounding, 0.5)
        )
        return next(fitting, of_times)

    def frames(self, fps: Fraction | None = None, at_most: int | None = None) -> Iterator[tuple[int, Any]]:
        """Yield frames as FFmpeg decodes them, each with its number in the file.

        When enough are taken, the rest of the file is counted, and not decoded. Video of high dynamic range
        is named in the log, for its colors are not mapped to the usual range; so is damage.

        Args:
            fps: frames a second to take: for each multiple of 1 / `fps` seconds the frame nearest in time, so
                a frame may be left out or repeated. None for each frame once.
            at_most: number of frames to take; None for all.

        Raises:
            VideoError: no file, no video, no frames, frames of several sizes, or fewer than are announced.
        """
        taken, self._is_enough = 0, False
        for number, ((time, frame), (later, _)) in enumerate(itertools.pairwise(self._decoded())):
            # Half-way to the next frame, that one becomes nearer.
            until = number + 1 if fps is None else math.floor((time + later) / 2 * fps) + 1
            until = until if at_most is None else min(until, at_most)
            yield from itertools.repeat((number, frame), until - taken)
            taken = max(until, taken)
            self._is_enough = taken == at_most

    def _decoded(self) -> Iterator[tuple[Fraction, Any]]:
        """Yield the time and the frame of each that the decoder shows, and at last the time of the end, None.

        As FFmpeg does, leave out packets before the first frame, which may lack those that they refer to.
        """
        self.times = []
        with self._opened() as (container, stream):
            stream.thread_type = "AUTO"  # decodes on several threads
            self.tick = stream.time_base
            rates = (stream.average_rate, stream.guessed_rate)
            self.announced = tuple(filter(None, rates)) or type(self).announced
            is_picture = self._is_picture(container)
            stored = shown = 0  # packets
            end = longest = previous = Fraction(0)  # seconds
            for packet in container.demux():
                if packet.pts is not None:
                    end = max(end, (packet.pts + (packet.duration or 0)) * packet.time_base)
                if packet.stream is not stream:
                    continue
                if packet.size:  # the last one has none
                    seconds = (packet.pts or 0) * self.tick
                    longest, previous = max(longest, abs(seconds - previous) * (stored > 0)), seconds
                    stored, shown = stored + 1, shown + (not packet.is_discard)
                try:
                    for frame in () if self._is_enough else packet.decode():
                        self._note(frame, stream)
                        yield self.times[-1], frame
                        self._is_enough = self._is_enough or is_picture
                        if self._is_enough:
                            break
                except _av().error.InvalidDataError:
                    if self.times:
                        raise
            self._check_end(container, stream, stored, end, longest)
            rest_is_counted = self._is_enough and not is_picture
            self.num_frames = max(len(self.times), shown * rest_is_counted)
        yield self.times[-1] + 1 / self.fps, None

    @contextlib.contextmanager
    def _opened(self) -> Iterator[tuple[Any, Any]]:
        """Open a video file; yield PyAV's container and stream. FFmpeg's errors turn into `VideoError`."""
        av, source, path = _av(), self.source, self.path
        if not isinstance(source, bytes):
            faults.refuse(
                (not path.exists(), f"there is no file {path}"),
                (path.is_dir(), f"{path} is a directory: give a video file"),
                error=VideoError,
            )
        try:
            # In a relative name FFmpeg takes the text before a colon for a protocol; after a slash not.
            file = io.BytesIO(source) if isinstance(source, bytes) else str(path.absolute())
            with av.open(file) as container:
                # A still cover picture, which FFmpeg counts as video, is left out.
                still = av.stream.Disposition.attached_pic
                moving = [each for each in container.streams.video if still not in each.disposition]
                if not moving:
                    raise VideoError(f"{path} has no video stream")
                best = container.streams.best("video")
                yield container, best if best in moving else moving[0]
        except av.error.FFmpegError as error:
            reason = error.strerror or type(error).__name__
            raise VideoError(
                f"{path} cannot be read as a video ({reason}): it is truncated or not a video"
            ) from error

    def _is_picture(self, container: Any) -> bool:
        """Return whether a file is one frame, whatever follows in it."""
        name = container.format.name
        # FFmpeg takes a JPEG for M-JPEG if another one follows, such as a phone's second view, of which the
        # headers tell by the MP format of CIPA DC-007.
        return bool(PICTURE.fullmatch(name)) or (
            name == "mjpeg"
            and (self.path.suffix.lower() in JPEG or b"MPF\0" in _first_bytes(self.source, HEAD))
        )

    def _note(self, frame: Any, stream: Any) -> None:
        """Take a decoded frame's time, and of the first one the size."""
        size, time = (frame.height, frame.width), Fraction(0)
        if not self.times:
            self._size, self._start, self._is_damaged = size, frame.pts, False
            orientation = Orientation.of(frame)
            self.height, self.width = orientation.sides(size)
            aspect = stream.sample_aspect_ratio or Fraction(1)  # a stored pixel's width over its height
            self.pixel = 1 / aspect if orientation.swapped else aspect
            if frame.color_trc in HDR:
                logger.warning(
                    "%s is HDR video (%s): its colors are taken as stored, without tone mapping, and look "
                    "pale; convert it to SDR for true ones",
                    self.path,
                    HDR[frame.color_trc],
                )
        else:
            is_timed = None not in (frame.pts, self._start)
            time = (frame.pts - self._start) * self.tick if is_timed else Fraction(0)
            time = time if time > self.times[-1] else self.times[-1] + 1 / self.announced[0]
            if size != self._size:
                raise VideoError(
                    f"{self.path} changes size at frame {len(self.times)}, from "
                    "{} x {} pixels to {} x {}".format(*self._size, *size)
                    + ": cut it there, or take fewer frames"
                )
        if frame.is_corrupt and not self._is_damaged:
            self._is_damaged = True
            logger.warning(
                "%s is damaged: frame %d, and maybe others, are what FFmpeg made of it",
                self.path,
                len(self.times),
            )
        self.times.append(time)

    def _check_end(self, container: Any, stream: Any, stored: int, end: Fraction, longest: Fraction) -> None:
        """Raise `VideoError` if the header of a file that is read announces more than was there.

        `stored` packets were there, and ended after `end` seconds; `longest` is the longest time between two.
        """
        name = container.format.name
        # An .mp4 has an index of its packets. The header of an .avi counts empty packets too, which show the
        # frame before them again; if the file is cut off, FFmpeg shortens its duration, in frames.
        is_short_avi = name == "avi" and (stream.duration or 0) < stream.frames
        announced = stream.frames if is_short_avi else len(stream.index_entries) * name.startswith("mov")
        seconds = (container.duration or 0) / 1e6 if name in DURATION_IN_HEADER else 0
        faults.refuse(
            (
                announced > stored,
                f"{self.path} is truncated: {announced} frames are announced, {stored} are there",
            ),
            # The last frame may have no duration, or have been held for longer than others.
            (
                seconds - end > max(0.25, 2 * longest),
                f"{self.path} is truncated: {seconds:.6g} s are announced, {float(end):.6g} s are there",
            ),
            (
                not self.times and self.path.suffix.lower() == ".webp" and is_video(self.path),
                f"{self.path} is an animated WebP, which this FFmpeg cannot decode: make an .apng of it, "
                f"without loss, by PIL.Image.open({self.path.name!r}).save({self.path.stem + '.apng'!r}, "
                "'PNG', save_all=True)",
            ),
            (not self.times, f"{self.path} has no frames"),
            error=VideoError,
        )


def probe(source: Source, at_most: int | None = None) -> Video:
    """Read a video for its properties and errors alone; `at_most` is the number of frames to decode."""
    video = Video(source)
    collections.deque(video.frames(at_most=at_most), maxlen=0)  # drops the frames
    return video


class Orientation(NamedTuple):
    """The changes that set a stored frame upright: a phone stores an upright video on its side.

    If `swapped`, rows and columns are exchanged first. Then `upward` reverses the rows, and `leftward` the
    columns.
    """

    swapped: bool = False
    upward: bool = False
    leftward: bool = False

    @classmethod
    def of(cls, frame: Any) -> Self:
        """Return the orientation of a decoded frame, by its display matrix; upright if it has none."""
        matrix = frame.side_data.get("DISPLAYMATRIX")
        if matrix is None:
            return cls()
        # The matrix is that of ISO/IEC 14496-12: nine integers, row by row. A pixel at (x, y) is shown at
        # x' = a x + c y and y' = b x + d y.
        a, b, _, c, d, *_ = struct.unpack("=9i", bytes(matrix))
        # For a quarter turn a and d are 0: then y' follows x by b, and x' follows y by c.
        swapped = abs(b) > abs(a)
        return cls(swapped, upward=(b if swapped else d) < 0, leftward=(c if swapped else a) < 0)

    def sides(self, sides: tuple[int, int]) -> tuple[int, int]:
        """Exchange (height, width) if the frame is stored on its side; a second call undoes this."""
        return (sides[1], sides[0]) if self.swapped else sides

    def pixels(self, pixels: np.ndarray) -> np.ndarray:
        """Return stored pixels (H, W, 3) set upright."""
        pixels = pixels.swapaxes(0, 1) if self.swapped else pixels
        return np.ascontiguousarray(pixels[:: -1 if self.upward else 1, :: -1 if self.leftward else 1])


@dataclass(frozen=True)
class Framing:
    """The size that frames get, by resizing, by cropping, or by resizing and then cropping them.

    Attributes:
        height, width: the size, in pixels.
        crop: whether the middle is cut out; else frames are resized.
        resized: with `crop`, the (height, width) to which frames are resized before; None for no resizing.
    """

    height: int
    width: int
    crop: bool = False
    resized: tuple[int, int] | None = None

    def enlargement(self, info: Video) -> float:
        """Return the factor by which a video's picture is enlarged along a side; 1 if it is not."""
        if self.crop and self.resized is None:
            return 1.0
        # The ratios of the two sides; `info.pixel` is a pixel's width over its height. If frames are cropped
        # after they are resized, the crop lowers the ratio of the side that it cuts: the other side's, the
        # larger one, is the factor of the resizing.
        return max(self.height / info.height, float(self.width / (info.width * info.pixel)), 1.0)


def cover(info: Video, height: int, width: int) -> Framing:
    """Return the framing that resizes a video to just cover `height` x `width`, and cuts out the middle."""
    # The smallest height that covers `height`, and whose width covers `width`; `shape` is width over height.
    covering_height = max(Fraction(height), width / info.shape)
    resized = round(covering_height), round(covering_height * info.shape)
    return Framing(height, width, crop=True, resized=resized)


def framing(info: Video, *, multiple: int, height: int | None, width: int | None, crop: bool) -> Framing:
    """Return the framing of a video for a requested size; every side is a multiple of `multiple`.

    Args:
        info: properties of the video.
        multiple: number of pixels that must divide both sides.
        height, width: the requested size. If one side is None, it follows from the video's shape (width over
            height), or with `crop` from the video's size. If both are None, the video's size is taken.
        crop: whether to cut out the middle instead of resizing; sides are then rounded down to multiples.

    Raises:
        VideoError: a side is no multiple, or too large, or larger than the video to crop.
    """
    if not crop and height and not width:
        width = max(round(height * info.shape / multiple), 1) * multiple
    elif not crop and width and not height:
        height = max(round(width / info.shape / multiple), 1) * multiple
    chosen_height, chosen_width = height or info.height, width or info.width
    if max(chosen_height, chosen_width) > LARGEST:
        raise VideoError(f"got {chosen_height} x {chosen_width} pixels: give at most {LARGEST} a side")
    # Rounded down to multiples, but not to 0. A crop has this size. Without a crop it only tells whether the
    # chosen sides are multiples.
    rounded_height, rounded_width = (
        max(side // multiple * multiple, multiple) for side in (chosen_height, chosen_width)
    )
    can_crop = rounded_height <= info.height and rounded_width <= info.width
    if crop:
        if not can_crop:
            raise VideoError(
                f"cannot crop {info.height} x {info.width} pixels to {rounded_height} x {rounded_width}"
            )
        return Framing(rounded_height, rounded_width, crop=True)
    if (chosen_height, chosen_width) != (rounded_height, rounded_width):  # a side is no multiple
        nearest = (max(round(side / multiple), 1) * multiple for side in (chosen_height, chosen_width))
        raise VideoError(
            f"{info.path.name} in {chosen_height} x {chosen_width} pixels (height x width): both must be "
            f"multiples of {multiple}; pass "
            + (f"--crop for {rounded_height} x {rounded_width}, or " if can_crop else "")
            + "--height {} --width {} to resize".format(*nearest)
        )
    return Framing(chosen_height, chosen_width)


def read_frames(source: Source, size: Framing, count: int) -> Iterator[torch.Tensor]:
    """Yield the first `count` frames of a video as uint8 (1, 3, H, W), upright, one at a time.

    Args:
        source: path or bytes of the video file.
        size: the size that frames are brought to, and the way.
        count: number of frames.

    Raises:
        VideoError: the file cannot be read, ends before the last frame, or has frames of several sizes.
    """
    video = Video(source)
    for _, frame in video.frames(at_most=count):
        yield framed(frame, size)
    if video.num_frames < count:
        raise VideoError(f"{video.path} has {video.num_frames} frames, {count} are wanted")


def read_image(path: str | Path) -> Any:
    """Return an image file as a Pillow image in RGB, upright; raise `VideoError` if it cannot be read."""
    try:
        with Image.open(path) as image:
            upright = ImageOps.exif_transpose(image)
            is_deep = upright.mode.startswith("I;16")  # 16 bits of gray, which `convert` would cut off at 255
            return (upright.point(lambda value: value / 257) if is_deep else upright).convert("RGB")
    # Pillow raises a `SyntaxError` for a broken PNG, and its own error for more pixels than it allows.
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise VideoError(f"cannot read {path} as an image ({error})") from error


def framed(frame: Any, size: Framing | None = None) -> torch.Tensor:
    """Return a decoded frame as uint8 (1, 3, H, W), upright, in a size; None for its own."""
    orientation = Orientation.of(frame)
    # The upright (height, width) to resize to, before any crop; None for no resizing.
    resized = size and (size.resized if size.crop else (size.height, size.width))
    height, width = orientation.sides(resized) if resized else (None, None)  # as stored: FFmpeg resizes first
    pixels = orientation.pixels(
        frame.to_ndarray(format="rgb24", width=width, height=height, interpolation="BICUBIC")
    )
    if size:  # frames that are resized alone have the size already
        top, left = (pixels.shape[0] - size.height) // 2, (pixels.shape[1] - size.width) // 2
        pixels = pixels[top : top + size.height, left : left + size.width]
    return torch.from_numpy(pixels).permute(2, 0, 1)[None].contiguous()


# Writing


class Sink:
    """A writer of frames. This base class drops them, for a process that writes no output."""

    def write(self, frames: torch.Tensor) -> None:
        """Write uint8 frames (1, 3, t, H, W)."""

    def finish(self) -> None:
        """Write the end of the output, after the last frame."""

    def close(self) -> None:
        """Close the open files, even if writing was not completed."""


def write_all(sink: Sink, pieces: Iterable[torch.Tensor]) -> int:
    """Write frames, which come in `pieces` (1, 3, t, H, W), into a sink; return the number of frames."""
    written = 0
    for frames in pieces:
        sink.write(frames)
        written += frames.shape[2]
    return written


def _frames_NHWC(frames: torch.Tensor) -> Iterator[np.ndarray]:
    """Yield the pixels (H, W, 3) of each frame of (1, 3, t, H, W)."""
    yield from frames[0].permute(1, 2, 3, 0).contiguous().numpy()


class _GifSink(Sink):
    """Writes an animated GIF: each frame has its own palette, and lasts for whole hundredths of a second."""

    SHORTEST = 20
    """Fewest milliseconds of a frame: browsers show a shorter frame for a tenth of a second."""

    def __init__(self, path: Path, fps: Fraction):
        self._path = path
        self._hundredths = Fraction(100) / fps  # the duration of a frame, in hundredths of a second
        self._images: list[Any] = []

    def write(self, frames: torch.Tensor) -> None:
        # All frames are held, as Pillow writes a GIF at once. Palette indices take a third of RGB's bytes.
        self._images += [Image.fromarray(pixels).quantize() for pixels in _frames_NHWC(frames)]

    def finish(self) -> None:
        if self._images:
            first, *rest = self._images
            # When each frame begins, in hundredths of a second, and when the last one ends. These times are
            # rounded, and not the durations, whose errors would add up.
            starts = [round(i * self._hundredths) for i in range(len(self._images) + 1)]
            # Pillow takes milliseconds; browsers slow down frames shorter than `SHORTEST`. With loop=0 the
            # GIF is repeated without end.
            durations = [max(10 * (end - start), self.SHORTEST) for start, end in itertools.pairwise(starts)]
            first.save(self._path, "GIF", save_all=True, append_images=rest, duration=durations, loop=0)


class _FrameSink(Sink):
    """Writes numbered pictures into a directory: frame_00000.png and so on."""

    def __init__(self, path: Path):
        self._path = path
        self._count = 0

    def write(self, frames: torch.Tensor) -> None:
        for pixels in _frames_NHWC(frames):
            Image.fromarray(pixels).save(self._path / f"frame_{self._count:05d}.png")
            self._count += 1


@contextlib.contextmanager
def writing(path: str | Path, fps: Fraction | float) -> Iterator[Sink]:
    """Open a sink for an .mp4 or .gif file, or a directory of numbered PNG frames; `fps` is frames a second.

    Raises:
        OutputError: as `check_writing` raises it, or the output cannot be written.
    """
    suffix = check_writing(path, fps)  # "" for a directory
    # The exact fraction of a float such as 29.97 does not fit FFmpeg's 32-bit integers.
    rate = Fraction(fps).limit_denominator(100_000)
    with whole_file(path, directory=not suffix) as temporary:
        makers = {
            ".mp4": lambda: _Mp4Sink(temporary, rate),
            ".gif": lambda: _GifSink(temporary, rate),
            "": lambda: _FrameSink(temporary),
        }
        with contextlib.closing(makers[suffix]()) as sink:
            yield sink
            sink.finish()


def check_writing(path: str | Path, fps: Fraction | float) -> str:
    """Return the suffix of an output, "" for a directory; raise `OutputError` for a bad output.

    It is bad if it has another suffix than .mp4 and .gif, is a directory with files in it, has a rate that is
    not above 0, or shows a frame for longer than `LONGEST` seconds.
    """
    path = check_output(path)
    refuse(path, (not 0 < fps < math.inf, f"it has {fps} frames a second: give a rate above 0"))  # nor NaN
    suffix = path.suffix.lower()
    refuse(
        path,
        (
            1 / fps > LONGEST,
            f"a frame would last for {float(1 / fps):.0f} s, at most {LONGEST} s are possible; give another "
            "--fps",
        ),
        (suffix not in (".mp4", ".gif", ""), "give a name in .mp4 or .gif, or a directory for frames"),
        (path.is_dir() and bool(suffix), "it is a directory"),
        (path.is_dir() and any(path.iterdir()), "it is a directory that is not empty"),
        (
            path.is_dir() and path.samefile("."),
            "it is the current directory, which frames would replace; name a new one",
        ),
        (path.is_file() and not suffix, "it is a file; frames go into a directory"),
        # A mount point cannot be replaced by another directory.
        (path.is_dir() and resolved(path).is_mount(), "something is mounted there; give a directory in it"),
    )
    return suffix


class _Mp4Sink(Sink):
    """Writes an .mp4 of H.264 in yuv420p, which every player shows; its loss of quality is hardly seen.

    The file names its color standard. It is the one that players suppose for a file that names none: BT.709
    from `HD_ROWS` rows on, BT.601 below.
    """

    OPTIONS: ClassVar = {"crf": "18", "mbtree": "0"}
    """Options of the encoder x264 by which equal frames give equal files.

    With macroblock trees (mbtree) its output varies from run to run, even on one thread. Without the trees a
    rate factor (crf) of 18 gives the PSNR that 16 gives with them, in a quarter more bytes.
    """

    def __init__(self, path: Path, fps: Fraction):
        self._fps = fps
        self._stream: Any = None
        self._container = _av().open(str(path), "w", format="mp4")

    def write(self, frames: torch.Tensor) -> None:
        for pixels in _frames_NHWC(frames):
            if self._stream is None:
                self._stream = self._add_stream(*pixels.shape[:2])
            frame = (
                _av()
                .VideoFrame.from_ndarray(pixels, format="rgb24")
                .reformat(
                    format="yuv420p",
                    dst_colorspace=self._stream.codec_context.colorspace,
                    dst_color_range=LIMITED_RANGE,
                )
            )
            self._container.mux(self._stream.encode(frame))

    def _add_stream(self, height: int, width: int) -> Any:
        """Add a video stream with the frames' size and colors; return it."""
        if height % 2 or width % 2:
            raise VideoError(f"got frames of {height} x {width} pixels: an .mp4 needs even sides")
        stream = self._container.add_stream(
            "libx264", self._fps, self.OPTIONS, height=height, width=width, pix_fmt="yuv420p"
        )
        context = stream.codec_context
        context.color_range = LIMITED_RANGE
        context.colorspace = BT709 if height >= HD_ROWS else BT601
        # H.273 numbers primaries, transfer and matrix (`colorspace`) each in a table of its own. A standard's
        # number is the same in all three.
        context.color_primaries = context.color_trc = context.colorspace
        return stream

    def finish(self) -> None:
        """Write the frames that x264 holds back, and the index."""
        if self._stream is not None:
            self._container.mux(self._stream.encode(None))  # None flushes the encoder
        self._container.close()

    def close(self) -> None:
        # Closing writes the file's end, which fails if a frame failed: the frame's error is to be reported.
        # After a success no error is hidden, because `finish` has closed the container already.
        with contextlib.suppress(_av().error.FFmpegError):
            self._container.close()
