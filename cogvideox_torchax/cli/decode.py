"""`decode`: make a video of a latent file, or videos of a directory of latents."""

import argparse
from pathlib import Path

from cogvideox_torchax.cli import batch, common, devices, options
from cogvideox_torchax.dataset import formats
from cogvideox_torchax.files import latents, video

COMMAND = options.Command(
    "decode latents to a video, or a directory of them",
    "latents.safetensors -o clip.mp4",
    (
        options.Option("latents", help="a file that `encode` wrote, or a directory"),
        options.output(
            "an .mp4 or .gif file, or a directory for PNG frames; of a directory's latents, one for .mp4 "
            "files, where what is done already is skipped",
            required=True,
        ),
        *options.model_options(default="the model named in the latent file"),
        options.TILING,
        *options.DECODE_MANY,
        *options.PROCESSES,
        options.FPS,
        options.PROFILE,
    ),
)


def run(args: argparse.Namespace) -> int:
    """Decode a latent file to a video, or a directory of them with `batch`; return the exit code."""
    common.check_input(args.latents)
    if Path(args.latents).is_dir():
        return batch.decode(args)
    batch.check_one(args)  # raises for options that only many clips have
    if Path(args.latents).suffix.lower() in video.SUFFIXES:
        raise ValueError(f"{args.latents} is a video: encode it first, and decode the latents")
    if Path(args.latents).suffix in formats.SUFFIXES.values():
        raise ValueError(
            f"{args.latents} is a shard for trainers: decode the latent files of which it is made"
        )
    with devices.process_group(args) as group:
        loaded_latents = latents.load(args.latents)
        fps = args.fps or loaded_latents.fps
        with group.writing(args.output, fps) as sink:  # an error in the output comes before the model's work
            vae = common.load_vae(args.model or loaded_latents.model, args.backend, args.dtype, group.mesh)
            clock = common.announcing_clock(args)
            written = common.decode_to(sink, vae, loaded_latents, args)
    if group.is_first:
        common.print_results(args, clock, {"frames": written, "fps": float(fps)})
    return 0
