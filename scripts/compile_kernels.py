"""Compiles every Pallas kernel of the published models, at all of their shapes, for TPUs that need not exist.

    python scripts/compile_kernels.py v6e:2x4 v5p:2x2x2    # minutes each; a topology has eight devices

The installed libtpu compiles, and checks the bounds of each access to memory where it can. The models'
programs are traced, and each of their kernels is compiled alone.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import numpy as np
import torch
from jax.experimental import pallas as pl
from jax.sharding import Mesh, SingleDeviceSharding

from benchmarks.plan import chips, networks, videos
from benchmarks.plan.programs import Work
from cogvideox_torchax import make_mesh
from cogvideox_torchax.vae.directions import DECODE, ENCODE

BOUNDS: dict[str, str | bool] = {"xla_mosaic_on_device_checks": "bounds"}
"""The compiler's option by which a kernel checks the bounds of its accesses."""

Kernels = dict[tuple[str, ...], tuple[Callable[..., Any], list[jax.ShapeDtypeStruct]]]
"""Kernels with their operands' structs, by name, operands, results and constants."""


def works(topology: str) -> Iterator[tuple[Work, Any]]:
    """Yield the published models' programs with the mesh of each, on one device or on eight."""
    devices = chips.topology_devices(topology)
    alone, eight = (make_mesh(1, count, devices=devices[:count]) for count in (1, 8))
    for mesh, height, width in ((alone, 480, 720), (eight, 480, 720), (eight, 768, 1360)):
        for direction in (DECODE, ENCODE):
            job = videos.Job(direction, 17, height, width)  # a first chunk and two later ones
            vae = videos.weightless_vae("5b", torch.bfloat16)
            yield from ((work, mesh) for work in videos.chunk_works(vae, job, mesh))
    for model in networks.TRANSFORMERS:
        frames, height, width = (21, 96, 170) if model == "1.5-5b" else (13, 60, 90)
        step = networks.step_work(
            model, torch.bfloat16, alone, None, frames=frames, height=height, width=width
        )
        yield step, alone


def traced_kernels(topology: str) -> Kernels:
    """Return the distinct kernels of the published models' programs for a topology."""
    found: Kernels = {}
    pallas_call = pl.pallas_call

    def recorded(kernel: Any, *, name: str, **options: Any) -> Callable[..., Any]:
        run = pallas_call(kernel, name=name, **options)

        def call(*operands: Any) -> Any:
            structs = [jax.ShapeDtypeStruct(operand.shape, operand.dtype) for operand in operands]
            constants = str(getattr(kernel, "keywords", None))
            found[name, str(structs), str(options["out_shape"]), constants] = run, structs
            return run(*operands)

        return call

    with mock.patch.object(pl, "pallas_call", recorded):
        for work, mesh in works(topology):
            work.lowered(mesh)
    return found


def failures(topology: str) -> int:
    """Compile the kernels for one device of a topology, print a line for each, and count those that fail."""
    device, failed = chips.topology_devices(topology)[0], 0
    place = SingleDeviceSharding(device)
    for (name, operands, *_), (run, structs) in traced_kernels(topology).items():
        placed = [jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=place) for each in structs]
        try:
            # Lowering a kernel asks for the chip's kind.
            with jax.set_mesh(Mesh(np.array([device]), ("device",))):
                jax.jit(run).lower(*placed).compile(BOUNDS)
            print(topology, name, "compiles", flush=True)
        except Exception as error:
            print(topology, name, operands, "FAILS:", error, flush=True)
            failed += 1
    return failed


if __name__ == "__main__":
    sys.exit(sum(map(failures, sys.argv[1:])) > 0)
