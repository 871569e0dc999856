"""The tables of estimates in the documents, each a function without arguments, from results/."""

import argparse
import math
import re
from typing import Any

from benchmarks import calibration, runs
from benchmarks.pages import RESULTS, estimate, estimates, kept
from benchmarks.plan.chips import GIB
from benchmarks.plan.command import CASES, parsed
from benchmarks.plan.networks import STEPS
from benchmarks.report import beside
from cogvideox_torchax.files.reports import load, table

VIDEOS = {
    "2b, 49 x 480 x 720, one v6e": "pipeline-2b-v6e-1",
    "5b, 49 x 480 x 720, one v6e": "pipeline-5b-v6e-1",
    "5b, 49 x 480 x 720, eight v6e": "pipeline-5b-v6e-8",
    "1.5-5b, 81 x 768 x 1360, eight v6e": "pipeline-1.5-5b-v6e-8",
}
"""By a video: the estimate of its pipeline."""
SHOWN_CHIPS = {"v5e-1": "one v5e", "v6e-1": "one v6e", "v6e-8": "eight v6e"}
"""By the end of an estimate's name: the chips of a column of README's first table."""
FEW_STEPS: list[tuple[str, str, int | None]] = [
    ("CogVideoX-5b, 8 steps, LoRA GYP666/BLADE", "5b", 8),
    ("CogVideoX-5b, 4 steps, LoRA GYP666/BLADE", "5b", 4),
    ("CogVideoX-2b, 4 steps, LoRA Luo-Yihong/TDM_CogVideoX-2B_LoRA", "2b", 4),
]
"""Rows of README's first table: the label, the model, and the number of steps without guidance."""
CHUNKS = {
    kind: tuple(f"plan-v6e-1-{kind}-{build}" for build in ("torchax-stock", "torchax"))
    for kind in ("decode", "encode")
}
"""By direction: the estimates of a steady chunk by diffusers' modules, and by this project's."""
FUSED = "norm_conv3d", "upsampled"
"""The kernels with a column in `composition`, which sums up the times of all others."""
LAYER = {
    # By a kernel of 5b: (its part of a layer; floor, ms)
    "attention": ("attention", 21.2),
    "modulated_norm": ("two modulated norms", 0.54),
    "linear": ("queries, keys and values", 2.20),
    "linear_gelu": ("ff1 with GELU", 2.93),
    "gated_linear": ("ff2 and out, with gate and residual", 3.66),
    "prepare": ("`prepare`: norms of queries and keys, rotation, layout", 0.81),
}
LAYERS = 42
SHOWN = {
    # By what `intervals` says of it: its estimate.
    "decode a chunk, stock torchax": "plan-v6e-1-decode-torchax-stock",
    "decode a chunk": "plan-v6e-1-decode-torchax",
    "encode a chunk, stock torchax": "plan-v6e-1-encode-torchax-stock",
    "encode a chunk": "plan-v6e-1-encode-torchax",
    "a step of 5b": "network-step-5b-v6e-1",
}


# How far estimates are off


def calibrations() -> str:
    """Return a table of published times over their estimates, a row for each kind and chip."""
    ratios: dict[tuple[str, str], list[float]] = {}
    for name, row in kept("calibration")["rows"].items():
        ratios.setdefault((row["bound"], name.partition(":")[0]), []).append(row["seconds"] / row["estimate"])
    return table(
        ("bound by", "chip", "programs", "measured / estimate"),
        [
            (
                *of,
                str(len(found)),
                " to ".join(dict.fromkeys(f"{end:.2f}" for end in (min(found), max(found)))),
            )
            for of, found in sorted(ratios.items())
        ],
    )


def stretches() -> dict[str, tuple[float, float]]:
    """Return, by the names of `SHOWN`, the least and the largest ratio to its estimate that is likely."""
    programs = {name: estimate(case)["programs"][-1] for name, case in SHOWN.items()}
    return {
        name: tuple(end / program["seconds"] for end in calibration.interval(program))
        for name, program in programs.items()
    }


def intervals() -> str:
    """Return the sentences of the intervals."""
    kinds, each = (
        ", ".join(f"{name} {low:.2f} to {high:.2f}" for name, (low, high) in found.items())
        for found in (calibration.intervals(), stretches())
    )
    return f"Measured over estimated, by kind: {kinds}.\nSo, for programs of this project: {each}."


# The VAE


