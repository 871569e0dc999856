"""The tables of measurements in the documents, each a function, and the plot of memory, from results/."""

import statistics
from typing import Any

from benchmarks import runs
from benchmarks.pages import RESULTS, ROOT, estimate, kept
from benchmarks.report import beside
from cogvideox_torchax.files.extras import needing
from cogvideox_torchax.files.reports import load, table
from cogvideox_torchax.files.whole import whole_file

PANELS = {
    # kind of curves of memory: label of its axis
    "over_frames": "frames of 64 x 96",
    "over_size": "pixels of each of 17 frames",
    "long": "frames of 16 x 24, file to file",
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
    """Return sentences about the host's times for a step, and about a CPU that is the device."""
    report = kept("host")
    two, five = (report["layers"][name]["step_ms"] for name in ("2b", "5b and 1.5-5b"))
    port, stock = (report["beside_stock"][way] for way in ("torchax", "torchax-stock"))
    return (
        f"On a CPU, the host takes {two:.0f} ms for a step of 2b, and {five:.0f} ms for one of 5b or 1.5-5b, "
        f"measured with small\ntransformers of as many layers. Where the CPU itself is the device, a step of "
        f"a small transformer takes\n{port:.1f} ms, and {stock:.1f} ms with diffusers' own modules through "
        "torchax."
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


def memory() -> str:
    """Return the table of the memory over the number of frames."""
    curves = kept("memory")["over_frames"]
    return table(
        ("MiB, by frames", *(str(frames) for frames, _height, _width in curves[0]["points"])),
        [(curve["way"], *(f"{value:.0f}" for value in curve["MiB"])) for curve in curves],
    )


def plot_memory() -> None:
    with needing("plots", "drawing needs matplotlib"):
        import matplotlib.pyplot
    matplotlib.use("Agg")  # which draws without a display
    figure, axes = matplotlib.pyplot.subplots(1, len(PANELS), figsize=(4.5 * len(PANELS), 4))
    for axis, (kind, label) in zip(axes, PANELS.items(), strict=True):
        for curve in kept("memory")[kind]:
            places = [
                height * width if kind == "over_size" else frames for frames, height, width in curve["points"]
            ]
            axis.plot(places, curve["MiB"], "o-", label=curve["way"])
        axis.set(xlabel=label, ylabel="MiB over a video of one frame", ylim=(0, None))
        axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2, frameon=False)  # above the curves
    figure.tight_layout()
    with whole_file(ROOT / "docs" / "images" / "memory.png") as temporary:
        figure.savefig(temporary, dpi=110, format="png")


# Compiling


def compiling() -> str:
    """Return sentences on the first call of a pipeline's programs, without a compile cache and with it."""
    cold, warm = kept("first-call"), kept("ready")["cpu_seconds"]
    traced, read = (
        sum(seconds for name, seconds in warm[process].items() if name != "imports")
        for process in ("first", "later")
    )
    return (
        f"The four programs of a 5b pipeline for one v6e compile in {cold['side by side']:.0f} s on "
        f"{cold['cores']} CPU cores,\nafter {warm['first']['imports']:.0f} s of imports and {traced:.0f} s "
        "of one core in which they are traced and lowered.\nA later process reads them as they were lowered, "
        f"in {read:.1f} s, and finds what they compile to in the compile cache."
    )


# Errors, and versions


def layers() -> str:
    """Return a table of both builds' errors in float32: of each kind of layer its worst, and the whole."""
    results = {
        result["backend"]: result for result in kept("verify")["results"] if result["dtype"] == "float32"
    }
    worst: dict[str, dict[str, float]] = {}
    for build in ("torchax", "flax"):
        errors = [(layer["name"], layer["relative"]) for layer in results[build]["layers"]]
        errors += [(f"{name}, whole", error["relative"]) for name, error in results[build]["whole"].items()]
        for name, error in errors:
            kind = next(part for part in reversed(name.split(".")) if not part.isdecimal())
            row = worst.setdefault(kind, {"torchax": 0.0, "flax": 0.0})
            row[build] = max(row[build], error)
    rows = [(kind, *(f"{error:.1e}" for error in row.values())) for kind, row in worst.items()]
    return table(("layers", "torchax", "Flax"), rows)


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
    return table(
        ("choice", "videos that are right"),
        [
            (name, f"{statistics.mean(group['all'] for group in found.values()):.2f}")
            for name, found in kept("prompts")["choices"].items()
        ],
    )
