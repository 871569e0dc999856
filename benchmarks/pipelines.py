"""The weights of every pipeline on a device of every slice, which tell where it cannot fit.

    python -m benchmarks.pipelines                             # writes results/pipelines.json: weights alone
    python -m benchmarks plan --cases pipeline-5b-v6e-1    # compiles one pipeline for one slice
    python -m benchmarks draw planning.md

The weights follow from shapes and from how a mesh splits them, so they are known of every slice without
compiling. What a program needs beside its weights is read off its compiled form, where one was estimated.
"""

from benchmarks.pages import keep
from benchmarks.plan.command import CASES, parsed
from benchmarks.plan.requests import requested


def main() -> None:
    """Write the weights of every pipeline on a device of every slice, as `plan` computes them."""
    rows = {}
    for case, words in CASES.items():
        if case.startswith("pipeline-"):
            request = requested(parsed(words.split()))
            rows[case] = {
                "weights": list(request.weights),
                "decoder": sum(request.weights) - request.other_weights[-1],
                "parallel": request.about["parallel"],
            }
    keep("pipelines", {"rows": rows}, "diffusers", "transformers")


if __name__ == "__main__":
    main()
