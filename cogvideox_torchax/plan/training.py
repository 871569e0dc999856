"""`plan` for a step of training: a video encoded, decoded again, and the gradients of every weight.

The whole step is compiled as one program, its blocks computed anew in the backward pass. A torch loop runs
the same chunks one after another, and its optimizer's moments lie beside the weights: `table` counts them.
"""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from cogvideox_torchax import runtime
from cogvideox_torchax.plan.chips import Chip
from cogvideox_torchax.plan.jobs import Job
from cogvideox_torchax.plan.programs import ProgramPlan, read_program
from cogvideox_torchax.plan.schedule import compile_with_schedules
from cogvideox_torchax.sharding import make_mesh
from cogvideox_torchax.vae.torchax.autoencoder import AutoencoderKLCogVideoX

MOMENTS = 2
"""Of a weight, in float32, that AdamW keeps."""

FLOAT32_BYTES = 4


def plan_train_step(
    vae: AutoencoderKLCogVideoX,
    job: Job,
    devices: list[Any],
    chip: Chip | None,
    *,
    dp: int = 1,
    tp: int = 1,
    rematerialize: bool = True,
) -> ProgramPlan:
    """Compiles one step of training: the gradients of all weights, of one video for each device of "dp".

    Args:
        vae: of `weightless_vae`.
        job: the video, its `kind` aside.
        devices, chip, dp, tp: as `plan_programs` takes them.
        rematerialize: whether blocks are computed anew, as `enable_gradient_checkpointing` has it.

    Raises:
        PlanError: a size that the model cannot take.
    """
    import jax

    runtime.enable()
    if dp * tp > 1:
        vae.place_on(make_mesh(dp, tp, devices=devices))
    vae.train()
    if rematerialize:
        vae.enable_gradient_checkpointing()
    frames, (channels, *size) = replace(job, kind="encode").chunk_shapes(vae)
    latents, (latent_channels, *latent_size) = replace(job, kind="decode").chunk_shapes(vae)
    encode, decode = vae.build_program("encode"), vae.build_program("decode")
    dtype = runtime.jax_dtype(vae.dtype)

    def weights_and(program: runtime.ChunkProgram, *shape: int) -> tuple[Any, Any]:
        weights, _ = program.structs(shape, dtype)
        placement = jax.sharding.SingleDeviceSharding(devices[0])
        whole = next(iter(weights.values())).sharding or placement
        array = jax.ShapeDtypeStruct(shape, dtype, sharding=whole)
        placed = {
            name: jax.ShapeDtypeStruct(weight.shape, weight.dtype, sharding=whole)
            for name, weight in weights.items()
        }
        return placed, array

    taken = sum(chunk.length for chunk in latents)
    encoder, video = weights_and(encode, dp, channels, job.frames, *size)
    decoder, noise = weights_and(decode, dp, latent_channels, taken, *latent_size)
    step = jax.jit(
        jax.value_and_grad(
            _loss(
                lambda weights, x: encode.run_video(weights, x, [chunk.length for chunk in frames]),
                lambda weights, z: decode.run_video(weights, z, [chunk.length for chunk in latents]),
            )
        )
    )
    start = time.perf_counter()
    with jax.set_mesh(make_mesh(dp, tp, devices=devices)):  # lowering a kernel asks it for the chip's kind
        compiled, schedules = compile_with_schedules(step.lower((encoder, decoder), video, noise), chip)
    seconds = time.perf_counter() - start
    return read_program("train-step", job.frames, compiled, chip, seconds, schedules=schedules)


def _loss(encoded: Callable[..., Any], decoded: Callable[..., Any]) -> Callable[..., Any]:
    """Of (weights of both halves, video, noise): L1 and squares of the pixels, and a small KL."""
    import jax.numpy as jnp

    def loss(weights: tuple[Any, Any], video: Any, noise: Any) -> Any:
        encoder, decoder = weights
        mean, logvar = jnp.split(encoded(encoder, video).astype("float32"), 2, axis=1)
        logvar = logvar.clip(-30.0, 20.0)
        sampled = mean + jnp.exp(0.5 * logvar) * noise
        error = decoded(decoder, sampled.astype(video.dtype)).astype("float32") - video
        kl = 0.5 * (mean**2 + jnp.exp(logvar) - 1.0 - logvar).mean()
        return jnp.abs(error).mean() + (error**2).mean() + 1e-6 * kl

    return loss


def table(plan: ProgramPlan, vae: AutoencoderKLCogVideoX, chip: Chip | None) -> dict[str, Any]:
    """A plan in words and figures, a device: what `plan` prints."""
    gib = 2**30
    moments = MOMENTS * FLOAT32_BYTES * sum(math.prod(weight.shape) for weight in vae.parameters())
    peak = plan.peak_bytes + moments
    rows: dict[str, Any] = {
        "network": "train-step: encode, decode, the gradients of every weight",
        "TFLOP": plan.flops / 1e12,
        "weights_and_video_GiB": plan.argument_bytes / gib,
        "temporaries_GiB": plan.temp_bytes / gib,
        "gradients_GiB": plan.output_bytes / gib,
        "optimizer_GiB": moments / gib,
        "peak_memory_GiB": peak / gib,
    }
    if chip is not None:
        rows["fits"] = f"{'yes' if peak <= chip.memory else 'no'} ({chip.memory / gib:.2f} GiB)"
    if plan.seconds is not None:
        rows["estimate_s"] = plan.seconds
    if plan.collective_seconds:
        rows["collectives_s"] = sum(plan.collective_seconds.values())
        rows["with_collectives_s"] = plan.seconds_with_collectives
    rows["compiled_in_s"] = plan.compile_seconds
    return rows
