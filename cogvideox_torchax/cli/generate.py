"""`generate`: make a video of a prompt and a model's other inputs, or many of a file of prompts."""

import argparse
import contextlib
from pathlib import Path
from typing import Any

from cogvideox_torchax.cli import common, devices, prompts
from cogvideox_torchax.cli.generation import FORMAT, SUFFIXES, Generator, Stage, check, request_of
from cogvideox_torchax.files import reports, video, whole
from cogvideox_torchax.pipelines import description


def run(args: argparse.Namespace) -> int | None:
    """Generate the video of a prompt, or those of a file of prompts, and print the report.

    What is there of them is not made again. Return 1 if some of many cannot be generated, else 0 or None.
    """
    common.take_bundled_pipeline(args)  # sets `args.model` if no --model is given
    lines = prompts.read(Path(args.prompts)) if args.prompts else []
    # A line's video beside --image is a fault of this line alone, and says nothing about the pipeline.
    clip = not args.image and (args.video is not None or any("video" in fields for _, fields in lines))
    model = description.describe(args.model, image=True if args.image else None, clip=clip)
    args.fps = args.fps or model.fps
    request = request_of(args, model)
    generate = Generator(args, model, request)
    heads = model.transformer["num_attention_heads"]
    devices.choose_mesh(args, guided=request.guidance_scale > 1, heads=heads)
    return prompts.run(args, generate, lines) if args.prompts else _run_one(args, generate)


def _run_one(args: argparse.Namespace, generate: Generator) -> None:
    """Generate one video, by all processes of the command together."""
    request, until, path = generate.request, generate.until, Path(args.output)
    check(request, generate.model)
    # Beside the options, which processes compare: all of them have to go on from the same stage.
    args.begun = generate.made(request)
    if args.begun < until:
        video.check_writing(args.output, args.fps)
        for stage in SUFFIXES:
            whole.check_file(request.file(stage))
    with (
        devices.process_group(args) as group,
        whole.locked(f"{path}.run", path) if group.is_first else contextlib.nullcontext(),
    ):
        clock = common.announcing_clock(args)
        if args.begun < until:
            generate.load(group, args.begun)
            generate(request)
    if not group.is_first:
        return
    reached = max(until, args.begun)
    report: dict[str, Any] = {"output": str(path if reached == Stage.VIDEO else request.file(reached))}
    if args.begun >= until:
        common.say(f"{report['output']} is there, made by the same request: delete it for another")
    if reached == Stage.VIDEO:
        asked, made = request.frames, reports.load(request.file(reached), FORMAT)["frames"]
        report |= {"frames": made, "fps": float(args.fps)}
        if made != asked:
            common.say(f"{asked} frames were asked for, {made} made: {common.LENGTHS_THAT_STAY}")
    common.print_results(args, clock, report)
