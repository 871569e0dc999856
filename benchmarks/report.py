"""Redraws the tables and plots of docs/ from benchmarks/results/."""

import contextlib
import io
import sys
from pathlib import Path
from typing import Any

from benchmarks.pages import fill
from cogvideox_torchax.bench import device
from cogvideox_torchax.bench.ladder import Size
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
COMPILED_VIDEOS = "decode 49 x 480 x 720", "encode 49 x 480 x 720", "decode 49 x 768 x 1360"
"""The videos of the rows of `compile_times`."""


def measured(report: dict[str, Any]) -> str:
    """Return the times of a report of `bench device`: a title, and a table with a column for each way.

    A row has the milliseconds of one part of a job, by each way of running it. Kernels are left out.
    """
    rows: dict[tuple[str, ...], dict[str, str]] = {}  # by (job, part, video): the cells by way
    for result in report["results"]:
        for part in result.get("parts", []):
            if not result["job"].startswith("kernels "):
                row = rows.setdefault((result["job"], part["part"], Size(**result["size"]).video), {})
                row[result["way"]] = f"{1e3 * part['median_s']:.3g}"
    ways = list(dict.fromkeys(way for row in rows.values() for way in row))
    errors = [result["check"]["relative_error"] for result in report["results"] if result["status"] == "ok"]
    where = f"{report['host']['cpus']} CPUs ({report['host']['machine']}), {report['date'][:10]}"
    title = f"{report['dtype']}, {where}, ms; largest error {max(errors):.1e}:"
    cells = [(*about, *(row.get(way, "") for way in ways)) for about, row in rows.items()]
    return f"{title}\n\n{table(('job', 'part', 'video', *ways), cells)}"


FUSED = "norm_conv3d", "upsampled"
"""The kernels with a column in `composition`, which sums up the times of all others."""


def plans_table(plans: list[dict[str, Any]]) -> str:
    """Return the model and the compiler of the VAE's plans, and a table with a row for each plan."""
    origins = {
        f"Model {plan['model']}, {plan['dtype']}, libtpu {plan['versions']['libtpu']}, "
        f"jax {plan['versions']['jax']}"
        for plan in plans
    }
    rows = sorted(map(_row, plans), key=lambda row: (row[1], row[0]))  # by chips, then by video
    return f"{'; '.join(sorted(origins))}:\n\n{table(PLANS_HEAD, rows)}\n"


def composition(plans: list[dict[str, Any]]) -> str:
    """Return a table of the milliseconds of each part of a program, of the torchax build's plans for v6e."""
    head = ("program", "total", *FUSED, "other kernels", "XLA", "collectives")
    rows = []
    for plan in plans:
        if plan["backend"] != "torchax" or len(plan["programs"]) == 1 or "v6e" not in plan["topology"]:
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


def _row(plan: dict[str, Any]) -> tuple[str, ...]:
    """Return the row of a plan below `PLANS_HEAD`; a plan may have the steady chunk's program alone."""
    job, summary = plan["job"], plan["summary"]
    first, steady = plan["programs"][0], plan["programs"][-1]
    count, generation = plan["mesh"]["dp"] * plan["mesh"]["tp"], plan["topology"].partition(":")[0]
    devices = f"{count} {generation}" + (" core" + "s" * (count > 1) if generation == "tpu7x" else "")
    tiles = f" in tiles of {job['tile'][0]} x {job['tile'][1]}" if job["tile"] else ""
    one_chunk = summary["chunks"] == 1
    whole = one_chunk or len(plan["programs"]) > 1  # else the first chunk's program was not planned
    peak = max(program["peak_bytes"] for program in plan["programs"])
    return (
        f"{job['kind']} {job['frames']} x {job['height']} x {job['width']}{tiles}",
        devices,
        plan["backend"],
        _milliseconds(first["seconds_with_collectives"]) if whole else "",
        "" if one_chunk else _milliseconds(steady["seconds_with_collectives"]),
        f"{summary['with_collectives_s']:.2f}" if whole and "with_collectives_s" in summary else "",
        (f"{peak / 1e9:.1f}" + (" (does not fit)" if summary.get("fits") is False else "")) if whole else "",
    )


