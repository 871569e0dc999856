"""Encoding and decoding of one clip by a *unit*: an `EncodeClip` or a `DecodeClip`, with model and settings.

A *bucket* is one of the sizes that the clips of a data set are brought to. A *window* is a part of a clip
that gets latents of its own. The field `about` of `Latents` names the source, its changes and the settings.
"""

import functools
import hashlib
import io
import itertools
import json
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from pathlib import PurePosixPath
from typing import Any

import torch

from cogvideox_torchax import backends, runtime
from cogvideox_torchax.files import faults, kinds, latents as latent_files, video
from cogvideox_torchax.files.latents import Latents
from cogvideox_torchax.vae import memory
from cogvideox_torchax.vae.checkpoint import DTYPES
from cogvideox_torchax.vae.directions import DECODE, ENCODE, Direction
from cogvideox_torchax.vae.sizes import parse_size

POSTERIOR, MEAN, SAMPLE, BOTH = "posterior", "mean", "sample", "both"
Takers = dict[str, Callable[[Any, torch.Generator], torch.Tensor]]
"""By a tensor's name in a latent file: the function (posterior, generator) that returns the tensor."""
ALL: Takers = {
    latent_files.TENSOR: lambda posterior, _: posterior.mode(),
    latent_files.LOGVAR: lambda posterior, _: posterior.logvar,
    latent_files.SAMPLE: lambda posterior, generator: posterior.sample(generator),
}
KEEP: dict[str, Takers] = {
    POSTERIOR: {name: ALL[name] for name in (latent_files.TENSOR, latent_files.LOGVAR)},
    MEAN: {latent_files.TENSOR: ALL[latent_files.TENSOR]},
    SAMPLE: {latent_files.TENSOR: ALL[latent_files.SAMPLE]},
    BOTH: ALL,
}
"""By a value of `ClipConfig.keep`: the tensors to keep. A sample alone is saved under the mean's name."""

FASTEST = 1000
"""Most frames a second that a clip may be resampled to; a higher rate is taken for a mistake."""
AHEAD_BYTES = 2**30
"""Most bytes of frames that are held before a clip is encoded; a longer clip is decoded again while it is."""


class ClipError(ValueError):
    """A clip that cannot be encoded or decoded; the message says why."""


def check_id(name: Any, where: str = "") -> None:
    """Raise `ClipError` unless a clip's id is a relative path that stays within an output directory.

    It must have its shortest spelling, so that two ids cannot name one file. `where` begins the message.
    """
    path = PurePosixPath(name) if isinstance(name, str) else PurePosixPath()
    is_other = path.is_absolute() or ".." in path.parts or path.as_posix() != name or "\0" in name
    if not path.parts or is_other:
        raise ClipError(f"{where}got the id {name!r}: a path that must not lead out of the output is wanted")


@dataclass(frozen=True)
class Bucket:
    """A size that clips are brought to: frames, and height and width in pixels."""

    frames: int
    height: int
    width: int

    @classmethod
    def parse(cls, text: str) -> "Bucket":
        """Return the bucket of a text such as "49x480x720": frames, height, width; else raise `SizeError`."""
        return cls(*parse_size(text, frames=True))

    def __str__(self) -> str:
        return f"{self.frames}x{self.height}x{self.width}"


@dataclass(frozen=True)
class Clip:
    """A video to encode.

    Attributes:
        id: its name in the data set; "" for a clip that is in none.
        source: a video file's path, or its bytes.
        caption: kept beside the latents.
        frames, height, width: the number of frames and the size to encode, which take precedence over the
            config's. If the config has buckets, `frames` is the most that may be taken, and a height or a
            width is an error.
    """

    id: str
    source: video.Source
    caption: str = ""
    frames: int | None = None
    height: int | None = None
    width: int | None = None


