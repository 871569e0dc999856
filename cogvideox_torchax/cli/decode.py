"""`decode`: make a video of a latent file, or videos of a directory of latents."""

import argparse
from pathlib import Path

from cogvideox_torchax.cli import batch, common, devices
from cogvideox_torchax.files import latents, video


def run(args: argparse.Namespace) -> int:
    """Decode a latent file to a video, or a directory of them with `batch`; return the exit code."""
    if Path(args.latents).is_dir():
        return batch.decode(args)
    if Path(args.latents).suffix.lower() in video.SUFFIXES:
        raise ValueError(f"{args.latents} is a video: encode it first, and decode the latents")
    with devices.process_group(args) as group:
        loaded_latents = latents.load(args.latents)
        fps = args.fps or loaded_latents.fps
        with group.writing(args.output, fps) as write:  # an error in the output comes before the model's work
            vae = common.load_vae(args.model or loaded_latents.model, args.backend, args.dtype, group.mesh)
            clock = common.announcing_clock(args)
            written = common.decode_to(write, vae, loaded_latents, args)
    if group.is_first:
        common.print_results(args, clock, {"frames": written, "fps": float(fps)})
    return 0