def _milliseconds(seconds: float | None) -> str:
    """Return the cell of a time; None, a time that is not known, is empty."""
    return "" if seconds is None else f"{1e3 * seconds:.0f}"


def compile_times(document: dict[str, Any]) -> str:
    """Return the table of the seconds and the memory to compile the programs of `COMPILED_VIDEOS`."""
    rows = []
    for job in document["jobs"]:
        if job["job"].rpartition(",")[0] in COMPILED_VIDEOS:  # without ", one chip"
            seconds = [f"{program['compile_seconds']:.0f}" for program in job["programs"]]
            rows.append((job["job"], *seconds, f"{job['process_bytes'] / 2**30:.1f}"))
    return table(("job", "first chunk, s", "steady chunk, s", "memory of the host, GiB"), rows)


def rounding(document: dict[str, Any]) -> str:
    """Return the table of bfloat16's errors over PyTorch's, by the results that are convolved together.

    `document` is the report of `rounding.py`, whose tile "0" is direct convolution.
    """
    rows = [
        (row["name"], *(f"{row[tile] / row['torch']:.2f}" if tile in row else "" for tile in ("0", "2", "4")))
        for row in document["rows"]
    ]
    return table(("channels", "direct", "two results together", "four"), rows)


def sample(plan: dict[str, Any]) -> str:
    """Return what `plan` prints of a whole video, as a block of code."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        print_report(plan["summary"])
    return f"```text\n{printed.getvalue()}```"


def redraw(results: Path, docs: Path) -> None:
    """Write the tables of the VAE's plans, of compile times and of rounding into the pages of `docs`."""
    plans = [load(path, jobs.FORMAT) for path in sorted(results.glob("plan*.json"))]
    compiled, rounded = (
        parse((results / f"{name}.json").read_text()) for name in ("compile-times", "rounding")
    )
    fill(docs / "performance.md", "plans", plans_table(plans))
    fill(docs / "kernels.md", "composition", composition(plans))
    fill(docs / "performance.md", "compile-times", compile_times(compiled))
    fill(docs / "accuracy.md", "rounding", rounding(rounded))
    fill(docs / "planning.md", "sample", sample(plans[0]))


def redraw_devices(results: Path, page: Path) -> None:
    """Write a table and a plot beside each report in `results`/devices, and links to them into a page.

    Times on a CPU go into the page too, and after a link an accelerator's times next to PyTorch's.
    """
    links = []
    for path in sorted((results / "devices").glob("*.json")):
        report = load(path, device.FORMAT)
        draw_device(report, path.with_suffix(".png"))
        path.with_suffix(".md").write_text(markdown(report))
        link = f"[{path.stem}](../benchmarks/results/devices/{path.stem}.md)"
        if report["device"]["platform"] == "cpu":
            fill(page, "measured", measured(report))
        else:
            link += beside_torch(report)
        links.append(link)
    fill(page, "devices", "; ".join(links))


def beside_torch(report: dict[str, Any]) -> str:
    """Return ": JOB of SIZE, N s (PyTorch, eager: N s); ..." for what the port and PyTorch ran alike.

    These are the jobs that both did at one size, with results within the contract.
    """
    port: dict[str, float] = {}  # by job and size, seconds of a whole run
    torch: dict[str, float] = {}
    for result in report["results"]:
        of_way = {"torchax": port, "torch": torch}.get(result["way"])
        if of_way is not None and result["status"] == "ok" and result["check"]["passed"]:
            of_way[f"{result['job']} of {Size(**result['size']).name}"] = result["whole"]["median_s"]
    texts = [
        f"{name}, {port[name]:.3g} s (PyTorch, eager: {torch[name]:.3g} s)" for name in port if name in torch
    ]
    return f": {'; '.join(texts)}" if texts else ""


if __name__ == "__main__":
    try:
        redraw(ROOT / "benchmarks" / "results", ROOT / "docs")
        redraw_devices(ROOT / "benchmarks" / "results", ROOT / "docs" / "performance.md")
    except ValueError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
