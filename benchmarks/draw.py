"""`python -m benchmarks draw`: the tables of the documents, from results/."""

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import (
    caches,
    dataset_throughput,
    first_call,
    host,
    memory,
    pipelines,
    runs,
    schedules,
    sharding,
    torchtpu,
)
from benchmarks.jobs import Size
from benchmarks.pages import RESULTS, ROOT, estimate, fill
from benchmarks.report import beside, markdown
from cogvideox_torchax.files.reports import load, parse, table, write_text
from cogvideox_torchax.plan.chips import GIB
from cogvideox_torchax.plan.networks import STEPS

VIDEOS = {
    "2b, 49 x 480 x 720, one v6e": "pipeline-2b-v6e-1",
    "5b, 49 x 480 x 720, one v6e": "pipeline-5b-v6e-1",
    "5b, 49 x 480 x 720, v6e-8": "pipeline-5b-v6e-8",
    "1.5-5b, 81 x 768 x 1360, v6e-8": "pipeline-1.5-5b-v6e-8",
}
"""By a video: the key of the estimates of its parts in `pipelines.PARTS`."""
FUSED = "norm_conv3d", "upsampled"
"""The kernels with a column in `composition`, which sums up the times of all others."""
LAYER = {
    # By a kernel of 5b: (its part of a layer; ms before it, of XLA or a kernel of commit 4ef3ce7; floor, ms)
    "attention": ("attention", 28.7, 21.2),
    "modulated_norm": ("two modulated norms", 5.21, 0.54),
    "linear": ("queries, keys and values", 2.94, 2.20),
    "linear_gelu": ("ff1 with GELU", 5.30, 2.93),
    "gated_linear": ("ff2 and out, with gate and residual, and the copy that out read", 6.15, 3.66),
    "prepare": ("`prepare`: norms of queries and keys, rotation, layout", 1.19, 0.81),
}
LAYERS = 42
PROGRAMS = "programs/1"
"""The format of the kept report of the programs of others."""
COMPILED_VIDEOS = "decode 49 x 480 x 720", "encode 49 x 480 x 720", "decode 49 x 768 x 1360"
"""The videos of the rows of `compile_times`."""


def estimates(pattern: str) -> list[dict[str, Any]]:
    """Return the kept estimates whose names in results/ match a pattern, sorted by name."""
    return [estimate(path.stem) for path in sorted(RESULTS.glob(f"{pattern}.json"))]


# The VAE


def plans() -> str:
    """Return the model and the compiler of the VAE's estimates, and a table with a row for each."""
    found = estimates("plan-*")
    origins = {
        f"Model {each['model']}, {each['dtype']}, libtpu {each['versions']['libtpu']}, "
        f"jax {each['versions']['jax']}"
        for each in found
    }
    head = ("video", "chips", "build", "first chunk, ms", "steady chunk, ms", "whole video, s", "peak, GiB")
    rows = sorted(map(_plan_row, found), key=lambda row: (row[1], row[0]))  # by chips, then by video
    return f"{'; '.join(sorted(origins))}:\n\n{table(head, rows)}\n"


def _plan_row(plan: dict[str, Any]) -> tuple[str, ...]:
    """Return the row of a plan in `plans`; a plan may have the steady chunk's program alone."""
    job, summary = plan["job"], plan["summary"]
    first, steady = (1e3 * plan["programs"][i]["seconds_with_collectives"] for i in (0, -1))
    count, generation = plan["mesh"]["dp"] * plan["mesh"]["tp"], plan["topology"].partition(":")[0]
    one_chunk = summary["chunks"] == 1
    whole = one_chunk or len(plan["programs"]) > 1  # else the first chunk's program was not planned
    peak = max(program["peak_bytes"] for program in plan["programs"])
    return (
        f"{job['direction']} {job['frames']} x {job['height']} x {job['width']}"
        + (f" in tiles of {job['tile'][0]} x {job['tile'][1]}" if job["tile"] else ""),
        f"{count} {generation}" + (" core" + "s" * (count > 1) if generation == "tpu7x" else ""),
        plan["backend"],
        f"{first:.0f}" if whole else "",
        "" if one_chunk else f"{steady:.0f}",
        f"{summary['with_collectives_s']:.2f}" if whole else "",
        (f"{peak / GIB:.1f}" + ("" if summary["fits"] else " (does not fit)")) if whole else "",
    )


