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
    # The plans of its parts: prompt, step and VAE.
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


def _row(plan: dict[str, Any]) -> tuple[str, ...]:
    job, mesh, summary = plan["job"], plan["mesh"], plan["summary"]
    video = f", {job['frames']} x {job['height']} x {job['width']}" if job["network"] == "step" else ""
    return (
        f"{job['network']}, {plan['model']}{video}",
        f"{plan['topology']}, dp={mesh['dp']} tp={mesh['tp']}",
        f"{summary['arguments_GiB']:.2f}",
        f"{summary['temporaries_GiB']:.2f}",
        summary["fits"].partition(" ")[0],
        *map(_seconds, (summary["estimate_s"], summary["collectives_s"])),
    )


def _seconds(value: float) -> str:
    return f"{value:.4f}" if value < 0.01 else f"{value:.2f}"


def _parts(prompt: str, step: str, vae: str) -> list[Path]:
    return [
        RESULTS / f"network-{prompt}.json",
        RESULTS / f"network-{step}.json",
        RESULTS / f"plan-{vae}-torchax.json",
    ]


def _video(name: str, plans: list[Path]) -> tuple[str, ...]:
    prompts, step, frames = (load(plan, FORMAT)["summary"]["with_collectives_s"] for plan in plans)
    parts = (prompts, STEPS * step, step, frames, prompts + STEPS * step + frames)
    return name, *(f"{seconds:.3f}" if seconds < 0.1 else f"{seconds:.2f}" for seconds in parts)


FIGURE_HEAD = ("estimates, CogVideoX-5b, bfloat16", "chips", "diffusers through torchax", "this project")


def _figures() -> list[tuple[str, ...]]:
    """Return the rows of README's table."""

    def plan(name: str) -> dict[str, Any]:
        return load(RESULTS / f"{name}.json", FORMAT)

    def steady(kind: str, build: str) -> str:
        found = plan(f"plan-v6e-1-{kind}-{build}")["programs"][-1]["seconds_with_collectives"]
        return f"{found:.3f} s"

    rows = [
        (
            f"{kind} a chunk, 8 frames of 480 x 720",
            "1 v6e",
            *(steady(kind, b) for b in ("torchax-stock", "torchax")),
        )
        for kind in ("decode", "encode")
    ]
    video = plan("plan-v6e-8-decode-torchax")["summary"]["with_collectives_s"]
    rows.append(("decode 81 frames of 768 x 1360", "8 v6e", "", f"{video:.2f} s"))
    step = plan("network-step-5b-v6e-1")["summary"]["with_collectives_s"]
    rows.append(("a denoising step, 49 frames of 480 x 720", "1 v6e", "", f"{step:.2f} s"))
    name = "5b, 49 x 480 x 720, v6e-8"
    rows.append(
        (
            "a prompt to 49 frames of 480 x 720, 50 steps",
            "8 v6e",
            "",
            f"{_video(name, _parts(*VIDEOS[name]))[-1]} s",
        )
    )
    return rows


LAYER = {
    # A kernel of 5b: what of a layer it computes; ms before (XLA, or a kernel of commit 4ef3ce7); floor.
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
    (step,) = plan["programs"]
    now = {name: step["kernel_times"][name]["seconds"] / LAYERS * 1e3 for name in LAYER}
    return [
        (part, f"{before:.2f}", f"{now[name]:.2f}", f"{floor:.2f}")
        for name, (part, before, floor) in LAYER.items()
    ]


TRAINING_HEAD = ("v6e, 1 x 64 x 64, bfloat16", "estimate, ms", "floor, ms", "temporaries, GiB", "compile, s")


def _training(plan: dict[str, Any]) -> list[tuple[str, ...]]:
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


def _kept(case: str) -> Path:
    return RESULTS / f"{case if case.startswith(('train', 'cached')) else f'network-{case}'}.json"


if __name__ == "__main__":
    for case in sys.argv[1:]:
        if code := main(["plan", *CASES[case].split(), "-o", str(_kept(case))]):
            sys.exit(code)
    training = load(_kept(TRAINING), FORMAT)
    fill(DOCS / "planning.md", "training", table(TRAINING_HEAD, _training(training)))
    layer = _layer(load(_kept("step-5b-v6e-1"), FORMAT))
    fill(DOCS / "kernels.md", "layer", table(LAYER_HEAD, layer))
    plans = [load(path, FORMAT) for path in sorted(RESULTS.glob("network-*.json"))]
    fill(PAGE, "network plans", table(HEAD, [_row(plan) for plan in plans]))
    videos = {name: _parts(*cases) for name, cases in VIDEOS.items()}
    kept = {name: parts for name, parts in videos.items() if all(part.exists() for part in parts)}
    fill(PAGE, "videos", table(VIDEO_HEAD, [_video(*item) for item in kept.items()]))
    fill(DOCS.parent / "README.md", "figures", table(FIGURE_HEAD, _figures()))
