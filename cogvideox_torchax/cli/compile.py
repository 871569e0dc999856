"""`compile`: fills the compile cache for given sizes, so that the first request finds its programs there."""

import argparse
import re
from typing import TYPE_CHECKING, Any

from cogvideox_torchax.cli import common, devices
from cogvideox_torchax.cli.clips import SPATIAL_SCALE
from cogvideox_torchax.runtime.quiet import quiet_libraries
from cogvideox_torchax.vae import chunks

if TYPE_CHECKING:
    from cogvideox_torchax.vae.torchax.autoencoder import AutoencoderKLCogVideoX

KINDS = ("decode", "encode")


def add(subparsers: Any) -> argparse.ArgumentParser:
    command = common.add_command(
        subparsers,
        "compile",
        "compile the VAE's programs for given sizes, before the first request",
        "cogvideox-torchax compile 49x480x720 81x768x1360 --model zai-org/CogVideoX-5b --dtype bfloat16",
    )
    command.add_argument("sizes", nargs="+", type=_size, metavar="FRAMESxHEIGHTxWIDTH", help="of the videos")
    command.add_argument("--only", choices=KINDS, help="compile for one half alone (default: both)")
    common.add_model_options(command, default=str(common.DEMO_MODEL))
    devices.add_mesh_options(command)
    return command


def run(args: argparse.Namespace) -> int:
    import jax

    from cogvideox_torchax import backends, runtime

    if not backends.backend(args.backend).compiled_by_jax:
        raise ValueError(f"--backend {args.backend} has no compile cache: take torchax or flax")
    runtime.configure_compile_cache()
    cache = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    if not cache:
        raise ValueError(f"the compile cache is off: set {runtime.COMPILE_CACHE_VARIABLE} to a directory")
    quiet_libraries()
    with devices.joined(args) as team:
        vae = common.load_vae(args.model, args.backend, args.dtype, team.mesh)
    programs = []
    for size in args.sizes:
        for kind in (args.only,) if args.only else KINDS:
            common.say(f"{kind} {' x '.join(map(str, size))}")
            watch = common.Stopwatch()
            (_encode if kind == "encode" else _decode)(vae, *size)
            programs.append(
                {"kind": kind, "size": "x".join(map(str, size)), "compile_s": watch.compile_seconds}
            )
    report = {"device": common.device_name(args.backend), "compile_cache": cache, "programs": programs}
    common.print_report(report if args.json else _rows(report), args.json)
    return 0


def _size(text: str) -> tuple[int, int, int]:
    match = re.fullmatch(r"(\d+)x(\d+)x(\d+)", text)
    frames, height, width = map(int, match.groups()) if match else (0, 0, 0)
    if frames < 1 or height < 1 or width < 1 or height % SPATIAL_SCALE or width % SPATIAL_SCALE:
        raise argparse.ArgumentTypeError(
            f"{text}: give frames, height and width, 49x480x720 say, pixels in multiples of {SPATIAL_SCALE}"
        )
    return frames, height, width


def _encode(vae: "AutoencoderKLCogVideoX", frames: int, height: int, width: int) -> None:
    """Runs what a clip of this size runs, as far as its programs go: a first chunk and a later one."""
    import torch

    count = _frames_of_two_chunks(frames, vae.num_sample_frames_batch_size)
    blank = torch.zeros(1, vae.config["in_channels"], height, width, dtype=torch.uint8)
    for _ in vae.encode_stream((blank for _ in range(count)), count):
        pass


def _decode(vae: "AutoencoderKLCogVideoX", frames: int, height: int, width: int) -> None:
    """As `_encode`, of the latents that a clip of this size has."""
    import torch

    halvings = chunks.temporal_steps(vae.config["temporal_compression_ratio"])
    pieces = chunks.plan(frames, vae.num_sample_frames_batch_size)
    length = sum(chunks.encoded_length(piece.length, halvings) for piece in pieces)
    count = _frames_of_two_chunks(length, vae.num_latent_frames_batch_size)
    scale = vae.spatial_scale
    shape = (1, vae.config["latent_channels"], count, height // scale, width // scale)
    for _ in vae.decode_stream(torch.zeros(shape, dtype=vae.dtype), output_dtype=torch.uint8):
        pass


def _frames_of_two_chunks(frames: int, frames_a_chunk: int) -> int:
    return sum(chunk.length for chunk in chunks.plan(frames, frames_a_chunk)[:2])


def _rows(report: dict[str, Any]) -> dict[str, Any]:
    compiled = {f"{each['kind']} {each['size']}, s": each["compile_s"] for each in report["programs"]}
    return {"device": report["device"], "compile cache": report["compile_cache"], **compiled}