def builds() -> str:
    """Return a table of both builds' times: measured on a CPU, and estimated for a v6e."""
    measured = load(RESULTS / "ab-5b-cpu.json", runs.FORMAT)
    pytorch = {name: peer for name, _port, peer in beside(measured, "torch")}
    rows = [
        (f"{name}, measured", f"{pytorch[name]:.2f}", f"{port:.2f}", f"{flax:.2f}", f"{port / flax:.2f}")
        for name, port, flax in beside(measured, "flax")
    ]
    for kind in ("decode", "encode"):
        port, flax = (estimate(f"plan-v6e-1-{kind}-{build}")["summary"] for build in ("torchax", "flax"))
        ours, theirs = port["with_collectives_s"], flax["with_collectives_s"]
        name = f"{port['video']}, v6e, an estimate"
        rows.append((name, "", f"{ours:.2f}", f"{theirs:.2f}", f"{ours / theirs:.2f}"))
    return table(("job", "PyTorch, s", "torchax, s", "Flax, s", "torchax over Flax"), rows)


def composition() -> str:
    """Return a table of the milliseconds of each part of a program, of the torchax build's plans for v6e."""
    rows = []
    for plan in estimates("plan-v6e-*-torchax"):
        if len(plan["programs"]) == 1:
            continue
        job, chips = plan["job"], plan["mesh"]["dp"] * plan["mesh"]["tp"]
        video = f"{job['direction']} {job['height']} x {job['width']}, {chips} chip{'s' * (chips > 1)}"
        for program in plan["programs"]:
            chunk = "first" if program["name"] == "first" else "steady"
            kernels = {name: kernel["seconds"] for name, kernel in program["kernel_times"].items()}
            fused = [kernels.pop(name, 0.0) for name in FUSED]
            by_xla = sum(program["shares"].get(kind, 0.0) for kind in ("convolutions", "copies", "other"))
            moved = sum((program["collective_seconds"] or {}).values())
            parts = [*fused, sum(kernels.values()), by_xla, moved]
            name = f"{video}, {chunk} chunk of {program['frames']}"
            rows.append((name, *(f"{1e3 * seconds:.1f}" for seconds in (sum(parts), *parts))))
    return table(("program", "total", *FUSED, "other kernels", "XLA", "collectives"), rows)


def compile_times() -> str:
    """Return the table of the seconds and the memory to compile the programs of `COMPILED_VIDEOS`."""
    rows = []
    for job in parse((RESULTS / "compile-times.json").read_text())["jobs"]:
        if job["job"].rpartition(",")[0] in COMPILED_VIDEOS:  # without ", one chip"
            seconds = [f"{program['compile_seconds']:.0f}" for program in job["programs"]]
            rows.append((job["job"], *seconds, f"{job['process_bytes'] / GIB:.1f}"))
    return table(("job", "first chunk, s", "steady chunk, s", "memory of the host, GiB"), rows)


def rounding() -> str:
    """Return the table of bfloat16's errors over PyTorch's, by the results that are convolved together.

    The tile "0" of `rounding.py`'s report is direct convolution.
    """
    rows = [
        (row["name"], *(f"{row[tile] / row['torch']:.2f}" if tile in row else "" for tile in ("0", "2", "4")))
        for row in parse((RESULTS / "rounding.json").read_text())["rows"]
    ]
    return table(("channels", "direct", "two results together", "four"), rows)


# A pipeline's networks, and training


def networks() -> str:
    """Return a table with a row for each estimate of a step or a prompt."""
    head = ("network", "mesh", "arguments, GiB", "temporaries, GiB", "fits", "estimate, s", "collectives, s")
    return table((*head, "a step's host, s"), [_network_row(plan) for plan in estimates("network-*")])


