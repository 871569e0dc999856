"""The gradients of a step that trains the VAE: its programs, and the memory that the step takes.

Each direction is a program with its forward and backward pass, in which blocks are recomputed (gradient
checkpointing). A torch loop runs the same chunks one after another. Its optimizer's moments are in memory
beside the weights; its update is not compiled.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax

from benchmarks.plan.chips import GIB
from benchmarks.plan.programs import ProgramPlan, Work
from benchmarks.plan.videos import Job
from cogvideox_torchax import runtime
from cogvideox_torchax.vae.directions import Direction
from cogvideox_torchax.vae.torchax.autoencoder import AutoencoderKLCogVideoX


def gradient_works(vae: AutoencoderKLCogVideoX, job: Job, mesh: Any) -> Iterator[Work]:
    """Yield the program of each direction's gradients.

    `vae` has no weights; it is set to train, and placed on a mesh of more than one device. `job` is the
    video, whose direction is not read; a batch has a video for each device of the mesh's "dp".
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
        yield Work(f"train {direction}", sum(lengths), jax.jit(gradients).lower, structs)


def optimizer_bytes(vae: AutoencoderKLCogVideoX) -> int:
    """Return the bytes of AdamW's moments: two of each weight, in float32."""
    return 2 * 4 * sum(math.prod(weight.shape) for weight in vae.parameters())


def memory(plans: Sequence[ProgramPlan]) -> dict[str, float]:
    """Return the memory of a training step per device beside the optimizer's, by the names that are printed.

    The encoder's activations stay in memory for its backward pass while the decoder runs: a step takes at
    most the temporaries of both programs together.
    """
    return {
        "weights_and_inputs_GiB": sum(plan.argument_bytes for plan in plans) / GIB,
        "temporaries_GiB_at_most": sum(plan.temp_bytes for plan in plans) / GIB,
        "gradients_GiB": sum(plan.output_bytes for plan in plans) / GIB,
    }
