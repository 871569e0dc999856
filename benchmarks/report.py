"""The report of a run as Markdown, and the versions and the machine of a run."""

import datetime
import os
import platform
import statistics
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.jobs import Size
from cogvideox_torchax import __version__
from cogvideox_torchax.files.reports import table, write_json, write_text
from cogvideox_torchax.versions import versions

PACKAGES = ("torch", "torchax", "jax", "jaxlib", "diffusers", "flax", "numpy")


def about() -> dict[str, Any]:
    """Return a report's fields about a run: its date, commit, versions and machine."""
    return {
        "version": __version__,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "versions": {"python": platform.python_version(), **versions(*PACKAGES)},
        "host": {
            "machine": platform.machine(),
            "system": platform.system(),
            "cpus": os.cpu_count(),
            "load": os.getloadavg()[0],  # of the last minute
        },
    }


def _commit() -> str | None:
    """Return the git commit of the running code, with "+" for changed files; None outside a checkout."""
    root = Path(__file__).parents[1]
    # The paths are given so that git does not search the directories above.
    git = ["git", f"--git-dir={root / '.git'}", f"--work-tree={root}"]
    # All tags are excluded, so that `describe` always gives the hash.
    describe = [*git, "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty=+"]
    try:
        return subprocess.run(describe, capture_output=True, text=True).stdout.strip() or None
    except OSError:  # there is no git
        return None


def host_peak_bytes() -> int | None:
    """Return this process's peak memory in bytes, not counting its parent's; None off Linux."""
    status = Path("/proc/self/status")
    if not status.is_file():
        return None
    # Such as "VmHWM:   12345 kB". `getrusage` is of no use here: a child's peak starts from its parent's.
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


# Tables


HEAD = (
    *("job", "by", "size", "error", "part", "compile, s", "cold start, s", "warm start, s", "run, ms"),
    *("fastest to slowest", "runs", "GFLOP/s", "host, MB", "device, MB", "estimate, ms"),
    "estimate over measured",
)


def markdown(report: dict[str, Any]) -> str:
    """Return a report of `runs.run` as Markdown: its circumstances, a table, and the ratio torchax/flax.

    A column without entries is left out.
    """
    host, device, dp = report["host"], report["device"], report["mesh"]["dp"] or 1
    mesh = f", mesh dp={dp} tp={device['used'] // dp}" if device["used"] > 1 else ""
    commit, changed, _ = (report["commit"] or "unknown").partition("+")  # "+": files had changed
    packages = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    lines = [
        f"{device['used']} x {device['kind']}{mesh}, {report['dtype']}, {report['date'][:10]}, "
        f"commit {commit[:12]}{changed}, {host['cpus']} CPUs ({host['machine']}), load {host['load']:.1f}, "
        f"{packages}."
    ]
    if "not_estimated" in report:
        lines.append(f"Not estimated: {report['not_estimated']}.")
    lines += [f"Kernel of {op} switched off: {why}." for op, why in report.get("switched_off", {}).items()]
    rows = [row for result in report["results"] for row in _rows(result)]
    used = [i for i in range(len(HEAD)) if any(row[i] for row in rows)]
    lines.append(table([HEAD[i] for i in used], [[row[i] for i in used] for row in rows]))
    ratios = [
        f"{name}: torchax/flax {port / flax:.2f} ({1e3 * port:.3g} ms / {1e3 * flax:.3g} ms)"
        for name, port, flax in beside(report, "flax")
    ]
    return "\n\n".join([*lines, *(["\n".join(f"- {ratio}" for ratio in ratios)] if ratios else [])]) + "\n"


def beside(report: dict[str, Any], peer: str) -> Iterator[tuple[str, float, float]]:
    """Yield (job and size, seconds of the port, seconds of the peer) of what both ran at one size, right."""
    seconds: dict[str, dict[str, float]] = {"torchax": {}, peer: {}}  # by way, then by job and size
    for result in report["results"]:
        if result["way"] in seconds and result["status"] == "ok" and result["check"]["passed"]:
            name = f"{result['job']} of {Size(**result['size']).name}"
            seconds[result["way"]][name] = result["whole"]["median_s"]
    for name, port in seconds["torchax"].items():
        if name in seconds[peer]:
            yield name, port, seconds[peer][name]


def _rows(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the rows of a result below `HEAD`: of the whole run if it has several parts, and of each part.

    Only a result with the status "ok" has times: a peer (a backend with diffusers' own modules) even if its
    error is beyond the contract (the allowed error). Any other has a single row, with the reason.
    """
    labels = (result["job"], result["way"], Size(**result["size"]).name)
    check = result.get("check", {})
    if result["status"] != "ok":
        reason = result.get("reason") or check.get("reason")
        reason = reason or f"relative error {float(check['relative_error']):.1e}"
        # "|" would end the cell.
        return [(*labels, f"{result['status']}: {reason}".replace("|", "/"), *[""] * (len(HEAD) - 4))]
    error = f"{check['relative_error']:.1e}" + ("" if check["passed"] else ", beyond the contract")
    parts, whole = result["parts"], {"part": "whole", **result["whole"], "peak_bytes": None}
    of_whole = (
        f"{result['flops'] / whole['median_s'] / 1e9:.3g}" if result.get("flops") else "",
        _cell(result["host_peak_bytes"], 1e6, ".0f"),
    )
    shown = [*([whole] if len(parts) > 1 else []), *parts]
    return [
        (
            *(*labels, error, part["part"]),
            *(_cell(part["compile_s"]), _cell(part["start_s"])),
            _cell(statistics.median(part["warm_starts_s"]) if "warm_starts_s" in part else None),
            _cell(part["median_s"], 1e-3),
            f"{_cell(part['min_s'], 1e-3)} to {_cell(part['max_s'], 1e-3)}",
            str(part["runs"]),
            *(of_whole if part is shown[0] else [""] * len(of_whole)),
            _cell(part["peak_bytes"], 1e6, ".0f"),
            *_estimate_cells(result.get("estimate", {}), part),
        )
        for part in shown
    ]


def _cell(value: float | None, unit: float = 1.0, format_spec: str = ".3g") -> str:
    """Return a value as text in a unit, such as seconds in ms for a unit of 1e-3; empty for None."""
    return "" if value is None else format(value / unit, format_spec)


def _estimate_cells(estimates: dict[str, Any], part: dict[str, Any]) -> tuple[str, str]:
    """Return two cells: a part's estimate in ms, and the ratio of the estimate to the measured time.

    Without an estimate the first cell has the reason, which `estimates` may have instead of seconds by part.
    """
    seconds = estimates.get(part["part"])
    if seconds is None:
        reason = f"not estimated: {estimates['reason']}" if "reason" in estimates else ""
        return reason.replace("|", "/"), ""  # "|" would end the cell
    return _cell(seconds, 1e-3), f"{seconds / part['median_s']:.2f}"


def write(report: dict[str, Any], path: Path) -> list[Path]:
    """Write a report to `path` as JSON, and beside it as Markdown; return the files."""
    return [write_json(path, report), write_text(path.with_suffix(".md"), markdown(report))]
