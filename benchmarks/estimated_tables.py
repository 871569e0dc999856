"""The tables of estimates in the documents, each a function without arguments, from results/."""

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks import calibration
from benchmarks.pages import RESULTS, ROOT, STAR, estimate, estimates, kept
from benchmarks.plan.chips import CHIPS, GIB
from benchmarks.plan.command import CASES, parsed
from benchmarks.plan.networks import STEPS
from cogvideox_torchax.files.reports import pyplot, save_figure, table

PARTS = {
    "pipeline-2b-v6e-1": ("network-prompt-v6e-1", "network-step-2b-v6e-1", "plan-v6e-1-decode-torchax"),
    "pipeline-2b-v6e-8": ("network-prompt-v6e-8", "network-step-2b-v6e-8", "plan-v6e-8-decode-small-torchax"),
    "pipeline-5b-v6e-1": ("network-prompt-v6e-1", "network-step-5b-v6e-1", "plan-v6e-1-decode-torchax"),
    "pipeline-5b-v6e-8": ("network-prompt-v6e-8", "network-step-5b-v6e-8", "plan-v6e-8-decode-small-torchax"),
    "pipeline-1.5-5b-v6e-8": (
        "network-prompt-v6e-8",
        "network-step-1.5-5b-v6e-8",
        "plan-v6e-8-decode-torchax",
    ),
}
"""Estimates of a prompt, a step and decoding on one slice, which were compiled one by one."""
VIDEOS = {
    "2b, 49 x 480 x 720, one v6e": "pipeline-2b-v6e-1",
    "5b, 49 x 480 x 720, one v6e": "pipeline-5b-v6e-1",
    "5b, 49 x 480 x 720, v6e-8": "pipeline-5b-v6e-8",
    "1.5-5b, 81 x 768 x 1360, v6e-8": "pipeline-1.5-5b-v6e-8",
}
"""By a video: the key of the estimates of its parts in `PARTS`."""
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
RUNNING_MAXIMUM = {"v6e": 1705, "v5e": 3396, "v5p": 1685, "tpu7x": 1811}
"""By chip: cycles of the attention kernel of commit 4ef3ce7, which kept a running maximum."""


SHOWN = {
    # By a bar of the picture: its estimate, and what README says of it.
    "decode a chunk, stock torchax": "plan-v6e-1-decode-torchax-stock",
    "decode a chunk": "plan-v6e-1-decode-torchax",
    "encode a chunk, stock torchax": "plan-v6e-1-encode-torchax-stock",
    "encode a chunk": "plan-v6e-1-encode-torchax",
    "a step of 5b": "network-step-5b-v6e-1",
}


def starred(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table, with a line below it if a cell has a `STAR`."""
    note = "\n\n\\* Made by the earlier method, which took the compiler's cycles for what only moves data."
    return table(head, rows) + (note if any(STAR in cell for row in rows for cell in row) else "")


# How far estimates are off


def calibrations() -> str:
    """Return the table of published times beside estimates."""
    return table(
        (
            "chip: program",
            "measured, ms",
            "estimate, ms",
            "measured / estimate",
            "bound by",
            "source; clock",
        ),
        [
            (
                name,
                *(f"{1e3 * seconds:.3g}" for seconds in (row["seconds"], row["estimate"])),
                f"{row['seconds'] / row['estimate']:.2f}",
                row["bound"],
                row["source"],
            )
            for name, row in kept("calibration")["rows"].items()
        ],
    )


def likely(name: str) -> tuple[float, float, float]:
    """Return the seconds of an estimate's last program, and the ends of their interval."""
    program = estimate(name)["programs"][-1]
    return program["seconds"], *calibration.interval(program)


def shown() -> dict[str, tuple[float, float, float]]:
    """Return what is `likely`, by the bars' names."""
    return {label: likely(name) for label, name in SHOWN.items()}


def intervals(page: str) -> str:
    """Return the sentences of the intervals, with a link to the page of `calibrations`."""
    kinds = [f"{kind} {low:.2f} to {high:.2f}" for kind, (low, high) in calibration.intervals().items()]
    each = [f"{name} {low / mid:.2f} to {high / mid:.2f}" for name, (mid, low, high) in shown().items()]
    return (
        f"[Published times]({page}#how-far-estimates-are-off) of other programs are these multiples of their "
        f"estimates:\n{', '.join(kinds)}.\n"
        f"So these multiples of the estimates here are likely:\n{', '.join(each)}."
    )


def plot_intervals() -> None:
    """Draw the estimates of `SHOWN` as bars with their intervals."""
    bars = dict(reversed(shown().items()))  # the first one at the top
    figure, axis = pyplot().subplots(figsize=(8, 0.5 * len(bars) + 1), layout="tight")
    mid, low, high = zip(*bars.values(), strict=True)
    axis.barh([*bars], mid, xerr=[np.subtract(mid, low), np.subtract(high, mid)], capsize=4)
    axis.set(xlabel="seconds on one v6e, estimated, with intervals")
    save_figure(figure, ROOT / "docs" / "images" / "estimates.png")


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
    return f"{'; '.join(sorted(origins))}:\n\n{starred(head, rows)}\n"


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
        plan["backend"] + plan["star"],
        f"{first:.0f}" if whole else "",
        "" if one_chunk else f"{steady:.0f}",
        f"{summary['with_collectives_s']:.2f}" if whole else "",
        (f"{peak / GIB:.1f}" + ("" if summary["fits"] else " (does not fit)")) if whole else "",
    )


