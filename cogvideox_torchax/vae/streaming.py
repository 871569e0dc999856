"""The base class of both builds, a VAE of diffusers that runs chunk by chunk: streams, tiles and checks.

A piece is a part of a stream's input that its source gives at once: one frame or several. It may be shorter
or longer than a chunk. Moments are the encoder's result, the means and log-variances of the latents.

Axis letters: N videos, C channels, T frames, t frames of a chunk, H rows, W columns. Tensors are NCTHW.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch
from diffusers.models.autoencoders.autoencoder_kl_cogvideox import (
    AutoencoderKLCogVideoX as DiffusersAutoencoder,
)
from diffusers.models.autoencoders.vae import DecoderOutput, DiagonalGaussianDistribution

from cogvideox_torchax import runtime
from cogvideox_torchax.arrays import values
from cogvideox_torchax.runtime.host import host_view
from cogvideox_torchax.runtime.models import PortedModel
from cogvideox_torchax.runtime.trees import replaced_method
from cogvideox_torchax.sharding import BatchPlacement
from cogvideox_torchax.vae import memory, tiling
from cogvideox_torchax.vae.checks import check_shape, check_values, integers_refused
from cogvideox_torchax.vae.directions import DECODE, ENCODE, NCTHW, Direction


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

    tile_choices: dict[Any, tuple[int, int] | None] | None = None
    """The tiles that "auto" has chosen (`memory.tile_of`); None for tiles of the size that the user gave."""

    @property
    def spatial_compression_ratio(self) -> int:
        """Pixels of a frame for each latent pixel, along one axis."""
        return 2 ** (len(self.config["block_out_channels"]) - 1)

    def enable_tiling(
        self,
        tile_sample_min_height: int | Literal["auto"] | None = None,
        tile_sample_min_width: int | None = None,
        tile_overlap_factor_height: float | None = None,
        tile_overlap_factor_width: float | None = None,
    ) -> None:
        """Run frames that are larger than a tile in tiles.

        Args:
            tile_sample_min_height: the height of a tile in pixels; or "auto" for the largest tiles whose
                chunk should fit into the device's memory, if whole frames do not fit. They are chosen when a
                video of a new size is first encoded or decoded.
            tile_sample_min_width: the width of a tile in pixels.
            tile_overlap_factor_height: the part of a tile's height that it shares with the next tile.
            tile_overlap_factor_width: the same of its width.
        """
        is_auto = tile_sample_min_height == "auto"
        super().enable_tiling(
            None if is_auto else tile_sample_min_height,  # pyright: ignore[reportArgumentType]
            tile_sample_min_width,
            tile_overlap_factor_height,
            tile_overlap_factor_width,
        )
        self.tile_choices = {} if is_auto else None

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
    ) -> tuple[Iterator[torch.Tensor], Sequence[int]]:
        """Check a whole input, or an iterable of its pieces; return its chunks, and its (T, H, W).

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
            return frames_of_chunks(self, direction, source), source.shape[2:]
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
        chunks = regrouped_into_chunks(direction.takes, first, iterator, plan, check)
        return chunks, (num_frames, *first.shape[-2:])

    def results(
        self,
        direction: Direction,
        chunks: Iterable[torch.Tensor],
        plan: tiling.TilePlan | None = None,
        as_uint8: bool = False,
    ) -> Iterator[Any]:
        """Return an iterator over the results of a video's chunks, which stay on the device.

        They are arrays of JAX, or tensors where the model runs elsewhere. `plan` has the tiles of a frame;
        without it, whole frames run. With `as_uint8` decoded frames are bytes.
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
        """Encode in tiles, even if tiling is off; return the posterior's means and log-variances."""
        return self._run(ENCODE, x, in_tiles=True)

    @_checked(DECODE)
    def tiled_decode(self, z: torch.Tensor, return_dict: bool = True) -> DecoderOutput | tuple[torch.Tensor]:
        """Decode in tiles, even if tiling is off."""
        frames = self._run(DECODE, z, in_tiles=True)
        return DecoderOutput(sample=frames) if return_dict else (frames,)

    def _run(self, direction: Direction, x: torch.Tensor, *, in_tiles: bool = False) -> torch.Tensor:
        """Return the joined results of all chunks; for a plain tensor they are one, on the host."""
        plan = self._tile_plan(direction, x.shape[2:], in_tiles=in_tiles)
        return joined(self.results(direction, frames_of_chunks(self, direction, x), plan), x)

    def _tile_plan(
        self, direction: Direction, size: Sequence[int], *, in_tiles: bool = False
    ) -> tiling.TilePlan | None:
        """Return the tiles of an input of `size` (T, H, W); None if tiling is off, or one tile is enough.

        With `in_tiles` tiling counts as on.
        """
        frames, rows, columns = size
        scale = self.spatial_compression_ratio
        pixels = scale // direction.scale(scale)  # of a video for each row of the input
        tile = memory.tile_of(self, direction, rows * pixels, columns * pixels, frames)
        tile = tile or (memory.own_tile(self) if in_tiles else None)
        if tile is None:
            return None
        settings = tiling.TileSettings(
            tile[0] // scale,
            tile[1] // scale,
            self.tile_overlap_factor_height,
            self.tile_overlap_factor_width,
        )
        return settings.plan(direction, (rows, columns), scale)

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
        autocasts = not runtime.is_on_jax(self) and torch.is_autocast_enabled(x.device.type)
        if not is_stream_of_bytes and not autocasts and x.dtype != self.dtype:
            raise ValueError(
                f"got {direction.takes} of {x.dtype} for weights of {self.dtype}: pass them .to({self.dtype})"
            )
        find_nonfinite = functools.partial(runtime.first_nonfinite, x)
        check_values(direction, runtime.largest(x), find_nonfinite, NCTHW, first_frame=first_frame)

    def _check_place(self, name: str, x: torch.Tensor, for_stream: bool) -> None:
        """Accept every tensor; a subclass may raise `ValueError` for one that is not with the weights."""


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


