"""A video in pieces: frames gathered into chunks, results brought to the host while the next are computed."""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator

import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

from cogvideox_torchax import runtime
from cogvideox_torchax.vae.chunks import Chunk

Fetch = Callable[[torch.Tensor], torch.Tensor]
"""From a torchax tensor that may still be being computed to a plain one."""


def with_time(frames: torch.Tensor) -> torch.Tensor:
    """A single frame (N, C, H, W) as a piece of one frame; a piece as it is."""
    return frames[:, :, None] if frames.ndim == 4 else frames


def gathered(
    what: str,
    first: torch.Tensor,
    rest: Iterator[torch.Tensor],
    plan: list[Chunk],
    check: Callable[..., None],
) -> Iterator[torch.Tensor]:
    """Chunks (N, C, t, H, W) out of pieces of any length, or of single frames (N, C, H, W).

    Args:
        what: "video" or "latents", for errors.
        first, rest: the pieces.
        plan: the chunks of the whole.
        check: takes a chunk, `follow_weights=True` and its `first_frame`, and raises for a bad one.

    Raises:
        ValueError: a piece of another size than the first; more or fewer frames than planned.
    """
    num_frames = plan[-1].stop
    piece = with_time(first)
    for chunk in plan:
        parts: list[torch.Tensor] = []
        at = chunk.start
        while at < chunk.stop:
            if not piece.shape[2]:
                piece = next(rest, None)
                if piece is None:
                    raise ValueError(f"the {what} ended after {at} frames where {num_frames} were announced")
                piece = with_time(piece)
            if (*piece.shape[:2], *piece.shape[3:]) != (*first.shape[:2], *first.shape[-2:]):
                raise ValueError(
                    f"frame {at} is {tuple(piece.shape)}, the ones before it {tuple(first.shape)}"
                )
            taken = min(chunk.stop - at, piece.shape[2])
            parts.append(piece[:, :, :taken])
            piece, at = piece[:, :, taken:], at + taken
        whole = torch.cat(parts, dim=2)
        check(whole, follow_weights=True, first_frame=chunk.start)
        yield whole
    if piece.shape[2] or next(rest, None) is not None:
        raise ValueError(f"the {what} goes on after the {num_frames} frames that were announced")


def overlapped(results: Iterator[torch.Tensor], fetch: Fetch) -> Iterator[torch.Tensor]:
    """Each result on the host, asked for only when the next one is already being computed.

    Where the next one fails, the one before it still comes.
    """
    previous = None
    while True:
        result, failure = None, None
        try:
            result = next(results, None)
            if result is not None:
                runtime.fetch_async(result)
        except Exception as error:
            failure = error
        if previous is not None:
            yield fetch(previous)
        if failure is not None:
            raise failure
        if result is None:
            return
        previous = result


def posteriors(moments: Iterator[torch.Tensor]) -> Iterator[DiagonalGaussianDistribution]:
    """The posterior of each chunk's moments."""
    for chunk in moments:
        yield DiagonalGaussianDistribution(chunk)


def by_video(pieces: Iterable[torch.Tensor]) -> list[Iterator[torch.Tensor]]:
    """The chunks of a batch as those of each of its videos."""
    chunked = iter(pieces)
    first = next(chunked)
    copies = itertools.tee(itertools.chain([first], chunked), first.shape[0])
    return [
        map(functools.partial(runtime.take_videos, start=i, count=1), copy) for i, copy in enumerate(copies)
    ]
