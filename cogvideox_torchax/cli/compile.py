"""`compile`: fill the compile cache for given sizes, so that the first request finds its programs there."""

import argparse
import collections
import contextlib
import functools
import itertools
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from cogvideox_torchax.arrays.compile_cache import COMPILE_CACHE_VARIABLE, configure_compile_cache
from cogvideox_torchax.cli import common, devices, generate
from cogvideox_torchax.files import reports
from cogvideox_torchax.terminal import CompileClock
from cogvideox_torchax.vae.directions import DECODE, ENCODE, Direction


def run(args: argparse.Namespace) -> None:
    """Compile the programs that encode and decode each size into JAX's cache, and report the seconds."""
    cache = configure_compile_cache()
    if not cache:
        raise ValueError(f"the compile cache is off: set {COMPILE_CACHE_VARIABLE} to a directory")
    if args.pipeline:
        works = {"pipeline": functools.partial(_generate, args)}
    else:
        common.take_bundled_model(args)
        vae = common.load_vae(args.model, args.backend, args.dtype, devices.mesh_of(args))
        works = {each: functools.partial(_run_every_program, vae, each) for each in (DECODE, ENCODE)}
    programs = []
    for size, (kind, work) in itertools.product(args.sizes, works.items()):
        size_text = "x".join(map(str, size))
        common.say(f"{kind} {size_text}")
        clock = CompileClock()
        work(*size)
        # `clock.seconds` leaves out the time of running.
        programs.append({"kind": kind, "size": size_text, "compile_s": clock.seconds})
    report = {"device": common.device_name(args.backend), "compile_cache": cache}
    # The printed table has a row for each program; the JSON has a list of them.
    rows = {f"{each['kind']} {each['size']}, s": each["compile_s"] for each in programs}
    reports.print_report(report | ({"programs": programs} if args.json else rows), args.json)


def _generate(args: argparse.Namespace, frames: int, height: int, width: int) -> None:
    """Generate a video in two steps, by the command `generate`: more steps need no other programs."""
    from cogvideox_torchax import cli

    given = ["generate", "--prompt", "a cat", "--num-inference-steps", "2", "--quiet", "-o"]
    with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stdout(sys.stderr):
        generating = cli.parser().parse_args([*given, str(Path(directory) / "compiled.mp4")])
        vars(generating).update(frames=frames, height=height, width=width, model=args.model)
        vars(generating).update(dtype=args.dtype, dp=args.dp or 1, tp=args.tp or 1)
        generate.run(generating)


def _run_every_program(vae: Any, direction: Direction, frames: int, height: int, width: int) -> None:
    """Run zeros through every program of a direction: the first run of a program compiles it.

    The first chunk has one program, all later chunks another. Each exists for pixels in uint8 (the command
    line and the streams) and in the model's dtype (`vae.encode`, `vae.decode` and pipelines).
    """
    if direction is DECODE:  # the input is latents: their size replaces the video's
        frames = sum(ENCODE.result_lengths(vae, frames))  # the latent frames of every chunk
        height, width = height // vae.spatial_compression_ratio, width // vae.spatial_compression_ratio
    # The frames of two chunks are enough: the program of the second chunk serves all later chunks.
    count = sum(len(chunk) for chunk in direction.chunks(vae, frames)[:2])
    # `direction.channels_key` is the name of the config's field for the number of input channels.
    shape = (1, vae.config[direction.channels_key], count, height, width)
    for dtype in (torch.uint8, vae.dtype):
        if direction is ENCODE:
            results = vae.encode_stream(torch.zeros(shape, dtype=dtype))
        else:
            output_dtype = dtype if dtype == torch.uint8 else None  # None is the model's dtype
            results = vae.decode_stream(torch.zeros(shape, dtype=vae.dtype), output_dtype=output_dtype)
        collections.deque(results, maxlen=0)  # a chunk is computed when its result is taken
