"""`plan` for a step of training: the gradients of every weight, for a video that is encoded and decoded.

Each direction is a program with its forward and backward pass, in which blocks are recomputed (gradient
checkpointing). A torch loop runs the same chunks one after another. Its optimizer's moments are in memory
beside the weights: `training_table` counts them.
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
"""Number of moments that AdamW keeps of each weight, in float32."""
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
    """Compile a training step's gradients, and yield the plan of each direction's program.

    A program is the forward and backward pass of encoding or of decoding. The optimizer's update is not
    compiled; `training_table` counts its memory. A batch has one video for each device of "dp".

    Args:
        vae: a ported VAE without weights; it is set to train with gradient checkpointing.
        job: the video; its `direction` is not read.
        devices: devices of a topology, or of this machine.
        chip: the chip whose peaks give the times; None for no times.
        dp, tp: sizes of the mesh, whose axis "dp" splits the batch and "tp" the width.

    Raises:
        SizeError: a size that the model cannot take.
    """
    mesh = make_mesh(dp, tp, devices=devices)
    for work in gradient_works(vae, job, mesh):
        yield compile_program(work, mesh, chip)


def gradient_works(vae: AutoencoderKLCogVideoX, job: Job, mesh: Any) -> Iterator[Work]:
    """Yield the program of each direction's gradients.

    Args:
        vae: a VAE without weights; it is set to train, and placed on a mesh of more than one device.
        job: the video; its `direction` is not read.
        mesh: of `make_mesh`, of the devices to compile for.
    """
    runtime.enable()
    if mesh.size > 1:
        vae.place_on(mesh)
    trained: Any = vae.train()  # diffusers wraps the next method in a way that pyright cannot follow
    trained.enable_gradient_checkpointing()
    for direction in Direction:
        chunks, (channels, *size) = replace(job, direction=direction).chunk_shapes(vae)
        lengths = [len(chunk) for chunk in chunks]  # numbers of frames
        program = vae.build_program(direction)
        if mesh.size == 1:  # otherwise `place_on` has chosen the program's devices
            program.place = runtime.Place(mesh.devices.item())
        # The input x is a video for each device on the axis "dp".
        shape, dtype = (mesh.shape["dp"], channels, sum(lengths), *size), runtime.jax_dtype(vae.dtype)
        weights, _input, _cache = program.structs((shape, dtype))
        # All weights have one sharding: they are whole on every device. So is x: `run_video` splits each of
        # its chunks over the mesh.
        replicated = next(iter(weights.values())).sharding
        x = jax.ShapeDtypeStruct(shape, dtype, sharding=replicated)

        # Defaults keep this direction's program and lengths: it may be traced after the loop has gone on.
        def gradients(weights: Any, x: Any, program: Any = program, lengths: Any = lengths) -> Any:
            """Return the gradients of weights and input `x`, for half the sum of the result's squares."""
            result, pull_back = jax.vjp(lambda *inputs: program.run_video(*inputs, lengths), weights, x)
            return pull_back(result)  # the loss's gradient with respect to the result is the result itself

        structs = functools.partial(tuple, (weights, x))  # a function that returns the pair
        yield Work(f"train {direction}", sum(lengths), jax.jit(gradients).lower, structs, program)


def training_table(
    plans: list[ProgramPlan], vae: AutoencoderKLCogVideoX, chip: Chip | None
) -> dict[str, Any]:
    """Return the figures of a training step per device, by the names that `plan` prints.

    The encoder's activations stay in memory for its backward pass while the decoder runs: a step takes at
    most the temporaries of both programs together.

    Args:
        plans: plans of `plan_train_step`.
        vae: the VAE that was planned.
        chip: the chip that the programs are compiled for; None for no verdict on memory.
    """
    # The optimizer keeps `MOMENTS` float32 numbers for each weight.
    moments = MOMENTS * FLOAT32_BYTES * sum(math.prod(weight.shape) for weight in vae.parameters())
    temporaries = sum(plan.temp_bytes for plan in plans)
    results = sum(plan.output_bytes for plan in plans)
    arguments = sum(plan.argument_bytes for plan in plans)
    seconds = [plan.seconds_with_collectives for plan in plans]
    total_seconds = sum(part for part in seconds if part is not None)
    return figures(
        "train-step: the gradients of every weight of encoder and decoder",
        {
            "weights_and_inputs_GiB": arguments,
            "temporaries_GiB_at_most": temporaries,
            "gradients_GiB": results,
            "optimizer_GiB": moments,
            "peak_memory_GiB_at_most": arguments + temporaries + results + moments,
        },
        {} if None in seconds else {"with_collectives_s": total_seconds},
        flops=sum(plan.flops for plan in plans),
        compile_seconds=sum(plan.compile_seconds for plan in plans),
        chip=chip,
    )
