"""`plan`: compile programs for a TPU on a machine that has none; print whether they fit, and their work."""

import argparse
import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cogvideox_torchax.backends import names
from cogvideox_torchax.cli import options
from cogvideox_torchax.files import faults, reports, whole
from cogvideox_torchax.pipelines import cache_options

TOPOLOGY = "v6e:1x1"
ONLY = {
    **dict.fromkeys(("backend", "encode", "save_hlo"), ("vae",)),
    **dict.fromkeys(("tiling", "no_advice"), ("vae", "pipeline")),
    **dict.fromkeys(("cache", "skips"), ("step",)),
    **dict.fromkeys(("no_guidance", "parallel"), ("step", "pipeline")),
    "weights": ("prompt", "step", "pipeline"),
    "offload": ("pipeline",),
    **dict.fromkeys(("frames", "height", "width"), ("vae", "step", "pipeline")),
}
"""By option, the values of `--network` that it goes with; other options go with all values."""


COMMAND = options.Command(
    "compile for a TPU or GPU on a machine without one: does it fit, in which tiles, on how many chips",
    "--model 5b --topology v6e:1x1 --frames 49 --height 480 --width 720",
    (
        options.Option(
            "--model",
            group="program",
            metavar="2b|5b|1.5-5b|DIR_OR_ID",
            help="whose shapes to plan, of a pipeline or a VAE (default: 5b)",
        ),
        options.Option(
            "--pipeline",
            group="program",
            metavar="2b|5b|1.5-5b|DIR_OR_ID",
            help="plan this pipeline whole, or one of its networks with --network",
        ),
        options.Option(
            "--topology",
            group="chips",
            default=TOPOLOGY,
            help=f"generation and grid of TPUs, or h100, h200, a100, l4 for a GPU (default: {TOPOLOGY})",
        ),
        options.Option(
            "--platform",
            group="chips",
            choices=("tpu", "cpu"),
            default="tpu",
            help="cpu: no floor, but quick",
        ),
        options.Option(
            "--frames",
            "--num-frames",
            group="program",
            type=int,
            default=49,
            help="frames of the video (default: 49)",
        ),
        options.Option("--height", group="program", type=int, default=480, help="in pixels (default: 480)"),
        options.Option("--width", group="program", type=int, default=720, help="in pixels (default: 720)"),
        options.Option(
            "--dp", group="chips", type=int, default=1, help="mesh: devices that a batch is split over"
        ),
        options.Option(
            "--tp", group="chips", type=int, default=1, help="mesh: devices that a width is split over"
        ),
        options.Option(
            "--backend", group="program", choices=names("plan"), default="torchax", help="whose programs"
        ),
        options.Option(
            "--tiling",
            group="program",
            nargs="?",
            const="default",
            metavar="HEIGHTxWIDTH",
            help="plan a tile of the video, in pixels; without a size, the tile that enable_tiling() takes",
        ),
        options.Option(
            "--no-advice",
            group=options.REPORT,
            action="store_true",
            help="when it does not fit, do not compile what would",
        ),
        options.Option(
            "--network",
            group="program",
            choices=("vae", "step", "prompt", "pipeline"),
            help="the VAE, a step of the transformer, the text encoder, or all of them with all weights in "
            "memory (default: vae, or pipeline with --pipeline)",
        ),
        options.Option(
            "--no-guidance",
            group="denoising step",
            action="store_true",
            help="without guidance, which doubles the batch",
        ),
        options.Option(
            "--parallel",
            group="denoising step",
            choices=("context", "tensor"),
            help="split the tokens (context) or the weights (tensor) over --tp "
            "(default: context where --tp divides the heads)",
        ),
        options.Option(
            "--cache",
            group="denoising step",
            metavar="first-block:0.1|pab|magcache:FILE|taylorseer|fastercache",
            help="with --network step: what a video takes with one of diffusers' caches",
        ),
        options.Option(
            "--skips",
            group="denoising step",
            type=int,
            metavar="N",
            help="with --cache first-block: how many of 50 steps it skips",
        ),
        options.Option(
            "--encode", group="program", action="store_true", help="plan encoding instead of decoding"
        ),
        options.Option(
            "--dtype",
            group="program",
            default="bfloat16",
            help="of weights and activations (default: bfloat16)",
        ),
        options.Option(
            "--weights",
            group="weights",
            choices=("int8", "int8-dynamic"),
            help="matrices of the transformer and the text encoder in eight bits; with int8-dynamic the "
            "transformer's tokens too",
        ),
        options.Option(
            "--offload",
            group="weights",
            action="store_true",
            help="with --pipeline: does it fit if a network's weights wait on the host while it is not used",
        ),
        options.Option(
            "--save-hlo",
            group=options.REPORT,
            metavar="DIR",
            help="keep the compiled text of each program there",
        ),
        options.output("write the plan there as JSON"),
        options.Option(
            "--json",
            group=options.REPORT,
            action="store_true",
            help="print the plan as JSON, and the rest on stderr",
        ),
    ),
)


def check(args: argparse.Namespace) -> None:
    """Set `args.model` and `args.network`; raise `ValueError` for options that would have no effect."""
    if args.model and args.pipeline:
        raise ValueError(f"got --model {args.model} and --pipeline {args.pipeline}: give one of them")
    args.network = args.network or ("pipeline" if args.pipeline else "vae")
    args.model = args.pipeline or args.model or "5b"
    # A value other than the default shows that an option was passed. The default of a flag without a value is
    # False in `args`, and None in this table.
    defaults = {option.flags[0]: option.settings.get("default") for option in COMMAND.options}
    for name, networks in ONLY.items():  # by option, the values of --network that it goes with
        flag = f"--{name.replace('_', '-')}"
        if args.network not in networks and (getattr(args, name) or None) != defaults[flag]:
            raise ValueError(f"{flag} does not go with --network {args.network}")
    if args.cache:
        # Called only for its error about an unknown cache.
        cache_options.config_of(args.cache, steps=50, guided=not args.no_guidance)
    has_skips, is_first_block = args.skips is not None, (args.cache or "").startswith("first-block")
    faults.refuse(
        (
            args.platform == "cpu" and args.topology != TOPOLOGY,  # the default
            f"--topology {args.topology} does not go with --platform cpu: leave one out",
        ),
        (
            has_skips != is_first_block,
            "--skips N says how many of 50 steps --cache first-block skips, which decides as it runs: give "
            "both or neither",
        ),
        (
            has_skips and not 0 <= args.skips < 50,
            f"got --skips {args.skips}: of 50 steps, the first of which is computed",
        ),
    )


def run(args: argparse.Namespace) -> None:
    """Compile and print a plan; with `--output` write it too."""
    check(args)
    from cogvideox_torchax.cli import planning  # imports JAX: wrong options are refused before that

    deliver(args, planning.planned)


def deliver(args: argparse.Namespace, make: Callable[[argparse.Namespace], dict[str, Any]]) -> None:
    """Call `make`, which prints a plan's figures and returns its JSON document; write that with `--output`.

    With `--json` stdout gets the document alone, and what `make` prints goes to stderr.
    """
    if args.output:  # raises before the work, not after it
        whole.check_file(args.output)
    with contextlib.redirect_stdout(sys.stderr) if args.json else contextlib.nullcontext():
        document = make(args)
    if args.output:
        reports.write_json(Path(args.output), document)
    if args.json:
        print(json.dumps(document))
