"""`generate`: make a video of a prompt and a model's other inputs, in stages that can be resumed.

The *stages* are the text, whose result is embeddings, and the latents. `--save-stages` keeps their results.
"""

import argparse
import contextlib
import shlex
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

from cogvideox_torchax import runtime
from cogvideox_torchax.cli import common, devices, generation, preview, prompts, stages
from cogvideox_torchax.files import latents as latent_files, whole
from cogvideox_torchax.pipelines import description

FPS, FPS_OF_1_5 = Fraction(8), Fraction(16)
"""The frames a second that CogVideoX and CogVideoX 1.5 were trained with, by their model cards."""


def run(args: argparse.Namespace) -> int | None:
    """Generate a video, from a prompt or from the stage of an earlier run, and print the report.

    With `--prompts` generate many: then return 1 if some cannot be generated, else 0.
    """
    common.take_bundled_pipeline(args)  # sets `args.model` if no --model is given
    if args.prompts:
        args.fps = args.fps or _frame_rate_of(args.model)
        return prompts.run(args)
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
        written = common.decode_to(sink, vae, latents, args, group.fetch_to_first)
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
