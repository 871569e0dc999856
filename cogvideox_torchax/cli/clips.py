"""The work that commands share: a clip to latents, latents to a sink."""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cogvideox_torchax.cli import common
from cogvideox_torchax.cli.devices import Fetch
from cogvideox_torchax.files import video
from cogvideox_torchax.vae import chunks

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


def open_clip(args: argparse.Namespace) -> Clip:
    """Checks the video and the sizes asked for, before anything is loaded."""
    info = video.probe(args.video)
    size = video.framing(info, multiple=SPATIAL_SCALE, height=args.height, width=args.width, crop=args.crop)
    if args.frames and args.frames > info.num_frames:
        raise ValueError(f"{info.path} has {info.num_frames} frames, --frames asks for {args.frames}")
    return Clip(info, size, args.frames or info.num_frames)


def encode_clip(
    vae: "AutoencoderKLCogVideoX", clip: Clip, args: argparse.Namespace, fetch: Fetch
) -> "Latents":
    """The clip's latents, where `fetch` brings them: the posterior's mode, or a sample where there is a
    seed."""
    import torch

    from cogvideox_torchax.files.latents import Latents

    generator = None if args.seed is None else torch.Generator("cpu").manual_seed(args.seed)
    posteriors = common.progress(
        vae.encode_stream(clip.frames(), clip.num_frames, fetch=fetch),
        total=len(chunks.plan(clip.num_frames, vae.num_sample_frames_batch_size)),
        name="encode",
        args=args,
    )
    parts = [
        posterior.mode() if generator is None else posterior.sample(generator) for posterior in posteriors
    ]
    return Latents(
        tensor=torch.cat(parts, dim=2),
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
    import torch

    z = latents.tensor.to(vae.dtype)
    stream = common.progress(
        vae.decode_stream(z, output_dtype=torch.uint8, fetch=fetch),
        total=len(chunks.plan(z.shape[2], vae.num_latent_frames_batch_size)),
        name="decode",
        args=args,
    )
    written = 0
    for frames in stream:
        sink.write(frames)
        written += frames.shape[2]
    return written
