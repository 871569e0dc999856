"""Redraws the tables and plots of docs/ from benchmarks/results/."""

import contextlib
import io
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.pages import fill
from cogvideox_torchax.bench import ab, device
from cogvideox_torchax.bench.report import device_markdown, draw, draw_device
from cogvideox_torchax.cli.common import print_report
from cogvideox_torchax.files.reports import load, parse, table
from cogvideox_torchax.plan import jobs
from cogvideox_torchax.vae.directions import Direction

ROOT = Path(__file__).parents[1]

MEASURED_HEAD = (
    "backend",
    "error",
    "cold start, s",
    "warm start, s",
    "steady encode, s",
    "steady decode, s",
)
PLANS_HEAD = (
    "video",
    "chips",
    "build",
    "first chunk, ms",
    "steady chunk, ms",
    "whole video, s",
    "peak, GB",
)
COMPILED = "decode 49 x 480 x 720", "encode 49 x 480 x 720", "decode 49 x 768 x 1360"
"""The jobs of `compile_times`."""


def measured(report: dict[str, Any]) -> str:
    """Return the table of a comparison: a row for each backend of the first video, under its origin."""
    rows, case = [], report["cases"][0]
    for result in case["results"]:
        if result["status"] == "ok":
            halves = [result[kind] for kind in Direction]
            error = max(half["check"]["relative_error"] for half in halves)
            starts = [_total(half[name] for half in halves) for name in ("start_cold_s", "start_warm_s")]
            seconds = *starts, *(half["steady"]["median_s"] for half in halves)
            rows.append((result["backend"], f"{error:.1e}", *map(_seconds, seconds)))
    video = f"{case['frames']} frames of {case['height']} x {case['width']}"
    where = f"{report['host']['cpus']} CPUs ({report['host']['machine']}), {report['date'][:10]}"
    title = f"{report['model_name']}, {video}, {report['options']['dtype']}, {where}:"
    return f"{title}\n\n{table(MEASURED_HEAD, rows)}"


def _total(seconds: Iterable[float | None]) -> float | None:
    found = list(seconds)
    return None if None in found else sum(value for value in found if value is not None)


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


FUSED = "norm_conv3d", "upsampled"
"""The kernels that `composition` names; it adds all others."""


def plans_table(plans: list[dict[str, Any]]) -> str:
    """Return a table for each job, topology and mesh, with a row for each backend."""
    origins = sorted({_origin(plan) for plan in plans})
    rows = sorted((_row(plan) for plan in plans), key=lambda row: (row[1], row[0]))
    return f"{'; '.join(origins)}:\n\n{table(PLANS_HEAD, rows)}\n"


def _origin(plan: dict[str, Any]) -> str:
    versions = plan["versions"]
    return f"Model {plan['model']}, {plan['dtype']}, libtpu {versions['libtpu']}, jax {versions['jax']}"


def composition(plans: list[dict[str, Any]], backend: str = "torchax") -> str:
    """Return each v6e program's time by its parts, in milliseconds, for a backend."""
    head = ("program", "total", *FUSED, "other kernels", "XLA", "collectives")
    rows = []
    for plan in plans:
        if plan["backend"] != backend or len(plan["programs"]) == 1 or "v6e" not in plan["topology"]:
            continue
        job, mesh = plan["job"], plan["mesh"]
        chips = mesh["dp"] * mesh["tp"]
        video = f"{job['kind']} {job['height']} x {job['width']}, {chips} chip{'s' * (chips > 1)}"
        for program in plan["programs"]:
            chunk = "first" if program["name"] == "first" else "steady"
            kernels = {name: kernel["seconds"] for name, kernel in program["kernel_times"].items()}
            fused = [kernels.pop(name, 0.0) for name in FUSED]
            by_xla = sum(program["shares"].get(kind, 0.0) for kind in ("convolutions", "copies", "other"))
            moved = sum((program["collective_seconds"] or {}).values())
            parts = [*fused, sum(kernels.values()), by_xla, moved]
            name = f"{video}, {chunk} chunk of {program['frames']}"
            rows.append((name, *(f"{1e3 * seconds:.1f}" for seconds in (sum(parts), *parts))))
    return table(head, rows)


def _chips(plan: dict[str, Any]) -> str:
    count, generation = plan["mesh"]["dp"] * plan["mesh"]["tp"], plan["topology"].partition(":")[0]
    return f"{count} {generation}" + (" core" + "s" * (count > 1) if generation == "tpu7x" else "")


