"""Which pipeline fits on which TPU: the weights on a device of every slice, and a table with the estimates.

    python -m benchmarks.pipelines                             # writes results/pipelines.json: weights alone
    python -m benchmarks estimate --cases pipeline-5b-v6e-1    # compiles one pipeline for one slice
    python -m benchmarks draw planning.md

Weights are arithmetic, of shapes and of how a mesh splits them: they take no compiler, and are of all slices.
What a program needs beside them is read off its compiled form, in the estimates that were made.
"""

import math
import os
from typing import Any

if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=16")

import numpy as np
import torch

from benchmarks.estimate.command import CASES
from benchmarks.estimate.command import FORMAT as ESTIMATE
from benchmarks.pages import RESULTS
from cogvideox_torchax import runtime
from cogvideox_torchax.files.reports import load, table, write_json
from cogvideox_torchax.plan.chips import CHIPS, GIB
from cogvideox_torchax.sharding import make_mesh

FORMAT = "cogvideox-torchax-pipelines/1"
RESULT = RESULTS / "pipelines.json"
PREFIX = "pipeline-"
HEAD = (
    *("pipeline", "chips, mesh", "memory of a device, GiB", "weights, GiB", "peak, GiB", "fits"),
    *("a video, s", "compiled"),
)
PROMPTS, STEPS = 2, 50
PARTS = {
    "pipeline-2b-v6e-1": ("network-prompt-v6e-1", "network-step-2b-v6e-1", "plan-v6e-1-decode-torchax"),
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
    from benchmarks.estimate.command import parsed
    from cogvideox_torchax.plan import models, networks

    runtime.enable()
    parts: dict[str, tuple[Any, ...]] = {}  # by a pipeline: text encoder, transformer, VAE, without weights
    rows = {}
    for case, words in CASES.items():
        if not case.startswith(PREFIX):
            continue
        args = parsed(words.split())
        if args.model not in parts:
            text = networks.text_encoder(networks.text_encoder_config(args.model), torch.bfloat16)
            parts[args.model] = (
                networks.port_network(text),
                networks.weightless_transformer(args.model, torch.bfloat16),
                models.weightless_vae(args.model, torch.bfloat16),
            )
        *sequences, vae = parts[args.model]
        mesh, chip = make_mesh(args.dp, args.tp), CHIPS[args.topology.partition(":")[0]]
        for network in sequences:
            network.place_on(mesh, None, chip.memory)
        rows[case] = {
            "weights": [*map(_on_a_device, sequences), _bytes(vae)],
            "decoder": _bytes(vae.decoder),
            "parallel": str(sequences[1].parallelism),
        }
    write_json(RESULT, {"format": FORMAT, "rows": rows})


def _on_a_device(network: Any) -> int:
    """Return the bytes of a placed network's weights on one device of its mesh."""
    place = network.placement
    return sum(
        math.prod(struct.sharding.shard_shape(struct.shape)) * weight.element_size()
        for name, weight in network.named_parameters()
        for struct in [place.weight_struct(name, tuple(weight.shape), np.float32)]
    )


def _bytes(network: Any) -> int:
    return sum(weight.numel() * weight.element_size() for weight in network.parameters())


def drawn() -> str:
    """Return the table: a row for each slice, with what was compiled for it."""
    from benchmarks.estimate.command import parsed

    rows = []
    for case, found in load(RESULT, FORMAT)["rows"].items():
        args, (model, generation, count) = (
            parsed(CASES[case].split()),
            case.removeprefix(PREFIX).rsplit("-", 2),
        )
        memory = CHIPS[generation].memory
        total, (how, peak, seconds) = sum(found["weights"]), _compiled(case, found)
        fits = "" if total <= memory else "no"
        if peak:
            fits = "yes" if peak <= memory else "no"
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

    Where the pipeline was not compiled whole, the estimates of its parts are taken if there are all three.
    """
    path = RESULTS / f"{case}.json"
    if path.exists():
        summary = load(path, ESTIMATE)["summary"]
        return "whole", summary["peak_memory_GiB"] * GIB, summary["with_collectives_s"]
    parts = [RESULTS / f"{name}.json" for name in PARTS.get(case, ())]
    if not parts or not all(part.exists() for part in parts):
        return "not compiled", 0.0, 0.0
    documents = [load(part, ESTIMATE) for part in parts]
    own = [*found["weights"][:2], found["decoder"]]
    peaks = [max(program["peak_bytes"] for program in document["programs"]) for document in documents]
    prompt, step, decoding = (document["summary"]["with_collectives_s"] for document in documents)
    peak = sum(found["weights"]) + max(peak - weights for peak, weights in zip(peaks, own, strict=True))
    return "in parts", peak, PROMPTS * prompt + STEPS * step + decoding


TABLES = {("docs/planning.md", "pipelines"): drawn}

if __name__ == "__main__":
    main()