def plans() -> str:
    """Return the model and the compiler of the VAE's estimates, and a table with a row for each video."""
    found = [plan for plan in estimates("plan-*") if plan["summary"]["chunks"] > 1]
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
    job, summary, programs = plan["job"], plan["summary"], plan["programs"]
    first, steady = (f"{1e3 * programs[i]['seconds_with_collectives']:.0f}" for i in (0, -1))
    whole = (
        f"{summary['with_collectives_s']:.2f}",
        f"{max(each['peak_bytes'] for each in programs) / GIB:.1f}",
    )
    count, generation = plan["mesh"]["dp"] * plan["mesh"]["tp"], plan["topology"].partition(":")[0]
    about = (
        f"{job['direction']} {job['frames']} x {job['height']} x {job['width']}",
        f"{count} {generation}",
        plan["backend"],
    )
    return (*about, first, steady, *whole) if len(programs) > 1 else (*about, "", steady, "", "")


def composition() -> str:
    """Return a table of the milliseconds of a steady chunk's parts, of the torchax build's plans for v6e."""
    plans = [plan for plan in estimates("plan-v6e-*-torchax") if plan["summary"]["chunks"] > 1]
    return table(
        ("steady chunk", "total", *FUSED, "other kernels", "XLA", "collectives"),
        [_composition_row(plan["job"], plan["mesh"], plan["programs"][-1]) for plan in plans],
    )


def _composition_row(job: dict[str, Any], mesh: dict[str, int], program: dict[str, Any]) -> tuple[str, ...]:
    kernels = {name: kernel["seconds"] for name, kernel in program["kernel_times"].items()}
    fused = [kernels.pop(name, 0.0) for name in FUSED]
    others = sum(kernels.values())
    by_xla = program["seconds"] - sum(fused) - others
    parts = [*fused, others, by_xla, sum(program["collective_seconds"].values())]
    return (
        f"{job['direction']} {job['height']} x {job['width']}, {math.prod(mesh.values())} v6e",
        *(f"{1e3 * seconds:.1f}" for seconds in (sum(parts), *parts)),
    )


def sharding() -> str:
    return table(
        (
            *("chunk", "latents", "FLOPs, 8 / 1", "temporaries, 1 device, MiB", "on each of 8, MiB"),
            "halos",
            "sums",
        ),
        [
            (
                result["kind"],
                " x ".join(map(str, result["latents"])),
                f"{result['flops_ratio']:.3f}",
                f"{result['temp_mib_single_device']:,.0f}",
                f"{result['temp_mib_per_device']:,.0f}",
                _traffic(result["collectives"]["collective-permute"], "MiB", 2**20),
                _traffic(result["collectives"]["all-reduce"], "KiB", 2**10),
            )
            for result in kept("sharding")["results"]
        ],
    )


def _traffic(collectives: dict[str, int], unit: str, size: int) -> str:
    return f"{collectives['bytes'] / size:,.0f} {unit} in {collectives['count']}"


# Kernels


def convolutions() -> str:
    return table(
        ("kernel", "schedule, ms", "floor, ms", "bytes, ms"),
        [
            (kind, *(f"{one[name]:.2f}" for name in ("schedule_ms", "floor_ms", "bytes_ms")))
            for kind, one in kept("schedules")["convolutions"].items()
        ],
    )


def attention() -> str:
    return table(
        ("chip", "cycles"),
        [
            (chip, f"{one['cycles_of_1024_x_1024']:.0f}")
            for chip, one in kept("schedules")["attention"].items()
        ],
    )


def layer() -> str:
    """Return a table of the milliseconds of each part of a layer, of a step of 5b."""
    (step,) = estimate("network-step-5b-v6e-1")["programs"]
    return table(
        ("part of a layer", "estimate, ms", "floor, ms"),
        [
            (part, f"{step['kernel_times'][name]['seconds'] / LAYERS * 1e3:.2f}", f"{floor:.2f}")
            for name, (part, floor) in LAYER.items()
        ],
    )


# GPUs, and pipelines


def gpus() -> str:
    """Return the table of the memory of programs on a GPU, which `plan` has written."""
    return table(
        ("program of 5b, 49 x 480 x 720, on one H100", "GiB"),
        [
            # A step's one program is "step" too.
            (
                ", ".join(dict.fromkeys((name, program["name"]))),
                f"{program['peak_bytes'] / GIB:.1f}",
            )
            for name in ("decode", "encode", "step")
            for program in kept(f"gpu-{name}")["programs"]
        ],
    )