def _network_row(plan: dict[str, Any]) -> tuple[str, ...]:
    job, mesh, summary, (program,) = plan["job"], plan["mesh"], plan["summary"], plan["programs"]
    is_step = job["network"] == "step"
    video = f", {job['frames']} x {job['height']} x {job['width']}" if is_step else ""
    return (
        f"{job['network']}, {plan['model']}{video}",
        f"{plan['topology']}, dp={mesh['dp']} tp={mesh['tp']}",
        f"{program['argument_bytes'] / GIB:.2f}",
        f"{program['temp_bytes'] / GIB:.2f}",
        "yes" if summary["fits"] else "no",
        *(_seconds(summary[name], 0.01, 4) for name in ("estimate_s", "collectives_s")),
        f"{host.step_seconds(plan['model']):.3f}" if is_step else "",
    )


def videos() -> str:
    """Return a table of the seconds of a whole video, from the prompt to the frames."""
    head = (
        *("video", "prompts, s", f"{STEPS} steps, s", "one step, s", "a step's host, s"),
        *("VAE, s", "total, s"),
    )
    rows = [(name, *(_seconds(seconds, 0.1, 3) for seconds in seconds_of_video(name))) for name in VIDEOS]
    return table(head, rows)


def seconds_of_video(name: str) -> tuple[float, ...]:
    """Return the seconds of the prompts, all steps, one step, its work on the host, the VAE, and a video.

    The host queues a step while the device computes the one before, so the longer of the two counts. `name`
    is a key of `VIDEOS`.
    """
    parts = map(estimate, pipelines.PARTS[VIDEOS[name]])
    prompts, one_step, frames = (part["summary"]["with_collectives_s"] for part in parts)
    host_step = host.step_seconds(name)
    steps = STEPS * max(one_step, host_step)
    return prompts, steps, one_step, host_step, frames, prompts + steps + frames


def _seconds(value: float, least: float, digits: int) -> str:
    """Return the cell of a time: two digits after the point, or so many `digits` below `least`."""
    return f"{value:.{digits if value < least else 2}f}"


def figures() -> str:
    """Return README's table."""
    head = ("estimated time, CogVideoX-5b in bfloat16", "chips", "diffusers through torchax", "this project")
    rows = []
    for kind in ("decode", "encode"):
        plans = [estimate(f"plan-v6e-1-{kind}-{build}") for build in ("torchax-stock", "torchax")]
        chunks = (f"{plan['programs'][-1]['seconds_with_collectives']:.3f} s" for plan in plans)
        rows.append((f"{kind} a chunk, 8 frames of 480 x 720", "1 v6e", *chunks))
    video = estimate("plan-v6e-8-decode-torchax")["summary"]["with_collectives_s"]
    step = estimate("network-step-5b-v6e-1")["summary"]["with_collectives_s"]
    whole = seconds_of_video("5b, 49 x 480 x 720, v6e-8")[-1]
    rows += [
        ("decode 81 frames of 768 x 1360", "8 v6e", "", f"{video:.2f} s"),
        ("a denoising step, 49 frames of 480 x 720", "1 v6e", "", f"{step:.2f} s"),
        ("a prompt to 49 frames of 480 x 720, 50 steps", "8 v6e", "", f"{whole:.2f} s"),
    ]
    return table(head, rows)


def layer() -> str:
    """Return a table of the milliseconds of each part of a layer, of a step of 5b."""
    (step,) = estimate("network-step-5b-v6e-1")["programs"]
    rows = [
        (part, f"{before:.2f}", f"{step['kernel_times'][name]['seconds'] / LAYERS * 1e3:.2f}", f"{floor:.2f}")
        for name, (part, before, floor) in LAYER.items()
    ]
    return table(("part of a layer", "before, ms", "now, ms", "floor, ms"), rows)


