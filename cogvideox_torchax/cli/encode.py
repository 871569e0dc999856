"""`encode`: make a latent file of a video, or a directory of latents of many videos."""

import argparse

from cogvideox_torchax.cli import batch, common, devices
from cogvideox_torchax.files import kinds, latents
from cogvideox_torchax.vae.directions import DECODE


def run(args: argparse.Namespace) -> int:
    """Encode a video to a latent file, or many videos with `batch`; return the exit code."""
    if kinds.is_many(args.video):
        return batch.encode(args)
    clip = common.open_clip(args, fps=args.fps)
    if clip.info.variable and not args.fps:
        common.say("the frame rate varies, and every frame is taken: pass --fps for frames at even times")
    with devices.process_group(args) as group:
        common.take_bundled_model(args)  # sets `args.model` if no --model is given
        vae = common.load_vae(args.model, args.backend, args.dtype, group.mesh)
        clock = common.announcing_clock(args)
        encoded = common.encoder_of(args, vae, fps=args.fps).encode(clip)
        if not group.is_first:
            return 0
        latents.save(encoded, args.output)
        latent_frames = encoded.tensor.shape[2]
        decoded_frames = sum(DECODE.result_lengths(vae, latent_frames))  # the sum over the chunks
        if decoded_frames != clip.num_frames:
            common.say(
                f"{clip.num_frames} frames are {latent_frames} of latents, which decode to {decoded_frames}: "
                f"{common.LENGTHS_THAT_STAY}"
            )
    common.print_results(
        args,
        clock,
        {
            "frames": clip.num_frames,
            "size": f"{clip.framing.height} x {clip.framing.width}",
            "latents": " x ".join(map(str, encoded.tensor.shape)),
        },
    )
    return 0
