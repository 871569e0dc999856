"""Read videos and images; write .mp4, .gif and PNG frames. The only module that imports PyAV.

PyAV binds FFmpeg. A *packet* is a frame, or some sound, as it is stored; `pts` is its time, in ticks of its
stream's clock, which are `time_base` seconds long.
"""

import bisect
import collections
import contextlib
import io
import itertools
import logging
import math
import re
import struct
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from PIL import Image, ImageOps

from cogvideox_torchax import upstream
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
ONE_EACH = ("av1", "h264", "hevc", "vp9")
"""Codecs of which each packet is a frame, from the first frame that is shown on."""

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
COPIED_AUDIO_CODECS = ("aac", "ac3", "alac", "eac3", "mp3", "opus")
"""Codecs of sound that an .mp4 can hold: such sound is copied, other sound is left out."""
BT709, BT601 = 1, 6
"""The numbers in ITU-T H.273 of two color standards: of HD television, and of television in 525 lines."""
HD_ROWS = 720
"""Fewest rows of a frame whose colors are written in BT.709; players suppose BT.601 for fewer."""
LIMITED_RANGE = 1
"""FFmpeg's number for luma of 16 to 235."""


class VideoError(ValueError):
    """A video or an image that cannot be read, or not in the size wanted; the message says what to do."""


# Reading


@dataclass(frozen=True)
class VideoInfo:
    """The properties of a video file.

    Attributes:
        path: of the file; for a video in bytes, words for messages.
        height, width: of a frame, upright, in pixels as they are stored.
        fps: frames a second, on average.
        num_frames: number of frames that are shown; an edit list may hide others.
        times: seconds after the first frame at which each is shown; empty if the file does not say.
        tick: period of the clock of `times`, in seconds.
        sound: the codec of the sound track; "" for none, "unknown" if FFmpeg has no decoder.
        pixel: the width over the height of a pixel as it is shown, which need not be square.
    """

    path: Path
    height: int
    width: int
    fps: Fraction
    num_frames: int
    times: tuple[Fraction, ...] = ()
    tick: Fraction = Fraction(0)
    sound: str = ""
    pixel: Fraction = Fraction(1)

    @property
    def shape(self) -> Fraction:
        """A frame's width over its height, as it is shown."""
        return self.width * self.pixel / self.height

    @property
    def gaps(self) -> tuple[Fraction, Fraction]:
        """Shortest and longest time from a frame to the next, in seconds; (0, 0) without two `times`."""
        seconds = [b - a for a, b in itertools.pairwise(self.times)]
        return (min(seconds), max(seconds)) if seconds else (Fraction(0), Fraction(0))

    @property
    def variable(self) -> bool:
        """True if the frame rate varies."""
        shortest, longest = self.gaps
        # Times are whole ticks, so at a steady rate the gaps may differ by one tick. Where a gap is four
        # ticks or shorter, one tick is a large part of it, and any difference counts as varying.
        return longest - shortest > (self.tick if 4 * self.tick < shortest else 0)

    def at_rate(self, fps: Fraction) -> list[int]:
        """Return the indices of the frames that show the video at another rate.

        For each multiple of 1 / `fps` seconds the frame nearest in time is taken, so an index may be left out
        or repeated.
        """
        times = self.times or [index / self.fps for index in range(self.num_frames)]
        # The times half-way between two frames, from which on the second of the two is nearer.
        borders = [(a + b) / 2 for a, b in itertools.pairwise(times)]
        # Multiples are counted up to half a frame after the last frame's time.
        count = math.floor((times[-1] + 1 / self.fps / 2) * fps) + 1
        # The number of borders before a time is the index of the frame that is nearest to it.
        return [bisect.bisect_left(borders, index / fps) for index in range(count)]