def composition() -> str:
    """Return a table of the milliseconds of each part of a program, of the torchax build's plans for v6e."""
    return starred(
        ("program", "total", *FUSED, "other kernels", "XLA", "collectives"),
        [
            _composition_row(plan, program)
            for plan in estimates("plan-v6e-*-torchax")
            if len(plan["programs"]) > 1
            for program in plan["programs"]
        ],
    )


def _composition_row(plan: dict[str, Any], program: dict[str, Any]) -> tuple[str, ...]:
    job, chips = plan["job"], plan["mesh"]["dp"] * plan["mesh"]["tp"]
    video = f"{job['direction']} {job['height']} x {job['width']}, {chips} chip{'s' * (chips > 1)}"
    chunk = f"{_chunk(program)} of {program['frames']}{plan['star']}"
    kernels = {name: kernel["seconds"] for name, kernel in program["kernel_times"].items()}
    fused = [kernels.pop(name, 0.0) for name in FUSED]
    others = sum(kernels.values())
    by_xla = program["seconds"] - sum(fused) - others
    parts = [*fused, others, by_xla, sum(program["collective_seconds"].values())]
    return (f"{video}, {chunk}", *(f"{1e3 * seconds:.1f}" for seconds in (sum(parts), *parts)))


def _chunk(program: dict[str, Any]) -> str:
    return "first chunk" if program["name"] == "first" else "steady chunk"


def torchtpu() -> str:
    """Return the table of the programs, beside torchax's and those of diffusers' own modules by torchax."""
    head = ("program", "stock torchax, ms", "torchax, ms", "TorchTPU, ms", "TorchTPU over torchax")
    rows = []
    for direction, captured in kept("torchtpu")["programs"].items():
        stock, ported = (
            {program["name"]: program for program in estimate(f"plan-v6e-1-{direction}-{build}")["programs"]}
            for build in ("torchax-stock", "torchax")
        )
        for plan in captured:
            name, own = plan["name"], ported[plan["name"]]
            rows.append(
                (
                    f"{direction}, {_chunk(plan)}",
                    # Of stock modules the first chunk's program is not estimated.
                    f"{1e3 * stock[name]['seconds']:.0f}" if name in stock else "",
                    f"{1e3 * own['seconds']:.1f}",
                    f"{1e3 * plan['seconds']:.1f}",
                    f"{plan['seconds'] / own['seconds']:.2f}",
                    f"{own['kernels']} and {plan['kernels']}",
                    f"{own['temp_bytes'] / GIB:.1f} and {plan['temp_bytes'] / GIB:.1f}",
                )
            )
    return table((*head, "kernels", "temporaries, GiB"), rows)


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
        ("chip", "cycles", "with a running maximum, formerly"),
        [
            (chip, f"{one['cycles_of_1024_x_1024']:.0f}", str(RUNNING_MAXIMUM.get(chip, "")))
            for chip, one in kept("schedules")["attention"].items()
        ],
    )


def linear() -> str:
    """Return a table of the milliseconds of a layer's products, a row for each chip and kind of weights."""
    cases = kept("schedules")["linear"]
    return table(
        ("chip, weights", *(f"{part}, ms" for part in next(iter(cases.values())))),
        [(name, *(f"{ms:.2f}" for ms in parts.values())) for name, parts in cases.items()],
    )


def layer() -> str:
    """Return a table of the milliseconds of each part of a layer, of a step of 5b."""
    (step,) = estimate("network-step-5b-v6e-1")["programs"]
    return table(
        ("part of a layer", "before, ms", "now, ms", "floor, ms"),
        [
            (
                part,
                f"{before:.2f}",
                f"{step['kernel_times'][name]['seconds'] / LAYERS * 1e3:.2f}",
                f"{floor:.2f}",
            )
            for name, (part, before, floor) in LAYER.items()
        ],
    )


# GPUs, a pipeline's networks, and training


