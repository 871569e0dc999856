"""Read videos and images; write .mp4, .gif and PNG frames, also what pipelines return, by `save_video`.

This is the only module that imports PyAV, which binds FFmpeg. A *packet* is a frame, or some sound, as it is
stored; `pts` is its time, in ticks of its stream's clock, which are `time_base` seconds long.
"""

import collections
import contextlib
import io
import itertools
import logging
import math
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps

from cogvideox_torchax import runtime, upstream
from cogvideox_torchax.files import faults
from cogvideox_torchax.files.extras import needing
from cogvideox_torchax.files.whole import check_output, refuse, resolved, whole_file

logger = logging.getLogger("cogvideox_torchax")

Source = str | Path | bytes
"""A video file: its path, or its bytes."""

SUFFIXES = (
    *(".3g2", ".3gp", ".apng", ".asf", ".avi", ".flv", ".gif", ".m2ts", ".m4v", ".mkv", ".mov", ".mp4"),
    *(".mpeg", ".mpg", ".mts", ".mxf", ".ogv", ".ts", ".vob", ".webm", ".wmv", ".y4m"),
)
"""Suffixes by which the videos in a directory are found; .avif and .webp are mostly still pictures."""

# FFmpeg's names of the formats of pictures. A file in one of them is one frame, whatever follows in it.
PICTURE = re.compile(r"image2|\w+_pipe")
# FFmpeg takes a JPEG for a video if another one follows, such as a phone's second view.
JPEG = (".jfif", ".jpe", ".jpeg", ".jpg")
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
X264 = {"crf": "18", "mbtree": "0"}
"""Options of the encoder x264 by which equal frames give equal files.

With macroblock trees (mbtree) its output varies from run to run, even on one thread. Without the trees a rate
factor (crf) of 18 gives the PSNR that 16 gives with them, in a quarter more bytes.
"""
SHORTEST = 20
"""Fewest milliseconds of a GIF's frame: browsers show a shorter frame for a tenth of a second."""
ROUNDING = 0.5 / 255
"""Largest distance at which a float may lie outside of [0, 1]: it still rounds to the byte 0 or 255."""


class VideoError(ValueError):
    """A video or an image that cannot be read, or not in the size wanted; the message says what to do."""


# Reading


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
        is named in the log, for its colors are not mapped to the usual range.

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
            # A picture is one frame, whatever follows in its file.
            is_picture = PICTURE.fullmatch(container.format.name) or self.path.suffix.lower() in JPEG
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

    def _note(self, frame: Any, stream: Any) -> None:
        """Take a decoded frame's time, and of the first one the size."""
        size, time = (frame.height, frame.width), Fraction(0)
        if not self.times:
            self._size, self._start = size, frame.pts
            swapped, _, _ = orientation(frame)
            self.height, self.width = size[::-1] if swapped else size
            aspect = stream.sample_aspect_ratio or Fraction(1)  # a stored pixel's width over its height
            self.pixel = 1 / aspect if swapped else aspect
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
            (not self.times, f"{self.path} has no frames"),
            error=VideoError,
        )


def probe(source: Source, at_most: int | None = None) -> Video:
    """Read a video for its properties and errors alone; `at_most` is the number of frames to decode."""
    video = Video(source)
    collections.deque(video.frames(at_most=at_most), maxlen=0)  # drops the frames
    return video


