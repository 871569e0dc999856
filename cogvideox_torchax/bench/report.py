"""Results of `bench` as Markdown and as plots, and the versions and the machine of a run."""

import datetime
import os
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cogvideox_torchax import __version__
from cogvideox_torchax.bench.ladder import Size
from cogvideox_torchax.files.reports import pyplot, save_figure, table, write_json, write_text
from cogvideox_torchax.versions import versions

PACKAGES = ("torch", "torchax", "jax", "jaxlib", "diffusers", "flax", "numpy")
Row = tuple[str, ...]
"""The cells of a table's row."""


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
    """Return the git commit of the running code, with "+" if files have changed.

    Return None if the code is not in a git checkout.
    """
    root = Path(__file__).parents[2]
    # The paths are given so that git does not search the directories above: an installed package may be
    # inside another project's checkout.
    git = ["git", f"--git-dir={root / '.git'}", f"--work-tree={root}"]
    # All tags are excluded, so that `describe` always gives the hash.
    describe = [*git, "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty=+"]
    try:
        return subprocess.run(describe, capture_output=True, text=True).stdout.strip() or None
    except OSError:  # there is no git
        return None


# Tables


def markdown(report: dict[str, Any]) -> str:
    """Return a report as Markdown: a line about the device, the host and the versions, then a table.

    The report is of `device.run`, which has a field "device", or of `ab.run`.
    """
    if "device" in report:
        head, rows_of, description = DEVICE_HEAD, _device_rows, _device(report)
    else:
        head, rows_of, description = HEAD, _backend_rows, _comparison(report)
    host = report["host"]
    commit, changed, _ = (report["commit"] or "unknown").partition("+")  # "+": files had changed
    packages = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    lines = [
        f"{description}, {report['date'][:10]}, commit {commit[:12]}{changed}, "
        f"{host['cpus']} CPUs ({host['machine']}), load {host['load']:.1f}, {packages}."
    ]
    if "not_planned" in report:
        lines.append(f"Not planned: {report['not_planned']}.")
    lines += [f"Kernel of {op} switched off: {why}." for op, why in report.get("switched_off", {}).items()]
    # `rows_of` returns the rows of a timed result; `_job_rows` also makes those of failed results.
    rows = [row for result in report["results"] for row in _job_rows(result, rows_of, len(head))]
    return "\n\n".join([*lines, table(head, rows)]) + "\n"


def _job_rows(
    result: dict[str, Any], timed_rows: Callable[[dict[str, Any]], list[Row]], width: int
) -> list[Row]:
    """Return the table's rows for one job, run in one way (by a backend, or by this project without kernels).

    Args:
        result: the job's result. Status "ok" means that it was timed; a peer (a backend with diffusers' own
            modules) is timed even if its error is beyond the contract (the allowed error). Any other result
            has a single row, with the reason and no times.
        timed_rows: returns the rows of a timed result, without the first four cells: job, way, size, error.
        width: number of columns of the table.
    """
    labels = (result["job"], result["way"], Size(**result["size"]).name)
    if result["status"] == "ok":
        beyond = "" if result["check"]["passed"] else ", beyond the contract"
        error = f"{result['check']['relative_error']:.1e}{beyond}"
        return [(*labels, error, *row) for row in timed_rows(result)]
    reason = (
        result.get("reason")
        or result["check"].get("reason")
        or f"relative error {float(result['check']['relative_error']):.1e}"
    )
    # "|" would end the cell.
    return [(*labels, f"{result['status']}: {reason}".replace("|", "/"), *[""] * (width - 4))]


def _cell(value: float | None, unit: float = 1.0, format_spec: str = ".3g") -> str:
    """Return a value as text in a unit, such as seconds in ms for a unit of 1e-3; empty for None."""
    return "" if value is None else format(value / unit, format_spec)


def _megabytes(value: int | None) -> str:
    """Return a number of bytes as text in MB; empty for None."""
    return _cell(value, 1e6, ".0f")


HEAD = (
    *("direction", "backend", "video", "error", "device", "lower, s", "compile, s", "cold start, s"),
    *("warm start, s", "first chunk, s", "steady, s (min to max)", "frames/s", "GFLOP/s", "of peak"),
    *("host, MB", "device, MB"),
)