def _row(plan: dict[str, Any]) -> tuple[str, ...]:
    job, summary = plan["job"], plan["summary"]
    first, steady = plan["programs"][0], plan["programs"][-1]
    tiles = f" in tiles of {job['tile'][0]} x {job['tile'][1]}" if job["tile"] else ""
    one = summary["chunks"] == 1
    whole = one or len(plan["programs"]) > 1  # else the first chunk's program was not planned
    peak = max(program["peak_bytes"] for program in plan["programs"])
    return (
        f"{job['kind']} {job['frames']} x {job['height']} x {job['width']}{tiles}",
        _chips(plan),
        plan["backend"],
        _milliseconds(first["seconds_with_collectives"]) if whole else "",
        "" if one else _milliseconds(steady["seconds_with_collectives"]),
        f"{summary['with_collectives_s']:.2f}" if whole and "with_collectives_s" in summary else "",
        (f"{peak / 1e9:.1f}" + (" (does not fit)" if summary.get("fits") is False else "")) if whole else "",
    )


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.0f}"


def compile_times(document: dict[str, Any]) -> str:
    """Return the table of what it takes to compile some programs of the VAE."""
    rows = []
    for job in document["jobs"]:
        if job["job"].rpartition(",")[0] in COMPILED:
            seconds = [f"{program['compile_seconds']:.0f}" for program in job["programs"]]
            rows.append((job["job"], *seconds, f"{job['process_bytes'] / 2**30:.1f}"))
    return table(("job", "first chunk, s", "steady chunk, s", "memory of the host, GiB"), rows)


def rounding(document: dict[str, Any]) -> str:
    """Return the table of bfloat16's errors over PyTorch's, by direct convolution and by filtering."""
    rows = [
        (row["name"], *(f"{row[tile] / row['torch']:.2f}" if tile in row else "" for tile in ("0", "2", "4")))
        for row in document["rows"]
    ]
    return table(("channels", "direct", "two results together", "four"), rows)


def sample(plan: dict[str, Any]) -> str:
    """Return what `plan` prints of a whole video, as a block of code."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        print_report(plan["summary"], as_json=False)
    return f"```text\n{printed.getvalue()}```"


def redraw(results: Path, docs: Path) -> None:
    """Write the tables of every `ab*.json` and `plan*.json` of `results` into the pages, between their marks.

    The results go into docs/benchmarks.md, the breakdown of a program's time into docs/performance.md, the
    comparison of the builds into docs/migration.md.
    """
    images = docs / "images"
    images.mkdir(parents=True, exist_ok=True)
    runs = []
    for path in sorted(results.glob("ab*.json")):
        report = load(path, ab.FORMAT)
        plots = draw(report, images, path.stem)
        runs += [measured(report), *(f"![{plot.stem}](images/{plot.name})" for plot in plots)]
    plans = {path.stem: load(path, jobs.FORMAT) for path in sorted(results.glob("plan*.json"))}
    fill(docs / "performance.md", "measured", "\n\n".join(runs))
    fill(docs / "performance.md", "plans", plans_table([*plans.values()]))
    fill(docs / "kernels.md", "composition", composition([*plans.values()]))
    fill(
        docs / "performance.md",
        "compile-times",
        compile_times(parse((results / "compile-times.json").read_text())),
    )
    fill(docs / "accuracy.md", "rounding", rounding(parse((results / "rounding.json").read_text())))
    fill(docs / "planning.md", "sample", sample(next(iter(plans.values()))))


def redraw_devices(results: Path, page: Path) -> None:
    """Write a table and a plot beside every file under results/devices, and links to them into a page."""
    links = []
    for path in sorted((results / "devices").glob("*.json")):
        report = load(path, device.FORMAT)
        draw_device(report, path.with_suffix(".png"))
        path.with_suffix(".md").write_text(device_markdown(report))
        links.append(f"[{path.stem}](../benchmarks/results/devices/{path.stem}.md)")
    fill(page, "devices", ", ".join(links))


if __name__ == "__main__":
    try:
        redraw(ROOT / "benchmarks" / "results", ROOT / "docs")
        redraw_devices(ROOT / "benchmarks" / "results", ROOT / "docs" / "performance.md")
    except ValueError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