def is_video(path: Path) -> bool:
    """Return whether a file in a directory counts as a video, by its suffix; a still picture does not."""
    suffix = path.suffix.lower()
    return (
        suffix in SUFFIXES
        and path.is_file()
        and (suffix not in MOVING or MOVING[suffix] in path.read_bytes()[:64])
    )


def _av() -> Any:
    """Return the package PyAV; `VideoError` if it is not installed."""
    with needing("video", "reading and writing video needs PyAV", VideoError):
        import av
        from av.sidedata.sidedata import Type
    upstream.accept_unknown_members(Type)  # else no side data of a picture with EXIF could be read
    return av


def _name_for_messages(source: Source) -> Path:
    return Path("the video") if isinstance(source, bytes) else Path(source)


@contextlib.contextmanager
def _opened(source: Source, **options: str) -> Iterator[tuple[Any, Any]]:
    """Open a video file; yield PyAV's container and stream. FFmpeg's errors turn into `VideoError`."""
    # `options` are FFmpeg's options for reading the file, by name.
    av, path = _av(), _name_for_messages(source)
    if not isinstance(source, bytes):
        if not path.exists():
            raise VideoError(f"there is no file {path}")
        if path.is_dir():
            raise VideoError(f"{path} is a directory: give a video file")
    try:
        # In a relative name FFmpeg takes the text before a colon for a protocol; after a slash it does not.
        file = io.BytesIO(source) if isinstance(source, bytes) else str(path.absolute())
        with av.open(file, options=options) as container:
            stream = _main_stream(container, "video")
            if stream is None:
                raise VideoError(f"{path} has no video stream")
            yield container, stream
    except av.error.FFmpegError as error:
        reason = error.strerror or type(error).__name__
        raise VideoError(
            f"{path} cannot be read as a video ({reason}): it is truncated or not a video"
        ) from error


def _main_stream(container: Any, kind: str) -> Any:
    """Return the best stream of a `kind`, "video" or "audio", by FFmpeg; None without one."""
    # A still cover picture, which FFmpeg counts as video, is left out.
    still = _av().stream.Disposition.attached_pic
    moving = [each for each in getattr(container.streams, kind) if still not in each.disposition]
    best = container.streams.best(kind)
    return best if best in moving else next(iter(moving), None)


def _shown(source: Source) -> Iterator[Any]:
    """Yield the frames that the decoder shows; FFmpeg's errors turn into `VideoError`.

    As FFmpeg does, leave out packets before the first frame, which may lack those that they refer to.
    """
    with _opened(source) as (container, stream):
        stream.thread_type = "AUTO"  # decodes on several threads
        frame, path = None, _name_for_messages(source)
        is_picture = PICTURE.fullmatch(container.format.name) or (
            # FFmpeg takes a JPEG for M-JPEG if another one follows, such as a phone's second view.
            container.format.name == "mjpeg" and (path.suffix.lower() in JPEG or _has_views(source))
        )
        for packet in container.demux(stream):
            try:
                for frame in packet.decode():
                    yield frame
                    if is_picture:
                        return
            except _av().error.InvalidDataError:
                if frame:
                    raise


def _has_views(source: Source) -> bool:
    """Return whether a JPEG says that more pictures follow, by the MP format of CIPA DC-007."""
    if isinstance(source, bytes):
        return b"MPF\0" in source[:HEAD]
    with open(source, "rb") as file:
        return b"MPF\0" in file.read(HEAD)


def _is_ascending(ticks: Sequence[int | None]) -> bool:
    return None not in ticks and all(a < b for a, b in itertools.pairwise(ticks))  # pyright: ignore


