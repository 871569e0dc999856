"""`plan` for a step of training: the gradients of every weight, of a video encoded and decoded again.

Each direction is a program, its forward and backward pass, blocks computed anew. A torch loop runs the same
chunks one after another, and its optimizer's moments lie beside the weights: `training_table` counts them.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax

from cogvideox_torchax import runtime
from cogvideox_torchax.plan.chips import Chip
from cogvideox_torchax.plan.jobs import Job
from cogvideox_torchax.plan.programs import ProgramPlan, Work, compile_program
from cogvideox_torchax.plan.report import figures
from cogvideox_torchax.sharding import make_mesh
from cogvideox_torchax.vae.directions import Direction
from cogvideox_torchax.vae.torchax.autoencoder import AutoencoderKLCogVideoX

MOMENTS = 2
"""Moments of a weight, in float32, that AdamW keeps."""
FLOAT32_BYTES = 4


def plan_train_step(
    vae: AutoencoderKLCogVideoX,
    job: Job,
    devices: list[Any],
    chip: Chip | None,
    *,
    dp: int = 1,
    tp: int = 1,
) -> Iterator[ProgramPlan]:
    """Compile a training step's gradients: a program that encodes and one that decodes, forward and backward.

    The optimizer's update is not compiled: `training_table` counts its memory. A batch has one video for each
    device of "dp".

    Args:
        vae: of `weightless_vae`.
        job: the video, its `direction` aside.
        devices, chip, dp, tp: as `plan_programs` takes them.

    Raises:
        SizeError: a size that the model cannot take.
    """
    mesh = make_mesh(dp, tp, devices=devices)
    for work in gradient_works(vae, job, mesh):
        yield compile_program(work, mesh, chip)


def gradient_works(vae: AutoencoderKLCogVideoX, job: Job, mesh: Any) -> Iterator[Work]:
    """Yield the gradients' program of each direction; the arguments are as `chunk_works` takes them."""
    runtime.enable()
    if mesh.size > 1:
        vae.place_on(mesh)
    trained: Any = vae.train()  # whose method is wrapped in a way that pyright cannot follow
    trained.enable_gradient_checkpointing()
    for direction in Direction:
        pieces, (channels, *size) = replace(job, direction=direction).chunk_shapes(vae)
        lengths = [chunk.length for chunk in pieces]
        program = vae.build_program(direction)
        if mesh.size == 1:
            program.place = runtime.Place(mesh.devices.item())
        shape, dtype = (mesh.shape["dp"], channels, sum(lengths), *size), runtime.jax_dtype(vae.dtype)
        weights, *_ = program.structs((shape, dtype))
        sharding = next(iter(weights.values())).sharding  # that of what is whole on every device
        x = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

        def gradients(weights: Any, x: Any, program: Any = program, lengths: Any = lengths) -> Any:
            result, pull_back = jax.vjp(lambda *given: program.run_video(*given, lengths), weights, x)
            return pull_back(result)  # the gradient of half the sum of squares is the result itself

        structs = functools.partial(tuple, (weights, x))
        yield Work(f"train {direction}", sum(lengths), jax.jit(gradients).lower, structs, program)


def training_table(
    plans: list[ProgramPlan], vae: AutoencoderKLCogVideoX, chip: Chip | None
) -> dict[str, Any]:
    """Return a plan's figures per device, as `plan` prints them.

    The encoder's activations for its backward pass lie beside the decoder's: a step takes at most the
    temporaries of both programs together.
    """
    moments = MOMENTS * FLOAT32_BYTES * sum(math.prod(weight.shape) for weight in vae.parameters())
    temporaries = sum(plan.temp_bytes for plan in plans)
    results = sum(plan.output_bytes for plan in plans)
    arguments = sum(plan.argument_bytes for plan in plans)
    seconds = [plan.seconds_with_collectives for plan in plans]
    whole = sum(part for part in seconds if part is not None)
    return figures(
        "train-step: the gradients of every weight of encoder and decoder",
        {
            "weights_and_inputs_GiB": arguments,
            "temporaries_GiB_at_most": temporaries,
            "gradients_GiB": results,
            "optimizer_GiB": moments,
            "peak_memory_GiB_at_most": arguments + temporaries + results + moments,
        },
        {} if None in seconds else {"with_collectives_s": whole},
        flops=sum(plan.flops for plan in plans),
        compile_seconds=sum(plan.compile_seconds for plan in plans),
        chip=chip,
    )
