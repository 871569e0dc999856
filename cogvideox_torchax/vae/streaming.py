"""The base class of both builds, a VAE of diffusers that runs chunk by chunk: streams, slicing and checks.

A piece is a part of a stream's input that its source gives at once: one frame or several. It may be shorter
or longer than a chunk. Slicing is diffusers' word for running the videos of a batch one at a time. Moments
are the encoder's result, the means and log-variances of the latents. A step runs a chunk: (chunk, cache) ->
(result, next cache).

Axis letters: N videos, C channels, T frames, t frames of a chunk, H rows, W columns. Tensors are NCTHW.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_cogvideox import (
    AutoencoderKLCogVideoX as DiffusersAutoencoder,
)
from diffusers.models.autoencoders.vae import DecoderOutput, DiagonalGaussianDistribution

from cogvideox_torchax import runtime
from cogvideox_torchax.runtime.bridge import take
from cogvideox_torchax.runtime.models import PortedModel
from cogvideox_torchax.runtime.trees import replaced_method
from cogvideox_torchax.sharding import BatchPlacement
from cogvideox_torchax.vae import tiling
from cogvideox_torchax.vae.axes import NCTHW
from cogvideox_torchax.vae.checks import check_shape, check_values, integers_refused
from cogvideox_torchax.vae.chunks import Step
from cogvideox_torchax.vae.directions import DECODE, ENCODE, Direction


def _checked(direction: Direction) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator of a method that overrides one of diffusers' class; it checks the method's input.

    `direction` tells what the input is. If a user has replaced the method in diffusers' class, and the
    weights are on JAX, the user's method runs there instead of the decorated one.
    """

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        name = method.__name__

        @functools.wraps(method)
        def call(self: Any, x: torch.Tensor, *args: Any, **options: Any) -> Any:
            self._check(direction, x)
            with self.in_use():
                if not runtime.is_on_jax(self) or replaced_method(DiffusersAutoencoder, name) is None:
                    return method(self, x, *args, **options)
                # `run_method` compiles any method. On a mesh it splits the batch over "dp", but no video's
                # width.
                place = None if self.mesh is None else BatchPlacement(self.mesh)
                replacement = getattr(DiffusersAutoencoder, name)
                return runtime.run_method(self, replacement, x, *args, place=place, name="vae", **options)

        return call

    return decorate


