"""`bench`: backends measured against each other, or the devices that JAX has beside what `plan` estimates."""

import argparse
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cogvideox_torchax.backends import Use, names
from cogvideox_torchax.bench import ladder, report
from cogvideox_torchax.cli import common, options
from cogvideox_torchax.files import reports
from cogvideox_torchax.vae import checkpoint

_backends = functools.partial(options.Option, group="bench backends")
BACKENDS = (
    _backends(
        "--model",
        metavar="DIR_OR_ID",
        default=str(common.DEMO_MODEL),
        help="a CogVideoX VAE or a whole pipeline (default: the bundled one)",
    ),
    _backends(
        "--backends",
        nargs="+",
        choices=names(Use.BENCH),
        default=["torch", "torchax-stock", "torchax"],
        help="default: torch torchax-stock torchax; torchax-stock is diffusers' modules on torchax",
    ),
    _backends("--frames", type=int, default=17, help="of the video (default: 17)"),
    _backends("--height", type=int, default=64, help="in pixels (default: 64)"),
    _backends("--width", type=int, default=96, help="in pixels (default: 96)"),
    _backends(
        "--sweep",
        action="append",
        default=[],
        metavar="AXIS",
        help="values to measure: frames=9,17,33 or size=64x96,128x192; repeatable",
    ),
    _backends(
        "--repetitions",
        type=options.positive,
        default=5,
        help="measured runs in each process (default: 5)",
    ),
    _backends("--warmups", type=int, default=2, help="runs before the first that counts (default: 2)"),
    _backends(
        "--rounds",
        type=options.positive,
        default=2,
        help="processes for each backend; with 2 or more, warm starts are measured too (default: 2)",
    ),
)
"""Options of the comparison of backends."""
_device = functools.partial(options.Option, group="bench device")
DEVICE = (
    _device(
        "--jobs",
        nargs="+",
        metavar="JOB",
        default=[*ladder.JOBS],
        help=f"any of {', '.join(ladder.JOBS)}, with spaces between (default: all)",
    ),
    _device("--device", metavar="tpu|cuda|cpu", help="default: what JAX chooses"),
    _device("--dp", type=options.positive, help="mesh: devices that a batch is split over"),
    _device(
        "--tp", type=options.positive, help="mesh: devices that a width is split over (default: one device)"
    ),
    _device(
        "--limit", type=options.positive, metavar="SECONDS", default=1800, help="for one job (default: 1800)"
    ),
)
"""Options of the measurement of a device."""

COMMAND = options.Command(
    "measure backends against each other, or a device",
    "--frames 17 --height 128 --width 192 --sweep frames=9,17,33 -o out/bench",
    (
        options.Option(
            "what",
            nargs="?",
            choices=("backends", "device"),
            default="backends",
            help="backends against each other (default), or the device against plan's estimates",
        ),
        options.Option(
            "--dtype", choices=("float32", "bfloat16"), help="default: float32; on a TPU or GPU, bfloat16"
        ),
        *BACKENDS,
        *DEVICE,
        options.output("write JSON, Markdown and plots there", metavar="DIR"),
        options.Option("--json", action="store_true", help="print the results as JSON"),
        options.Option("--quiet", action="store_true", help="do not say what is being run"),
    ),
)


def check(args: argparse.Namespace) -> None:
    """Raise `ValueError` for an option of `bench device` in `bench backends`, or the other way round.

    A value other than the default shows that an option was given.
    """
    for option in BACKENDS if args.what == "device" else DEVICE:
        (flag,) = option.flags
        if getattr(args, flag.removeprefix("--")) != option.settings.get("default"):
            raise ValueError(f"{flag} does not go with bench {args.what}")


def run(args: argparse.Namespace) -> int:
    """Measure backends or a device; print the report.

    With `--output` the report is written after each result too, so that a stopped run leaves its results.

    Returns:
        The exit code: 1 where a result is wrong or none succeeded, else 0.
    """
    check(args)
    output = None if args.output is None else common.report_directory(args.output)
    path = None if output is None else output / ("device.json" if args.what == "device" else "ab.json")

    def keep(document: dict[str, Any]) -> None:
        """Write the report to `path`, the JSON file in `--output`, if there is one."""
        if path is not None:
            reports.write_json(path, document)

    document = _measured(args, path, keep) if args.what == "device" else _compared(args, keep)
    print(json.dumps(document) if args.json else report.markdown(document))
    if path is not None:
        for written in report.write(document, path):
            common.say(f"wrote {written}")
    # "wrong" is beyond the tolerance; further statuses are "failed" and "does not fit" (into memory).
    statuses = [result["status"] for result in document["results"]]
    return 1 if "wrong" in statuses or "ok" not in statuses else 0


def _compared(args: argparse.Namespace, keep: Callable[[Any], None]) -> dict[str, Any]:
    """Compare backends, and return the report.

    `keep` is called with the unfinished report after each size of video, to write it to a file.
    """
    from cogvideox_torchax.bench import ab

    # The one size of the options, or a size for each value of --sweep.
    sizes = ab.sweep(ladder.Size(args.model, args.frames, args.height, args.width), args.sweep)
    checkpoint.locate_vae(args.model)  # raises before the work, not after it
    settings = ab.Options(
        model=args.model,
        backends=tuple(dict.fromkeys(args.backends)),  # each once, in the given order
        dtype=args.dtype or "float32",
        repetitions=args.repetitions,
        warmups=args.warmups,
        rounds=args.rounds,
    )
    return ab.run(settings, sizes, common.narrator(args), keep)


def _measured(args: argparse.Namespace, path: Path | None, keep: Callable[[Any], None]) -> dict[str, Any]:
    """Measure the devices, and return the report.

    Args:
        args: the command's options.
        path: path of the report's file; the report of an earlier run in that file is resumed. None without
            `--output`.
        keep: called with the unfinished report after each result, to write it to `path`.
    """
    from cogvideox_torchax.bench import device

    settings = device.DeviceOptions(
        small=str(common.DEMO_MODEL),  # the model for the sizes that are called small
        jobs=tuple(dict.fromkeys(args.jobs)),  # each once, in the given order
        platform=args.device,
        dtype=args.dtype,
        dp=args.dp,
        tp=args.tp,
        limit=args.limit,
    )
    earlier_report = reports.load(path, device.FORMAT) if path is not None and path.exists() else None
    return device.run(settings, common.narrator(args), keep, earlier_report)
