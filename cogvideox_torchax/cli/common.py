"""Code that commands share: it loads models, encodes clips, decodes latents, and prints.

A *unit*, an `EncodeClip` or a `DecodeClip`, holds a model and its settings.
"""

import argparse
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar

import torch
from tqdm.auto import tqdm

from cogvideox_torchax import backends, runtime
from cogvideox_torchax.cli.options import SPATIAL_SCALE
from cogvideox_torchax.dataset import clip
from cogvideox_torchax.dataset.clip import (
    MEAN,
    SAMPLE,
    Clip,
    ClipConfig,
    ClipPart,
    DecodeClip,
    EncodeClip,
)
from cogvideox_torchax.files import reports, video
from cogvideox_torchax.files.latents import Latents
from cogvideox_torchax.terminal import CompileClock

TINY_PIPELINE = Path(__file__).parent.parent / "assets" / "tiny-pipeline"
DEMO_MODEL = TINY_PIPELINE / "vae"
TINY_PROMPT = "a red circle moves to the left on a blue background"
TINY_SAMPLING = {"num_inference_steps": 20, "guidance_scale": 1.5}
"""How the bundled pipeline samples unless options say otherwise; much more guidance makes spots."""
LENGTHS_THAT_STAY = "the model returns as many as it took only for 8 k or 8 k + 1 of them"
"""The end of a message about a number of frames that encoding and decoding change."""

Item = TypeVar("Item")
Unit = TypeVar("Unit", EncodeClip, DecodeClip)


def take_bundled_model(args: argparse.Namespace) -> None:
    """Set `args.model` to the bundled model if the command was given none, and print a line about it."""
    if args.model is None:
        args.model = str(DEMO_MODEL)
        say(f"no --model is given: taking the small bundled model {DEMO_MODEL} (docs/tiny-vae.md)")


def take_bundled_pipeline(args: argparse.Namespace) -> None:
    """Set `args.model` to the bundled pipeline, and how it samples where no option says, if none is given."""
    if args.model is None:
        args.model = str(TINY_PIPELINE)
        say(
            f"no --model is given: taking the small bundled pipeline {args.model}, which knows prompts such "
            f"as: {TINY_PROMPT} (docs/tiny-pipeline.md has all words)"
        )
        vars(args).update({k: v for k, v in TINY_SAMPLING.items() if getattr(args, k) is None})


def load_vae(model: str, backend: str, dtype: str, mesh: Any = None) -> Any:
    return backends.backend(backend).load(model, getattr(torch, dtype), mesh).vae


def device_name(backend: str) -> str:
    """Return the name of a backend's devices, such as "2 x TPU v6 lite"; one device has no number."""
    if not backends.backend(backend).on_jax:
        return "cpu"
    import jax

    first, *others = jax.devices()
    return f"{len(others) + 1} x {first.device_kind}" if others else first.device_kind


# Clips


def config_of(args: argparse.Namespace, fps: Fraction | None = None, **options: Any) -> ClipConfig:
    """Return a `ClipConfig` with the values of a command's options; `options`, by field, take precedence.

    `fps` is the rate at which frames are taken from a clip; None for every frame.
    """
    # A command may lack some of these options: then the field keeps its default.
    names = ("model", "backend", "dtype", "tiling", "dp", "tp", "frames", "height", "width", "crop")
    fields = {name: getattr(args, name) for name in names if hasattr(args, name)} | options
    return ClipConfig(**fields, fps=None if fps is None else str(fps))


def open_clip(args: argparse.Namespace, at_most: int | None = None, fps: Fraction | None = None) -> ClipPart:
    """Return the part of `args.video` to encode; raise `ValueError` for an impossible size.

    The part is the first `--frames` frames; without that option at most the first `at_most`, or all for None.
    `fps` is the rate at which frames are taken; None for the video's own.
    """
    config = config_of(args, fps, dtype="float32")  # `verify` has several dtypes; the part depends on none
    # The clip is in no data set, so its id is "".
    return clip.read(Clip("", args.video), config, SPATIAL_SCALE, at_most)


def unit_of(kind: type[Unit], args: argparse.Namespace, vae: Any, **options: Any) -> Unit:
    """Return an `EncodeClip` or a `DecodeClip` of a loaded model, with a progress bar for a clip's chunks.

    `options` are fields of `ClipConfig`, which take precedence over the command's.
    """
    return kind(config_of(args, **options), say, vae=vae, follow=functools.partial(progress, args=args))


def encoder_of(args: argparse.Namespace, vae: Any, **options: Any) -> EncodeClip:
    """Return an `EncodeClip` that keeps the posterior's mean, or with `--seed` a sample; see `unit_of`."""
    keep = MEAN if args.seed is None else SAMPLE
    return unit_of(EncodeClip, args, vae, keep=keep, seed=args.seed or 0, **options)


def decode_to(write: video.Write, vae: Any, latents: Latents, args: argparse.Namespace) -> int:
    """Decode latents and write each chunk's frames; return the number of frames."""
    # `args` may have no model and no dtype: the latents name their model, and the loaded VAE has the dtype.
    unit = unit_of(DecodeClip, args, vae, model=latents.model, dtype=runtime.dtype_name(vae.dtype))
    return sum(map(write, unit.stream(latents)))


# Messages and reports


def progress(
    items: Iterable[Item], total: int, name: str, *, args: argparse.Namespace, unit: str = "chunk"
) -> Iterator[Item]:
    """Yield `total` items under a progress bar with the title `name`, unless `--quiet` is given."""
    yield from tqdm(items, total=total, desc=name, unit=unit, disable=args.quiet, leave=False)


def print_results(args: argparse.Namespace, clock: CompileClock, results: dict[str, Any]) -> None:
    """Print the report of a command that has written `args.output`, with the device and the times."""
    report = {
        "output": args.output,
        "backend": args.backend,
        "device": device_name(args.backend),
        **results,
        "compile_s": clock.seconds,  # of tracing and compiling
        "total_s": clock.elapsed,
    }
    reports.print_report(report, args.json)


def announcing_clock(args: argparse.Namespace) -> CompileClock:
    """Return a clock that also prints when a large program is compiled, unless `--quiet` is given."""
    return CompileClock(narrator(args))


def narrator(args: argparse.Namespace) -> Callable[[str], None]:
    return (lambda line: None) if args.quiet else say


def say(message: str) -> None:
    """Print a line for a person on stderr: stdout is for results, which a program may read."""
    # Not by `print`, whose line would begin where a progress bar ends. A file name that is no UTF-8 has lone
    # surrogates, which not every stream can write: they are written as escapes.
    tqdm.write(message.encode("utf-8", "backslashreplace").decode(), file=sys.stderr)
