"""`verify`: compare backends with PyTorch in float32, layer by layer and as a whole."""

import argparse
import json

import torch

from cogvideox_torchax import __version__, backends
from cogvideox_torchax.cli import common, options
from cogvideox_torchax.files import reports, whole
from cogvideox_torchax.vae.sizes import check_sides

DTYPES = ("float32", "bfloat16")
FILES = ("verify.json", "verify.md", "verify.png")


COMMAND = options.Command(
    "compare backends with PyTorch in float32, layer by layer and as a whole",
    "--model zai-org/CogVideoX-5b --video clip.mp4 --frames 17 --crop -o out",
    (
        options.Option(
            "--model",
            metavar="DIR_OR_ID",
            default=str(common.DEMO_MODEL),
            help="a CogVideoX VAE or a whole pipeline (default: the bundled one)",
        ),
        options.Option("--video", metavar="CLIP", help="what to encode (default: noise from a fixed seed)"),
        options.Option(
            "--backends",
            nargs="+",
            choices=backends.names("verify"),
            default=["torch", "torchax"],
            help="to compare (default: torch torchax)",
        ),
        options.Option(
            "--dtype", nargs="+", choices=DTYPES, default=["float32"], help="of each (default: float32)"
        ),
        *options.clip_options(),
        options.output(f"write {', '.join(FILES)} there", metavar="DIR"),
        options.JSON,
        options.Option("--quiet", action="store_true", help="do not say what is being run"),
        options.PROFILE,
    ),
)


def run(args: argparse.Namespace) -> int:
    """Compare backends with PyTorch in float32, in each dtype; return 1 if one breaks a contract, else 0."""
    from cogvideox_torchax.vae.torchax.networks import stock_of
    from cogvideox_torchax.verify import compare, report

    for name in args.backends:
        backends.backend(name)  # raises for one that is not installed, before the work
    if args.output is not None:
        reports.pyplot()  # raises before the work, not after it
    output = None if args.output is None else whole.make_directory(args.output)
    x = _video(args)
    # `load_vae` loads this project's class; the reference is diffusers' own, with the same weights.
    reference = stock_of(common.load_vae(args.model, "torch", "float32"))
    say = common.narrator(args)
    with torch.no_grad():
        say("PyTorch in float32: encode and decode")
        verifier = compare.Verifier(reference, x)
        candidates = [
            compare.make_candidate(name, getattr(torch, dtype), reference)
            for dtype in args.dtype
            for name in args.backends
        ]
        results = verifier.verify(candidates, say)
    about = {
        "version": __version__,
        "model": args.model,
        "video": args.video or "noise",
        "frames": x.shape[2],
        "size": f"{x.shape[3]} x {x.shape[4]}",
        # The device of a backend that runs on JAX, if there is one: `max` finds the first True.
        "device": common.device_name(max(args.backends, key=lambda name: backends.backend(name).on_jax)),
    }
    document, page = report.as_json(results, about), report.markdown(results, about)
    if output is not None:
        json_name, markdown_name, plot_name = FILES
        reports.write_json(output / json_name, document)
        reports.write_text(output / markdown_name, page)
        report.draw_layers(results, output / plot_name)
    print(json.dumps(document) if args.json else page)
    return 0 if all(result.passed for result in results) else 1


def _video(args: argparse.Namespace) -> torch.Tensor:
    """Return the frames of `--video`, or noise from a fixed seed, as floats (1, 3, T, H, W) in [-1, 1]."""
    if args.video is not None:
        frames = torch.stack(list(common.open_clip(args).stream()), dim=2)
        return frames.float() / 127.5 - 1
    if args.crop:
        raise ValueError("--crop is for a clip: pass one with --video")
    generator = torch.Generator().manual_seed(0)
    # By default 17 frames, which are two chunks, so that all programs run; the frames are small, because
    # PyTorch runs them on the CPU.
    shape = (1, 3, args.frames or 17, args.height or 64, args.width or 96)
    check_sides("noise", *shape[3:], multiple=common.SPATIAL_SCALE)
    return torch.rand(shape, generator=generator) * 2 - 1
