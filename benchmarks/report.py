"""Redraws the tables and plots of docs/ from benchmarks/results/."""

import sys
from pathlib import Path
from typing import Any

from cogvideox_torchax.bench import ab
from cogvideox_torchax.bench.report import draw, markdown
from cogvideox_torchax.files.reports import fill, load, table
from cogvideox_torchax.plan import jobs
from cogvideox_torchax.vae.directions import Direction

ROOT = Path(__file__).parents[1]

BUILDS = ("torch", "torchax-stock", "torchax", "flax")
"""The backends of the comparison in docs/migration.md."""


def builds(reports: list[dict[str, Any]]) -> str:
    """One table of the first case of each report that has both builds: what a user waits for."""
    head = ("model", "device", "video", "backend")
    rows = []
    for report in reports:
        case = report["cases"][0]
        results = {result["backend"]: result for result in case["results"] if result["status"] == "ok"}
        if not {"torchax", "flax"} <= set(results):
            continue
        about = (report["model_name"], f"{case['frames']} x {case['height']} x {case['width']}")
        for result in (results[name] for name in BUILDS if name in results):
            halves = [_waiting(result[kind]) for kind in Direction]
            rows.append((about[0], result["device"], about[1], result["backend"], *halves[0], *halves[1]))
    columns = ("error", "cold start, s", "warm start, s", "steady, s")
    return table((*head, *(f"{kind}: {column}" for kind in Direction for column in columns)), rows)


def _waiting(half: dict[str, Any]) -> tuple[str, ...]:
    seconds = (half["start_cold_s"], half["start_warm_s"], half["steady"]["median_s"])
    return (
        f"{half['check']['relative_error']:.1e}",
        *("" if value is None else f"{value:.3g}" for value in seconds),
    )


GB = 1e9
HEAD = (
    "backend",
    "steady chunk, ms",
    "convolutions, ms",
    "copies, ms",
    "other, ms",
    "Pallas kernels, ms",
    "of them by bytes",
    "collectives, ms",
    "floor, ms",
    "of peak",
    "first chunk, ms",
    "whole video, s",
    "temporaries, GB",
    "peak, GB",
    "fits",
    "collectives",
    "compile, s",
)

FUSED = "norm_conv3d", "upsampled"
"""The kernels that `composition` names; it adds all others."""


def plans_table(plans: list[dict[str, Any]]) -> str:
    """A table for each job, topology and mesh, a row for each backend."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for plan in plans:
        groups.setdefault(_title(plan), []).append(plan)
    parts = []
    for title, members in groups.items():
        versions = members[0]["versions"]
        parts.append(f"**{title}** (libtpu {versions['libtpu']}, jax {versions['jax']})")
        parts.append(table(HEAD, [_row(plan) for plan in members]))
    return "\n\n".join(parts) + "\n"


def composition(plans: list[dict[str, Any]], backend: str = "torchax") -> str:
    """What the time of each program of a backend consists of, in milliseconds: a row for each program."""
    head = (
        "program",
        "frames in",
        "all",
        *FUSED,
        "other kernels",
        "convolutions",
        "copies",
        "other",
        "collectives",
    )
    rows = []
    for plan in plans:
        if plan["backend"] != backend:
            continue
        job, mesh = plan["job"], plan["mesh"]
        chips = mesh["dp"] * mesh["tp"]
        video = f"{job['kind']} {job['height']} x {job['width']}, {chips} chip{'s' * (chips > 1)}"
        for program in plan["programs"]:
            chunk = "first" if program["name"] == "first" else "steady"
            kernels = {name: kernel["seconds"] for name, kernel in program["kernel_times"].items()}
            fused = [kernels.pop(name, 0.0) for name in FUSED]
            shares = [program["shares"].get(kind, 0.0) for kind in ("convolutions", "copies", "other")]
            parts = [*fused, sum(kernels.values()), *shares, _sum(program["collective_seconds"]) or 0.0]
            name = f"{video}, {chunk} chunk", str(program["frames"])
            rows.append((*name, *(f"{1e3 * seconds:.1f}" for seconds in (sum(parts), *parts))))
    return table(head, rows)


def _title(plan: dict[str, Any]) -> str:
    job, mesh = plan["job"], plan["mesh"]
    tiles = f" in tiles of {job['tile'][0]} x {job['tile'][1]}" if job["tile"] else ""
    return (
        f"{job['kind']} {job['frames']} x {job['height']} x {job['width']}{tiles}, model {plan['model']}, "
        f"{plan['dtype']}, {plan['topology']}, dp={mesh['dp']} tp={mesh['tp']}"
    )


def _row(plan: dict[str, Any]) -> tuple[str, ...]:
    first, steady, summary = plan["programs"][0], plan["programs"][-1], plan["summary"]
    shares, seconds = steady["shares"], steady["seconds"]
    whole = len(plan["programs"]) > 1 or summary["chunks"] == 1  # else the first chunk's program is another
    moved = ", ".join(
        f"{count} {kind} (largest {largest / 1e6:.2f} MB)"
        for kind, (count, largest) in steady["collectives"].items()
    )
    return (
        plan["backend"],
        _milliseconds(seconds),
        *(_milliseconds(shares.get(kind)) for kind in ("convolutions", "copies", "other", "kernels")),
        str(steady["kernels_by_bytes"]) if seconds and steady["kernels"] else "",
        _milliseconds(_sum(steady["collective_seconds"])),
        _milliseconds(steady["floor_seconds"]),
        f"{steady['floor_seconds'] / seconds:.0%}" if seconds else "",
        _milliseconds(first["seconds"] if first["name"] == "first" else None),
        f"{summary['whole_video_s']:.2f}" if seconds and whole else "",
        f"{steady['temp_bytes'] / GB:.1f}",
        f"{max(program['peak_bytes'] for program in plan['programs']) / GB:.1f}" if whole else "",
        {True: "yes", False: "no", None: ""}[summary.get("fits")] if whole else "",
        moved,
        f"{steady['compile_seconds']:.0f}",
    )


def _sum(parts: dict[str, float] | None) -> float | None:
    return sum(parts.values()) if parts else None


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.0f}"


def redraw(results: Path, docs: Path) -> None:
    """Puts every `ab*.json` and `plan*.json` of `results` into docs/benchmarks.md, what a program's time
    consists of into docs/performance.md, and what compares the builds into docs/migration.md, between their
    marks."""
    images = docs / "images"
    images.mkdir(parents=True, exist_ok=True)
    runs, reports = [], []
    for path in sorted(results.glob("ab*.json")):
        report = load(path, ab.FORMAT)
        reports.append(report)
        plots = draw(report, images, path.stem)
        runs += [f"### {path.stem}", markdown(report).rstrip()]
        runs += [f"![{plot.stem}](images/{plot.name})" for plot in plots]
    plans = [load(path, jobs.FORMAT) for path in sorted(results.glob("plan*.json"))]
    page = docs / "benchmarks.md"
    fill(page, "bench ab", "\n\n".join(runs))
    fill(page, "plan", plans_table(plans))
    fill(docs / "performance.md", "composition", composition(plans))
    fill(docs / "migration.md", "builds", builds(reports))


if __name__ == "__main__":
    try:
        redraw(ROOT / "benchmarks" / "results", ROOT / "docs")
    except ValueError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
