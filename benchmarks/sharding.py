"""Cost of a width-sharded chunk program per device, from its compiled form: work, memory, communication.

    python -m benchmarks.sharding     # then python -m benchmarks draw

This compiles the steady chunk of the published model, in bfloat16, for one device and for a mesh of dp=1,
tp=8, on eight CPU devices that are really one machine. Nothing is run, and no weights are made.
"""

import json
import os
import platform
from dataclasses import asdict
from typing import Any

if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    os.environ.setdefault("COGVIDEOX_TORCHAX_COMPILE_CACHE", "off")

import jax
import torch

from benchmarks.pages import RESULTS
from cogvideox_torchax import make_mesh
from cogvideox_torchax.files import reports
from cogvideox_torchax.plan import jobs
from cogvideox_torchax.plan.programs import ProgramPlan, compile_program
from cogvideox_torchax.vae.directions import Direction
from cogvideox_torchax.versions import versions

DEVICES = 8
MIB = 2**20
RESULT = RESULTS / "sharding.json"
LATENTS = ((60, 90), (96, 170))
"""Heights and widths of the latents."""


def measure(direction: Direction, height: int, width: int) -> dict[str, Any]:
    """Compile a direction's steady chunk for one device and for eight; return the costs of both."""
    job = jobs.Job(direction, frames=17, height=8 * height, width=8 * width)
    alone, split = (_steady_chunk(job, devices) for devices in (1, DEVICES))
    return {
        "kind": direction,
        "latents": [height, width],
        "flops_ratio": split.flops * DEVICES / alone.flops,
        "temp_mib_single_device": alone.temp_bytes / MIB,
        "temp_mib_per_device": split.temp_bytes / MIB,
        "collectives": {kind: asdict(traffic) for kind, traffic in split.collectives.items()},
    }


def _steady_chunk(job: jobs.Job, devices: int) -> ProgramPlan:
    vae, mesh = jobs.weightless_vae("5b", torch.bfloat16), make_mesh(dp=1, tp=devices)
    _first, steady = jobs.chunk_works(vae, job, mesh)
    return compile_program(steady, mesh)


def drawn() -> str:
    head = (
        "chunk",
        "latents",
        "FLOPs, 8 / 1",
        "temporaries, 1 device, MiB",
        "on each of 8, MiB",
        "halos",
        "sums",
    )
    rows = []
    for result in json.loads(RESULT.read_text())["results"]:
        moved = result["collectives"]
        halos, sums = moved["collective-permute"], moved["all-reduce"]
        rows.append(
            (
                result["kind"],
                " x ".join(map(str, result["latents"])),
                f"{result['flops_ratio']:.3f}",
                f"{result['temp_mib_single_device']:,.0f}",
                f"{result['temp_mib_per_device']:,.0f}",
                f"{halos['bytes'] / MIB:,.0f} MiB in {halos['count']}",
                f"{sums['bytes'] / 1024:,.0f} KiB in {sums['count']}",
            )
        )
    return reports.table(head, rows)


TABLES = {("docs/architecture.md", "sharding"): drawn}


def main() -> None:
    """Measure each direction and size, and keep the results after each."""
    results = []
    for size in LATENTS:
        for direction in Direction:
            results.append(measure(direction, *size))
            print(results[-1], flush=True)
            about = {
                "versions": {**versions("jax", "torch"), "python": platform.python_version()},
                "platform": jax.devices()[0].platform,
                "devices": DEVICES,
                "dtype": "bfloat16",
                "results": results,
            }
            reports.write_json(RESULT, about)


if __name__ == "__main__":
    main()