@dataclass(frozen=True)
class ClipConfig:
    """The settings by which clips are encoded, or latents decoded, as plain values.

    Attributes:
        model: a directory or a hub id.
        backend: name of the backend.
        dtype: dtype of the weights, as a text such as "bfloat16".
        frames: number of first frames to encode; None for all. A clip with fewer frames is an error.
        fps: frames a second to take from a clip, by the times of its frames, as text such as "8"; None for
            every frame, whatever its time.
        windows: whether a clip gives as many latents, each of `frames` or of a bucket's length, as it has
            frames for; else it gives one, of its first frames.
        height, width: pixels to resize to; None for the clip's own.
        crop: whether to cut out the middle instead of resizing.
        min_size: fewest pixels of a clip's shorter side; a smaller clip is an error.
        buckets: sizes to choose from, in place of `frames` to `crop`; see `choose`. A clip is resized to
            cover its bucket, and cropped.
        keep: tensors to keep: "posterior" for mean and log-variance, "mean", "sample" for a sample of the
            posterior, "both" for all three.
        seed: seed of the samples, which depend on it and on the clip's id alone.
        tiling: tiles of "HEIGHTxWIDTH" in pixels, "auto" for tiles if a clip does not fit, None for no tiles.
        dp, tp: mesh of this process's own devices; None for one device.

    Raises:
        ClipError: a value is unknown, or does not go with another.
    """

    model: str
    backend: str = "torchax"
    dtype: str = "float32"
    frames: int | None = None
    fps: str | None = None
    windows: bool = False
    height: int | None = None
    width: int | None = None
    crop: bool = False
    min_size: int | None = None
    buckets: tuple[Bucket, ...] = ()
    keep: str = POSTERIOR
    seed: int = 0
    tiling: str | None = None
    dp: int | None = None
    tp: int | None = None

    def __post_init__(self) -> None:
        has_size = self.frames or self.height or self.width or self.crop
        # Raises `ClipError` with the first message whose condition is true.
        faults.refuse(
            (self.keep not in KEEP, f"got keep={self.keep!r}: one of {', '.join(KEEP)}"),
            (
                self.dtype not in DTYPES.values(),
                f"got dtype={self.dtype!r}: one of {', '.join(DTYPES.values())}, as a text",
            ),
            (
                not isinstance(self.fps, str | None),
                f"got fps={self.fps!r}: give a text, such as '8' or '30000/1001'",
            ),
            (
                not isinstance(self.buckets, tuple)
                or not all(isinstance(bucket, Bucket) for bucket in self.buckets),
                f"got buckets={self.buckets!r}: give a tuple of `Bucket`",
            ),
            (
                self.buckets and has_size,
                "got buckets and frames, a height, a width or a crop: buckets have them all; "
                "give one of them",
            ),
            (
                self.windows and not (self.buckets or self.frames),
                "got windows of no length: give buckets or a number of frames",
            ),
            (
                isinstance(self.fps, str) and kinds.frame_rate(self.fps) > FASTEST,
                f"got {self.fps} frames a second: {FASTEST} are the most",
            ),
            error=ClipError,
        )

    def fixed_settings(self, model_sha256: str) -> dict[str, Any]:
        """Return the settings that the latents depend on, as JSON's values.

        An output directory takes only latents of equal settings. Backend and mesh are left out, because they
        change results by rounding alone. A hash stands for the model, wherever its files are; it is "" for a
        model that is not loaded, and then the settings have none.
        """
        ignored = ("model", "backend", "dp", "tp")
        settings = {name: value for name, value in asdict(self).items() if name not in ignored}
        settings |= {"buckets": [str(bucket) for bucket in self.buckets]}  # `asdict` has made dicts of them
        return {**settings, "model_sha256": model_sha256} if model_sha256 else settings

    def load(self) -> Any:
        """Return the VAE, loaded on its backend and placed on the mesh of this process's devices."""
        mesh = local_mesh(self.dp, self.tp)
        return backends.backend(self.backend).load(self.model, getattr(torch, self.dtype), mesh).vae


def local_mesh(dp: int | None, tp: int | None, heads: int | None = None) -> Any:
    """Return the mesh of this process's own devices, as `make_mesh` does; None for one device.

    Of several processes each has a model of its own.
    """
    if (dp, tp) in ((None, None), (1, 1)):
        return None
    import jax

    from cogvideox_torchax import sharding

    return sharding.make_mesh(dp or 1, tp, heads=heads, devices=jax.local_devices())