class ChunkedVAE(PortedModel, DiffusersAutoencoder):
    """The base of both builds: diffusers' VAE with streams, tiles and checks of inputs of this package.

    A subclass defines `results`, which runs the chunks.
    """

    @property
    def spatial_compression_ratio(self) -> int:
        """Pixels of a frame for each latent pixel, along one axis."""
        return 2 ** (len(self.config["block_out_channels"]) - 1)

    def encode_stream(
        self,
        frames: torch.Tensor | Iterable[torch.Tensor],
        num_frames: int | None = None,
    ) -> Iterator[DiagonalGaussianDistribution]:
        """Encode a video that need not fit into memory, chunk by chunk.

        While the caller uses the posterior of a chunk, the next chunk is computed.

        Args:
            frames: a video (N, C, T, H, W), or an iterable of its frames (N, C, H, W), as floats in [-1, 1]
                or as uint8. They are where the weights are, or plain torch tensors.
            num_frames: the number of frames of an iterable. The length must be known before the first frame
                is encoded, because the first chunk takes the remainder.

        Returns:
            An iterator over the chunks' posteriors, plain torch tensors without gradients. Their `mode()`s,
            concatenated on axis 2, equal the mode of `encode`. If the source of the frames fails, the
            posteriors that were computed come before the error.

        Raises:
            ValueError: at once, for a bad video or first frame, or an iterable without `num_frames`; later,
                for a bad frame, or more or fewer frames than announced.
        """
        return (DiagonalGaussianDistribution(moments) for moments in self._stream(ENCODE, frames, num_frames))

    def decode_stream(
        self,
        z: torch.Tensor | Iterable[torch.Tensor],
        num_frames: int | None = None,
        *,
        output_dtype: torch.dtype | None = None,
    ) -> Iterator[torch.Tensor]:
        """Decode latents chunk by chunk, and hold the frames of at most two chunks.

        While the caller uses the frames of a chunk, the next chunk is computed.

        Args:
            z: latents (N, C, T, H, W), not scaled by `scaling_factor`, or an iterable of pieces of them, of
                any lengths. Latents are where the weights are, or plain torch tensors; pieces are plain.
            num_frames: the number of latent frames of an iterable.
            output_dtype: torch.uint8 for bytes (0 to 255); None for the model's dtype, in about [-1, 1].

        Returns:
            An iterator over frames (N, C, t, H, W), plain torch tensors without gradients. Concatenated on
            axis 2, they equal the frames of `decode`.

        Raises:
            ValueError: at once, for bad latents or a bad first piece, another output dtype, or an iterable
                without `num_frames`; later, for a bad piece, or more or fewer frames than announced.
        """
        if output_dtype not in (None, torch.uint8):
            raise ValueError(f"decode_stream got output_dtype {output_dtype}: None or torch.uint8")
        return self._stream(DECODE, z, num_frames, as_uint8=output_dtype is not None)

    def _stream(
        self,
        direction: Direction,
        source: torch.Tensor | Iterable[torch.Tensor],
        num_frames: int | None,
        *,
        as_uint8: bool = False,
        finish: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> Iterator[torch.Tensor]:
        """Check an input, and return an iterator over its chunks' results, which are copied to the host.

        Before that, `finish` changes a result where it is.
        """
        # `source` is the whole input, or an iterable of its pieces, with `num_frames` frames in all.
        chunks, size = self._checked_chunks(direction, source, num_frames)
        results = self.results(direction, chunks, self._tile_plan(direction, size), as_uint8)
        return fetched_one_behind(results if finish is None else map(finish, results))

    def _checked_chunks(
        self, direction: Direction, source: torch.Tensor | Iterable[torch.Tensor], num_frames: int | None
    ) -> tuple[Iterator[torch.Tensor], torch.Size]:
        """Check a whole input, or an iterable of its pieces; return its chunks, and its (rows, columns).

        Of an iterable the first piece is checked now, and each chunk when it is taken.
        """
        name = f"{direction}_stream"  # errors name the public method
        if hasattr(source, "ndim"):  # a tensor, or an array, which must not count as an iterable of frames
            check_is_tensor(source)
        if isinstance(source, torch.Tensor):
            self._check(direction, source, for_stream=True)
            if num_frames not in (None, source.shape[2]):
                raise ValueError(
                    f"{name} got {source.shape[2]} frames where {num_frames} were announced: leave "
                    "num_frames out, or cut them"
                )
            return frames_of_chunks(self, direction, source), source.shape[3:]
        if num_frames is None or num_frames < 1:
            raise ValueError(
                f"{name} got an iterable and num_frames={num_frames}: pass num_frames, how many it gives"
            )
        iterator = iter(source)
        first = next(iterator, None)
        if first is None:
            raise ValueError(f"{name} got no frames where {num_frames} were announced")
        check = functools.partial(self._check, direction, for_stream=True)
        check(with_time(first))  # a piece may be a frame, without an axis of time
        plan = direction.chunks(self, num_frames)
        # Errors call the input by `takes`, "video" or "latents".
        return regrouped_into_chunks(direction.takes, first, iterator, plan, check), first.shape[-2:]

    def results(
        self,
        direction: Direction,
        chunks: Iterable[torch.Tensor],
        plan: tiling.TilePlan | None = None,
        as_uint8: bool = False,
    ) -> Iterator[torch.Tensor]:
        """Return an iterator over the results of a video's chunks, which stay on the device.

        `plan` has the tiles of a frame; without it, whole frames run. With `as_uint8` decoded frames are
        bytes. If the model's slicing is on, each chunk runs one video at a time.
        """
        raise NotImplementedError

    @_checked(ENCODE)
    def _encode(self, x: torch.Tensor) -> torch.Tensor:
        """Return the means and log-variances of a video's posterior, for diffusers' `encode`."""
        return self._run(ENCODE, x)

    @_checked(DECODE)
    def _decode(self, z: torch.Tensor, return_dict: bool = True) -> DecoderOutput | tuple[torch.Tensor]:
        """Return the frames of latents, for diffusers' `decode`."""
        frames = self._run(DECODE, z)
        return DecoderOutput(sample=frames) if return_dict else (frames,)

    @_checked(ENCODE)
    def tiled_encode(self, x: torch.Tensor) -> torch.Tensor:
        """Encode in tiles, even if one tile is enough; return the posterior's means and log-variances."""
        return self._run(ENCODE, x, in_tiles=True)

    @_checked(DECODE)
    def tiled_decode(self, z: torch.Tensor, return_dict: bool = True) -> DecoderOutput | tuple[torch.Tensor]:
        """Decode in tiles, even if one tile is enough."""
        frames = self._run(DECODE, z, in_tiles=True)
        return DecoderOutput(sample=frames) if return_dict else (frames,)

    def _run(self, direction: Direction, x: torch.Tensor, *, in_tiles: bool = False) -> torch.Tensor:
        """Return the joined results of all chunks; for a plain tensor they are one, on the host.

        With `in_tiles` tiles run even if one is enough or tiling is off.
        """
        plan = self._tile_plan(direction, x.shape[3:], always=in_tiles)
        # The iterator starts the chunks' computations. All are started before the first result is fetched,
        # because fetching waits.
        parts = list(self.results(direction, frames_of_chunks(self, direction, x), plan))
        if not runtime.on_accelerator(x):
            for part in parts:
                runtime.fetch_async(part)
            parts = [runtime.to_torch(part) for part in parts]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 2)

    def _tile_plan(
        self, direction: Direction, size: torch.Size, *, always: bool = False
    ) -> tiling.TilePlan | None:
        """Return the tiles of an input of `size` (rows, columns), or None to run whole frames."""
        # Whole frames run if tiling is off, or if one tile is enough. With `always` tiles run even then.
        if not always and not self.use_tiling:
            return None
        settings = tiling.TileSettings(
            self.tile_latent_min_height,
            self.tile_latent_min_width,
            self.tile_overlap_factor_height,
            self.tile_overlap_factor_width,
        )
        return settings.plan(direction, size, self.spatial_compression_ratio, always=always)

    def _check(
        self, direction: Direction, x: torch.Tensor, *, for_stream: bool = False, first_frame: int = 0
    ) -> None:
        """Raise `ValueError` for an input that the model cannot take.

        Streams pass `for_stream`: they take plain tensors for weights on an accelerator too, and videos of
        bytes. `first_frame` is the position of the first frame of `x` in the whole video, for errors.
        """
        check_is_tensor(x)
        check_shape(direction, tuple(x.shape), NCTHW, self.config, self.spatial_compression_ratio)
        self._check_place(direction.takes, x, for_stream)
        is_stream_of_bytes = for_stream and direction == ENCODE and x.dtype == torch.uint8
        if not is_stream_of_bytes and not x.dtype.is_floating_point:
            raise integers_refused(direction, x.dtype)
        if not is_stream_of_bytes and not self._takes_dtype(x):
            raise ValueError(
                f"got {direction.takes} of {x.dtype} for weights of {self.dtype}: pass them .to({self.dtype})"
            )
        find_nonfinite = functools.partial(runtime.first_nonfinite, x)
        check_values(direction, runtime.largest(x), find_nonfinite, NCTHW, first_frame=first_frame)

    def _check_place(self, name: str, x: torch.Tensor, for_stream: bool) -> None:
        """Accept every tensor; a subclass may raise `ValueError` for one that is not with the weights."""

    def _takes_dtype(self, x: torch.Tensor) -> bool:
        return x.dtype == self.dtype


