"""`reconstruct`: a video through the VAE and back."""

import argparse
import contextlib
from typing import Any

from cogvideox_torchax.cli import common, devices
from cogvideox_torchax.cli.clips import decode_to, encode_clip, open_clip
from cogvideox_torchax.runtime.quiet import quiet_libraries


def add(subparsers: Any) -> argparse.ArgumentParser:
    command = common.add_command(
        subparsers,
        "reconstruct",
        "encode a video and decode it again",
        "cogvideox-torchax reconstruct clip.mp4 -o again.mp4 --frames 49 --crop",
    )
    command.add_argument("video", help="any video that FFmpeg reads")
    command.add_argument(
        "-o",
        "--output",
        required=True,
        metavar="FILE",
        help="an .mp4 or .gif file, or a directory for PNG frames",
    )
    common.add_model_options(command, default=str(common.DEMO_MODEL))
    common.add_clip_options(command)
    devices.add_options(command)
    command.add_argument("--fps", type=common.frame_rate, help="frames a second (default: the source's)")
    common.add_profile_option(command)
    return command


def run(args: argparse.Namespace) -> int:
    clip = open_clip(args)
    with contextlib.ExitStack() as stack:
        team = stack.enter_context(devices.joined(args))
        sink = stack.enter_context(team.writing(args.output, args.fps or clip.info.fps))
        quiet_libraries()
        vae = common.load_vae(args.model, args.backend, args.dtype, team.mesh)
        watch = common.Stopwatch()
        encoded = encode_clip(vae, clip, args, team.everywhere)
        written = decode_to(sink, vae, encoded, args, team.at_first)
    if not team.is_first:
        return 0
    report = {
        "output": args.output,
        "backend": args.backend,
        "device": common.device_name(args.backend),
        "frames_in": clip.num_frames,
        "frames_out": written,
        "size": f"{clip.size.height} x {clip.size.width}",
        "compile_s": watch.compile_seconds,
        "total_s": watch.seconds,
    }
    common.print_report(report, args.json)
    return 0
