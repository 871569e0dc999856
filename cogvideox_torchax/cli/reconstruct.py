"""`reconstruct`: encode a video and decode it again, without a file of latents."""

import argparse

from cogvideox_torchax.cli import common, devices


def run(args: argparse.Namespace) -> None:
    clip = common.open_clip(args)
    with devices.process_group(args) as group:
        fps = args.fps or clip.info.fps
        with group.writing(args.output, fps) as write:  # an error in the output comes before the model's work
            common.take_bundled_model(args)  # sets `args.model` if no --model is given
            vae = common.load_vae(args.model, args.backend, args.dtype, group.mesh)
            clock = common.announcing_clock(args)
            written = common.decode_to(write, vae, common.encoder_of(args, vae).encode(clip), args)
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
