"""The TPU compiler's figures for a pipeline's networks and a training step.

They are kept in results/ for the tables in docs/pipelines.md, docs/planning.md and docs/performance.md.

    python benchmarks/plan_pipeline.py CASE ...      # minutes each
    python benchmarks/plan_pipeline.py               # draws the tables
"""

import sys
from pathlib import Path
from typing import Any

from benchmarks.pages import fill
from cogvideox_torchax.cli import main
from cogvideox_torchax.files.reports import load, table
from cogvideox_torchax.plan.jobs import FORMAT

RESULTS = Path(__file__).parent / "results"
DOCS = Path(__file__).parent.parent / "docs"
PAGE = DOCS / "performance.md"
EIGHT = "--topology v6e:2x4 --dp 2 --tp 4"
LARGE = "--frames 81 --height 768 --width 1360"
SMALL = "--frames 49 --height 480 --width 720"
STEP = f"--network step --model 5b --topology v6e:1x1 {SMALL}"
TRAINING = "train-step-v6e-1"
CASES = {
    "step-1.5-5b-v6e-8": f"--network step --model 1.5-5b {EIGHT} {LARGE}",
    "step-1.5-5b-v6e-4": f"--network step --model 1.5-5b --topology v6e:2x2 --dp 2 --tp 2 {LARGE}",
    "step-1.5-5b-v6e-16": f"--network step --model 1.5-5b --topology v6e:4x4 --dp 2 --tp 8 {LARGE}",
    "step-1.5-5b-v6e-32": f"--network step --model 1.5-5b --topology v6e:4x8 --dp 2 --tp 16 {LARGE}",
    "step-5b-v6e-1": STEP,
    "cached-first-block": f"{STEP} --cache first-block:0.1 --skips 20",
    "cached-pab": f"{STEP} --cache pab",
    "cached-magcache": f"{STEP} --cache magcache:{Path(__file__).parent / 'ratios.json'}",
    "cached-taylorseer": f"{STEP} --cache taylorseer",
    "cached-fastercache": f"{STEP} --cache fastercache",
    "step-5b-v6e-2": f"--network step --model 5b --topology v6e:1x2 --dp 2 {SMALL}",
    "step-2b-v6e-1": f"--network step --model 2b --topology v6e:1x1 {SMALL}",
    "step-5b-v6e-8": f"--network step --model 5b {EIGHT} {SMALL}",
    "prompt-v6e-1": "--network prompt --model 5b --topology v6e:1x1",
    "prompt-v6e-8": f"--network prompt --model 5b {EIGHT}",
    TRAINING: "--network train-step --model 5b --frames 1 --height 64 --width 64",
}
STEPS = 50
VIDEOS = {
    # Cases of the plans of a video's parts: of the prompt and a step in `CASES`, of the VAE in `plan.CASES`.
    "2b, 49 x 480 x 720, one v6e": ("prompt-v6e-1", "step-2b-v6e-1", "v6e-1-decode"),
    "5b, 49 x 480 x 720, one v6e": ("prompt-v6e-1", "step-5b-v6e-1", "v6e-1-decode"),
    "5b, 49 x 480 x 720, v6e-8": ("prompt-v6e-8", "step-5b-v6e-8", "v6e-8-decode-small"),
    "1.5-5b, 81 x 768 x 1360, v6e-8": ("prompt-v6e-8", "step-1.5-5b-v6e-8", "v6e-8-decode"),
}
VIDEO_HEAD = ("video", "prompts, s", f"{STEPS} steps, s", "one step, s", "VAE, s", "total, s")
HEAD = (
    "network",
    "mesh",
    "arguments, GiB",
    "temporaries, GiB",
    "fits",
    "estimate, s",
    "collectives, s",
)


def _file(case: str) -> str:
    """Return the name in results/ of the plan of a case of `CASES`."""
    return case if case.startswith(("train", "cached")) else f"network-{case}"


def _plan(name: str) -> dict[str, Any]:
    """Return a kept plan, by its name in results/."""
    return load(RESULTS / f"{name}.json", FORMAT)


def _row(plan: dict[str, Any]) -> tuple[str, ...]:
    """Return the row of a network's plan below `HEAD`."""
    job, mesh, summary = plan["job"], plan["mesh"], plan["summary"]
    video = f", {job['frames']} x {job['height']} x {job['width']}" if job["network"] == "step" else ""
    return (
        f"{job['network']}, {plan['model']}{video}",
        f"{plan['topology']}, dp={mesh['dp']} tp={mesh['tp']}",
        f"{summary['arguments_GiB']:.2f}",
        f"{summary['temporaries_GiB']:.2f}",
        summary["fits"].partition(" ")[0],
        *(_seconds(summary[name], 0.01, 4) for name in ("estimate_s", "collectives_s")),
    )


