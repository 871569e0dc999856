"""Cost of a width-sharded chunk program per device, from its compiled form: work, memory, communication.

    python -m benchmarks.sharding     # then python -m benchmarks draw

This compiles the steady chunk of the published model, in bfloat16, for one device and for a mesh of dp=1,
tp=8, on eight CPU devices that are really one machine. Nothing is run, and no weights are made.
"""

import os
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import torch

from benchmarks.pages import keep
from benchmarks.plan.programs import ProgramPlan, compile_program
from benchmarks.plan.videos import Job, chunk_works, weightless_vae
from cogvideox_torchax import make_mesh
from cogvideox_torchax.vae.directions import Direction

MIB = 2**20
DEVICES = 8
LATENTS = ((60, 90), (96, 170))
"""Heights and widths of the latents."""


def plan(job: Job, tp: int) -> ProgramPlan:
    """Compile the steady chunk of a job for a mesh of `tp` CPU devices; return its figures."""
    mesh = make_mesh(1, tp, devices=jax.devices()[:tp])
    *_first, steady = chunk_works(weightless_vae("5b", torch.bfloat16), job, mesh)
    return compile_program(steady, mesh)


def measure(direction: Direction, height: int, width: int) -> dict[str, Any]:
    """Return the costs of a steady chunk of latents of `height` x `width`, on one device and on the mesh."""
    job = Job(direction, 17, 8 * height, 8 * width)
    alone, sharded = (plan(job, tp) for tp in (1, DEVICES))
    return {
        "kind": direction,
        "latents": [height, width],
        "flops_single_device": alone.flops,
        "flops_ratio": DEVICES * sharded.flops / alone.flops,
        "temp_mib_single_device": alone.temp_bytes / MIB,
        "temp_mib_per_device": sharded.temp_bytes / MIB,
        "collectives": {kind: vars(traffic) for kind, traffic in sharded.collectives.items()},
    }


def main() -> None:
    """Measure each direction and size, and keep the results after each."""
    results = []
    for size in LATENTS:
        for direction in Direction:
            results.append(measure(direction, *size))
            print(results[-1], flush=True)
            keep("sharding", {"tp": DEVICES, "dtype": "bfloat16", "results": results}, "jax", "torch")


if __name__ == "__main__":
    main()
