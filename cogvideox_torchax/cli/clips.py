"""The work that commands share: a clip to latents, latents to a sink."""

import argparse
from collections.abc import Iterator
from typing import Any, TypeVar

from cogvideox_torchax.cli import common
from cogvideox_torchax.cli.devices import Fetch, ProcessGroup
from cogvideox_torchax.dataset import Clip, ClipConfig, DecodeClip, EncodeClip
from cogvideox_torchax.dataset.clip import MEAN, SAMPLE, DecodedClip, select_part
from cogvideox_torchax.files import sinks, video
from cogvideox_torchax.files.latents import TENSOR, Latents
from cogvideox_torchax.vae.directions import DECODE, ENCODE

SPATIAL_SCALE = 8
"""Sample pixels to a latent pixel in every published CogVideoX; the model checks its own."""

Unit = TypeVar("Unit", EncodeClip, DecodeClip)


def config_of(args: argparse.Namespace, **options: Any) -> ClipConfig:
    """Return the `ClipConfig` of a command, from those of the command's options that are its fields.

    `options` are further fields, and take precedence over the command's.
    """
    names = ("model", "backend", "dtype", "tiling", "dp", "tp", "frames", "height", "width", "crop")
    given = {name: getattr(args, name) for name in names if hasattr(args, name)} | options
    common.parse_dtype(given["dtype"])
    return ClipConfig(**given)


def open_clip(args: argparse.Namespace, at_most: int | None = None) -> DecodedClip:
    """Return the part of `args.video` to encode, not read yet; raise `ValueError` for a size that cannot be.

    Without `--frames` the part is the first `at_most` frames, or all of a shorter video; all without both.
    """
    count = args.frames or (at_most and min(at_most, video.probe(args.video).num_frames))
    # The model's name and the clip's id are "": `select_part` uses neither.
    config = ClipConfig("", frames=count, height=args.height, width=args.width, crop=args.crop)
    return select_part(Clip("", args.video), config, SPATIAL_SCALE)


def unit_of(kind: type[Unit], args: argparse.Namespace, vae: Any, fetch: Fetch, **options: Any) -> Unit:
    """Return an `EncodeClip` or a `DecodeClip`, which shows a bar of a clip's chunks.

    Args:
        kind: which of the two classes.
        args: the command's options.
        vae: the loaded model.
        fetch: brings a chunk's result to the host.
        options: fields of `ClipConfig`; they take precedence over the command's.
    """

    def follow(parts: Iterator[Any], total: int, name: str) -> Iterator[Any]:
        """Yield the `total` results of a clip's chunks under a bar named `name`."""
        return common.progress(parts, total=total, name=name, args=args)

    return kind(config_of(args, **options), common.say, vae=vae, fetch=fetch, follow=follow)


def encoder_of(args: argparse.Namespace, vae: Any, fetch: Fetch) -> EncodeClip:
    """Return the encoder of a clip to its posterior's mode, or with `--seed` to a sample of the posterior."""
    keep = MEAN if args.seed is None else SAMPLE
    return unit_of(EncodeClip, args, vae, fetch, keep=keep, seed=args.seed or 0)


def decode_to(sink: sinks.Sink, vae: Any, latents: Latents, args: argparse.Namespace, fetch: Fetch) -> int:
    """Decode latents with `vae` and write each chunk's frames into a sink; return the number of frames."""
    # `args` may name neither: the latents name their model, and the loaded VAE has the dtype.
    options = {"model": latents.model, "dtype": str(vae.dtype).removeprefix("torch.")}
    return sinks.write_all(sink, unit_of(DecodeClip, args, vae, fetch, **options).stream(latents))


def reconstruct_to(
    sink: sinks.Sink, vae: Any, clip: DecodedClip, args: argparse.Namespace, group: ProcessGroup
) -> int:
    """Encode and decode a clip, and write each chunk's frames into a sink; return the number of frames.

    Latents are decoded as soon as there are enough for a chunk: memory does not grow with the clip. If there
    are several processes, each gets the latents, which all decode together; only the first gets the frames.
    """
    encoder, scale = encoder_of(args, vae, group.fetch_to_all), vae.spatial_compression_ratio
    latent_frames, _ = frames_through(vae, clip.num_frames)
    shape = latent_frames, clip.framing.height // scale, clip.framing.width // scale
    decoder = unit_of(DecodeClip, args, vae, group.fetch_to_first)
    frames = decoder.pieces(lambda: (piece[TENSOR] for piece in encoder.pieces(clip)), shape)
    return sinks.write_all(sink, frames)


def frames_through(vae: Any, frames: int) -> tuple[int, int]:
    """Return how many latent frames a video is encoded to, and how many frames those are decoded to."""
    latent = sum(ENCODE.results(vae, frames))
    return latent, sum(DECODE.results(vae, latent))