def gpus() -> str:
    """Return the table of the memory of programs on a GPU, which `plan` has written."""
    head = ("program of 5b, 49 x 480 x 720, on one H100", "arguments, GiB", "temporaries, GiB", "whole, GiB")
    columns = ("argument_bytes", "temp_bytes", "peak_bytes")
    return table(
        head,
        [
            (
                ", ".join(dict.fromkeys((name, program["name"]))),  # a step's one program is "step" too
                *(f"{program[column] / GIB:.1f}" for column in columns),
            )
            for name in ("decode", "encode", "step")
            for program in kept(f"gpu-{name}")["programs"]
        ],
    )


def networks() -> str:
    """Return a table with a row for each estimate of a step or a prompt."""
    return starred(
        (
            *(
                "network",
                "mesh",
                "arguments, GiB",
                "temporaries, GiB",
                "fits",
                "estimate, s",
                "collectives, s",
            ),
            "a step's host, s",
        ),
        [_network_row(plan) for plan in estimates("network-*")],
    )


def _network_row(plan: dict[str, Any]) -> tuple[str, ...]:
    job, mesh, summary, (program,) = plan["job"], plan["mesh"], plan["summary"], plan["programs"]
    is_step = job["network"] == "step"
    video = f", {job['frames']} x {job['height']} x {job['width']}" if is_step else ""
    return (
        f"{job['network']}, {plan['model']}{video}{plan['star']}",
        f"{plan['topology']}, dp={mesh['dp']} tp={mesh['tp']}",
        f"{program['argument_bytes'] / GIB:.2f}",
        f"{program['temp_bytes'] / GIB:.2f}",
        "yes" if summary["fits"] else "no",
        *(_seconds(summary[name], 0.01, 4) for name in ("estimate_s", "collectives_s")),
        f"{host_step_seconds(plan['model']):.3f}" if is_step else "",
    )


def host_step_seconds(video: str) -> float:
    """Return the seconds of the host for a step; `video` begins with the model's name."""
    rows = kept("host")["layers"]  # by names such as "5b and 1.5-5b"
    return next(row["step_ms"] for name, row in rows.items() if video.split(",")[0] in name) / 1e3


def videos() -> str:
    """Return a table of the seconds of a whole video, from the prompt to the frames."""
    return table(
        (
            *("video", "prompts, s", f"{STEPS} steps, s", "one step, s", "a step's host, s", "VAE, s"),
            "total, s",
        ),
        [(name, *(_seconds(seconds, 0.1, 3) for seconds in seconds_of_video(name))) for name in VIDEOS],
    )


def seconds_of_video(name: str) -> tuple[float, ...]:
    """Return the seconds of the prompts, all steps, one step, its work on the host, the VAE, and a video.

    The host queues a step while the device computes the one before, so the longer of the two counts. `name`
    is a key of `VIDEOS`.
    """
    parts = map(estimate, PARTS[VIDEOS[name]])
    prompts, one_step, frames = (part["summary"]["with_collectives_s"] for part in parts)
    host_step = host_step_seconds(name)
    steps = STEPS * max(one_step, host_step)
    return prompts, steps, one_step, host_step, frames, prompts + steps + frames


def _seconds(value: float, least: float, digits: int) -> str:
    """Return the cell of a time: two digits after the point, or so many `digits` below `least`."""
    return f"{value:.{digits if value < least else 2}f}"


def pipelines() -> str:
    """Return a table of the weights on every slice, with what was compiled for it."""
    return _fitting(kept("pipelines")["rows"])


def small_chips() -> str:
    """Return the rows of `pipelines` for one chip of v5e or v6e, and for eight of v5e."""
    small = re.compile(r"-(v5e-[18]|v6e-1)(-int8|-int8-dynamic)?$")
    return _fitting({case: row for case, row in kept("pipelines")["rows"].items() if small.search(case)})


def _fitting(found_rows: dict[str, Any]) -> str:
    """Return a table with a row for each case, which says whether it fits, with offload if it has to."""
    head = ("pipeline", "chips, mesh", "memory of a device, GiB", "weights, GiB", "peak, GiB")
    rows = []
    for case, found in found_rows.items():
        args = parsed(CASES[case].split())
        generation, grid = args.topology.split(":")
        memory, weights = CHIPS[generation].memory, found["weights"]
        how, program_peaks, seconds, over = _compiled(case)
        peak = offload_peak = 0.0
        if program_peaks:
            prompt, step, *decoding = program_peaks
            beside = weights[2] - found["decoder"]  # the VAE's encoder
            offload_peak = max(prompt, step, max(decoding) + beside)
            others = prompt - weights[0], step - weights[1], max(decoding) - found["decoder"]
            peak = sum(weights) + max(others)
        moving = 0.0
        # Weights that fit do not tell whether the pipeline does.
        fits = ("yes" if peak <= memory else "no") if program_peaks else ""
        if fits == "no" and offload_peak <= memory:  # each network goes to the devices, and back
            fits, moving = "with offload", 2 * sum(weights) / CHIPS[generation].host_link
        rows.append(
            (
                f"{args.model}, {args.frames} x {args.height} x {args.width}"
                + (f", {args.weights}" if args.weights else "")
                + (f", tiles of {args.tiling}" if args.tiling else ""),
                f"{math.prod(map(int, grid.split('x')))} {generation}, dp={args.dp} tp={args.tp}",
                f"{memory / GIB:g}",
                f"{sum(weights) / GIB:.1f}",
                *(f"{each / GIB:.1f}" if each else "" for each in (peak, offload_peak)),
                fits,
                f"{over}{seconds + moving:.1f}" if fits not in ("", "no") else "",
                f"{moving:.1f}" if moving else "",
                how,
            )
        )
    return starred(
        (*head, "peak with offload, GiB", "fits", "a video, s", "of these moving, s", "compiled"), rows
    )


