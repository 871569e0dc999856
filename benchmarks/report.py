"""Redraws the tables and plots of docs/ from benchmarks/results/."""

import contextlib
import io
import sys
from pathlib import Path
from typing import Any

from benchmarks.pages import fill
from cogvideox_torchax.bench import device
from cogvideox_torchax.bench.report import draw_device, markdown
from cogvideox_torchax.cli.common import print_report
from cogvideox_torchax.files.reports import load, parse, table
from cogvideox_torchax.plan import jobs

ROOT = Path(__file__).parents[1]

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
    """Return a table of milliseconds, of each part of a job each way, under its origin."""
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    for result in report["results"]:
        size = result["size"]
        video = f"{size['frames']} x {size['height']} x {size['width']}"
        for part in result.get("parts", []):
            if not result["job"].startswith("kernels "):
                row = rows.setdefault((result["job"], part["part"], video), {})
                row[result["way"]] = f"{1e3 * part['median_s']:.3g}"
    ways = list(dict.fromkeys(way for row in rows.values() for way in row))
    errors = [result["check"]["relative_error"] for result in report["results"] if result["status"] == "ok"]
    where = f"{report['host']['cpus']} CPUs ({report['host']['machine']}), {report['date'][:10]}"
    title = f"{report['dtype']}, {where}, ms; largest error {max(errors):.1e}:"
    cells = [(*about, *(row.get(way, "") for way in ways)) for about, row in rows.items()]
    return f"{title}\n\n{table(('job', 'part', 'video', *ways), cells)}"


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
    """Write the tables of every `plan*.json` of `results` into the pages, between their marks."""
    plans = {path.stem: load(path, jobs.FORMAT) for path in sorted(results.glob("plan*.json"))}
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
    """Write a table and a plot beside each file of results/devices; links and a CPU's times into a page."""
    links = []
    for path in sorted((results / "devices").glob("*.json")):
        report = load(path, device.FORMAT)
        draw_device(report, path.with_suffix(".png"))
        path.with_suffix(".md").write_text(markdown(report))
        if report["device"]["platform"] == "cpu":
            fill(page, "measured", measured(report))
        links.append(f"[{path.stem}](../benchmarks/results/devices/{path.stem}.md)")
    fill(page, "devices", ", ".join(links))


if __name__ == "__main__":
    try:
        redraw(ROOT / "benchmarks" / "results", ROOT / "docs")
        redraw_devices(ROOT / "benchmarks" / "results", ROOT / "docs" / "performance.md")
    except ValueError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
