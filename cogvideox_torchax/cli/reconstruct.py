"""`reconstruct`: encode a video and decode it again, without a file of latents."""

import argparse
from collections.abc import Iterator
from typing import Any

import torch

from cogvideox_torchax.cli import common, devices
from cogvideox_torchax.dataset.clip import ClipPart, DecodeClip
from cogvideox_torchax.files import latents, video
from cogvideox_torchax.vae.directions import ENCODE


def run(args: argparse.Namespace) -> None:
    clip = common.open_clip(args)
    with devices.process_group(args) as group:
        fps = args.fps or clip.info.fps
        video.check_writing(args.output, fps)  # raises before the model is loaded
        common.take_bundled_model(args)  # sets `args.model` if no --model is given
        vae = common.load_vae(args.model, args.backend, args.dtype, group.mesh)
        # `result_lengths` has the number of frames of each chunk's result.
        latent_frames = sum(ENCODE.result_lengths(vae, clip.num_frames))
        with group.writing(args.output, fps) as write:
            clock = common.announcing_clock(args)
            written = sum(map(write, _reconstruction(vae, clip, latent_frames, args)))
    if group.is_first:
        if written != clip.num_frames:
            common.say(f"{clip.num_frames} frames were read, {written} written: {common.LENGTHS_THAT_STAY}")
        if clip.info.variable:
            common.say(f"the frame rate varies, and the output's does not: it has {float(fps):.6g} a second")
        common.print_results(
            args,
            clock,
            {
                "frames_in": clip.num_frames,
                "frames_out": written,
                "size": f"{clip.framing.height} x {clip.framing.width}",
            },
        )


def _reconstruction(
    vae: Any, clip: ClipPart, latent_frames: int, args: argparse.Namespace
) -> Iterator[torch.Tensor]:
    """Encode and decode a clip; yield each chunk's frames, uint8 (1, 3, t, H, W).

    Latents are decoded as soon as there are enough for a chunk, so memory does not grow with the clip.
    """
    encoder, decoder = common.encoder_of(args, vae), common.unit_of(DecodeClip, args, vae)
    scale = vae.spatial_compression_ratio
    shape = latent_frames, clip.framing.height // scale, clip.framing.width // scale

    def encoded() -> Iterator[torch.Tensor]:
        """Yield the latents of each chunk, from the first on; called again if decoding ran out of memory."""
        return (chunk[latents.TENSOR] for chunk in encoder.encode_chunks(clip))

    return decoder.decode_chunks(encoded, shape)