REPLACEMENTS = {
    "ndarray": "torch.from_numpy(...)",
    "AutoencoderKLOutput": "its .latent_dist.mode() or .sample()",
    "DiagonalGaussianDistribution": "its .mode() or .sample()",
    "DecoderOutput": "its .sample",
}
"""Advice on what to pass in place of an object, by the name of the object's class."""


def check_is_tensor(x: Any) -> None:
    """Raise `ValueError` unless an input is a torch tensor."""
    if not isinstance(x, torch.Tensor):
        kind = type(x).__name__
        replacement = REPLACEMENTS.get(kind, "a tensor, or a JAX array to FlaxAutoencoderKLCogVideoX")
        raise ValueError(f"got {kind} where the model takes a torch tensor: pass {replacement}")


def frames_of_chunks(vae: Any, direction: Direction, x: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the chunks (N, C, t, H, W) of a video or of latents."""
    for chunk in Direction(direction).chunks(vae, x.shape[2]):  # `direction` may be a name
        yield take(x, 2, chunk.start, len(chunk))


def with_time(frames: torch.Tensor) -> torch.Tensor:
    """Return a frame (N, C, H, W) as (N, C, 1, H, W), and several frames (N, C, t, H, W) unchanged."""
    return frames[:, :, None] if frames.ndim == 4 else frames


def regrouped_into_chunks(
    what: str,
    first: torch.Tensor,
    rest: Iterator[torch.Tensor],
    plan: list[range],
    check: Callable[..., None],
) -> Iterator[torch.Tensor]:
    """Yield the chunks (N, C, t, H, W) of an input that comes in pieces: `first`, then the `rest`.

    `plan` has the range of frames of each chunk. `check(chunk, first_frame=position)` raises an error for a
    bad chunk, whose first frame has this position in the input. Errors call the input `what`: "video" or
    "latents".

    Raises:
        ValueError: a piece has another size than the first; there are more or fewer frames than planned.
    """
    num_frames = plan[-1].stop

    def single_frames() -> Iterator[torch.Tensor]:
        """Yield each frame (N, C, H, W)."""
        position = 0
        for piece in map(with_time, itertools.chain([first], rest)):
            # Compare all axes but the one of frames, which `first` lacks if it is a single frame.
            if (*piece.shape[:2], *piece.shape[3:]) != (*first.shape[:2], *first.shape[-2:]):
                raise ValueError(
                    f"frame {position} is {tuple(piece.shape)}, the ones before it {tuple(first.shape)}"
                )
            position += piece.shape[2]
            yield from piece.unbind(2)

    frames = single_frames()
    for chunk in plan:
        parts = list(itertools.islice(frames, len(chunk)))
        if len(parts) < len(chunk):
            received = chunk.start + len(parts)
            raise ValueError(f"the {what} ended after {received} frames where {num_frames} were announced")
        stacked = torch.stack(parts, dim=2)
        check(stacked, first_frame=chunk.start)
        yield stacked
    if next(frames, None) is not None:
        raise ValueError(f"the {what} goes on after the {num_frames} frames that were announced")


@torch.no_grad()  # while the generator runs; the caller has its own setting between the results
def fetched_one_behind(results: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield each result on the host; it is copied there while the next one is computed."""
    # On JAX, `next` only starts the computation of a chunk, and `fetch_async` only starts the copy of its
    # result to the host. `to_torch` waits for both.
    result = next(results)  # every input has at least one chunk
    failure = None
    runtime.fetch_async(result)
    while result is not None:
        # The next chunk is started before this one's result is waited for. If the next one fails, this one's
        # result is yielded before the error is raised.
        next_result = None
        try:
            next_result = next(results, None)
            if next_result is not None:
                runtime.fetch_async(next_result)
        except Exception as error:
            failure = error
        yield runtime.to_torch(result)
        if failure is not None:
            raise failure
        result = next_result


def one_video_at_a_time(step: Step) -> Step:
    """Return a step that runs each video of a chunk alone, by `step`, as diffusers' slicing does."""

    def run_each(chunk: torch.Tensor, caches: Any) -> tuple[torch.Tensor, Any]:
        # A single video's cache is that of `step`; that of several videos is the list of their caches.
        if len(chunk) == 1:
            return step(chunk, caches)
        videos = [runtime.take(chunk, axis=0, start=i, length=1) for i in range(len(chunk))]
        caches = caches or [None] * len(videos)  # None at the start of a video
        outputs = [step(video, cache) for video, cache in zip(videos, caches, strict=True)]
        return runtime.concatenate([result for result, _ in outputs], 0), [cache for _, cache in outputs]

    return run_each