@dataclass(frozen=True)
class ClipPart:
    """The part of a clip to encode, such as a window of it.

    Attributes:
        clip, info: the clip, and what its file is.
        framing: the size that frames are brought to.
        indices: the frames of the file to encode, in ascending order; a higher rate repeats some.
        length: frames that one `Latents` is made of: with the config's `windows` a window's, else all.
        changes: the changes to the clip's frames, for the latents' `about`.
        frames: uint8 (1, 3, T, H, W); None for a long clip, which is decoded again while it is encoded.
        fps: frames a second at which frames are taken; None for every frame.
        sha256: hash of the file; "" if it was not computed.
    """

    clip: Clip
    info: video.Video
    framing: video.Framing
    indices: Sequence[int]
    length: int
    changes: dict[str, Any] = field(default_factory=dict)
    frames: torch.Tensor | None = None
    fps: Fraction | None = None
    sha256: str = ""

    @property
    def num_frames(self) -> int:
        return len(self.indices)

    def stream(self) -> Iterator[torch.Tensor]:
        """Yield the frames, uint8 (1, 3, H, W), one at a time."""
        if self.frames is not None:
            yield from self.frames.unbind(2)
        else:
            for _, frame in video.Video(self.clip.source).frames(self.fps, self.num_frames):
                yield video.framed(frame, self.framing)

    def windows(self) -> Iterator["ClipPart"]:
        """Yield the clip's windows in order, each with an id of its own, such as "a.mp4/00002"."""
        frames_left = self.stream()  # one iterator for all windows: each takes its next `length` frames
        for number, start in enumerate(range(0, self.num_frames, self.length)):
            yield replace(
                self,
                clip=replace(self.clip, id=f"{self.clip.id}/{number:05}" if self.clip.id else ""),
                indices=self.indices[start : start + self.length],
                changes={**self.changes, "first_frame": self.indices[start]},
                frames=torch.stack(list(itertools.islice(frames_left, self.length)), dim=2),
            )


def read(clip: Clip, config: ClipConfig, scale: int, at_most: int | None = None) -> ClipPart:
    """Read the part of a clip to encode.

    If the config has buckets, one of them gives the number of frames and the size. Otherwise the number of
    frames, the height and the width each come from the clip, or else from the config, or else from the video.
    Frames of more than `AHEAD_BYTES` are only counted.

    Args:
        clip, config: the clip and the settings.
        scale: the pixels to a latent pixel along a side; it must divide the height and the width.
        at_most: most frames to take if neither clip nor config says how many.

    Raises:
        VideoError: the video cannot be read.
        ClipError: the clip is too short or too small, or of another size than the config asks for.
    """
    info, fps = video.Video(clip.source), kinds.frame_rate(config.fps) if config.fps else None
    longest = max((bucket.frames for bucket in config.buckets), default=None)
    if config.windows:
        most = clip.frames if longest else None
    else:  # with buckets, a clip's `frames` is the most that may be taken
        most = min(clip.frames or longest, longest) if longest else clip.frames or config.frames or at_most
    frames = info.frames(fps, most)
    first = list(itertools.islice(frames, longest or 1))  # as many as tell the bucket
    if config.min_size and min(info.height, info.width) < config.min_size:
        raise ClipError(f"{info.path} is {info.height} x {info.width}, at least {config.min_size} are wanted")
    framing, length = _framing_and_length(clip, config, info, len(first), scale)
    room = AHEAD_BYTES // (3 * framing.height * framing.width)  # frames of uint8 RGB
    indices, held = [], []
    for index, frame in itertools.chain(first, frames):
        indices.append(index)
        if len(indices) <= room:
            held.append(video.framed(frame, framing))
    length = length or len(indices)
    if length > len(indices):
        raise ClipError(f"{info.path} has {len(indices)} frames, {length} are wanted")
    num_windows = len(indices) // length if config.windows else 1  # as many as there are frames for
    taken = indices[: num_windows * length]
    changes = {
        "source_frames": info.num_frames,
        "source_fps": str(info.fps),
        "variable_frame_rate": info.variable,
        "dropped_frames": info.num_frames - 1 - taken[-1],  # of the file, after the last one that is taken
        "repeated_frames": len(taken) - len(set(taken)),
        "source_height": info.height,
        "source_width": info.width,
        "first_frame": taken[0],
    }
    pixels = torch.stack(held[: len(taken)], dim=2) if len(taken) <= len(held) else None
    return ClipPart(clip, info, framing, taken, length, changes, pixels, fps)


def _framing_and_length(
    clip: Clip, config: ClipConfig, info: video.Video, frames: int, scale: int
) -> tuple[video.Framing, int | None]:
    """Return the size that a clip is brought to, and the frames of its latents; None for all of them."""
    if config.buckets:
        if clip.height or clip.width:
            raise ClipError("it has a height or a width of its own: buckets have theirs")
        bucket = choose(config.buckets, info, frames)
        # The frames are resized to just cover the bucket, and then cropped to it.
        return video.cover(info, bucket.height, bucket.width), bucket.frames
    height, width = clip.height or config.height, clip.width or config.width
    size = video.framing(info, multiple=scale, height=height, width=width, crop=config.crop)
    return size, clip.frames or config.frames


Chunks = Iterator[Any]
"""Yields the result of each chunk of a clip: in encoding its posterior, in decoding its frames."""


