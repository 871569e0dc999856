"""`generate`: make a video of a prompt and a model's other inputs, or many of a file of prompts."""

import argparse
import contextlib
import functools
from pathlib import Path
from typing import Any

from cogvideox_torchax.cli import batch, common, devices, options, prompts
from cogvideox_torchax.cli.generation import FORMAT, Generator, Stage, Video, check, request_of
from cogvideox_torchax.files import faults, reports, video, whole
from cogvideox_torchax.pipelines import description

_request = functools.partial(options.Option, group="request")
_sampling = functools.partial(options.Option, group="sampling")
_many = functools.partial(options.Option, group="many prompts")
COMMAND = options.Command(
    "generate a video with a CogVideoX pipeline",
    "--prompt 'A cat walks.' --model zai-org/CogVideoX-5b -o cat.mp4",
    (
        options.Option(
            "--model", metavar="DIR_OR_ID", help="a whole pipeline (default: the small bundled one)"
        ),
        _request("--prompt", help="what to show"),
        _request(
            "--prompts",
            metavar="FILE",
            help="many prompts: a .txt file with one on each line, or a .jsonl file with an object on each; "
            "-o is then a directory",
        ),
        _request("--negative-prompt", help="what not to show"),
        _request("--image", metavar="FILE", help="the first frame, for an image-to-video model"),
        _request(
            "--video", "--control-video", metavar="FILE", help="a video to start from, or a control video"
        ),
        _request("--strength", type=float, help="how far from --video to go, 0 to 1 (default: 0.8)"),
        _sampling("--num-inference-steps", "--steps", type=int, help="denoising steps (default: 50)"),
        _sampling("--guidance-scale", type=float, help="classifier-free guidance, 1 for none (default: 6)"),
        _sampling("--seed", type=options.seed, help="of the noise (default: 0)"),
        _sampling(
            "--scheduler",
            metavar="CLASS",
            help="diffusers' class of a scheduler, such as CogVideoXDPMScheduler (default: the model's)",
        ),
        options.Option(
            "--frames", "--num-frames", group="size", type=int, help="how many (default: the model's)"
        ),
        options.Option(
            "--height", group="size", type=options.positive, help="in pixels (default: the model's)"
        ),
        options.Option(
            "--width", group="size", type=options.positive, help="in pixels (default: the model's)"
        ),
        options.Option(
            "--fps",
            group="size",
            type=options.frame_rate,
            help="frames a second (default: 8, of CogVideoX 1.5 16)",
        ),
        options.Option("--dtype", help="of weights and latents (default: bfloat16)"),
        _sampling(
            "--weights",
            choices=("int8", "int8-dynamic"),
            help="of T5's and the transformer's blocks: half the memory of bfloat16; int8-dynamic also "
            "multiplies the transformer's tokens in eight bits",
        ),
        options.Option(
            "--lora",
            metavar="FILE_OR_ID",
            help="a LoRA for the transformer: a safetensors file, a directory or a hub id",
        ),
        options.Option("--lora-scale", type=float, help="of the LoRA (default: 1)"),
        options.Option(
            "--dp",
            group="several devices",
            type=options.positive,
            default=1,
            help="mesh: devices for the two batches of guidance (default: 1)",
        ),
        options.Option(
            "--tp",
            group="several devices",
            type=options.positive,
            default=1,
            help="mesh: devices for the transformer's tokens (its weights, where this does not divide the "
            "heads), T5's weights and frames' width (default: 1)",
        ),
        _many(
            "--num-videos-per-prompt",
            type=options.positive,
            metavar="COUNT",
            help="by as many seeds (default: 1)",
        ),
        _many("--retry-failed", action="store_true", help="try prompts again that were bad before"),
        _many(
            "--distributed",
            action="store_true",
            help="run as one of several processes: one video is made on the mesh of all their devices, and "
            "--prompts are divided, with a model in each process; see encode --help",
        ),
        *options.CONNECTION,
        *options.RAY,
        options.Option(
            "--offload",
            group="several devices",
            action="store_true",
            help="keep a network's weights in the host's memory while it is not used, for small devices",
        ),
        _sampling(
            "--cache",
            metavar="first-block:0.1|pab|magcache:FILE|taylorseer|fastercache",
            help="reuse what steps have computed, by one of diffusers' caches",
        ),
        options.Option(
            "--until",
            choices=("text", "latents"),
            default="video",
            help="stop after the prompt's embeddings or the latents; without it the same command goes on",
        ),
        _sampling(
            "--preview",
            metavar="FILE.png",
            help="show frames there while steps go on, by a linear map of latents",
        ),
        options.VIDEO_OUTPUT,
        options.TILING,
        options.JSON,
        options.QUIET,
        options.PROFILE,
    ),
    {
        "--generator": "pass --seed",
        "--output-type": "the name after -o chooses between .mp4, .gif and a directory of PNG frames",
        **dict.fromkeys(
            (
                "--eta",
                "--timesteps",
                "--latents",
                "--prompt-embeds",
                "--use-dynamic-cfg",
                "--max-sequence-length",
                "--negative-prompt-embeds",
                "--attention-kwargs",
                "--control-image",
                "--control-video-latents",
                "--callback-on-step-end",
                "--return-dict",
            ),
            "port(pipeline) and a call in Python take it",
        ),
    },
)


