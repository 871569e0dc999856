"""Which pipeline fits on which TPU: the weights on a device of every slice, and a table with the estimates.

    python -m benchmarks.pipelines                             # writes results/pipelines.json: weights alone
    python -m benchmarks estimate --cases pipeline-5b-v6e-1    # compiles one pipeline for one slice
    python -m benchmarks draw planning.md

The weights follow from shapes and from how a mesh splits them, so they are known of every slice without
compiling. What a program needs beside its weights is read off its compiled form, where one was estimated.
"""

from typing import Any

from benchmarks.estimate.command import CASES, parsed
from benchmarks.pages import RESULTS, estimate
from cogvideox_torchax.cli import planning
from cogvideox_torchax.files.reports import load, table, write_json
from cogvideox_torchax.plan.chips import CHIPS, GIB
from cogvideox_torchax.plan.networks import STEPS

FORMAT = "cogvideox-torchax-pipelines/1"
RESULT = RESULTS / "pipelines.json"
PREFIX = "pipeline-"
HEAD = (
    *("pipeline", "chips, mesh", "memory of a device, GiB", "weights, GiB", "peak, GiB", "fits"),
    *("a video, s", "compiled"),
)
PROMPTS = 2
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


def main() -> None:
    """Write the weights of every pipeline on a device of every slice, as `plan` computes them."""
    rows = {}
    for case, words in CASES.items():
        if case.startswith(PREFIX):
            request = planning.requested(parsed(words.split()))
            parts = (request.about[f"{name}_GiB"] for name in ("text_encoder", "transformer", "vae"))
            weights = [round(size * GIB) for size in parts]
            rows[case] = {
                "weights": weights,
                "decoder": sum(weights) - request.other_weights[-1],
                "parallel": request.about["parallel"],
            }
    write_json(RESULT, {"format": FORMAT, "rows": rows})


def drawn() -> str:
    """Return the table: a row for each slice, with what was compiled for it."""
    rows = []
    for case, found in load(RESULT, FORMAT)["rows"].items():
        args = parsed(CASES[case].split())
        model, generation, count = case.removeprefix(PREFIX).rsplit("-", 2)
        memory = CHIPS[generation].memory
        total, (how, peak, seconds) = sum(found["weights"]), _compiled(case, found)
        # Without the peak, weights that fit do not tell whether the pipeline does.
        fits = "no" if max(total, peak) > memory else "yes" if peak else ""
        rows.append(
            (
                f"{model}, {args.frames} x {args.height} x {args.width}",
                f"{count} {generation}, dp={args.dp} tp={args.tp}",
                f"{memory / GIB:g}",
                f"{total / GIB:.1f}",
                f"{peak / GIB:.1f}" if peak else "",
                fits,
                f"{seconds:.1f}" if peak else "",
                how,
            )
        )
    return table(HEAD, rows)


def _compiled(case: str, found: dict[str, Any]) -> tuple[str, float, float]:
    """Return how a slice was compiled, the bytes at its peak, and the seconds of a video; 0 for not compiled.

    Where the pipeline was not compiled whole, the estimates of its parts are taken, if `PARTS` names them.
    """
    if (RESULTS / f"{case}.json").exists():
        summary = estimate(case)["summary"]
        return "whole", summary["peak_memory_GiB"] * GIB, summary["with_collectives_s"]
    if case not in PARTS:
        return "not compiled", 0.0, 0.0
    documents = [estimate(part) for part in PARTS[case]]
    own = [*found["weights"][:2], found["decoder"]]
    peaks = [max(program["peak_bytes"] for program in document["programs"]) for document in documents]
    prompt, step, decoding = (document["summary"]["with_collectives_s"] for document in documents)
    peak = sum(found["weights"]) + max(peak - weights for peak, weights in zip(peaks, own, strict=True))
    return "in parts", peak, PROMPTS * prompt + STEPS * step + decoding


TABLES = {("docs/planning.md", "pipelines"): drawn}

if __name__ == "__main__":
    main()
