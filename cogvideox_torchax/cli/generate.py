"""`generate`: a prompt, and the model's other inputs, to a video, in stages that can be resumed."""

import argparse
import contextlib
import functools
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from cogvideox_torchax import runtime
from cogvideox_torchax.cli import common, devices, options
from cogvideox_torchax.cli.arguments import Command, Option, frame_rate, positive
from cogvideox_torchax.cli.clips import decode_to
from cogvideox_torchax.cli.kept import kept_path, load_latents_stage, saved_latents
from cogvideox_torchax.files import latents as latent_files
from cogvideox_torchax.files import video
from cogvideox_torchax.files.latents import Latents
from cogvideox_torchax.files.whole import check_file
from cogvideox_torchax.pipelines import cache_options, generate, preview, stages
from cogvideox_torchax.runtime.clock import CompileClock

FPS = Fraction(8)

_request = functools.partial(Option, group="request")
_sampling = functools.partial(Option, group="sampling")
COMMAND = Command(
    "generate a video with a CogVideoX pipeline",
    "--prompt 'A cat walks.' --model zai-org/CogVideoX-5b -o cat.mp4",
    (
        Option("--model", required=True, metavar="DIR_OR_ID", help="a whole pipeline"),
        _request("--prompt", help="what to show"),
        _request("--negative-prompt", help="what not to show"),
        _request("--image", metavar="FILE", help="the first frame, for an image-to-video model"),
        _request("--video", metavar="FILE", help="a video to start from, or a control video"),
        _request("--strength", type=float, help="how far from --video to go, 0 to 1 (default: 0.8)"),
        _sampling("--num-inference-steps", type=int, help="denoising steps (default: 50)"),
        _sampling("--guidance-scale", type=float, help="classifier-free guidance, 1 for none (default: 6)"),
        _sampling("--seed", type=int, help="of the noise (default: 0)"),
        Option("--frames", group="size", type=int, help="how many (default: the model's)"),
        Option("--height", group="size", type=positive, help="in pixels (default: the model's)"),
        Option("--width", group="size", type=positive, help="in pixels (default: the model's)"),
        Option(
            "--fps",
            group="size",
            type=frame_rate,
            help="frames a second (default: 8, or a latents stage's)",
        ),
        Option("--dtype", help="of weights and latents (default: bfloat16)"),
        Option(
            "--dp",
            group="several devices",
            type=int,
            default=1,
            help="mesh: devices for the two batches of guidance (default: 1)",
        ),
        Option(
            "--tp",
            group="several devices",
            type=int,
            default=1,
            help="mesh: devices for the transformer's tokens (its weights, where this does not divide the "
            "heads), T5's weights and frames' width (default: 1)",
        ),
        _sampling(
            "--cache",
            metavar="first-block:0.1|pab|magcache:FILE|taylorseer|fastercache",
            help="reuse what steps have computed, by one of diffusers' caches",
        ),
        Option("--save-stages", group="stages", metavar="DIR", help="keep embeddings and latents there"),
        Option(
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
)


def run(args: argparse.Namespace) -> int:
    """Generate a video, from a prompt or from the stage of an earlier run; print the report, return 0."""
    if args.from_stage and not args.save_stages:
        raise ValueError("--from-stage needs the stages' directory: pass --save-stages DIR")
    if args.preview:
        check_file(args.preview)
        if not args.preview.endswith(".png"):
            raise ValueError(f"cannot write {args.preview}: a preview goes into a .png file")
    kept = load_latents_stage(args) if args.from_stage == stages.LATENTS else None
    args.fps = args.fps or (kept.fps if kept else FPS)
    # `keeping` is the outer context: the video is whole when it ends, and only then the latents are removed.
    with contextlib.ExitStack() as keeping, video.writing(args.output, args.fps) as sink:
        if args.save_stages:
            common.make_directory(args.save_stages, "keep stages in")
        else:
            check_file(kept_path(args))
        clock = CompileClock(common.narrator(args))
        vae, latents = _sampled(args) if kept is None else (_vae_for(args, kept), kept)
        if not args.save_stages:
            keeping.enter_context(saved_latents(args, latents))
        written = decode_to(sink, vae, latents, args, runtime.to_torch)
    common.print_results(args, clock, {"frames": written, "fps": float(args.fps)})
    return 0


def _vae_for(args: argparse.Namespace, latents: Latents) -> Any:
    """Return the model's VAE to decode latents with, in `--dtype` or else in the latents' dtype."""
    dtype = args.dtype or str(latents.tensor.dtype).removeprefix("torch.")
    return common.load_vae(args.model, "torchax", dtype, devices.mesh_of(args))


def _sampled(args: argparse.Namespace) -> tuple[Any, Latents]:
    """Check the request, then run the pipeline up to its VAE; return the VAE and the sampled latents.

    With `--save-stages` the embeddings and the latents are written too. With `--from-stage text` the prompt's
    embeddings are those of an earlier run.
    """
    mesh = devices.mesh_of(args)
    text = stages.load_text(args.save_stages) if args.from_stage else None  # an earlier run's embeddings
    model = generate.describe(args.model, image=args.image is not None, clip=args.video is not None)
    if text is not None:
        text.check_model(model.fingerprint)
    request = stages.request_from_options(vars(args), model.size, text)
    dtype = common.parse_dtype(request.dtype)
    generate.check(request, model)
    run_settings = {"steps": generate.steps_of(request, model), "guided": request.guidance_scale > 1}
    if args.cache:
        cache_options.config_of(args.cache, **run_settings)  # raises before the weights are loaded
    pipe = generate.load_generator(model, dtype, mesh, with_text=text is None)
    if args.cache:
        config = cache_options.config_of(args.cache, **run_settings, timestep=lambda: pipe.current_timestep)
        pipe.transformer.enable_cache(config)
    pipe.set_progress_bar_config(disable=args.quiet, desc="denoise", leave=False)
    directory = Path(args.save_stages) if args.save_stages else None
    show = preview.preview_writer(pipe.vae, args.preview, common.say) if args.preview else None
    work = generate.Generation(pipe, model, request, directory, show)
    embeddings: dict[str, Any] = work.encode_text() if text is None else dict(text.tensors)
    latents = replace(work.sample(embeddings), fps=args.fps)
    if directory is not None:
        latent_files.save(latents, stages.path_of(directory, stages.LATENTS))
    if args.cache:
        common.say(f"--cache {args.cache}: {pipe.transformer.step_cache}")
    return pipe.vae, latents