def probe(source: Source, at_most: int | None = None) -> VideoInfo:
    """Read a video's size, rate, number of frames and times; decode frames only to count them.

    The packets of an .mp4, .mov or .avi are its frames in most codecs. In other files a packet may show none.
    Video of high dynamic range is named in the log, for its colors are not mapped to the usual range.

    Args:
        source: path or bytes of the video file.
        at_most: number of first frames that the result is about, and that are decoded; None for all.

    Raises:
        VideoError: no file, no video, no frames, or fewer frames than the header announces.
    """
    path = _name_for_messages(source)
    with _opened(source) as (container, stream):
        packets = [  # their times, in ticks, of showing and of decoding; None for a packet without
            (packet.pts, packet.dts)
            for packet in container.demux(stream)
            if packet.size and not packet.is_discard  # not the empty one at the end, nor a hidden frame
        ]
        ticks = [pts for pts, _ in packets]
        # Times that begin anew, as in two files joined by `cat`, are of no use.
        is_timed = None not in ticks and _is_ascending([dts for _, dts in packets if dts is not None])
        # The header's number of frames includes those that an edit list hides. If fewer frames are shown, the
        # hidden ones are counted too, before the file is taken for truncated.
        announced = stream.frames
        stored = len(packets) if len(packets) >= announced else _count_packets(source)
        # The header of an .avi counts empty packets too, which show the frame before them again. If the file
        # is cut off, FFmpeg shortens its duration, in frames.
        if announced > stored and (container.format.name != "avi" or (stream.duration or 0) < announced):
            raise VideoError(f"{path} is truncated: {announced} frames are announced, {stored} are there")
        ticks = sorted(ticks) if is_timed else ticks  # packets come in the order of decoding
        if is_timed and container.duration and container.format.name in DURATION_IN_HEADER:
            seconds, end = container.duration / 1e6, _end(source)
            # The last frame may have no duration, or have been held for longer than others.
            longest = max((b - a for a, b in itertools.pairwise(ticks)), default=math.inf)
            if seconds - end > max(0.25, 2 * longest * stream.time_base):
                raise VideoError(
                    f"{path} is truncated: {seconds:.6g} s are announced, {float(end):.6g} s are there"
                )
        first = next(_shown(source), None)
        if first is None:
            raise VideoError(
                f"{path} is an animated WebP, which this FFmpeg cannot decode: make an .apng of it, without "
                f"loss, by PIL.Image.open({path.name!r}).save({path.stem + '.apng'!r}, 'PNG', save_all=True)"
                if path.suffix.lower() == ".webp" and is_video(path)
                else f"{path} has no frames"
            )
        is_frame_each = stream.codec_context.codec.intra_only or (
            # Each field of an interlaced frame may be a packet.
            _codec(stream) in ONE_EACH and not first.interlaced_frame
        )
        if not (is_timed and is_frame_each and announced == stored and first.pts == ticks[0]):
            shown = [frame.pts for frame in itertools.islice(_shown(source), at_most)]
            ticks = ticks if is_timed and len(shown) == len(packets) else shown
        ticks = ticks[:at_most]
        # Times are known if each frame has one, and all differ.
        times = tuple((pts - ticks[0]) * stream.time_base for pts in ticks) if _is_ascending(ticks) else ()
        if first.color_trc in HDR:
            logger.warning(
                "%s is HDR video (%s): its colors are taken as stored, without tone mapping, and look "
                "pale; convert it to SDR for true ones",
                path,
                HDR[first.color_trc],
            )
        orientation, sound = Orientation.of(first), _main_stream(container, "audio")
        height, width = orientation.sides((stream.height, stream.width))
        aspect = stream.sample_aspect_ratio or Fraction(1)  # a stored pixel's width over its height
        info = VideoInfo(
            path=path,
            height=height,
            width=width,
            fps=Fraction(0),  # until the times are known
            num_frames=len(ticks),
            times=times,
            tick=stream.time_base or Fraction(0),
            sound="" if sound is None else _codec(sound),
            pixel=1 / aspect if orientation.swapped else aspect,
        )
        return replace(info, fps=_rate(info, (stream.average_rate, stream.guessed_rate)))