def networks() -> str:
    """Return a table with a row for each estimate of a step, with guidance and without."""
    named = {"network-step": "", "one-pass": ", without guidance"}
    found = [(plan, passes) for name, passes in named.items() for plan in estimates(f"{name}-*")]
    found.sort(key=lambda each: (each[0]["model"], math.prod(each[0]["mesh"].values())))
    return table(
        ("step of", "chips, mesh", "estimate, s", "of it exchanges, s"),
        [
            (
                plan["model"] + passes,
                "{topology}, dp={mesh[dp]} tp={mesh[tp]}".format(**plan),
                *(f"{plan['summary'][name]:.3f}" for name in ("with_collectives_s", "collectives_s")),
            )
            for plan, passes in found
        ],
    )


def videos() -> str:
    """Return a table of the seconds of a whole video, from the prompt to the frames."""
    return table(
        ("video", "prompts, s", f"{STEPS} steps, s", "VAE, s", "total, s"),
        [(name, *map(_seconds, _video_seconds(estimate(case)))) for name, case in VIDEOS.items()],
    )


def _video_seconds(plan: dict[str, Any]) -> tuple[float, ...]:
    prompts, steps, *decoding = spent(plan)
    return prompts, steps, sum(decoding), sum(spent(plan))


def _seconds(value: float) -> str:
    return f"{value:.{3 if value < 0.1 else 2}f}"


def spent(plan: dict[str, Any]) -> list[float]:
    """Return the seconds of each program of a pipeline's estimate, as often as it runs in a video."""
    runs = zip(plan["counts"], plan["programs"], strict=True)
    return [count * program["seconds_with_collectives"] for count, program in runs]


def pipelines() -> str:
    """Return a table of the memory and the seconds of a video, by pipeline and slice."""
    return _fitting(re.compile("pipeline-"))


def small_chips() -> str:
    """Return the rows of `pipelines` for one chip of v5e or v6e, and for eight of v5e."""
    return _fitting(re.compile(r"pipeline-.*-(v5e-[18]|v6e-1)(-int8|-int8-dynamic)?$"))


def _fitting(wanted: re.Pattern[str]) -> str:
    """Return a table with a row for each case, which says whether it fits, with offload if it has to."""
    head = (
        *("pipeline", "chips, mesh", "peak, GiB", "peak with offload, GiB", "fits"),
        "a video, s",
    )
    cases = [case for case in CASES if wanted.match(case) and (RESULTS / f"{case}.json").exists()]
    return table(head, [_fitting_row(parsed(CASES[case].split()), estimate(case)) for case in cases])


def _fitting_row(args: argparse.Namespace, plan: dict[str, Any]) -> tuple[str, ...]:
    generation, grid = args.topology.split(":")
    fits, moving = fitting(plan)
    sizes = ("peak_memory_GiB", "offload_peak_GiB")
    return (
        args.model
        + (f", {args.weights}" if args.weights else "")
        + (f", tiles of {args.tiling}" if args.tiling else ""),
        f"{math.prod(map(int, grid.split('x')))} {generation}"
        + (f", dp={args.dp} tp={args.tp}" if args.dp * args.tp > 1 else ""),
        *(f"{plan['summary'][size]:.1f}" for size in sizes),
        fits,
        f"{sum(spent(plan)) + moving:.1f}" if fits != "no" else "",
    )


def fitting(plan: dict[str, Any]) -> tuple[str, float]:
    """Return whether a pipeline fits on its chips, and the seconds of its moves where offload is needed.

    With offload each network goes to the devices once for a video, and back.
    """
    summary = plan["summary"]
    memory = summary["memory_of_a_chip_GiB"]
    if summary["peak_memory_GiB"] <= memory:
        return "yes", 0.0
    if summary["offload_peak_GiB"] <= memory:
        return "with offload", summary["offload_moving_s"]
    return "no", 0.0


def caches() -> str:
    """Return the table of diffusers' caches: their memory, a video's time, and a small model's error."""
    head = (
        *("`--cache`", "arrays kept, one chip, GiB", "on each of eight, GiB"),
        f"{STEPS} steps on one v6e, estimate, s",
        f"small model: steps partly skipped, of {STEPS}",
        "small model: PSNR, dB",
    )
    step = estimate("network-step-5b-v6e-1")
    plain = ("none", "", "", f"{STEPS * step['summary']['with_collectives_s']:.1f}", "0", "")
    rows = [
        (f"`{name}`", f"{one:.2f}", f"{eight:.2f}", _cached(name, skipped), str(skipped), f"{quality:.1f}")
        for name, (one, eight, skipped, quality) in kept("caches")["rows"].items()
    ]
    return table(head, [plain, *rows])


