"""Results of `bench` as Markdown and as plots, and what they were made with."""

import datetime
import os
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cogvideox_torchax import __version__
from cogvideox_torchax.files.reports import pyplot, save_figure, table, write_json, write_text
from cogvideox_torchax.versions import versions

PACKAGES = ("torch", "torchax", "jax", "jaxlib", "diffusers", "flax", "numpy")
Row = tuple[str, ...]


def about() -> dict[str, Any]:
    """Return the date, the code, the versions and the machine of a run."""
    return {
        "version": __version__,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "versions": {"python": platform.python_version(), **versions(*PACKAGES)},
        "host": {
            "machine": platform.machine(),
            "system": platform.system(),
            "cpus": os.cpu_count(),
            "load": os.getloadavg()[0],
        },
    }


def _commit() -> str | None:
    """Return the git commit of the running code, "+" if it has changed since; None outside a checkout."""
    root = Path(__file__).parents[2]

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")).resolve() != root.resolve():
            return None  # installed into somebody else's repository
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


# Tables


def markdown(report: dict[str, Any]) -> str:
    """Return a table of what was measured, under lines that say of what and with what."""
    device = report.get("device")
    head, rows, described = (DEVICE_HEAD, _device_rows, _device) if device else (HEAD, _row, _comparison)
    host, made = report["host"], ", ".join(f"{name} {each}" for name, each in report["versions"].items())
    lines = [
        f"{described(report)}, {report['date'][:10]}, commit {(report['commit'] or 'unknown')[:12]}, "
        f"{host['cpus']} CPUs ({host['machine']}), load {host['load']:.1f}, {made}."
    ]
    if "not_planned" in report:
        lines.append(f"Not planned: {report['not_planned']}.")
    switched_off = report.get("switched_off", {})
    lines += [f"Kernel of {name} switched off: {why}." for name, why in switched_off.items()]
    cells = [row for result in report["results"] for row in _rows(result, rows, len(head))]
    return "\n\n".join([*lines, table(head, cells)]) + "\n"


def _rows(result: dict[str, Any], rows: Callable[[dict[str, Any]], list[Row]], width: int) -> list[Row]:
    """Return the rows of a result: of one that failed, or that is wrong, the reason without times."""
    size = result["size"]
    about = (
        result["job"],
        result["way"],
        f"{size['model']}, {size['frames']} x {size['height']} x {size['width']}",
    )
    if result["status"] == "ok":
        beyond = "" if result["check"]["passed"] else ", beyond the contract"
        error = f"{result['check']['relative_error']:.1e}{beyond}"
        return [(*about, error, *row) for row in rows(result)]
    found = result.get("reason") or result["check"].get("reason")
    found = found or f"relative error {float(result['check']['relative_error']):.1e}"
    return [(*about, f"{result['status']}: {found}".replace("|", "/"), *[""] * (width - 4))]


def _seconds(value: float | None, unit: float = 1.0) -> str:
    return "" if value is None else f"{value / unit:.3g}"


def _megabytes(value: int | None) -> str:
    return "" if value is None else f"{value / 1e6:.0f}"


HEAD = (
    *("half", "backend", "video", "error", "device", "lower, s", "compile, s", "cold start, s"),
    *("warm start, s", "first chunk, s", "steady, s (min to max)", "frames/s", "GFLOP/s", "of peak"),
    *("host, MB", "device, MB"),
)
STARTS = ("lower_s", "compile_s", "start_cold_s", "start_warm_s", "first_chunk_s")


def _comparison(report: dict[str, Any]) -> str:
    options = report["options"]
    return (
        f"Model {report['model_name']}, {options['dtype']}, median of "
        f"{options['rounds'] * options['repetitions']} runs over {options['rounds']} processes a backend, "
        f"{options['warmups']} warm-ups in each"
    )


def _row(result: dict[str, Any]) -> list[Row]:
    steady, share = result["steady"], result["share_of_peak"]
    median, least, most = (_seconds(steady[name]) for name in ("median_s", "min_s", "max_s"))
    return [
        (
            result["device"],
            *(_seconds(result[name]) for name in STARTS),
            f"{median} ({least} to {most})",
            f"{result['frames_per_s']:.1f}",
            f"{result['flops_per_s'] / 1e9:.1f}",
            "" if share is None else f"{share:.1%}",
            _megabytes(result["host_peak_bytes"]),
            _megabytes(result["device_peak_bytes"]),
        )
    ]


DEVICE_HEAD = (
    *("job", "by", "size", "error", "part", "compile, s", "run, ms", "fastest to slowest", "runs"),
    *("peak, MB", "estimate, ms", "estimate over measured"),
)


def _device(report: dict[str, Any]) -> str:
    device, dp = report["device"], report["mesh"]["dp"] or 1
    over = f", mesh dp={dp} tp={device['used'] // dp}" if device["used"] > 1 else ""
    return f"{device['used']} x {device['kind']}{over}, {report['dtype']}"