def _seconds(value: float, least: float, digits: int) -> str:
    """Return the cell of a time: two digits after the point, or so many `digits` below `least`."""
    return f"{value:.{digits if value < least else 2}f}"


def _video(name: str) -> tuple[str, ...]:
    """Return the row of a video of `VIDEOS` below `VIDEO_HEAD`."""
    prompt, step, vae = VIDEOS[name]
    plans = _plan(_file(prompt)), _plan(_file(step)), _plan(f"plan-{vae}-torchax")
    prompts, one_step, frames = (plan["summary"]["with_collectives_s"] for plan in plans)
    steps = STEPS * one_step
    parts = (prompts, steps, one_step, frames, prompts + steps + frames)
    return name, *(_seconds(seconds, 0.1, 3) for seconds in parts)


FIGURE_HEAD = (
    "estimated time, CogVideoX-5b in bfloat16",
    "chips",
    "diffusers through torchax",
    "this project",
)


def _figures() -> list[tuple[str, ...]]:
    """Return the rows of README's table, below `FIGURE_HEAD`."""
    rows = []
    for kind in ("decode", "encode"):
        plans = [_plan(f"plan-v6e-1-{kind}-{build}") for build in ("torchax-stock", "torchax")]
        seconds = (f"{plan['programs'][-1]['seconds_with_collectives']:.3f} s" for plan in plans)
        rows.append((f"{kind} a chunk, 8 frames of 480 x 720", "1 v6e", *seconds))
    video = _plan("plan-v6e-8-decode-torchax")["summary"]["with_collectives_s"]
    rows.append(("decode 81 frames of 768 x 1360", "8 v6e", "", f"{video:.2f} s"))
    step = _plan("network-step-5b-v6e-1")["summary"]["with_collectives_s"]
    rows.append(("a denoising step, 49 frames of 480 x 720", "1 v6e", "", f"{step:.2f} s"))
    whole = _video("5b, 49 x 480 x 720, v6e-8")[-1]
    rows.append(("a prompt to 49 frames of 480 x 720, 50 steps", "8 v6e", "", f"{whole} s"))
    return rows


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
LAYER_HEAD = ("part of a layer", "before, ms", "now, ms", "floor, ms")


def _layer(plan: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the rows below `LAYER_HEAD`, of the plan of a step of 5b."""
    (step,) = plan["programs"]
    now = {name: step["kernel_times"][name]["seconds"] / LAYERS * 1e3 for name in LAYER}
    return [
        (part, f"{before:.2f}", f"{now[name]:.2f}", f"{floor:.2f}")
        for name, (part, before, floor) in LAYER.items()
    ]


TRAINING_HEAD = ("v6e, 1 x 64 x 64, bfloat16", "estimate, ms", "floor, ms", "temporaries, GiB", "compile, s")


def _training(plan: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the rows of a training step's plan below `TRAINING_HEAD`: of each program, and of the step."""
    rows = [
        (
            f"{program['name']}, forward and backward",
            f"{program['seconds'] * 1e3:.1f}",
            f"{program['floor_seconds'] * 1e3:.2f}",
            f"{program['temp_bytes'] / 2**30:.2f}",
            f"{program['compile_seconds']:.0f}",
        )
        for program in plan["programs"]
    ]
    summary = plan["summary"]
    seconds, temporaries = summary["with_collectives_s"], summary["temporaries_GiB_at_most"]
    whole = (f"{seconds * 1e3:.1f}", "", f"{temporaries:.2f}", f"{summary['compiled_in_s']:.0f}")
    peak = summary["peak_memory_GiB_at_most"]
    step = f"a step; with weights, gradients and AdamW's moments {peak:.2f} GiB at most"
    return [*rows, (step, *whole)]


if __name__ == "__main__":
    for case in sys.argv[1:]:
        if code := main(["plan", *CASES[case].split(), "-o", str(RESULTS / f"{_file(case)}.json")]):
            sys.exit(code)
    fill(DOCS / "planning.md", "training", table(TRAINING_HEAD, _training(_plan(TRAINING))))
    fill(DOCS / "kernels.md", "layer", table(LAYER_HEAD, _layer(_plan("network-step-5b-v6e-1"))))
    plans = [_plan(path.stem) for path in sorted(RESULTS.glob("network-*.json"))]
    fill(PAGE, "network plans", table(HEAD, [_row(plan) for plan in plans]))
    fill(PAGE, "videos", table(VIDEO_HEAD, [_video(name) for name in VIDEOS]))
    fill(DOCS.parent / "README.md", "figures", table(FIGURE_HEAD, _figures()))
