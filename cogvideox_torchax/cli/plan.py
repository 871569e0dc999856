"""`plan`: compile for a TPU on a machine that has none; print whether it fits and how long it takes."""

import argparse
import contextlib
import json
import sys
from pathlib import Path

from cogvideox_torchax.backends import Use, names
from cogvideox_torchax.cli import options, planning
from cogvideox_torchax.cli.arguments import REPORT, Command, Option
from cogvideox_torchax.files import reports
from cogvideox_torchax.pipelines.cache_options import config_of

BACKEND, TOPOLOGY = "torchax", "v6e:1x1"
ONLY = {
    **dict.fromkeys(("backend", "tiling", "no_advice", "layers", "encode", "save_hlo"), ("vae",)),
    **dict.fromkeys(("no_guidance", "parallel", "cache", "skips"), ("step",)),
}
"""By option, the values of `--network` that it goes with; other options go with all."""


COMMAND = Command(
    "compile for a TPU on a machine without one: does it fit, how long does it take",
    "--model 5b --topology v6e:1x1 --frames 49 --height 480 --width 720",
    (
        Option(
            "--model",
            group="program",
            default="5b",
            metavar="2b|5b|1.5-5b|DIR_OR_ID",
            help="whose shapes to plan (default: 5b)",
        ),
        Option(
            "--topology",
            group="chips",
            default=TOPOLOGY,
            help=f"generation and grid of chips (default: {TOPOLOGY})",
        ),
        Option(
            "--platform", group="chips", choices=("tpu", "cpu"), default="tpu", help="cpu: no time, but quick"
        ),
        Option("--frames", group="program", type=int, default=49, help="frames of the video (default: 49)"),
        Option("--height", group="program", type=int, default=480, help="in pixels (default: 480)"),
        Option("--width", group="program", type=int, default=720, help="in pixels (default: 720)"),
        Option("--dp", group="chips", type=int, default=1, help="mesh: devices that a batch is split over"),
        Option("--tp", group="chips", type=int, default=1, help="mesh: devices that a width is split over"),
        Option("--backend", group="program", choices=names(Use.PLAN), default=BACKEND, help="whose programs"),
        Option(
            "--tiling",
            group="program",
            nargs="?",
            const="default",
            metavar="HEIGHTxWIDTH",
            help="plan a tile of the video, in pixels; without a size, the tile that enable_tiling() takes",
        ),
        Option(
            "--no-advice",
            group=REPORT,
            action="store_true",
            help="when it does not fit, do not compile what would",
        ),
        Option(
            "--layers", group=REPORT, action="store_true", help="on a mesh: what each layer holds and moves"
        ),
        Option(
            "--network",
            group="program",
            choices=("vae", "step", "prompt", "train-step"),
            default="vae",
            help="the VAE, a step of the transformer, the text encoder, a step training the VAE (default: "
            "vae)",
        ),
        Option(
            "--no-guidance",
            group="denoising step",
            action="store_true",
            help="with --network step: without guidance, which doubles the batch",
        ),
        Option(
            "--parallel",
            group="denoising step",
            choices=("context", "tensor"),
            help="with --network step: split the tokens (context) or the weights (tensor) over --tp "
            "(default: context where --tp divides the heads)",
        ),
        Option(
            "--cache",
            group="denoising step",
            metavar="first-block:0.1|pab|magcache:FILE|taylorseer|fastercache",
            help="with --network step: what a video takes with one of diffusers' caches",
        ),
        Option(
            "--skips",
            group="denoising step",
            type=int,
            metavar="N",
            help="with --cache first-block: how many of 50 steps it skips",
        ),
        Option("--encode", group="program", action="store_true", help="plan encoding instead of decoding"),
        Option(
            "--dtype",
            group="program",
            default="bfloat16",
            help="of weights and activations (default: bfloat16)",
        ),
        Option(
            "--save-hlo", group=REPORT, metavar="DIR", help="keep the compiled text of each program there"
        ),
        options.output("write the plan there as JSON"),
        Option(
            "--json", group=REPORT, action="store_true", help="print the plan as JSON, and the rest on stderr"
        ),
    ),
)


def check(args: argparse.Namespace) -> None:
    """Raise `ValueError` for options that would have no effect, given the other options."""
    for name, networks in ONLY.items():  # None, False and BACKEND are the options' defaults
        if args.network not in networks and getattr(args, name) not in (None, False, BACKEND):
            raise ValueError(f"--{name.replace('_', '-')} does not go with --network {args.network}")
    if args.platform == "cpu" and args.topology != TOPOLOGY:
        raise ValueError(f"--topology {args.topology} does not go with --platform cpu: leave one out")
    if args.cache:
        config_of(args.cache, steps=50, guided=not args.no_guidance)
    is_first_block = (args.cache or "").startswith("first-block")
    if (args.skips is not None) != is_first_block:
        raise ValueError(
            "--skips N says how many of 50 steps --cache first-block skips, which decides as it runs: give "
            "both or neither"
        )
    if args.skips is not None and not 0 <= args.skips < 50:
        raise ValueError(f"got --skips {args.skips}: of 50 steps, the first of which is computed")
    if args.layers and args.dp * args.tp == 1:
        raise ValueError("--layers tells what lies where on a mesh: pass --dp or --tp")
    if args.layers and args.backend == "flax":
        raise ValueError("--layers reads the names of PyTorch's modules: the Flax build's programs have none")


def run(args: argparse.Namespace) -> int:
    """Compile and print a plan; with `--output` write it too. Return 0.

    With `--json` stdout gets the JSON document alone, and all that is printed before it goes to stderr.
    """
    check(args)
    if args.output:  # raises before the work, not after it
        reports.check_file(Path(args.output))
    with contextlib.redirect_stdout(sys.stderr) if args.json else contextlib.nullcontext():
        document = planning.planned(args)
    if args.output:
        reports.write_json(Path(args.output), document)
    if args.json:
        print(json.dumps(document))
    return 0