def _cached(name: str, skipped: int) -> str:
    """Return the cell of the estimated seconds of a video with a cache; empty without an estimate.

    FirstBlockCache decides at run time which steps it skips: `skipped` is their number.
    """
    cache = name.partition(":")[0]
    if not (RESULTS / f"cached-{cache}.json").exists():
        return ""
    found = estimate(f"cached-{cache}")
    counts = (STEPS - skipped, skipped) if cache == "first-block" else found["counts"]
    seconds = (program["seconds_with_collectives"] for program in found["programs"])
    return f"{sum(count * one for count, one in zip(counts, seconds, strict=True)):.1f}"


# README


def figures() -> str:
    """Return README's two tables: a video's seconds by chips, and times beside those of diffusers."""
    videos = [
        (f"CogVideoX-{model}, {STEPS} steps with guidance", model, None) for model in ("5b", "2b")
    ] + FEW_STEPS
    found = [
        (label, *(_seconds_cell(model, chips, steps) for chips in SHOWN_CHIPS))
        for label, model, steps in videos
    ]
    found = [row for row in found if any(row[1:])]  # what was not planned at all has no row
    beside_others = [
        (f"{kind} 8 frames, one v6e, estimated; diffusers in torchax", *map(seconds, cases))
        for kind, cases in CHUNKS.items()
    ]
    port, torch = step_on_a_gpu()
    beside_others.append(("a step of 5b, NVIDIA H200, measured; diffusers in eager PyTorch", torch, port))
    ratios = [
        (label, f"{theirs:.3g}", f"{ours:.3g}", f"{theirs / ours:.1f}")
        for label, theirs, ours in beside_others
    ]
    return (
        table(("seconds for 49 frames of 480 x 720, estimated", *SHOWN_CHIPS.values()), found)
        + "\n\n"
        + table(("49 frames of 480 x 720", "diffusers, s", "this project, s", "ratio"), ratios)
    )


def times() -> str:
    """Return the sentences of README's first screen."""
    one, small, eight = (f"{video_seconds('5b', chips):.0f}" for chips in ("v6e-1", "v5e-1", "v6e-8"))
    fast = video_seconds("5b", "v6e-1", 4)
    late = 100 * max(high for _low, high in stretches().values()) - 100
    port, torch = step_on_a_gpu()
    return (
        f"CogVideoX-5b makes 49 frames of 480 x 720 in **{one} s on one v6e** chip, {small} s on one v5e "
        f"with offload,\n{eight} s on eight v6e, and {fast:.1f} s on one v6e with [a LoRA for four steps]"
        f"(#how-fast-it-is). These are estimates, up to\n{late:.0f} % too short; no TPU has run this "
        f"project yet. Measured on an NVIDIA H200, a denoising step takes **{port:.2f} s**,\n"
        f"and {torch:.2f} s with diffusers in PyTorch."
    )


def step_on_a_gpu() -> tuple[float, float]:
    """Return the measured seconds of a step of 5b on an H200: this project's, and diffusers' in PyTorch."""
    report = load(RESULTS / "devices" / "nvidia-h200.json", runs.FORMAT)
    ((_job, port, torch),) = beside(report, "torch")
    return port, torch


def seconds(name: str) -> float:
    """Return the estimated seconds of a plan's last program."""
    return estimate(name)["programs"][-1]["seconds"]


def video_seconds(model: str, chips: str, steps: int | None = None) -> float:
    """Return the seconds of a video, with the moves of offload: of all steps, or `steps` without guidance."""
    plan = estimate(f"pipeline-{model}-{chips}")
    prompts, denoising, *decoding = spent(plan)
    if steps:
        prompts /= 2  # there is no negative prompt
        denoising = steps * estimate(f"one-pass-{model}-{chips}")["summary"]["with_collectives_s"]
    return prompts + denoising + sum(decoding) + fitting(plan)[1]


def _seconds_cell(model: str, chips: str, steps: int | None) -> str:
    if steps and not (RESULTS / f"one-pass-{model}-{chips}.json").exists():
        return ""
    found = video_seconds(model, chips, steps)
    fits, _moving = fitting(estimate(f"pipeline-{model}-{chips}"))
    return f"{found:.{0 if found > 20 else 1}f}" + (", with offload" if fits == "with offload" else "")
