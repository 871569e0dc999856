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
from cogvideox_torchax import AutoencoderKLCogVideoX, make_mesh, port
from cogvideox_torchax.files import reports
from cogvideox_torchax.plan.jobs import weightless_vae
from cogvideox_torchax.plan.report import compile_last_chunk, report
from cogvideox_torchax.vae.directions import DECODE, Direction
from cogvideox_torchax.versions import versions

MIB = 2**20
RESULT = RESULTS / "sharding.json"
LATENTS = ((60, 90), (96, 170))
"""Heights and widths of the latents."""


def measure(
    single: AutoencoderKLCogVideoX,
    sharded: AutoencoderKLCogVideoX,
    direction: Direction,
    height: int,
    width: int,
) -> dict[str, Any]:
    """Compile a direction's steady chunk for one device and for the mesh; return the costs of both."""
    shape = (1, 16, 5, height, width) if direction is DECODE else (1, 3, 17, 8 * height, 8 * width)
    _, alone = compile_last_chunk(single, shape, direction=direction)
    found = report(sharded, shape, direction=direction)
    flops = alone.cost_analysis()["flops"]
    temp = alone.memory_analysis().temp_size_in_bytes
    devices = sharded.mesh.size
    return {
        "kind": direction,
        "latents": [height, width],
        "input": shape,
        "flops_single_device": flops,
        "flops_ratio": found.flops * devices / flops,
        "temp_mib_single_device": temp / MIB,
        "temp_mib_per_device": found.temp_bytes / MIB,
        "temp_ratio": found.temp_bytes / temp,
        "largest_all_gather_bytes": found.collectives["all-gather"].largest
        if "all-gather" in found.collectives
        else 0,
        "collectives": {
            kind: {"count": traffic.count, "bytes": traffic.bytes}
            for kind, traffic in found.collectives.items()
        },
        "layers": [asdict(row) for row in found.layers if row.collectives],
    }


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
    single, sharded = (weightless_vae("5b", torch.bfloat16) for _ in range(2))
    port(sharded, mesh=make_mesh(dp=1, tp=8))
    results = []
    for size in LATENTS:
        for direction in Direction:
            results.append(measure(single, sharded, direction, *size))
            print({key: value for key, value in results[-1].items() if key != "layers"}, flush=True)
            about = {
                "versions": {**versions("jax", "torch"), "python": platform.python_version()},
                "platform": jax.devices()[0].platform,
                "mesh": dict(sharded.mesh.shape),
                "dtype": "bfloat16",
                "results": results,
            }
            reports.write_json(RESULT, about)


if __name__ == "__main__":
    main()