def _rate(info: VideoInfo, announced: tuple[Fraction | None, ...]) -> Fraction:
    """Return the first announced rate that fits the times, or else the rate of the times."""
    if len(info.times) < 2:
        return next(filter(None, announced), Fraction(25))  # FFmpeg's default
    frames, seconds = len(info.times) - 1, info.times[-1]
    # FFmpeg's integers have 32 bits.
    of_times = (frames / seconds).limit_denominator(100_000) or Fraction(1, 100_000)
    rounding = math.inf if info.variable else 2 * info.tick  # seconds, but at most half a frame's
    fitting = (
        rate
        for rate in (*announced, Fraction(round(of_times)))  # whole, as times are rounded to milliseconds
        if rate and abs(rate * seconds - frames) <= min(rate * rounding, 0.5)
    )
    return next(fitting, of_times)


def _end(source: Source) -> Fraction:
    # Of the last packet of all streams, in seconds.
    with _opened(source) as (container, _):
        timed = (packet for packet in container.demux() if packet.pts is not None)
        return max((each.pts + (each.duration or 0)) * each.time_base for each in timed)


def _count_packets(source: Source) -> int:
    """Return the number of packets in a file, including those of frames that its edit list hides."""
    with _opened(source, ignore_editlist="1") as (container, stream):
        return sum(packet.size > 0 for packet in container.demux(stream))  # not the empty one at the end


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


def _codec(stream: Any) -> str:
    """Return a codec's own name, such as "mp3" for the decoder "mp3float"; "unknown" without a decoder."""
    return stream.codec_context.codec.canonical_name if stream.codec_context else "unknown"


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

    def enlargement(self, info: VideoInfo) -> float:
        """Return the factor by which a video's picture is enlarged along a side; 1 if it is not."""
        if self.crop and self.resized is None:
            return 1.0
        # The ratios of the two sides; `info.pixel` is a pixel's width over its height. If frames are cropped
        # after they are resized, the crop lowers the ratio of the side that it cuts: the other side's, the
        # larger one, is the factor of the resizing.
        return max(self.height / info.height, float(self.width / (info.width * info.pixel)), 1.0)


def cover(info: VideoInfo, height: int, width: int) -> Framing:
    """Return the framing that resizes a video to just cover `height` x `width`, and cuts out the middle."""
    # The smallest height that covers `height`, and whose width covers `width`; `shape` is width over height.
    covering_height = max(Fraction(height), width / info.shape)
    resized = round(covering_height), round(covering_height * info.shape)
    return Framing(height, width, crop=True, resized=resized)


def framing(info: VideoInfo, *, multiple: int, height: int | None, width: int | None, crop: bool) -> Framing:
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


def read_frames(source: Source, size: Framing, frames: int | Sequence[int]) -> Iterator[torch.Tensor]:
    """Yield frames of a video as uint8 (1, 3, H, W), upright, one at a time.

    Args:
        source: path or bytes of the video file.
        size: the size that frames are brought to, and the way.
        frames: number of frames, from the first on; or their indices in ascending order, which may repeat.

    Raises:
        VideoError: the file cannot be read, ends before the last frame, or has frames of several sizes.
    """
    indices = range(frames) if isinstance(frames, int) else frames
    path = _name_for_messages(source)
    count = 0  # of frames that were decoded
    first_size, is_damaged = None, False  # the first frame's (height, width)
    wanted = collections.Counter(indices)  # by index, how often the frame is yielded
    num_to_decode = max(wanted, default=-1) + 1  # all frames up to the last one that is wanted
    for count, frame in enumerate(itertools.islice(_shown(source), num_to_decode), 1):
        first_size = first_size or (frame.height, frame.width)
        if (frame.height, frame.width) != first_size:
            raise VideoError(
                f"{path} changes size at frame {count - 1}, from {first_size[0]} x {first_size[1]} "
                f"pixels to {frame.height} x {frame.width}: cut it there, or take fewer frames"
            )
        index = count - 1
        if frame.is_corrupt and not is_damaged:
            is_damaged = True
            logger.warning(
                "%s is damaged: frame %d, and maybe others, are what FFmpeg made of it", path, index
            )
        if index in wanted:
            pixels = torch.from_numpy(_framed_pixels(frame, size)).permute(2, 0, 1)[None].contiguous()
            yield from itertools.repeat(pixels, wanted[index])
    if count < num_to_decode:
        raise VideoError(
            f"{path} is truncated: {num_to_decode} frames were expected, {count} could be decoded"
        )


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