def _compiled(case: str) -> tuple[str, list[float], float, str]:
    """Return how a slice was compiled, each program's peak in bytes, and the seconds of a video.

    Where the pipeline was not compiled whole, the estimates of its parts are taken, if `PARTS` names them. A
    program whose time is not known counts by its floor: then "over " stands for the last result, else "".
    """
    is_whole = (RESULTS / f"{case}.json").exists()
    documents = [estimate(name) for name in ((case,) if is_whole else PARTS.get(case, ()))]
    if not documents:
        return "not compiled", [], 0.0, ""
    # 2: the prompt, and the negative one.
    counts = documents[0]["counts"] if is_whole else (2, STEPS, *documents[-1]["counts"])
    programs = [program for document in documents for program in document["programs"]]
    times = [program["seconds_with_collectives"] for program in programs]
    return (
        ("whole" if is_whole else "in parts") + max(document["star"] for document in documents),
        [program["peak_bytes"] for program in programs],
        sum(
            count * (program["floor_s"] if seconds is None else seconds)
            for count, seconds, program in zip(counts, times, programs, strict=True)
        ),
        "over " if None in times else "",
    )


def caches() -> str:
    """Return the table of diffusers' caches: their memory, a video's time, and a small model's error."""
    head = (
        *("`--cache`", "arrays kept, one chip, GiB", "on each of eight, GiB"),
        f"{STEPS} steps on one v6e, estimate, s",
        f"small model: steps partly skipped, of {STEPS}",
        "small model: PSNR, dB",
    )
    step = estimate("network-step-5b-v6e-1")
    plain = ("none" + step["star"], "", "", f"{STEPS * step['summary']['with_collectives_s']:.1f}", "0", "")
    rows = [
        (f"`{name}`", f"{one:.2f}", f"{eight:.2f}", _cached(name, skipped), str(skipped), f"{quality:.1f}")
        for name, (one, eight, skipped, quality) in kept("caches")["rows"].items()
    ]
    return starred(head, [plain, *rows])


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
    return f"{sum(count * one for count, one in zip(counts, seconds, strict=True)):.1f}{found['star']}"


def training() -> str:
    """Return a table of a training step: a row for each program, and one for the step."""
    plan = estimate("train-step-v6e-1")
    rows = [
        (
            f"{program['name']}, forward and backward{plan['star']}",
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
    return starred(
        ("v6e, 1 x 64 x 64, bfloat16", "estimate, ms", "floor, ms", "temporaries, GiB", "compile, s"),
        [*rows, whole],
    )


def figures() -> str:
    """Return README's table."""
    head = ("estimated time, CogVideoX-5b in bfloat16", "chips", "diffusers through torchax", "this project")
    decoding = estimate("plan-v6e-8-decode-torchax")["summary"]["with_collectives_s"]
    whole = seconds_of_video("5b, 49 x 480 x 720, v6e-8")[-1]
    return table(
        head,
        [
            *(
                (
                    *(f"{kind} a chunk, 8 frames of 480 x 720", "1 v6e"),
                    *(_with_interval(f"plan-v6e-1-{kind}-{build}") for build in ("torchax-stock", "torchax")),
                )
                for kind in ("decode", "encode")
            ),
            ("decode 81 frames of 768 x 1360", "8 v6e", "", f"{decoding:.2f} s"),
            (
                "a denoising step, 49 frames of 480 x 720",
                "1 v6e",
                "",
                _with_interval("network-step-5b-v6e-1"),
            ),
            ("a prompt to 49 frames of 480 x 720, 50 steps", "8 v6e", "", f"{whole:.2f} s"),
        ],
    )


def _with_interval(name: str) -> str:
    """Return the cell of an estimate's last program, in seconds with their interval."""
    seconds, low, high = likely(name)
    return f"{seconds:.3f} s ({low:.3f} to {high:.3f})"
