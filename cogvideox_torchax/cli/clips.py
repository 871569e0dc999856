"""The work that commands share: a clip to latents, latents to a sink."""

import argparse
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cogvideox_torchax.cli import common
from cogvideox_torchax.cli.devices import Fetch, Team
from cogvideox_torchax.files import video
from cogvideox_torchax.vae import memory
from cogvideox_torchax.vae.directions import DECODE, ENCODE, Direction

if TYPE_CHECKING:
    import torch

    from cogvideox_torchax.files.latents import Latents
    from cogvideox_torchax.vae.torchax.autoencoder import AutoencoderKLCogVideoX

SPATIAL_SCALE = 8
"""Sample pixels to a latent pixel in every published CogVideoX; the model checks its own."""


@dataclass(frozen=True)
class Clip:
    """The part of a video that a command works on."""

    info: video.VideoInfo
    size: video.Framing
    num_frames: int

    def frames(self) -> "Iterator[torch.Tensor]":
        return video.read_frames(self.info.path, self.size, self.num_frames)


def open_clip(args: argparse.Namespace, at_most: int | None = None) -> Clip:
    """Checks the video and the sizes asked for, before anything is loaded; `at_most` so many frames, where
    no number is asked for."""
    info = video.probe(args.video)
    size = video.framing(info, multiple=SPATIAL_SCALE, height=args.height, width=args.width, crop=args.crop)
    if args.frames and args.frames > info.num_frames:
        raise ValueError(f"{info.path} has {info.num_frames} frames, --frames asks for {args.frames}")
    return Clip(info, size, args.frames or min(at_most or info.num_frames, info.num_frames))


def latent_pieces(
    vae: "AutoencoderKLCogVideoX", clip: Clip, seed: int | None, fetch: Fetch
) -> "Iterator[torch.Tensor]":
    """The latents of the clip's chunks, where `fetch` brings them: the posterior's mode, or a sample where
    there is a seed."""
    import torch

    generator = None if seed is None else torch.Generator("cpu").manual_seed(seed)
    for posterior in vae.encode_stream(clip.frames(), clip.num_frames, fetch=fetch):
        yield posterior.mode() if generator is None else posterior.sample(generator)


def encode_clip(
    vae: "AutoencoderKLCogVideoX", clip: Clip, args: argparse.Namespace, fetch: Fetch
) -> "Latents":
    """The clip's latents, in tiles where those are asked for or memory runs out."""
    import torch

    from cogvideox_torchax.files.latents import Latents

    size = clip.size.height, clip.size.width
    _set_tiles(vae, args, ENCODE, size, clip.num_frames)
    parts = common.progress(
        memory.in_tiles_once_memory_is_out(
            vae, size, lambda: latent_pieces(vae, clip, args.seed, fetch), common.say
        ),
        total=len(ENCODE.chunks(vae, clip.num_frames)),
        name="encode",
        args=args,
    )
    return Latents(
        tensor=torch.cat(list(parts), dim=2),
        config=dict(vae.config),
        model=args.model,
        fps=clip.info.fps,
        num_frames=clip.num_frames,
    )


def decode_to(
    sink: video.Sink,
    vae: "AutoencoderKLCogVideoX",
    latents: "Latents",
    args: argparse.Namespace,
    fetch: Fetch,
) -> int:
    """Writes the decoded frames as they come; returns how many."""
    z = latents.tensor.to(vae.dtype)
    frames, rows, columns = z.shape[2:]
    return _decode_pieces(sink, vae, lambda: [z], (frames, rows, columns), args, fetch)


def reconstruct_to(
    sink: video.Sink,
    vae: "AutoencoderKLCogVideoX",
    clip: Clip,
    args: argparse.Namespace,
    team: Team,
) -> int:
    """Writes the clip's frames as they come back from the VAE; returns how many.

    A chunk's latents are decoded when there are enough of them: memory does not grow with the clip.
    """
    scale = vae.spatial_scale
    latent_frames, _ = frames_through(vae, clip.num_frames)
    shape = latent_frames, clip.size.height // scale, clip.size.width // scale
    pieces = functools.partial(latent_pieces, vae, clip, args.seed, team.everywhere)
    return _decode_pieces(sink, vae, pieces, shape, args, team.at_first)


def frames_through(vae: "AutoencoderKLCogVideoX", frames: int) -> tuple[int, int]:
    """To how many latent frames a video is encoded, and to how many frames these are decoded."""
    latent = sum(ENCODE.results(vae, frames))
    return latent, sum(DECODE.results(vae, latent))


def _decode_pieces(
    sink: video.Sink,
    vae: "AutoencoderKLCogVideoX",
    pieces: "Callable[[], Iterable[torch.Tensor]]",
    shape: tuple[int, int, int],
    args: argparse.Namespace,
    fetch: Fetch,
) -> int:
    """Decodes latents of `shape`, (frames, rows, columns), in tiles where those are asked for or memory runs
    out."""
    import torch

    frames, height, width = shape[0], *(side * vae.spatial_scale for side in shape[1:])
    _set_tiles(vae, args, DECODE, (height, width), frames)

    def start() -> "Iterator[torch.Tensor]":
        return vae.decode_stream(pieces(), frames, output_dtype=torch.uint8, fetch=fetch)

    stream = common.progress(
        memory.in_tiles_once_memory_is_out(vae, (height, width), start, common.say),
        total=len(DECODE.chunks(vae, frames)),
        name="decode",
        args=args,
    )
    written = 0
    for decoded in stream:
        sink.write(decoded)
        written += decoded.shape[2]
    return written


def _set_tiles(
    vae: "AutoencoderKLCogVideoX",
    args: argparse.Namespace,
    direction: Direction,
    size: tuple[int, int],
    frames: int,
) -> None:
    told = memory.set_tiles(vae, getattr(args, "tiling", None), direction, *size, frames)
    if told:
        common.say(f"{direction} in {told}")