class _ClipUnit:
    """A config and its model, which is left out of a pickle: another process loads its own.

    Args:
        config: model and settings.
        say: called with messages for a user.
        vae: the model, if it is loaded already.
        follow: wraps the results of a clip's chunks in a progress bar, given them, their number and the
            direction; None for no bar.
    """

    def __init__(
        self,
        config: ClipConfig,
        say: Callable[[str], None] = print,
        *,
        vae: Any = None,
        follow: Callable[[Chunks, int, str], Chunks] | None = None,
    ):
        self.config, self._say, self._follow = config, say, follow
        self.vae = config.load() if vae is None else vae

    @functools.cached_property
    def model_sha256(self) -> str:
        """A hash of the model's weights, their dtypes, and the config's fields that shape latents."""
        # The fields in which two models must agree to read each other's latents.
        shaping_fields = {name: self.vae.config.get(name) for name in latent_files.SHAPING_FIELDS}
        digest = hashlib.sha256(json.dumps(shaping_fields, sort_keys=True).encode())
        for name, weight in sorted(self.vae.state_dict().items()):
            digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
            digest.update(runtime.host_array(runtime.to_torch(weight)).tobytes())
        return digest.hexdigest()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.config, self._say)

    def _with_tiles_and_progress(
        self,
        direction: Direction,
        size: tuple[int, int],
        frames: int,
        start: Callable[[], Chunks],
        clip_id: str,
    ) -> Chunks:
        """Set the config's tiles, if any, and return the results of `start()` under a progress bar.

        `size` is the video's (height, width) in pixels, and `frames` the length of the input: video frames to
        encode, latent frames to decode. If memory runs out, smaller tiles are set, and `start` is called
        again.
        """

        def say(line: str) -> None:
            self._say(f"{clip_id}: {line}" if clip_id else line)

        memory.set_tiles(self.vae, self.config.tiling)
        tile = memory.tile_of(self.vae, direction, *size, frames)
        title = f"{direction} in tiles of {' x '.join(map(str, tile))}" if tile else direction
        if tile and self.config.tiling == "auto":
            say(f"{title} pixels, as whole frames do not fit into memory")
        # A tile may be larger than the frame. The result is a generator: `start` is called, and memory may
        # run out, when the results are taken.
        results = memory.retry_tiled_on_oom(self.vae, list(map(min, tile or size, size)), start, say)
        total = len(direction.chunks(self.vae, frames))
        # `_follow` wraps the results in a progress bar; it is None without one.
        return self._follow(results, total, title) if self._follow else results


class EncodeClip(_ClipUnit):
    """Encodes clips: `EncodeClip(config)(clip)`; equal clips give equal latents, whatever came before.

    A program is compiled once for each picture size and length of a chunk. `read` and `encode` are the two
    steps of a call, so that a loop can read the next clip while one is computed; any thread may read.
    """

    def __call__(self, clip: Clip) -> Latents:
        """Return the clip's latents; their `about` names the source and the model.

        Raises:
            VideoError, ClipError: the clip cannot be read, or not in the size that is wanted; or the config
                has windows, whose latents `encode_all` returns.
        """
        if self.config.windows:
            raise ClipError("a clip gives several latents: call `encode_all(read(clip))` for them")
        return self.encode(self.read(clip))

    def encode_all(self, part: ClipPart) -> Iterator[Latents]:
        """Yield the latents of a clip that `read` has returned: of each window, if the config has windows."""
        return map(self.encode, part.windows() if self.config.windows else [part])

    def read(self, clip: Clip) -> ClipPart:
        """Read a clip's frames, resized for the VAE, and compute the hash of its file.

        Frames of more than 1 GiB (`AHEAD_BYTES`) are only counted. Raise as `__call__` does.
        """
        part = read(clip, self.config, self.vae.spatial_compression_ratio)
        with io.BytesIO(clip.source) if isinstance(clip.source, bytes) else open(clip.source, "rb") as file:
            return replace(part, sha256=hashlib.file_digest(file, "sha256").hexdigest())

    def check(self) -> None:
        """Raise `ClipError` or `SizeError` for a config by which this model can encode no clip."""
        config, scale = self.config, self.vae.spatial_compression_ratio
        memory.check_tiling(config.tiling, scale)
        sides = () if config.crop else (config.height, config.width)  # a crop is rounded down to a multiple
        bucket_sides = [side for bucket in config.buckets for side in (bucket.height, bucket.width)]
        wanted = f"a multiple of {scale} is wanted, such as"
        faults.refuse(
            *(
                (side % scale, f"got a side of {side} pixels: {wanted} {max(round(side / scale), 1) * scale}")
                for side in (*sides, *bucket_sides)
                if side
            ),
            error=ClipError,
        )

    def encode(self, part: ClipPart) -> Latents:
        """Return the latents of a part of a clip; their `about` is empty for a clip without an id."""
        config, vae, clip_id = self.config, self.vae, part.clip.id
        with memory.restoring_tiles(vae):
            # A lambda, because encoding begins again, with smaller tiles, if memory runs out.
            posteriors = list(
                self._with_tiles_and_progress(
                    ENCODE,
                    (part.framing.height, part.framing.width),
                    part.num_frames,
                    lambda: vae.encode_stream(part.stream(), part.num_frames),
                    clip_id,
                )
            )
            about = self._about(part) if clip_id else {}  # before the tiles are restored: it names them
        # The seed depends on the clip's id, by a checksum: Python's `hash` differs from process to process.
        seed = zlib.crc32(f"{config.seed} {clip_id}".encode()) if clip_id else config.seed
        generator = torch.Generator("cpu").manual_seed(seed)
        tensors = {
            name: torch.cat([take(posterior, generator) for posterior in posteriors], dim=2)
            for name, take in KEEP[config.keep].items()
        }
        return Latents(
            tensor=tensors[latent_files.TENSOR],
            config=dict(vae.config),
            model=config.model,
            fps=kinds.frame_rate(config.fps) if config.fps else part.info.fps,
            num_frames=part.num_frames,
            logvar=tensors.get(latent_files.LOGVAR),
            sample=tensors.get(latent_files.SAMPLE),
            about=about,
        )

    def _about(self, part: ClipPart) -> dict[str, Any]:
        size = part.framing.height, part.framing.width
        # (height, width) in pixels, or None for whole frames.
        tile = memory.tile_of(self.vae, ENCODE, *size, part.num_frames)
        return {
            "id": part.clip.id,
            "caption": part.clip.caption,
            "height": part.framing.height,
            "width": part.framing.width,
            **part.changes,
            "tiles": "{}x{}".format(*tile) if tile else None,
            "source_sha256": part.sha256,
            "settings": self.config.fixed_settings(self.model_sha256),
        }