def _comparison(report: dict[str, Any]) -> str:
    """Return a phrase on how backends were compared: model, dtype, and numbers of runs."""
    options = report["options"]
    return (
        f"Model {report['model_name']}, {options['dtype']}, median of "
        f"{options['rounds'] * options['repetitions']} runs over {options['rounds']} processes a backend, "
        f"{options['warmups']} warm-ups in each"
    )


def _backend_rows(result: dict[str, Any]) -> list[Row]:
    """Return a list of one row, a backend's result: the cells from the column "device" of `HEAD` on."""
    times = ("lower_s", "compile_s", "start_cold_s", "start_warm_s", "first_chunk_s")
    median, least, most = (_cell(result["steady"][name]) for name in ("median_s", "min_s", "max_s"))
    return [
        (
            result["device"],
            *(_cell(result[name]) for name in times),
            f"{median} ({least} to {most})",
            f"{result['frames_per_s']:.1f}",
            f"{result['flops_per_s'] / 1e9:.1f}",
            _cell(result["share_of_peak"], format_spec=".1%"),
            _megabytes(result["host_peak_bytes"]),
            _megabytes(result["device_peak_bytes"]),
        )
    ]


DEVICE_HEAD = (
    *("job", "by", "size", "error", "part", "compile, s", "run, ms", "fastest to slowest", "runs"),
    *("peak, MB", "estimate, ms", "estimate over measured"),
)


def _device(report: dict[str, Any]) -> str:
    """Return a phrase on the devices that were measured: their number, kind, mesh and dtype."""
    device, dp = report["device"], report["mesh"]["dp"] or 1
    mesh = f", mesh dp={dp} tp={device['used'] // dp}" if device["used"] > 1 else ""
    return f"{device['used']} x {device['kind']}{mesh}, {report['dtype']}"


def _device_rows(result: dict[str, Any]) -> list[Row]:
    """Return a row for each part of a job's result: the cells below `DEVICE_HEAD` from "part" on."""
    return [  # a unit of 1e-3 writes seconds in ms
        (
            part["part"],
            _cell(part["compile_s"]),
            _cell(part["median_s"], unit=1e-3),
            f"{_cell(part['min_s'], unit=1e-3)} to {_cell(part['max_s'], unit=1e-3)}",
            str(part["runs"]),
            _megabytes(part["peak_bytes"]),
            *_estimate_cells(result.get("estimate", {}), part),
        )
        for part in result["parts"]
    ]


def _estimate_cells(estimates: dict[str, Any], part: dict[str, Any]) -> Row:
    """Return two cells: a part's estimate in ms, and the ratio of the estimate to the measured time.

    Without an estimate the first cell has the reason, if there is one, and the second cell is empty.

    Args:
        estimates: seconds by the names of parts. If nothing was estimated, it is empty or has a "reason".
        part: the part's name and its measured times.
    """
    seconds = estimates.get(part["part"])
    if seconds is None:
        reason = f"not planned: {estimates['reason']}" if "reason" in estimates else ""
        return reason.replace("|", "/"), ""  # "|" would end the cell
    return _cell(seconds, unit=1e-3), f"{seconds / part['median_s']:.2f}"


# Plots


def draw_device(report: dict[str, Any], path: Path) -> list[Path]:
    """Plot the estimate of each part of a job, such as a chunk, against its measured time.

    Return the files: `path`, or none if no part has an estimate.
    """
    points = [  # (name, measured seconds, estimated seconds)
        (f"{result['job']} {part['part']}", part["median_s"], result["estimate"][part["part"]])
        for result in report["results"]
        for part in result.get("parts", [])
        if result.get("estimate", {}).get(part["part"])
    ]
    if not points:
        return []
    figure, axes = pyplot().subplots(figsize=(7, 6), layout="constrained")
    _names, measured, estimated = zip(*points, strict=True)
    axes.loglog(measured, estimated, "o")
    axes.axline((1, 1), (2, 2), color="0.6")  # where the estimate equals the measured time
    for name, x, y in points:
        axes.annotate(name, (x, y), fontsize=7, xytext=(4, 2), textcoords="offset points")
    axes.set(xlabel="measured, s", ylabel="estimated, s", title=report["device"]["kind"])
    save_figure(figure, path)
    return [path]


