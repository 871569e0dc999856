"""`bench device`: the devices that JAX has, measured, beside what `plan` estimates."""

import argparse
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cogvideox_torchax.bench import ladder
from cogvideox_torchax.cli import common
from cogvideox_torchax.cli.arguments import Option, positive
from cogvideox_torchax.files import reports

_device = functools.partial(Option, group="bench device")
OPTIONS = (
    _device("--jobs", nargs="+", metavar="JOB", default=[*ladder.JOBS], help=" ".join(ladder.JOBS)),
    _device("--device", metavar="tpu|cuda|cpu", help="default: what JAX chooses"),
    _device("--dp", type=positive, help="mesh: devices that a batch is split over"),
    _device("--tp", type=positive, help="mesh: devices that a width is split over (default: one device)"),
    _device("--limit", type=float, metavar="SECONDS", default=1800.0, help="for one job (default: 1800)"),
)


def measured(args: argparse.Namespace, kept: Path | None, keep: Callable[[Any], None]) -> dict[str, Any]:
    """Measure the devices; return the report.

    Args:
        args: the command's options.
        kept: the report's file; one that exists is resumed. None where none is asked for.
        keep: gets the report after each result.
    """
    from cogvideox_torchax.bench import device

    options = device.DeviceOptions(
        small=str(common.DEMO_MODEL),
        jobs=tuple(dict.fromkeys(args.jobs)),
        platform=args.device,
        dtype=args.dtype,
        dp=args.dp,
        tp=args.tp,
        limit=args.limit,
    )
    before = reports.load(kept, device.FORMAT) if kept is not None and kept.exists() else None
    return device.run(options, common.narrator(args), keep, before)