def run(args: argparse.Namespace) -> int | None:
    """Generate the video of a prompt, or those of a file of prompts, and print the report.

    What is there of them is not made again. Return 1 if some of many cannot be generated, else 0 or None.
    """
    faults.refuse(
        (not (args.prompt or args.prompts), "a prompt is needed: give --prompt"),
        (
            (args.num_videos_per_prompt or args.retry_failed or args.ray is not None) and not args.prompts,
            "--num-videos-per-prompt, --retry-failed and --ray are for many: leave them out, or give "
            "--prompts",
        ),
        *batch.ray_faults(args),
        (
            args.prompts and (args.prompt or args.preview),
            "--prompt and --preview are for one video: leave them out, or --prompts",
        ),
        (
            (args.num_videos_per_prompt or 0) > prompts.SEEDS,
            f"got --num-videos-per-prompt {args.num_videos_per_prompt}: at most {prompts.SEEDS}, as many "
            "seeds as a line has",
        ),
        (
            args.preview and not args.preview.endswith(".png"),
            f"cannot write {args.preview}: a preview goes into a .png file",
        ),
        (
            args.strength is not None and not (args.video or args.prompts),
            f"got --strength {args.strength} without a video to start from: pass --video, or leave it out",
        ),
        (
            args.lora_scale is not None and not args.lora,
            f"got --lora-scale {args.lora_scale} without a LoRA: pass --lora, or leave it out",
        ),
    )
    if args.prompts:
        batch.check_output_directory(args.output, "video")
    common.take_bundled_pipeline(args)  # sets `args.model` if no --model is given
    if args.video:
        common.check_video(args.video, args.output)
    lines = prompts.read(Path(args.prompts)) if args.prompts else []
    # A line's video beside --image is a fault of this line alone, and says nothing about the pipeline.
    clip = not args.image and (args.video is not None or any("video" in fields for _, fields in lines))
    model = description.describe(args.model, image=True if args.image else None, clip=clip)
    args.fps = args.fps or model.fps
    request = request_of(args, model)
    generate = Generator(args, model, request)
    return prompts.run(args, generate, lines) if args.prompts else _run_one(args, generate)


def _run_one(args: argparse.Namespace, generate: Generator) -> None:
    """Generate one video, by all processes of the command together."""
    check(generate.request, generate.model)
    wanted, until = Video(generate.request, generate.settings, Path(args.output)), generate.until
    # Beside the options, which processes compare: all of them have to go on from the same stage.
    args.begun = wanted.made()
    if args.begun < until:
        video.check_writing(args.output, args.fps)
        for file in (*wanted.beside, *([args.preview] if args.preview else [])):
            whole.check_file(file)
    with (
        devices.process_group(args) as group,
        whole.reserved(args.output, ".lock") if group.is_first else contextlib.nullcontext(),
    ):
        clock = common.announcing_clock(args)
        if args.begun < until:
            generate.load(group, args.begun)
            generate(wanted)
    if not group.is_first:
        return
    reached = max(until, args.begun)
    report: dict[str, Any] = {"output": str(wanted.path if reached == Stage.VIDEO else wanted.file(reached))}
    if args.begun >= until:
        common.say(f"{report['output']} is there, made by the same request: delete it for another")
    if reached == Stage.VIDEO:
        wanted.tidy()
        asked, made = wanted.request.frames, reports.load(wanted.file(reached), FORMAT)["frames"]
        report |= {"frames": made, "fps": float(args.fps)}
        if made != asked:
            common.say(f"{asked} frames were asked for, {made} made: {common.LENGTHS_THAT_STAY}")
    common.print_results(args, clock, report)