def _framed_pixels(frame: Any, size: Framing) -> Any:
    """Return a decoded frame's RGB bytes (H, W, 3), upright, and resized and cropped to `size`."""
    orientation = Orientation.of(frame)
    # The upright (height, width) to resize to, before any crop; None for a crop without resizing.
    resized = size.resized if size.crop else (size.height, size.width)
    if resized is None:
        pixels = frame.to_ndarray(format="rgb24")
    else:
        height, width = orientation.sides(resized)  # as stored: FFmpeg resizes before the frame is upright
        pixels = frame.to_ndarray(format="rgb24", width=width, height=height, interpolation="BICUBIC")
    pixels = orientation.pixels(pixels)
    # Frames that are resized alone have the size already.
    top, left = (pixels.shape[0] - size.height) // 2, (pixels.shape[1] - size.width) // 2
    return pixels[top : top + size.height, left : left + size.width]


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


@dataclass(frozen=True)
class SourceTiming:
    """Times, sound and pixel shape of a source video, which an .mp4 takes over.

    Attributes:
        times: seconds after the first frame at which each is shown; empty for an even rate.
        sound: the file whose sound, in a codec that .mp4 takes, is copied; None for no sound.
        seconds: the length of the output, at which the sound is cut.
        pixel: a pixel's width over its height.
    """

    times: Sequence[Fraction] = ()
    sound: Path | None = None
    seconds: Fraction = Fraction(0)
    pixel: Fraction = Fraction(1)


@contextlib.contextmanager
def writing(path: str | Path, fps: Fraction | float, source: SourceTiming | None = None) -> Iterator[Sink]:
    """Open a sink for an .mp4 or .gif file, or a directory of numbered PNG frames.

    `fps` is frames a second. An .mp4 takes its times and sound from `source`; .gif and PNG have none.

    Raises:
        OutputError: as `check_writing` raises it, or the output cannot be written.
    """
    source = source or SourceTiming()
    suffix = check_writing(path, fps, source.times)  # "" for a directory
    # The exact fraction of a float such as 29.97 does not fit FFmpeg's 32-bit integers.
    rate = Fraction(fps).limit_denominator(100_000)
    with whole_file(path, directory=not suffix) as temporary:
        makers = {
            ".mp4": lambda: _Mp4Sink(temporary, rate, source),
            ".gif": lambda: _GifSink(temporary, rate),
            "": lambda: _FrameSink(temporary),
        }
        with contextlib.closing(makers[suffix]()) as sink:
            yield sink
            sink.finish()