def training() -> str:
    """Return a table of a training step: a row for each program, and one for the step."""
    plan = estimate("train-step-v6e-1")
    rows = [
        (
            f"{program['name']}, forward and backward",
            f"{program['seconds'] * 1e3:.1f}",
            f"{program['floor_s'] * 1e3:.2f}",
            f"{program['temp_bytes'] / GIB:.2f}",
            f"{program['compile_seconds']:.0f}",
        )
        for program in plan["programs"]
    ]
    summary = plan["summary"]
    whole = (
        f"a step; with weights, gradients and AdamW's moments {summary['peak_memory_GiB']:.2f} GiB at most",
        f"{summary['with_collectives_s'] * 1e3:.1f}",
        "",
        f"{summary['temporaries_GiB_at_most']:.2f}",
        f"{sum(program['compile_seconds'] for program in plan['programs']):.0f}",
    )
    head = ("v6e, 1 x 64 x 64, bfloat16", "estimate, ms", "floor, ms", "temporaries, GiB", "compile, s")
    return table(head, [*rows, whole])


def programs() -> str:
    """Return the table of the programs of others, which version 0.1.0 ran.

    In its second call no program compiled anything, and no network was left on the host.
    """
    rows = [
        (
            row["program"],
            row["commit"],
            row["devices"],
            f"{row['error']:.0e}",
            f"{row['first_s']:.1f}",
            f"{row['second_s']:.1f}",
        )
        for row in load(RESULTS / "programs_of_others.json", PROGRAMS)["rows"]
    ]
    return table(("program", "commit", "devices", "error", "first call, s", "second call, s"), rows)


# Devices


def devices() -> dict[str, dict[str, Any]]:
    """Return the kept reports of measured devices, by the name of their file."""
    return {path.stem: load(path, runs.FORMAT) for path in sorted((RESULTS / "devices").glob("*.json"))}


def device_links() -> str:
    """Return a list of links to each device's table, and for an accelerator what it took beside PyTorch."""
    items = []
    for name, report in devices().items():
        texts = [
            f"the job *{job}* took {port:.3g} s with this project, and {torch:.3g} s with "
            "diffusers in PyTorch (eager)"
            for job, port, torch in beside(report, "torch")
            if report["device"]["platform"] != "cpu"
        ]
        link = f"- [{name}](../benchmarks/results/devices/{name}.md)"
        items.append(f"{link}: {'; '.join(texts)}" if texts else link)
    return "\n".join(items)


def on_cpu() -> str:
    """Return the times on a CPU: a title, and a table with a column for each way.

    A row has the milliseconds of one part of a job, by each way of running it. Kernels are left out.
    """
    report, rows = devices()["cpu"], dict[tuple[str, ...], dict[str, str]]()
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


TABLES: dict[tuple[str, str], Callable[[], str]] = {
    ("README.md", "figures"): figures,
    ("docs/performance.md", "plans"): plans,
    ("docs/performance.md", "compile-times"): compile_times,
    ("docs/torchax-or-flax.md", "builds"): builds,
    ("docs/performance.md", "network plans"): networks,
    ("docs/performance.md", "videos"): videos,
    ("docs/performance.md", "devices"): device_links,
    ("docs/performance.md", "measured"): on_cpu,
    ("docs/kernels.md", "composition"): composition,
    ("docs/kernels.md", "layer"): layer,
    ("docs/accuracy.md", "rounding"): rounding,
    ("docs/planning.md", "training"): training,
    ("docs/pipelines.md", "programs"): programs,
    **caches.TABLES,
    **dataset_throughput.TABLES,
    **first_call.TABLES,
    **host.TABLES,
    **memory.TABLES,
    **pipelines.TABLES,
    **schedules.TABLES,
    **sharding.TABLES,
    **torchtpu.TABLES,
}
"""By page and name of its marks: the function that returns what goes between them."""


def draw(pages: Sequence[str] = ()) -> None:
    """Draw the tables of pages, such as "performance.md"; by default all, and what lies beside results."""
    names = {page.rpartition("/")[2] for page, _name in TABLES}
    if unknown := {*pages} - names:
        raise ValueError(f"got page {', '.join(sorted(unknown))}: one of {', '.join(sorted(names))}")
    for (page, name), drawn in TABLES.items():
        if not pages or page.rpartition("/")[2] in pages:
            fill(ROOT / page, name, drawn())
    if not pages:
        memory.plot()
        for name, report in devices().items():
            write_text(RESULTS / "devices" / f"{name}.md", markdown(report))