def orientation(frame: Any) -> tuple[bool, int, int]:
    """Return how to set a decoded frame upright, by its display matrix: phones store videos on their side.

    The result is (swapped, rows, columns). If `swapped`, rows and columns are exchanged first. Then a step of
    -1 reverses the rows, or the columns.
    """
    matrix = frame.side_data.get("DISPLAYMATRIX")
    # The matrix is that of ISO/IEC 14496-12: nine integers, row by row. A pixel at (x, y) is shown at
    # x' = a x + c y and y' = b x + d y.
    a, b, _, c, d, *_ = (1, 0, 0, 0, 1) if matrix is None else struct.unpack("=9i", bytes(matrix))
    # For a quarter turn a and d are 0: then y' follows x by b, and x' follows y by c.
    swapped = abs(b) > abs(a)
    return swapped, -1 if (b if swapped else d) < 0 else 1, -1 if (c if swapped else a) < 0 else 1


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
    chosen = height or info.height, width or info.width
    # Rounded down to multiples, but not to 0. A crop has this size. Without a crop it only tells whether the
    # chosen sides are multiples.
    rounded = tuple(max(side // multiple * multiple, multiple) for side in chosen)
    can_crop = rounded[0] <= info.height and rounded[1] <= info.width
    advice = "pass --crop for {} x {}, or " if can_crop else "pass "
    nearest = (max(round(side / multiple), 1) * multiple for side in chosen)
    faults.refuse(
        (
            max(chosen) > LARGEST,
            "got {} x {} pixels: give at most ".format(*chosen) + f"{LARGEST} a side",
        ),
        (
            crop and not can_crop,
            f"cannot crop {info.height} x {info.width} pixels to " + "{} x {}".format(*rounded),
        ),
        (
            not crop and chosen != rounded,  # a side is no multiple
            "{} in {} x {} pixels (height x width): ".format(info.path.name, *chosen)
            + f"both must be multiples of {multiple}; "
            + advice.format(*rounded)
            + "--height {} --width {} to resize".format(*nearest),
        ),
        error=VideoError,
    )
    return Framing(*rounded, crop=crop)


def read_image(path: str | Path) -> Any:
    """Return an image file as a Pillow image in RGB, upright; raise `VideoError` if it cannot be read."""
    try:
        with Image.open(path) as image:
            return ImageOps.exif_transpose(image).convert("RGB")
    # Pillow raises a `SyntaxError` for a broken PNG, and its own error for more pixels than it allows.
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise VideoError(f"cannot read {path} as an image ({error})") from error


def framed(frame: Any, size: Framing | None = None) -> torch.Tensor:
    """Return a decoded frame as uint8 (1, 3, H, W), upright, in a size; None for its own."""
    swapped, *steps = orientation(frame)
    # The upright (height, width) to resize to, before any crop; None for no resizing.
    resized = size and (size.resized if size.crop else (size.height, size.width))
    height, width = (resized or (None, None))[:: -1 if swapped else 1]  # as stored: FFmpeg resizes first
    stored = frame.to_ndarray(format="rgb24", width=width, height=height, interpolation="BICUBIC")
    rows, columns = (slice(None, None, step) for step in steps)
    pixels = (stored.swapaxes(0, 1) if swapped else stored)[rows, columns]
    if size:  # frames that are resized alone have the size already
        top, left = (pixels.shape[0] - size.height) // 2, (pixels.shape[1] - size.width) // 2
        pixels = pixels[top : top + size.height, left : left + size.width]
    return torch.from_numpy(np.ascontiguousarray(pixels)).permute(2, 0, 1)[None].contiguous()


# Writing


Write = Callable[[torch.Tensor], int]
"""A function that writes uint8 frames (1, 3, t, H, W), and returns t."""
Writer = contextlib.AbstractContextManager[Callable[[np.ndarray], Any]]
"""A context manager whose block gets a function that writes the pixels (H, W, 3) of one frame."""


@contextlib.contextmanager
def writing(path: str | Path, fps: Fraction | float) -> Iterator[Write]:
    """Yield a function that writes frames, uint8 (1, 3, t, H, W), and returns t.

    The output is an .mp4 or .gif file, or a directory of numbered PNG frames. `fps` is frames a second.

    Raises:
        OutputError: as `check_writing` raises it, or the output cannot be written.
    """
    suffix = check_writing(path, fps)  # "" for a directory
    # The exact fraction of a float such as 29.97 does not fit FFmpeg's 32-bit integers.
    rate = Fraction(fps).limit_denominator(100_000)
    with (
        whole_file(path, directory=not suffix) as temporary,
        WRITERS[suffix](temporary, rate) as write_frame,
    ):

        def write(frames: torch.Tensor) -> int:
            for pixels in frames[0].permute(1, 2, 3, 0).contiguous().numpy():
                write_frame(pixels)
            return frames.shape[2]

        yield write


def check_writing(path: str | Path, fps: Fraction | float) -> str:
    """Return the suffix of an output, "" for a directory; raise `OutputError` for a bad output.

    It is bad if it has another suffix than .mp4 and .gif, is a directory with files in it, has a rate that is
    not above 0, or shows a frame for longer than `LONGEST` seconds.
    """
    path = check_output(path)
    suffix = path.suffix.lower()
    refuse(
        path,
        (not 0 < fps < math.inf, f"it has {fps} frames a second: give a rate above 0"),  # nor NaN
        (fps * LONGEST < 1, f"a frame would last for more than {LONGEST} s; give another --fps"),
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


@contextlib.contextmanager
def _gif(path: Path, fps: Fraction) -> Iterator[Callable[[np.ndarray], None]]:
    """Write an animated GIF: each frame has its own palette, and lasts for whole hundredths of a second."""
    images: list[Image.Image] = []
    # All frames are held, as Pillow writes a GIF at once. Palette indices take a third of RGB's bytes.
    yield lambda pixels: images.append(Image.fromarray(pixels).quantize())
    if images:
        # When each frame begins, in hundredths of a second, and when the last one ends. These times are
        # rounded, and not the durations, whose errors would add up.
        starts = [round(i * 100 / fps) for i in range(len(images) + 1)]
        # Pillow takes milliseconds. With loop=0 the GIF is repeated without end.
        durations = [max(10 * (end - start), SHORTEST) for start, end in itertools.pairwise(starts)]
        images[0].save(path, "GIF", save_all=True, append_images=images[1:], duration=durations, loop=0)


@contextlib.contextmanager
def _pictures(path: Path, fps: Fraction) -> Iterator[Callable[[np.ndarray], None]]:
    """Write numbered pictures into a directory: frame_00000.png and so on."""
    numbers = itertools.count()
    yield lambda pixels: Image.fromarray(pixels).save(path / f"frame_{next(numbers):05d}.png")


@contextlib.contextmanager
def _mp4(path: Path, fps: Fraction) -> Iterator[Callable[[np.ndarray], None]]:
    """Write an .mp4 of H.264 in yuv420p, which every player shows; its loss of quality is hardly seen."""
    av, stream = _av(), None
    with av.open(str(path), "w", format="mp4") as container:

        def write(pixels: np.ndarray) -> None:
            nonlocal stream
            stream = stream or _h264_stream(container, fps, *pixels.shape[:2])
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24").reformat(
                format="yuv420p",
                dst_colorspace=stream.codec_context.colorspace,
                dst_color_range=LIMITED_RANGE,
            )
            container.mux(stream.encode(frame))

        yield write
        container.mux(stream.encode(None) if stream else ())  # the frames that x264 holds back


def _h264_stream(container: Any, fps: Fraction, height: int, width: int) -> Any:
    """Add a video stream to a container, which names its color standard; return it.

    The standard is the one that players suppose for a file that names none: BT.709 from `HD_ROWS` rows on,
    BT.601 below.
    """
    if height % 2 or width % 2:
        raise VideoError(f"got frames of {height} x {width} pixels: an .mp4 needs even sides")
    stream = container.add_stream("libx264", fps, X264, height=height, width=width, pix_fmt="yuv420p")
    context = stream.codec_context
    context.color_range = LIMITED_RANGE
    # H.273 numbers primaries, transfer and matrix (`colorspace`) each in a table of its own. A standard's
    # number is the same in all three.
    context.color_primaries = context.color_trc = context.colorspace = BT709 if height >= HD_ROWS else BT601
    return stream


WRITERS: dict[str, Callable[[Path, Fraction], Writer]] = {".mp4": _mp4, ".gif": _gif, "": _pictures}
"""By an output's suffix, "" for a directory."""


# What pipelines return


def save_video(frames: Any, path: str | Path, fps: Fraction | float) -> None:
    """Write the video that a pipeline returned: an .mp4 or .gif file, or a directory of PNG pictures.

    The output is complete or absent. An .mp4 needs the extra `video`.

    Args:
        frames: `frames` or `frames[0]` of a pipeline's result, of every `output_type` but "latent": Pillow
            images; arrays (T, H, W, 3) or (1, T, H, W, 3); or torch tensors (T, 3, H, W) or (1, T, 3, H, W),
            also on JAX. Values are floats in [0, 1], or uint8.
        path: of the file or the directory.
        fps: frames a second. CogVideoX makes 8, CogVideoX 1.5 makes 16.

    Raises:
        VideoError: frames of another type, shape or range, or several videos.
        OutputError: an output that cannot be written.
    """
    frames_THWC = _one_video(_array(frames), original=frames)
    # A `Fraction` can be made of Python's numbers, and of no NumPy scalar.
    with writing(path, fps if isinstance(fps, Fraction) else float(fps)) as write:
        for pixels in frames_THWC:
            if pixels.dtype != np.uint8:
                # Not Python's 255, with which NumPy would compute float16 in float16, and so round twice.
                pixels = (pixels.clip(0, 1) * np.float32(255)).round().astype(np.uint8)
            frame = torch.from_numpy(np.ascontiguousarray(pixels)).permute(2, 0, 1)
            write(frame[None, :, None])  # (3, H, W) as (1, 3, 1, H, W)


def _array(frames: Any) -> np.ndarray:
    """Return frames, or a list of them, as a NumPy array on the host with the channels last."""
    if isinstance(frames, torch.Tensor):
        host = runtime.to_torch(frames).detach().cpu()
        host = host.float() if host.is_floating_point() else host  # NumPy has no bfloat16
        # Torch's frames (..., 3, H, W) as (..., H, W, 3). `_one_video` refuses tensors with fewer axes.
        return np.moveaxis(host.numpy(), -3, -1) if host.ndim >= 3 else host.numpy()
    if isinstance(frames, list | tuple):
        arrays = [_array(frame) for frame in frames]
        if len({array.shape for array in arrays}) > 1:
            raise VideoError(f"got frames of several sizes: {sorted({array.shape for array in arrays})}")
        return np.stack(arrays) if arrays else np.empty(0)
    # Pillow's images have the method `convert`, arrays do not.
    return np.asarray(frames.convert("RGB") if hasattr(frames, "convert") else frames)


def _one_video(array: np.ndarray, *, original: Any) -> np.ndarray:
    """Return the video in an array, as (T, H, W, 3); raise `VideoError` unless it holds one video."""
    # The error names the type and shape of `original`, the user's argument, from which the array was made.
    kind, shape = type(original).__name__, tuple(getattr(original, "shape", array.shape))
    is_float = np.issubdtype(array.dtype, np.floating)
    video_THWC = array[0] if array.ndim == 5 and len(array) else array
    faults.refuse(
        (
            not is_float and array.dtype != np.uint8,
            f"got {kind} of {array.dtype}: give a pipeline's frames, images, floats or uint8",
        ),
        (
            array.ndim == 5 and len(array) != 1,
            f"got {shape[0] if shape else 0} videos, {kind} of shape {shape}: save frames[0] and so on alone",
        ),
        (
            video_THWC.ndim != 4 or video_THWC.shape[-1] != 3 or not video_THWC.size,
            f"got {kind} of shape {shape}: give images, arrays (T, H, W, 3) or torch tensors (T, 3, H, W); "
            "of a VAE's (1, 3, T, H, W), frames[0].transpose(0, 1) / 2 + 0.5; decode latents first",
        ),
        error=VideoError,
    )
    low, high = video_THWC.min(), video_THWC.max()
    # `ROUNDING` allows values slightly outside of [0, 1], which still round to 0 or 255. NaN is refused, as
    # every comparison with it is False.
    if is_float and not (low >= -ROUNDING and high <= 1 + ROUNDING):
        raise VideoError(
            f"got values from {low:.3g} to {high:.3g}, floats in [0, 1] are wanted: of [-1, 1] give "
            "frames / 2 + 0.5, of [0, 255] uint8"
        )
    return video_THWC
