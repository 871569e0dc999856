"""`verify`: compare backends with PyTorch in float32, layer by layer and as a whole."""

import argparse
import json

import torch

from cogvideox_torchax import __version__, backends
from cogvideox_torchax.cli import common
from cogvideox_torchax.files import reports, whole


def run(args: argparse.Namespace) -> int:
    """Compare backends with PyTorch in float32, in each dtype; return 1 if one breaks a contract, else 0."""
    from cogvideox_torchax.vae.torchax.networks import stock_of
    from cogvideox_torchax.verify import compare, report

    for name in args.backends:
        backends.backend(name)  # raises for one that is not installed, before the work
    output = None if args.output is None else whole.make_directory(args.output)
    x = _video(args)
    common.take_bundled_model(args)
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
        reports.write_json(output / "verify.json", document)
        reports.write_text(output / "verify.md", page)
    print(json.dumps(document) if args.json else page)
    return 0 if all(result.passed for result in results) else 1


def _video(args: argparse.Namespace) -> torch.Tensor:
    """Return the frames of `--video`, or noise from a fixed seed, as floats (1, 3, T, H, W) in [-1, 1]."""
    if args.video is not None:
        frames = torch.stack(list(common.open_clip(args).stream()), dim=2)
        return frames.float() / 127.5 - 1
    generator = torch.Generator().manual_seed(0)
    # By default 17 frames, which are two chunks, so that all programs run; the frames are small, because
    # PyTorch runs them on the CPU.
    shape = (1, 3, args.frames or 17, args.height or 64, args.width or 96)
    return torch.rand(shape, generator=generator) * 2 - 1
