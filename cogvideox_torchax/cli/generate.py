"""`generate`: make a video of a prompt and a model's other inputs, in stages that can be resumed.

The *stages* are the text, whose result is embeddings, and the latents. `--save-stages` keeps their results.
"""

import argparse
import contextlib
import functools
import shlex
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

from cogvideox_torchax import runtime
from cogvideox_torchax.cli import batch, common, devices, generation, options, preview, prompts, stages
from cogvideox_torchax.files import faults, latents as latent_files, whole
from cogvideox_torchax.pipelines import description

FPS, FPS_OF_1_5 = Fraction(8), Fraction(16)
"""The frames a second that CogVideoX and CogVideoX 1.5 were trained with, by their model cards."""

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
        _sampling("--num-inference-steps", type=int, help="denoising steps (default: 50)"),
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
            help="frames a second (default: 8, of CogVideoX 1.5 16, or a latents stage's)",
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
            "--save-stages", group="stages", metavar="DIR", help="keep embeddings and latents there"
        ),
        options.Option(
            "--from-stage",
            group="stages",
            choices=("text", "latents"),
            help="resume from the stage that --save-stages kept",
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
    """Generate a video, from a prompt or from the stage of an earlier run, and print the report.

    With `--prompts` generate many: then return 1 if some cannot be generated, else 0.
    """
    faults.refuse(
        (
            (args.num_videos_per_prompt or args.retry_failed or args.ray is not None) and not args.prompts,
            "--num-videos-per-prompt, --retry-failed and --ray are for many: leave them out, or give "
            "--prompts",
        ),
        *batch.ray_faults(args),
        (
            args.prompts and (args.prompt or args.save_stages or args.from_stage or args.preview),
            "--prompt, --save-stages, --from-stage and --preview are for one video: leave them out, or "
            "--prompts",
        ),
        (
            args.from_stage and not args.save_stages,
            "--from-stage needs the stages' directory: pass --save-stages DIR",
        ),
        (
            args.preview and not args.preview.endswith(".png"),
            f"cannot write {args.preview}: a preview goes into a .png file",
        ),
        # With the stage "latents", `_load_latents_stage` refuses these options with all others of sampling.
        (
            args.strength is not None
            and not (args.video or args.prompts)
            and args.from_stage != stages.LATENTS,
            f"got --strength {args.strength} without a video to start from: pass --video, or leave it out",
        ),
        (
            args.lora_scale is not None and not args.lora and args.from_stage != stages.LATENTS,
            f"got --lora-scale {args.lora_scale} without a LoRA: pass --lora, or leave it out",
        ),
    )
    common.take_bundled_pipeline(args)  # sets `args.model` if no --model is given
    if args.prompts:
        args.fps = args.fps or _frame_rate_of(args.model)
        return prompts.run(args)
    if args.preview:
        whole.check_file(args.preview)
    if args.video:
        common.check_video(args.video, args.output)
    latents = _load_latents_stage(args) if args.from_stage == stages.LATENTS else None
    args.fps = args.fps or (latents.fps if latents else _frame_rate_of(args.model))
    # Without --save-stages `_backed_up` keeps the sampled latents in a file while they are decoded. `backup`
    # is the outer context, which ends last: the file is removed only when the video is written completely.
    with (
        devices.process_group(args) as group,
        contextlib.ExitStack() as backup,
        group.writing(args.output, args.fps) as sink,
    ):
        if args.save_stages and not args.from_stage:  # else an earlier run has made it
            whole.make_directory(args.save_stages, "keep stages in")
        elif not args.save_stages:
            whole.check_file(_backup_path(args))
        clock = common.announcing_clock(args)
        if latents is None:
            vae, latents = _sample_latents(args, group)
        else:
            vae = _vae_for(args, latents, group.mesh)
        if not args.save_stages and group.is_first:
            backup.enter_context(_backed_up(args, latents))
        written = common.decode_to(sink, vae, latents, args)
    if group.is_first:
        if written != latents.num_frames:
            common.say(
                f"{latents.num_frames} frames were asked for, {written} made: {common.LENGTHS_THAT_STAY}"
            )
        common.print_results(args, clock, {"frames": written, "fps": float(args.fps)})
    return None


def _frame_rate_of(model: str) -> Fraction:
    # The transformer of CogVideoX 1.5 alone joins frames to patches.
    return FPS_OF_1_5 if description.config_of(model, "transformer/config.json").get("patch_size_t") else FPS


def _vae_for(args: argparse.Namespace, latents: latent_files.Latents, mesh: Any) -> Any:
    """Return the VAE to decode latents of an earlier run, in `--dtype` or else in the latents' dtype."""
    dtype = args.dtype or runtime.dtype_name(latents.tensor.dtype)
    return common.load_vae(args.model, "torchax", dtype, mesh)


def _load_latents_stage(args: argparse.Namespace) -> latent_files.Latents:
    """Return the latents that an earlier run wrote into `--save-stages`; this run only decodes them.

    `ValueError` for options of sampling, which is done already, and if there are no latents, or another
    model's.
    """
    # Names of the options of sampling alone: the fields of a request for a video, and some more. `--dtype` is
    # left out, because the VAE has a dtype too.
    sampling = {*stages.FIELDS, "preview", "cache", "scheduler", "lora", "lora_scale", "weights"} - {"dtype"}
    useless = sorted(stages.option(name) for name in sampling if getattr(args, name) is not None)
    if useless:
        raise ValueError(
            f"the latents are sampled already: leave {', '.join(useless)} out, or resume from 'text'"
        )
    path = stages.path_of(args.save_stages, stages.LATENTS)
    if not path.is_file():
        raise stages.StageError(f"there is no stage {path}: resume from 'text'")
    latents = latent_files.load(path)
    latents.check_model(description.config_of(args.model, description.VAE_CONFIG))  # by the JSON file alone
    return latents


def _backup_path(args: argparse.Namespace) -> Path:
    """Return the path, beside the output, of the file that `_backed_up` writes."""
    output = Path(args.output)  # drops the slash that a directory's name may end in
    return output.with_name(f"{output.name}.latents.safetensors")


@contextlib.contextmanager
def _backed_up(args: argparse.Namespace, latents: latent_files.Latents) -> Iterator[None]:
    """Keep the latents, which took long to sample, in a file while the `with` block writes their video.

    If the block succeeds, the file is removed. If it fails, the command that decodes the file is printed.
    """
    path = _backup_path(args)
    latent_files.save(latents, path)
    try:
        yield
    except BaseException:
        words = ["cogvideox-torchax", "decode", str(path), "-o", args.output]
        words += ["--dtype", runtime.dtype_name(latents.tensor.dtype)]
        words += ["--tiling", args.tiling] if args.tiling else []
        # All devices split the width: a VAE that decodes one video has no use for `dp`.
        words += ["--tp", str(args.dp * args.tp)] if args.dp * args.tp > 1 else []
        command = shlex.join(words)
        common.say(f"the latents are kept: {command}")
        raise
    path.unlink()


def _sample_latents(
    args: argparse.Namespace, group: devices.ProcessGroup
) -> tuple[Any, latent_files.Latents]:
    """Check the request, then run the pipeline up to its VAE; return the VAE and the sampled latents.

    `--save-stages` gets the prompt's embeddings and the latents. With `--from-stage text` an earlier run's
    embeddings are read there, and no text encoder is loaded.
    """
    # A description of the model by its configs. The weights are loaded after all checks.
    model = description.describe(args.model, image=args.image is not None, clip=args.video is not None)
    # An earlier run's embeddings. Here --from-stage is "text": with "latents" nothing is sampled.
    saved_text = stages.load_text(args.save_stages, model.fingerprint) if args.from_stage else None
    request = stages.request_from_options(vars(args), model.size, saved_text)
    common.parse_dtype(request.dtype)  # for its error
    generation.check(request, model)
    pipe = generation.prepared(args, model, request, with_text=saved_text is None)(group.mesh)
    # Of several processes the first writes files. The others make the same calls.
    directory = Path(args.save_stages) if args.save_stages and group.is_first else None
    # Called with the latents after each step, to write a picture of them.
    write_preview = None
    if args.preview:
        write_preview = (
            preview.preview_writer(pipe.vae, args.preview, common.say) if group.is_first else lambda _: None
        )
    # The keys are names of the pipeline's arguments.
    embeddings: dict[str, Any] = (
        generation.encode_text(pipe, model, request) if saved_text is None else dict(saved_text.tensors)
    )
    if directory is not None:
        # Latents of an earlier run are deleted before a new text is written, and before sampling, which may
        # fail: a process that is killed never leaves them beside a text that is not theirs.
        stages.path_of(directory, stages.LATENTS).unlink(missing_ok=True)
        if saved_text is None:
            stages.save_text(directory, embeddings, request=request, model=model.fingerprint)
    latents = generation.sample(pipe, model, request, embeddings, args.fps, write_preview)
    if directory is not None:
        latent_files.save(latents, stages.path_of(directory, stages.LATENTS))
    if args.cache and group.is_first:
        # As text, the cache is the number of steps that it has skipped.
        common.say(f"--cache {args.cache}: {pipe.transformer.step_cache}")
    return pipe.vae, latents
