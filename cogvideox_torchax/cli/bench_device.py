"""`bench device`: the devices that JAX has, measured, beside what `plan` estimates."""

import argparse
import functools
import json
from typing import Any

from cogvideox_torchax.bench import ladder, report
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


def run(args: argparse.Namespace) -> int:
    """Run `bench device`."""
    from cogvideox_torchax.bench import device

    output = None if args.output is None else common.report_directory(args.output)
    kept = None if output is None else output / "device.json"
    options = device.DeviceOptions(
        small=str(common.DEMO_MODEL),
        jobs=tuple(dict.fromkeys(args.jobs)),
        platform=args.device,
        dtype=args.dtype,
        dp=args.dp,
        tp=args.tp,
        limit=args.limit,
    )

    def keep(found: dict[str, Any]) -> None:
        if kept is not None:
            reports.write_json(kept, found)

    before = reports.load(kept, device.FORMAT) if kept is not None and kept.exists() else None
    found = device.run(options, common.say if not args.quiet else lambda line: None, keep, before)
    print(json.dumps(found) if args.json else report.device_markdown(found))
    if output is not None:
        for path in report.write_device(found, output):
            common.say(f"wrote {path}")
    statuses = [result["status"] for result in found["results"]]
    return 1 if "wrong" in statuses or "ok" not in statuses else 0