def frames_of_chunks(vae: Any, direction: Direction, x: torch.Tensor) -> Iterator[Any]:
    """Yield the chunks (N, C, t, H, W) of a video or of latents, as arrays if it is on JAX."""
    whole = runtime.as_array(x) if runtime.on_jax(x) else x
    for chunk in Direction(direction).chunks(vae, x.shape[2]):  # `direction` may be a name
        yield values.take(whole, 2, chunk.start, len(chunk))


def as_tensor(result: Any) -> torch.Tensor:
    """Return a chunk's result, a tensor or an array of JAX, as a tensor."""
    return result if isinstance(result, torch.Tensor) else runtime.tensor_of(result)


def joined(results: Iterator[Any], x: torch.Tensor) -> torch.Tensor:
    """Return the results of an input's chunks as one tensor: on the host for a plain `x`, else beside it."""
    # The iterator starts the chunks' computations. All are started before the first result is fetched,
    # because fetching waits.
    parts = list(results)
    if isinstance(parts[0], torch.Tensor) or runtime.on_accelerator(x):
        return as_tensor(values.concatenate(parts, 2))
    for part in parts:
        part.copy_to_host_async()
    return runtime.plain_tensor(np.concatenate(list(map(host_view, parts)), 2))


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
    # Each frame as (N, C, 1, H, W).
    frames = itertools.chain.from_iterable(
        with_time(piece).split(1, dim=2) for piece in itertools.chain([first], rest)
    )
    shape = with_time(first)[:, :, :1].shape
    for chunk in plan:
        parts = list(itertools.islice(frames, len(chunk)))
        for number, frame in enumerate(parts, chunk.start):
            if frame.shape != shape:
                raise ValueError(f"frame {number} is {tuple(frame.shape)}, the ones before it {tuple(shape)}")
        if len(parts) < len(chunk):
            received = chunk.start + len(parts)
            raise ValueError(f"the {what} ended after {received} frames where {plan[-1].stop} were announced")
        whole = torch.cat(parts, 2)
        check(whole, first_frame=chunk.start)
        yield whole
    if next(frames, None) is not None:
        raise ValueError(f"the {what} goes on after the {plan[-1].stop} frames that were announced")


@torch.no_grad()  # while the generator runs; the caller has its own setting between the results
def fetched_one_behind(results: Iterator[Any]) -> Iterator[torch.Tensor]:
    """Yield each result on the host; it is copied there while the next one is computed.

    If a result fails, the one before it is yielded before the error is raised.
    """
    # On JAX, a step of the loop only starts the computation of a chunk, and then the copy of its result to
    # the host. `to_torch` waits for both.
    before = None
    try:
        for result in map(as_tensor, results):
            if runtime.on_jax(result):
                runtime.array_of(result).copy_to_host_async()
            if before is not None:
                yield runtime.to_torch(before)
            before = result
    except Exception:
        if before is not None:
            yield runtime.to_torch(before)
        raise
    yield runtime.to_torch(before)  # pyright: ignore[reportArgumentType] - every input has a chunk
