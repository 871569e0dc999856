"""Results of `bench` as Markdown and as plots."""

from pathlib import Path
from typing import Any

from cogvideox_torchax.files.reports import pyplot, save_figure, table, write_json, write_text
from cogvideox_torchax.vae.directions import Direction

HEAD = (
    "backend",
    "device",
    "error",
    "lower, s",
    "compile, s",
    "cold start, s",
    "warm start, s",
    "first frame, s",
    "steady, s (min to max)",
    "frames/s",
    "GFLOP/s",
    "of peak",
    "host, MB",
    "device, MB",
)


def markdown(report: dict[str, Any]) -> str:
    """Return a table for each case and half, under a line with the numbers' origin."""
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    options = report["options"]
    runs = options["rounds"] * options["repetitions"]
    commit = (report["commit"] or "unknown")[:12]
    parts = [
        f"Model {report['model_name']}, {options['dtype']}, {report['date'][:10]}, commit {commit}, "
        f"{report['host']['cpus']} CPUs ({report['host']['machine']}), {versions}. Median of {runs} runs "
        f"over {options['rounds']} processes a backend, {options['warmups']} warm-ups in each."
    ]
    for case in report["cases"]:
        for kind in Direction:
            parts.append(f"**{kind}, {case['frames']} frames of {case['height']} x {case['width']}**")
            rows = [_row(result, kind) for result in case["results"]]
            parts.append(table(HEAD, rows) if rows else f"No reference: {case['reference']['reason']}")
    return "\n\n".join(parts) + "\n"


def _row(result: dict[str, Any], kind: str) -> tuple[str, ...]:
    if result["status"] != "ok":
        return (result["backend"], "", _why(result, kind), *[""] * (len(HEAD) - 3))
    half = result[kind]
    steady = half["steady"]
    seconds = [
        half[key] for key in ("lower_s", "compile_cold_s", "start_cold_s", "start_warm_s", "first_frame_s")
    ]
    share = half["share_of_peak"]
    return (
        result["backend"],
        result["device"],
        f"{half['check']['relative_error']:.1e}",
        *map(_seconds, seconds),
        f"{_seconds(steady['median_s'])} ({_seconds(steady['min_s'])} to {_seconds(steady['max_s'])})",
        f"{half['frames_per_s']:.1f}",
        f"{half['flops_per_s'] / 1e9:.1f}",
        "" if share is None else f"{share:.1%}",
        _megabytes(result["host_peak_bytes"]),
        _megabytes(result["device_peak_bytes"]),
    )


def _why(result: dict[str, Any], kind: str) -> str:
    if result["status"] != "wrong":
        return f"{result['status']}: {result['reason']}".replace("|", "/")
    verdict = result[kind]["check"]
    if verdict["passed"]:
        return "no time: the other half is wrong"
    found = verdict.get("reason") or f"relative error {float(verdict['relative_error']):.1e}"
    return f"wrong ({found})"


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _megabytes(value: int | None) -> str:
    return "" if value is None else f"{value / 1e6:.0f}"


# Devices

DEVICE_HEAD = (
    *("job", "by", "part", "size", "error", "compile, s", "run, ms", "fastest to slowest", "runs"),
    *("peak, MB", "estimate, ms", "estimate over measured"),
)


def device_markdown(report: dict[str, Any]) -> str:
    """Return a table of estimates and measurements, under lines that say of what."""
    device, mesh = report["device"], report["mesh"]
    dp, host = mesh["dp"] or 1, report["host"]
    over = f", mesh dp={dp} tp={device['used'] // dp}" if device["used"] > 1 else ""
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    lines = [
        f"{device['used']} x {device['kind']}{over}, {report['dtype']}, {report['date'][:10]}, commit "
        f"{(report['commit'] or 'unknown')[:12]}, {host['cpus']} CPUs ({host['machine']}), "
        f"load {host['load']:.1f}, "
        f"{versions}."
    ]
    if "not_planned" in report:
        lines.append(f"Not planned: {report['not_planned']}.")
    lines += [f"Kernel of {name} switched off: {why}." for name, why in report["switched_off"].items()]
    rows = [row for result in report["results"] for row in _device_rows(result)]
    return "\n\n".join([*lines, table(DEVICE_HEAD, rows)]) + "\n"


def _device_rows(result: dict[str, Any]) -> list[tuple[str, ...]]:
    size = result["size"]
    about = result["job"], result["way"]
    video = f"{size['model']}, {size['frames']} x {size['height']} x {size['width']}"
    if result["status"] != "ok":
        found = result.get("reason") or f"relative error {float(result['check']['relative_error']):.1e}"
        why = f"{result['status']}: {found}".replace("|", "/")
        return [(*about, "", video, why, *[""] * (len(DEVICE_HEAD) - 5))]
    error = f"{result['check']['relative_error']:.1e}"
    estimates = result.get("estimate", {})
    return [
        (
            *about,
            part["part"],
            video,
            error,
            _seconds(part["compile_s"]),
            _seconds(1e3 * part["median_s"]),
            f"{_seconds(1e3 * part['min_s'])} to {_seconds(1e3 * part['max_s'])}",
            str(part["runs"]),
            _megabytes(part["peak_bytes"]),
            *_estimated(estimates, part),
        )
        for part in result["parts"]
    ]


