"""The laboratory's command line in a checkout: `python -m benchmarks COMMAND`; see its `--help`."""

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.jobs import BACKENDS, JOBS, Budget, Size
from benchmarks.options import JSON, QUIET, Option, add_to, narrator, option, output, positive, say
from benchmarks.pages import DEMO_MODEL
from benchmarks.plan.command import OPTIONS
from cogvideox_torchax.files import reports, whole
from cogvideox_torchax.terminal import quiet_libraries
from cogvideox_torchax.vae.checkpoint import locate_vae
from cogvideox_torchax.vae.sizes import check_sides

MEASURED = (
    option("--dtype", choices=("float32", "bfloat16"), help="default: float32; on a TPU or GPU, bfloat16"),
    option("--platform", choices=("tpu", "cuda", "cpu"), help="default: what JAX chooses"),
    option(
        "--limit",
        type=positive,
        metavar="SECONDS",
        default=1800,
        help="for one measurement (default: 1800)",
    ),
    output("write JSON and Markdown there; a run that was ended goes on", metavar="DIR"),
    JSON,
    QUIET,
)
"""Options of `ab` and of `device`."""
COMMANDS: dict[str, tuple[str, tuple[Option, ...]]] = {
    "ab": (
        "measure torchax against Flax, PyTorch, and diffusers' own modules through torchax",
        (
            option(
                "--model",
                default=str(DEMO_MODEL),
                metavar="DIR_OR_ID",
                help="a CogVideoX VAE or a pipeline, or 2b or 5b: their shapes with random weights (default: "
                "the bundled model)",
            ),
            option(
                "--backends", nargs="+", choices=BACKENDS, default=BACKENDS[:4], help="default: the first 4"
            ),
            option("--frames", type=positive, default=17, help="of the video (default: 17)"),
            option("--height", type=int, default=64, help="in pixels (default: 64)"),
            option("--width", type=int, default=96, help="in pixels (default: 96)"),
            option(
                "--repetitions", type=positive, default=5, help="measured runs in each process (default: 5)"
            ),
            option("--warmups", type=int, default=2, help="runs before the first that counts (default: 2)"),
            option(
                "--rounds",
                type=positive,
                default=2,
                help="processes for each backend; from 2 on warm starts are measured too (default: 2)",
            ),
            *MEASURED,
        ),
    ),
    "device": (
        "measure every job on a device, beside the estimates for it",
        (
            option(
                *("--jobs",),
                nargs="+",
                choices=[*JOBS],
                metavar="JOB",
                default=[*JOBS],
                help=f"of {', '.join(JOBS)} (default: all)",
            ),
            option(
                "--quick",
                action="store_true",
                help="within ten minutes, compiling included: each kernel, a chunk to decode, and a step of "
                "two layers, by this project alone",
            ),
            option("--dp", type=positive, help="mesh: devices that a batch is split over"),
            option(
                "--tp", type=positive, help="mesh: devices that a width is split over (default: one device)"
            ),
            *MEASURED,
        ),
    ),
    "plan": (
        "compile for TPUs or a GPU that are not there: does it fit, in which tiles, on how many chips; "
        "memory, work, communication, and a TPU's times",
        OPTIONS,
    ),
    "calibrate": (
        "estimate programs whose times on TPUs others have published",
        (
            option(
                "--maxdiffusion",
                type=Path,
                metavar="CHECKOUT",
                help="compile the decoder of Wan's VAE too (wan_vae.py says how); default: its last estimate",
            ),
        ),
    ),
    "draw": (
        "draw the tables of the documents from results/",
        (option("pages", nargs="*", metavar="PAGE", help="such as performance.md (default: all)"),),
    ),
}
"""By name: the summary of a command, and its options."""
MODULES = {
    "plan": "benchmarks.plan.command",
    "calibrate": "benchmarks.calibration",
    "draw": "benchmarks.draw",
}
"""By a command that measures nothing: the module whose `run` takes its options."""


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = root.add_subparsers(dest="command", required=True)
    for name, (summary, options) in COMMANDS.items():
        add_to(commands.add_parser(name, help=summary, description=summary, allow_abbrev=False), options)
    return root


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return 0 for success, 2 for wrong input, 1 for a wrong result or none at all.

    `argv` is the command line without the program's name; None for the process's own.
    """
    args, others = parser().parse_known_args(argv)
    quiet_libraries()
    try:
        if others:
            raise ValueError(f"got {' '.join(others)}, which {args.command} does not take")
        if args.command in ("ab", "device"):
            return measured(args)
        importlib.import_module(MODULES[args.command]).run(args)
    except (ValueError, ImportError) as error:  # an `ImportError` names the extra to install
        print(f"benchmarks {args.command}: {error}", file=sys.stderr)
        return 2
    return 0


def measured(args: argparse.Namespace) -> int:
    """Measure backends or a device, and print the report; return the exit code.

    With `--output` the report is written after each result too, so that an ended run can be resumed.
    """
    from benchmarks import report, runs
    from benchmarks.plan.videos import CONFIGS

    options: dict[str, Any] = {
        "jobs": ("decode", "encode"),
        "platform": args.platform,
        "dtype": args.dtype,
        "limit": args.limit,
    }
    if args.command == "device":
        # "small" is the model of the sizes that are called so. Each job once, in the given order.
        options |= {
            "models": {"small": str(DEMO_MODEL)},
            "jobs": tuple(dict.fromkeys(args.jobs)),
            "dp": args.dp,
            "tp": args.tp,
        }
        if args.quick:
            args.output = args.output or "out/device-quick"
            quick_jobs = tuple(name for name in options["jobs"] if JOBS[name].quick)
            options |= {"jobs": quick_jobs, "ways": ("torchax",), "limit": min(args.limit, 180)}
            options |= {"quick": True, "seconds": runs.QUICK, "budget": Budget(1, 10, seconds=2.0)}
    else:
        if args.model not in CONFIGS:
            locate_vae(args.model)  # raises before the work, not after it
        check_sides("a video", args.height, args.width, multiple=8)
        # A report is read on other machines: it has the model's name, and no path of this machine.
        name = Path(args.model).expanduser().resolve().name
        options |= {
            "models": {name: args.model},
            "ways": tuple(dict.fromkeys(args.backends)),
            "size": Size(name, args.frames, args.height, args.width),
            "rounds": args.rounds,
            # A backend that is slow has as many runs as the others.
            "budget": Budget(args.warmups, args.repetitions, fewest=args.repetitions, seconds=0.0),
        }
    path = args.output and whole.make_directory(args.output) / f"{args.command}.json"
    before = reports.load(path, runs.FORMAT) if path and path.exists() else None

    def keep(document: dict[str, Any]) -> None:
        if path:
            reports.write_json(path, document)

    document = runs.run(runs.Settings(**options), narrator(args), keep, before)
    print(json.dumps(document) if args.json else report.markdown(document))
    for written in report.write(document, path) if path else ():
        say(f"wrote {written}")
    if args.command == "device" and path and document["device"]["platform"] != "cpu":
        say(
            f"please attach {path} to a new issue of the repository that you cloned; it names no host or path"
        )
    # "wrong" is beyond the tolerance; further statuses are "failed" and "does not fit" (into memory).
    statuses = [result["status"] for result in document["results"]]
    return 1 if "wrong" in statuses or "ok" not in statuses else 0


if __name__ == "__main__":
    sys.exit(main())