def draw(report: dict[str, Any], path: Path) -> list[Path]:
    """Draw the results that succeeded; return the files.

    One picture has bars of time and memory. If several numbers of frames were measured, another has time
    against the number of frames, for results of the first result's height and width. If several sizes were
    measured, another has time against the size, for results of the first result's number of frames.
    """
    succeeded = [result for result in report["results"] if result["status"] == "ok"]
    paths = [_draw_bars(succeeded, path.with_name(f"{path.stem}-bars.png"))] if succeeded else []
    for axis, fixed_fields in (("frames", ("height", "width")), ("size", ("frames",))):
        # By job and way (what is measured, and the backend that runs it): (frames or pixels, seconds).
        lines: dict[str, list[tuple[int, float]]] = {}
        for result in succeeded:
            size = result["size"]
            if all(size[field] == succeeded[0]["size"][field] for field in fixed_fields):
                x = size["frames"] if axis == "frames" else size["height"] * size["width"]
                name = f"{result['job']}, {result['way']}"
                lines.setdefault(name, []).append((x, result["steady"]["median_s"]))
        if max(map(len, lines.values()), default=0) > 1:  # a line of one point shows nothing
            paths.append(_draw_lines(lines, axis, path.with_name(f"{path.stem}-{axis}.png")))
    return paths


def _draw_bars(succeeded: list[dict[str, Any]], path: Path) -> Path:
    """Draw bars of the times and the memory, for results of the same size as the first; return the file."""
    results = [result for result in succeeded if result["size"] == succeeded[0]["size"]]
    names = [f"{result['job']}, {result['way']}" for result in results]
    shown = {
        "steady run, s (median, min to max)": [result["steady"]["median_s"] for result in results],
        "first run, empty compile cache, s": [result["start_cold_s"] for result in results],
        "first run, filled compile cache, s": [result["start_warm_s"] or 0 for result in results],
        "peak memory (device's, else host's), MB": [
            (result["device_peak_bytes"] or result["host_peak_bytes"] or 0) / 1e6 for result in results
        ],
    }
    figure, panels = pyplot().subplots(1, len(shown), figsize=(20, 5), layout="constrained", sharey=True)
    for panel, (title, values) in zip(panels, shown.items(), strict=True):
        panel.bar_label(panel.barh(names, values), fmt="%.3g", padding=2)
        panel.set(title=title)
    fastest, slowest = ([result["steady"][name] for result in results] for name in ("min_s", "max_s"))
    steady_panel, *_ = panels
    steady_panel.hlines(names, fastest, slowest, color="0.2")
    save_figure(figure, path)
    return path


def _draw_lines(lines: dict[str, list[tuple[int, float]]], axis: str, path: Path) -> Path:
    """Draw the measured seconds over the frames or pixels of a video; return the picture's path.

    Args:
        lines: by the line's label, its points: (frames or pixels, seconds).
        axis: "frames" if the points have frames, "size" if they have pixels.
        path: of the picture.
    """
    figure, panel = pyplot().subplots(figsize=(8, 5), layout="constrained")
    for name, points in lines.items():
        x, seconds = zip(*sorted(points), strict=True)
        panel.plot(x, seconds, marker="o", label=name)
    panel.xaxis.get_major_locator().set_params(integer=True)
    panel.set(
        title="steady run, median",
        xlabel="frames" if axis == "frames" else "pixels a frame",
        ylabel="s",
        ylim=(0, None),
    )
    panel.legend()
    save_figure(figure, path)
    return path


def write(report: dict[str, Any], path: Path) -> list[Path]:
    """Write a report to `path` as JSON, and beside it as Markdown and plots; return the files."""
    plots = draw_device(report, path.with_suffix(".png")) if "device" in report else draw(report, path)
    text = markdown(report)
    return [write_json(path, report), write_text(path.with_suffix(".md"), text), *plots]