def check_writing(path: str | Path, fps: Fraction | float, times: Sequence[Fraction] = ()) -> str:
    """Return the suffix of an output, "" for a directory; raise `OutputError` for a bad output.

    It is bad if it has another suffix than .mp4 and .gif, is a directory with files in it, has a rate that is
    not above 0, or shows a frame for longer than `LONGEST` seconds. `times` are as in `SourceTiming`.
    """
    path = check_output(path)
    refuse(path, (not 0 < fps < math.inf, f"it has {fps} frames a second: give a rate above 0"))  # nor NaN
    suffix = path.suffix.lower()
    longest = max([1 / Fraction(fps), *(b - a for a, b in itertools.pairwise(times))])  # seconds of a frame
    refuse(
        path,
        (
            longest > LONGEST,
            f"a frame would last for {float(longest):.0f} s, at most {LONGEST} s are possible; "
            "give another --fps",
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

    TICK = Fraction(1, 90_000)
    """Seconds of a tick, where frames have times of their own: that of MPEG's clock."""

    def __init__(self, path: Path, fps: Fraction, source: SourceTiming):
        self._fps = fps
        self._source = source
        self._written = 0
        self._stream: Any = None
        self._container = _av().open(str(path), "w", format="mp4")
        self._sound = _copied_sound(source, self._container)
        self._next_sound = next(self._sound, None)  # time of the packet that is copied next; None at the end

    def write(self, frames: torch.Tensor) -> None:
        """Write the frames; after each one copy the sound packets that are due before its time."""
        times, av = self._source.times, _av()
        for pixels in _frames_NHWC(frames):
            if self._stream is None:
                self._stream = self._add_video_stream(*pixels.shape[:2])
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24").reformat(
                format="yuv420p",
                dst_colorspace=self._stream.codec_context.colorspace,
                dst_color_range=LIMITED_RANGE,
            )
            # The frame's time, in seconds after the first frame.
            seconds = times[self._written] if times else Fraction(self._written) / self._fps
            if times:  # at an even rate the encoder counts the frames itself
                frame.pts, frame.time_base = round(seconds / self.TICK), self.TICK
            self._container.mux(self._stream.encode(frame))
            # `next` makes `_sound` copy the packet that is due at `_next_sound`, and returns the time of the
            # packet after it.
            while self._next_sound is not None and self._next_sound < seconds:
                self._next_sound = next(self._sound, None)
            self._written += 1

    def _add_video_stream(self, height: int, width: int) -> Any:
        """Add a video stream with the frames' size, colors, pixel shape and clock; return it."""
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
        if self._source.pixel != 1:  # a pixel's width over its height
            context.sample_aspect_ratio = self._source.pixel
        if self._source.times:
            stream.time_base = context.time_base = self.TICK
        return stream

    def finish(self) -> None:
        """Write the frames that x264 holds back, the remaining sound, and the index."""
        if self._stream is not None:
            self._container.mux(self._stream.encode(None))  # None flushes the encoder
            collections.deque(self._sound, maxlen=0)  # runs the generator to its end: copies the packets
        self._container.close()

    def close(self) -> None:
        """Close the source of the sound and the .mp4, without writing another packet."""
        # If the header could not be written to a full disk, another packet would crash FFmpeg.
        self._sound.close()
        # Closing writes the file's end, which fails if a frame failed: the frame's error is to be reported.
        # After a success no error is hidden, because `finish` has closed the container already.
        with contextlib.suppress(_av().error.FFmpegError):
            self._container.close()


def _copied_sound(source: SourceTiming, container: Any) -> Generator[Fraction]:
    """Copy the source's sound into a container, one packet for each step of this generator.

    Yield the time of a packet, in seconds after the first frame, before the packet is copied: the caller
    writes earlier frames first. Sound after `source.seconds` is cut.
    """
    if source.sound is None:
        return
    first = next(_shown(source.sound))
    with _av().open(str(source.sound.absolute())) as file:
        video, sound = _main_stream(file, "video"), _main_stream(file, "audio")
        # Of the first frame that is shown, in seconds; a frame may have no time.
        start = (first.pts if first.pts is not None else video.start_time or 0) * (video.time_base or 0)
        stream = container.add_stream_from_template(sound)
        for packet in file.demux(sound):
            if packet.pts is None:  # such as the empty packet at the end
                continue
            packet_time = packet.pts * packet.time_base - start  # in seconds after the first frame
            if packet_time >= source.seconds:
                return
            yield packet_time
            # Times count from the first frame. The time of decoding, dts, is that of playing, pts, because
            # sound is decoded in the order in which it plays.
            packet.pts = packet.dts = packet.pts - round(start / packet.time_base)
            packet.stream = stream
            container.mux(packet)
