"""What the host does between two denoising steps, on a small model on the CPU.

    PYTHONPATH=. python benchmarks/host_time.py          # writes results/host_time.json

From the moment that a step's network is done to the moment that the next one's is handed to JAX: guidance,
the scheduler's update, the pipeline's own loop, and finding program and weights. A network is waited for, so
what is counted is work; in a real run it hides behind the network that runs meanwhile.
"""

import argparse
import itertools
import os
import statistics
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("COGVIDEOX_TORCHAX_COMPILE_CACHE", "off")

import jax
import torch
from diffusers import CogVideoXDDIMScheduler, CogVideoXDPMScheduler

from cogvideox_torchax import port
from cogvideox_torchax.files import reports
from cogvideox_torchax.versions import versions
from tests import small_pipelines

FORMAT = "cogvideox-torchax-host-time/2"
LAYERS = (2, 42)  # as small as the tests have them, and as many as the published 5b has
STEPS, LEFT_OUT = 50, 5
SCHEDULERS = {"DDIM": CogVideoXDDIMScheduler, "DPM": CogVideoXDPMScheduler}


def gaps(pipe: Any, **options: Any) -> list[float]:
    """Seconds between the networks of each two steps after the first few; compiles first."""
    spans: list[tuple[float, float]] = []
    given = small_pipelines.inputs("text", num_inference_steps=STEPS, output_type="latent", **options)
    pipe(**given)
    program = pipe.transformer.program
    inherited = program._compiled

    def timed(*args: Any) -> Any:
        start = time.perf_counter()
        result = jax.block_until_ready(inherited(*args))
        spans.append((start, time.perf_counter()))
        return result

    program._compiled = timed
    try:
        pipe(**given)
    finally:
        program._compiled = inherited
    assert len(spans) == STEPS
    return [after[0] - before[1] for before, after in itertools.pairwise(spans)][LEFT_OUT:]


def measure(scheduler: Any, layers: int, **options: Any) -> dict[str, float]:
    transformer = small_pipelines.transformer("5b", num_layers=layers)
    pipe = port(
        small_pipelines.build(transformer=transformer, scheduler=small_pipelines.scheduler(scheduler))
    )
    found = gaps(pipe, **options)
    return {
        "median_ms": 1e3 * statistics.median(found),
        "lowest_ms": 1e3 * min(found),
        "highest_ms": 1e3 * max(found),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--output", type=Path, default=Path("benchmarks/results/host_time.json"))
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    results = {}
    for (name, kind), layers, guidance in itertools.product(SCHEDULERS.items(), LAYERS, (6.0, 1.0)):
        case = f"{name}, {layers} layers, guidance {guidance:g}"
        results[case] = measure(kind, layers, guidance_scale=guidance)
        print(case, results[case], flush=True)
    document = {
        "format": FORMAT,
        "steps": STEPS,
        "versions": versions("torch", "torchax", "jax", "diffusers"),
        "results": results,
    }
    reports.write_json(args.output, document)


if __name__ == "__main__":
    main()
