"""The tables of measurements in the documents, each a function, and the plot of memory, from results/."""

import statistics
from typing import Any

from benchmarks import runs
from benchmarks.jobs import Size
from benchmarks.pages import RESULTS, ROOT, estimate, kept
from benchmarks.plan.chips import GIB
from benchmarks.report import beside
from cogvideox_torchax.files.reports import load, pyplot, save_figure, table

COMPILED_VIDEOS = "decode 49 x 480 x 720", "encode 49 x 480 x 720", "decode 49 x 768 x 1360"
"""The videos of the rows of `compile_times`."""
PANELS = {
    # kind of curves of memory: (label of its axis, name of its table in the page, head of that table)
    "over_frames": ("frames of 64 x 96", "frames", "frames"),
    "over_size": ("pixels of each of 17 frames", "size", "pixels"),
    "long": ("frames of 16 x 24, file to file", "long", "frames"),
}
ROLES = {
    "bikes, end": "held out",
    "carphone": "chose settings",
    "carphone, resized": "chose settings",
    "bigbuckbunny": "trained on",
    "bikes": "trained on",
}
"""By a clip that the bundled model reconstructs: its role in the model's training."""


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


def builds() -> str:
    """Return a table of both builds' times: measured on a CPU, and estimated for a v6e."""
    measured = load(RESULTS / "ab-5b-cpu.json", runs.FORMAT)
    pytorch = {name: f"{peer:.2f}" for name, _port, peer in beside(measured, "torch")}
    rows = [
        (f"{name}, measured", pytorch[name], *_over(port, flax))
        for name, port, flax in beside(measured, "flax")
    ]
    for kind in ("decode", "encode"):
        port, flax = (estimate(f"plan-v6e-1-{kind}-{build}")["summary"] for build in ("torchax", "flax"))
        times = _over(port["with_collectives_s"], flax["with_collectives_s"])
        rows.append((f"{port['video']}, v6e, an estimate", "", *times))
    return table(("job", "PyTorch, s", "torchax, s", "Flax, s", "torchax over Flax"), rows)


def _over(port: float, flax: float) -> tuple[str, ...]:
    return f"{port:.2f}", f"{flax:.2f}", f"{port / flax:.2f}"


def host() -> str:
    """Return the table of the host's times for a step, and a sentence about a CPU that is the device."""
    report = kept("host")
    rows = [
        (name, f"{row['call_ms']:.1f}", f"{row['step_ms']:.1f}") for name, row in report["layers"].items()
    ]
    port, stock = (report["beside_stock"][way] for way in ("torchax", "torchax-stock"))
    return (
        table(("transformer of", "call, ms of the host", "step, ms of the host"), rows)
        + f"\n\nWhere the CPU itself is the device, a compiled step of a small transformer takes {port:.1f} "
        f"ms with this\nproject's modules, and {stock:.1f} ms with diffusers' own modules through torchax."
    )


def throughput() -> str:
    """Return the table of `encode DIRECTORY`, and the time that its ratio means for an estimated clip."""
    report, plan = kept("dataset_throughput"), estimate("plan-v6e-1-encode-torchax")
    frames, height, width = report["video"]
    job, seconds = plan["job"], plan["summary"]["with_collectives_s"]
    return table(
        ("encoding", "rate"),
        (
            (
                f"a directory, {report['clips']} clips of {frames} x {height} x {width}, bundled model, CPU",
                f"{report['batch_clips_a_second']:.2f} clips a second",
            ),
            (
                "the model alone, the same frames in memory",
                f"{report['own_clips_a_second']:.2f} clips a second",
            ),
            ("ratio, median of the rounds", f"{report['ratio']:.2f}"),
            (
                f"estimate for a clip of {job['frames']} x {job['height']} x {job['width']}, one v6e",
                f"{seconds:.2f} s",
            ),
            (
                "the same for a million clips, at that ratio",
                f"{1_000_000 * seconds / report['ratio'] / 3600:.0f} chip hours",
            ),
        ),
    )


# Memory


def memory(kind: str) -> str:
    """Return the table of a kind of curves."""
    (_label, _part, head), curves = PANELS[kind], kept("memory")[kind]
    names = [
        str(frames) if head == "frames" else f"{height} x {width}"
        for frames, height, width in curves[0]["points"]
    ]
    return table(
        (f"MiB, by {head}", *names),
        [(curve["way"], *(f"{value:.0f}" for value in curve["MiB"])) for curve in curves],
    )


def plot_memory() -> None:
    figure, axes = pyplot().subplots(1, len(PANELS), figsize=(4.5 * len(PANELS), 4))
    for axis, (kind, (label, _part, head)) in zip(axes, PANELS.items(), strict=True):
        for curve in kept("memory")[kind]:
            places = [
                frames if head == "frames" else height * width for frames, height, width in curve["points"]
            ]
            axis.plot(places, curve["MiB"], "o-", label=curve["way"])
        axis.set(xlabel=label, ylabel="MiB over a video of one frame", ylim=(0, None))
        axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2, frameon=False)  # above the curves
    figure.tight_layout()
    save_figure(figure, ROOT / "docs" / "images" / "memory.png")


# Compiling