def _device_rows(result: dict[str, Any]) -> list[Row]:
    return [
        (
            part["part"],
            _seconds(part["compile_s"]),
            _seconds(part["median_s"], 1e-3),
            f"{_seconds(part['min_s'], 1e-3)} to {_seconds(part['max_s'], 1e-3)}",
            str(part["runs"]),
            _megabytes(part["peak_bytes"]),
            *_estimated(result.get("estimate", {}), part),
        )
        for part in result["parts"]
    ]


def _estimated(estimates: dict[str, Any], part: dict[str, Any]) -> Row:
    seconds = estimates.get(part["part"])
    if seconds is None:
        return (f"not planned: {estimates['reason']}".replace("|", "/") if "reason" in estimates else "", "")
    return _seconds(seconds, 1e-3), f"{seconds / part['median_s']:.2f}"


# Plots


def draw_device(report: dict[str, Any], path: Path) -> list[Path]:
    """Draw estimates over measurements, where there are any."""
    points = [
        (f"{result['job']} {part['part']}", part["median_s"], result["estimate"][part["part"]])
        for result in report["results"]
        for part in result.get("parts", [])
        if result.get("estimate", {}).get(part["part"])
    ]
    if not points:
        return []
    figure, axes = pyplot().subplots(figsize=(7, 6), layout="constrained")
    axes.loglog([x for _, x, _ in points], [y for _, _, y in points], "o")
    axes.axline((1, 1), (2, 2), color="0.6")
    for name, x, y in points:
        axes.annotate(name, (x, y), fontsize=7, xytext=(4, 2), textcoords="offset points")
    axes.set(xlabel="measured, s", ylabel="estimated, s", title=report["device"]["kind"])
    save_figure(figure, path)
    return [path]


def draw(report: dict[str, Any], path: Path) -> list[Path]:
    """Draw bars of time and memory, and time over frames and over size if several were measured."""
    good = [result for result in report["results"] if result["status"] == "ok"]
    paths = [_draw_bars(good, path.with_name(f"{path.stem}-bars.png"))] if good else []
    for axis, fields in (("frames", ("height", "width")), ("size", ("frames",))):
        lines: dict[str, list[tuple[int, float]]] = {}
        for result in good:
            size = result["size"]
            if all(size[field] == good[0]["size"][field] for field in fields):
                x = size["frames"] if axis == "frames" else size["height"] * size["width"]
                name = f"{result['job']}, {result['way']}"
                lines.setdefault(name, []).append((x, result["steady"]["median_s"]))
        if max(map(len, lines.values()), default=0) > 1:
            paths.append(_draw_lines(lines, axis, path.with_name(f"{path.stem}-{axis}.png")))
    return paths


def _draw_bars(good: list[dict[str, Any]], path: Path) -> Path:
    results = [result for result in good if result["size"] == good[0]["size"]]
    names = [f"{result['job']}, {result['way']}" for result in results]
    shown = {
        "steady run, s (median, min to max)": [result["steady"]["median_s"] for result in results],
        "first run, empty compile cache, s": [result["start_cold_s"] for result in results],
        "first run, filled compile cache, s": [result["start_warm_s"] or 0 for result in results],
        "peak memory (device's, else host's), MB": [
            (result["device_peak_bytes"] or result["host_peak_bytes"] or 0) / 1e6 for result in results
        ],
    }
    figure, places = pyplot().subplots(1, len(shown), figsize=(20, 5), layout="constrained", sharey=True)
    for place, (title, values) in zip(places, shown.items(), strict=True):
        place.bar_label(place.barh(names, values), fmt="%.3g", padding=2)
        place.set(title=title)
    ends = [[result["steady"][name] for result in results] for name in ("min_s", "max_s")]
    places[0].hlines(names, *ends, color="0.2")
    save_figure(figure, path)
    return path


def _draw_lines(lines: dict[str, list[tuple[int, float]]], axis: str, path: Path) -> Path:
    figure, place = pyplot().subplots(figsize=(8, 5), layout="constrained")
    for name, line in lines.items():
        place.plot(*zip(*sorted(line), strict=True), marker="o", label=name)
    label = "frames" if axis == "frames" else "pixels a frame"
    place.set(title="steady run, median", xlabel=label, ylabel="s", ylim=(0, None))
    place.legend()
    save_figure(figure, path)
    return path


def write(report: dict[str, Any], path: Path) -> list[Path]:
    """Write JSON, Markdown and plots of a run; return what was written."""
    plots = draw_device(report, path.with_suffix(".png")) if "device" in report else draw(report, path)
    text = markdown(report)
    return [write_json(path, report), write_text(path.with_suffix(".md"), text), *plots]