def _estimated(estimates: dict[str, Any], part: dict[str, Any]) -> tuple[str, str]:
    seconds = estimates.get(part["part"])
    if seconds is None:
        return (f"not planned: {estimates['reason']}".replace("|", "/") if "reason" in estimates else "", "")
    return _seconds(1e3 * seconds), f"{seconds / part['median_s']:.2f}"


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
    _, measured, estimated = zip(*points, strict=True)
    figure, axes = pyplot().subplots(figsize=(7, 6), layout="constrained")
    axes.loglog(measured, estimated, "o")
    axes.axline((1, 1), (2, 2), color="0.6")
    for name, x, y in points:
        axes.annotate(name, (x, y), fontsize=7, xytext=(4, 2), textcoords="offset points")
    axes.set(xlabel="measured, s", ylabel="estimated, s", title=report["device"]["kind"])
    save_figure(figure, path)
    return [path]


def write_device(report: dict[str, Any], directory: Path) -> list[Path]:
    """Write JSON, Markdown and plot of a device; return what was written."""
    return [
        write_json(directory / "device.json", report),
        write_text(directory / "device.md", device_markdown(report)),
        *draw_device(report, directory / "device.png"),
    ]


# Plots


def draw(report: dict[str, Any], directory: Path, stem: str) -> list[Path]:
    """Draw bars of time and memory, and time over frames and over size if several were measured."""
    good = [
        (case, result) for case in report["cases"] for result in case["results"] if result["status"] == "ok"
    ]
    if not good:
        return []
    paths = [_draw_bars(good, directory / f"{stem}-bars.png")]
    for axis, label in (("frames", "frames"), ("size", "pixels a frame")):
        points = _points(report["cases"], good, axis)
        if points:
            paths.append(_draw_lines(points, label, directory / f"{stem}-{axis}.png"))
    return paths


def _draw_bars(good: list[tuple[Any, Any]], path: Path) -> Path:
    plt = pyplot()
    case = good[0][0]
    results = [result for other, result in good if other is case]
    names = [result["backend"] for result in results]
    figure, axes = plt.subplots(1, 4, figsize=(14, 4), layout="constrained")
    for place, kind in zip(axes[:2], Direction, strict=True):
        steady = [result[kind]["steady"] for result in results]
        medians = [run["median_s"] for run in steady]
        spread = [
            [median - run["min_s"] for median, run in zip(medians, steady, strict=True)],
            [run["max_s"] - median for median, run in zip(medians, steady, strict=True)],
        ]
        bars = place.bar(names, medians, yerr=spread, capsize=4, color=_colors(names))
        place.bar_label(bars, fmt="%.3g", padding=2)
        place.set(title=f"{kind}, steady run, s\n(median, min to max)")
    cold = [sum(result[kind]["start_cold_s"] for kind in Direction) for result in results]
    warm = [sum(result[kind]["start_warm_s"] or 0 for kind in Direction) for result in results]
    places = range(len(names))
    axes[2].bar([p - 0.2 for p in places], cold, 0.4, label="empty compile cache", color="0.45")
    if any(warm):  # one round has no second start
        axes[2].bar([p + 0.2 for p in places], warm, 0.4, label="filled compile cache", color="0.75")
    axes[2].set(title="first encode and decode\nof a process, s")
    axes[2].set_xticks(list(places), names)
    axes[2].legend(fontsize=8)
    memory = [(result["device_peak_bytes"] or result["host_peak_bytes"] or 0) / 1e6 for result in results]
    bars = axes[3].bar(names, memory, color=_colors(names))
    axes[3].bar_label(bars, fmt="%.0f", padding=2)
    where = "device" if any(result["device_peak_bytes"] for result in results) else "host"
    axes[3].set(title=f"peak memory\n({where}), MB")
    for place in axes:
        place.tick_params(axis="x", rotation=30)
        place.margins(y=0.12)
    figure.suptitle(f"{case['frames']} frames of {case['height']} x {case['width']}")
    save_figure(figure, path)
    return path


def _colors(names: list[str]) -> list[str]:
    return [f"C{index}" for index in range(len(names))]


def _points(cases: list[Any], good: list[tuple[Any, Any]], axis: str) -> dict[str, dict[str, list[Any]]]:
    """Return (x, median) for each half and backend, of the cases that vary along one axis only."""
    base = cases[0]
    same = ("height", "width") if axis == "frames" else ("frames",)
    chosen = [(case, result) for case, result in good if all(case[key] == base[key] for key in same)]
    xs = {_position(case, axis) for case, _ in chosen}
    if len(xs) < 2:
        return {}
    points: dict[str, dict[str, list[Any]]] = {kind: {} for kind in Direction}
    for case, result in chosen:
        for kind in Direction:
            line = points[kind].setdefault(result["backend"], [])
            line.append((_position(case, axis), result[kind]["steady"]["median_s"]))
    return points


def _position(case: Any, axis: str) -> int:
    return case["frames"] if axis == "frames" else case["height"] * case["width"]


def _draw_lines(points: dict[str, dict[str, list[Any]]], label: str, path: Path) -> Path:
    plt = pyplot()
    figure, axes = plt.subplots(1, len(points), figsize=(11, 4), layout="constrained")
    for place, (kind, lines) in zip(axes, points.items(), strict=True):
        for backend, line in lines.items():
            xs, ys = zip(*sorted(line), strict=True)
            place.plot(xs, ys, marker="o", label=backend)
        place.set(title=f"{kind}: steady run, median", xlabel=label, ylabel="s", ylim=(0, None))
        place.legend()
        place.grid(alpha=0.3)
    save_figure(figure, path)
    return path


def write(report: dict[str, Any], directory: Path, stem: str) -> list[Path]:
    """JSON, Markdown and plots of one run; returns what was written."""
    return [
        write_json(directory / f"{stem}.json", report),
        write_text(directory / f"{stem}.md", markdown(report)),
        *draw(report, directory, stem),
    ]