def compile_times() -> str:
    """Return the table of the seconds and the memory to compile the programs of `COMPILED_VIDEOS`."""
    return table(
        ("job", "first chunk, s", "steady chunk, s", "memory of the host, GiB"),
        [
            (
                job["job"],
                *(f"{program['compile_seconds']:.0f}" for program in job["programs"]),
                f"{job['process_bytes'] / GIB:.1f}",
            )
            for job in kept("compile-times")["jobs"]
            if job["job"].rpartition(",")[0] in COMPILED_VIDEOS  # without ", one chip"
        ],
    )


def first_call() -> str:
    """Return a line for each way to compile, and the cores and versions that it was measured with."""
    report = kept("first-call")
    packages = " and ".join(f"{name} {version}" for name, version in report["versions"].items())
    return table(
        (f"programs of 5b for one v6e, on {report['cores']} CPU cores, {packages}", "s"),
        [(way, f"{report[way]:.0f}") for way in ("one after the other", "side by side")],
    )


def ready() -> str:
    """Return a line for each program of a first call with a full compile cache, and one for the imports."""
    report = kept("ready")
    spent = report["cpu_seconds"]
    head = ("programs of 5b for one v6e", "traced and lowered, s of one core")
    seconds = {name.partition(":")[0]: each for name, each in spent.items() if ":" in name}
    seconds |= {"all": sum(seconds.values()), "imports": spent["imports"]}
    return table(head, [(name, f"{each:.2f}") for name, each in seconds.items()])


# Errors, and programs of others


def rounding() -> str:
    """Return the table of bfloat16's errors over PyTorch's, by the results that are convolved together.

    The tile "0" of `rounding.py`'s report is direct convolution.
    """
    return table(
        ("channels", "direct", "two results together", "four"),
        [
            (
                row["name"],
                *(f"{row[tile] / row['torch']:.2f}" if tile in row else "" for tile in ("0", "2", "4")),
            )
            for row in kept("rounding")["rows"]
        ],
    )


def tiny_vae() -> str:
    """Return a table of the bundled model by clip and length; a figure that builds share is given once."""
    results = kept("tiny_vae")["results"]
    rows = []
    for case, frames in dict.fromkeys((result["case"], result["frames"]) for result in results):
        lines = [each for each in results if (each["case"], each["frames"]) == (case, frames)]
        measures = ("psnr", "worst_frame_psnr", "ssim", "colour")
        seen = [sorted({line[measure] for line in lines}) for measure in measures]
        rows.append((case, ROLES[case], str(frames), *(" to ".join(map(str, values)) for values in seen)))
    return table(
        ("clip", "role in training", "frames", "PSNR, dB", "worst frame, dB", "SSIM", "color error"), rows
    )


def programs() -> str:
    """Return the table of the programs of others, which version 0.1.0 ran.

    In its second call no program compiled anything, and no network was left on the host.
    """
    return table(
        ("program", "commit", "devices", "error", "first call, s", "second call, s"),
        [
            (
                row["program"],
                row["commit"],
                row["devices"],
                f"{row['error']:.0e}",
                f"{row['first_s']:.1f}",
                f"{row['second_s']:.1f}",
            )
            for row in kept("programs_of_others")["rows"]
        ],
    )


def versions() -> str:
    """Return a table with a row for each set of versions that a part of the tests ran with."""
    shown = ("torch", "torchax", "jax", "diffusers", "transformers")
    rows = []
    for path in sorted(RESULTS.glob("versions-*.json")):
        report = kept(path.stem)
        outcome = report.get("reason", "").replace("|", "/")
        if "passed" in report:
            skipped = f", {report['skipped']} skipped" if report.get("skipped") else ""
            outcome = f"{report['passed']} of {report['passed'] + report['failed']}{skipped}"
        found = (report["versions"].get(package, "") for package in shown)
        rows.append((report["set"], report["python"], *found, outcome))
    return table(("set", "Python", *shown, "tests passed"), rows)


def prompts() -> str:
    """Return a table of the videos that show their prompts: a row for each group of scenes and aspect."""
    report = kept("prompts")
    (plain, found), *_ = report["choices"].items()
    shown = table(
        ("scenes", *next(iter(found.values()))),
        [(name, *(f"{share:.2f}" for share in aspects.values())) for name, aspects in found.items()],
    )
    return f"{plain}, {report['count']} scenes of each group:\n\n{shown}"


def eight_bits() -> str:
    """Return a table of what bfloat16 and eight bits change in the bundled pipeline."""
    report = kept("prompts")
    return table(
        ("choice", "error of a step", "PSNR of videos, dB", "videos that are right"),
        [
            (
                name,
                f"{100 * errors['step']:.2f} %",
                f"{errors['psnr']:.1f}",
                f"{statistics.mean(found['all'] for found in report['choices'][name].values()):.2f}",
            )
            for name, errors in report["errors"].items()
        ],
    )


def prompt_choices() -> str:
    """Return a table of the videos that show their prompts, with a row for each choice."""
    choices = kept("prompts")["choices"]
    return table(
        ("choice", *next(iter(choices.values()))),
        [(name, *(f"{one['all']:.2f}" for one in found.values())) for name, found in choices.items()],
    )