class DecodeClip(_ClipUnit):
    """Decodes latents: `DecodeClip(config)(latents)`, in the config's dtype, whatever the latents' is."""

    def __call__(self, latents: Latents) -> torch.Tensor:
        """Return the frames, uint8 (1, 3, T, H, W); `LatentsError` for another model's latents."""
        return torch.cat(list(self.stream(latents)), dim=2)

    def check(self, latents: Latents) -> None:
        """Raise `LatentsError` for several videos or another model's, `SizeError` for tiles of no use."""
        if len(latents.tensor) != 1:
            raise latent_files.LatentsError(
                f"got latents of {len(latents.tensor)} videos, one is decoded: save each by itself"
            )
        memory.check_tiling(self.config.tiling, self.vae.spatial_compression_ratio)
        latents.check_model(self.vae.config)

    def stream(self, latents: Latents) -> Iterator[torch.Tensor]:
        """Yield the frames of each chunk, uint8 (1, 3, t, H, W); raise as `check` does."""
        self.check(latents)
        vae, z = self.vae, latents.tensor.to(self.vae.dtype)
        frames, rows, columns = z.shape[2:]
        size = rows * vae.spatial_compression_ratio, columns * vae.spatial_compression_ratio  # in pixels
        with memory.restoring_tiles(vae):
            yield from self._with_tiles_and_progress(
                DECODE, size, frames, lambda: vae.decode_stream(z, output_dtype=torch.uint8), clip_id=""
            )


def choose(buckets: Sequence[Bucket], info: video.Video, frames: int) -> Bucket:
    """Return the bucket whose shape, width over height, is nearest to a video's.

    Only buckets of at most `frames` frames count; `ClipError` if there are none. Of equally near buckets the
    longest is taken, and of equally long ones the bucket with the most pixels.
    """
    fitting = [bucket for bucket in buckets if bucket.frames <= frames]
    if not fitting:
        raise ClipError(
            f"{info.path} gives {frames} of its {info.num_frames} frames, the shortest bucket has "
            f"{min(bucket.frames for bucket in buckets)}"
        )

    def rank(bucket: Bucket) -> tuple[float, int, int]:
        # By the logarithm, twice as wide is as far from the video's shape as half as wide.
        distance = abs(math.log(bucket.width / bucket.height / float(info.shape)))
        # Rounded, so that buckets of one shape and different sizes are equally near.
        return round(distance, 6), -bucket.frames, -bucket.height * bucket.width

    return min(fitting, key=rank)
