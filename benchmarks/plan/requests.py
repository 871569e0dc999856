"""The programs that the options of `plan` ask for, and the figures of the job that they make up.

A `Work` is a program to compile, and a `ProgramPlan`, or *plan*, has the compiler's figures for it. A
`PlanRequest` has all programs of a command line.
"""

import argparse
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import torch

from benchmarks.plan import chips, videos
from benchmarks.plan.chips import GIB
from benchmarks.plan.programs import ProgramPlan, TimedPlan, Work, peak_bytes, times
from cogvideox_torchax.sharding import make_mesh
from cogvideox_torchax.vae.directions import DECODE, ENCODE
from cogvideox_torchax.vae.memory import parse_tiles
from cogvideox_torchax.vae.sizes import check_sides


@dataclass(frozen=True)
class PlanRequest:
    """The programs to compile for a command line.

    Attributes:
        works: the programs.
        counts: number of times that each runs in the job.
        mesh: the devices to compile for.
        chip: the kind of chip that the devices are; None for CPUs.
        about: figures of the job that need no compiling, by the names that are printed.
        job: the job, for the plan's JSON.
        weights: for each network of the job, the bytes of its weights on a device; of a pipeline they are the
            text encoder's, the transformer's and the VAE's.
        other_weights: for each program, the bytes of the weights of other networks that are on its device
            meanwhile; empty for none.
        own_weights: the same with offload, where these are the encoder's beside the decoder's programs; empty
            for what is no pipeline.
        optimizer_bytes: of a training step, the bytes that its optimizer keeps on a device.
    """

    works: Sequence[Work]
    counts: Sequence[int]
    mesh: Any
    chip: chips.Chip | None
    about: dict[str, Any]
    job: dict[str, Any]
    weights: Sequence[int] = ()
    other_weights: Sequence[int] = ()
    own_weights: Sequence[int] = ()
    optimizer_bytes: int = 0

    @property
    def present_weights(self) -> Sequence[int]:
        """`other_weights`, or `own_weights` if the job is to be offloaded."""
        return self.own_weights if self.job.get("offload") else self.other_weights

    @property
    def present_bytes(self) -> int:
        """The bytes of the weights that are in memory together; with offload, of the largest network's."""
        return max(self.weights) if self.job.get("offload") else sum(self.weights)

    def figures(self, plans: Sequence[ProgramPlan]) -> dict[str, Any]:
        """Return the figures of the job, whose programs are compiled; of a pipeline also with offload.

        They are its peak memory, for a chip whether it fits, and for a TPU the floor of its time and the
        estimate. With offload a video moves each network's weights to the device once, and back, over the
        link to the host.
        """
        chip, figures = self.chip, dict(self.about)
        peak, present_peak = (
            peak_bytes(plans, weights) for weights in (self.other_weights, self.present_weights)
        )
        if self.optimizer_bytes:
            # The encoder's activations stay in memory for its backward pass while the decoder runs: a step
            # takes at most the temporaries of both programs together.
            parts = {
                "weights_and_inputs_GiB": sum(plan.argument_bytes for plan in plans) / GIB,
                "temporaries_GiB_at_most": sum(plan.temp_bytes for plan in plans) / GIB,
                "gradients_GiB": sum(plan.output_bytes for plan in plans) / GIB,
            }
            figures |= {"optimizer_GiB": self.optimizer_bytes / GIB, **parts}
            peak = present_peak = sum(parts.values()) * GIB + self.optimizer_bytes
        figures["peak_memory_GiB"] = peak / GIB
        if chip:
            figures |= {"memory_of_a_chip_GiB": chip.memory / GIB, "fits": present_peak <= chip.memory}
        if isinstance(chip, chips.TPU):
            runs = zip(self.counts, plans, strict=True)
            figures["floor_s"] = sum(count * plan.floor_seconds(chip) for count, plan in runs)
        elif chip:  # autotuning on a GPU chooses algorithms, and so the workspaces that these ask for
            figures["not_counted"] = "workspaces of cuDNN and cuBLAS, on an H200 1.2 to 6.4 GB"
        if self.own_weights:
            figures["offload_peak_GiB"] = peak_bytes(plans, self.own_weights) / GIB
        if self.own_weights and chip:
            figures["offload_moving_s"] = 2 * sum(self.weights) / chip.host_link
        timed = [plan for plan in plans if isinstance(plan, TimedPlan)]
        return figures | (times(self.counts, timed) if timed else {})


def requested(args: argparse.Namespace) -> PlanRequest:
    """Return the programs that the options of `plan` ask for; `ValueError` if they are not possible."""
    if args.platform == "tpu":
        # Simulated: this machine need not have them. If they are TPUs, libtpu also writes schedules.
        devices = chips.topology_devices(args.topology, schedules=True)
        chip = chips.chip_of(args.topology)
    else:
        devices, chip = jax.devices("cpu"), None
    makers = {"vae": _video, "pipeline": _pipeline, "train-step": _training_step}
    mesh = make_mesh(args.dp, args.tp, devices=devices)
    return makers.get(args.network, _network)(args, weightless_vae(args), mesh, chip)


def with_changes(args: argparse.Namespace, **changes: Any) -> argparse.Namespace:
    """Return a copy of a command's options with some of them changed."""
    return argparse.Namespace(**vars(args) | changes)


def weightless_vae(args: argparse.Namespace) -> Any:
    return videos.weightless_vae(args.model, getattr(torch, args.dtype))


def _video(args: argparse.Namespace, vae: Any, mesh: Any, chip: chips.Chip | None) -> PlanRequest:
    """Return the programs of the VAE that encode or decode a video, whole or in tiles."""
    # (height, width) of a tile. `--tiling` without a size is "default", the model's own; None is no tiling.
    tile = args.tiling and (vae.tile_sample_min_height, vae.tile_sample_min_width)
    if args.tiling not in (None, "default"):
        tile = parse_tiles(args.tiling, vae.spatial_compression_ratio)
    job = videos.Job(ENCODE if args.encode else DECODE, args.frames, args.height, args.width, tile)
    chunks, tiles = len(job.chunk_shapes(vae)[0]), job.tiles(vae)
    return PlanRequest(
        # There are at most two programs, the first chunk's and one for all later chunks: `counts` is cut to
        # one if there is one chunk. With tiles the counts make the job's floor too high, because tiles at the
        # edges are smaller.
        works=list(videos.chunk_works(vae, job, mesh, args.backend)),
        counts=(tiles, tiles * (chunks - 1))[:chunks],
        mesh=mesh,
        chip=chip,
        about={
            "video": f"{job.direction} {job.frames} x {job.height} x {job.width}",
            "chunks": chunks,
            "tiles": tiles,
        },
        job=vars(job),
        weights=(videos.weight_bytes(vae.encoder if args.encode else vae.decoder),),
    )


def _training_step(args: argparse.Namespace, vae: Any, mesh: Any, chip: chips.Chip | None) -> PlanRequest:
    """Return the programs of a training step, for a video of the size that the options give."""
    job = videos.Job(ENCODE, args.frames, args.height, args.width)  # planned in both directions
    return PlanRequest(
        works=list(videos.gradient_works(vae, job, mesh)),
        counts=(1, 1),
        mesh=mesh,
        chip=chip,
        about={"network": "train-step: the gradients of every weight"},
        job={"network": args.network, **_size(args)},
        optimizer_bytes=2 * 4 * sum(weight.numel() for weight in vae.parameters()),  # AdamW's float32 moments
    )


def _network(args: argparse.Namespace, vae: Any, mesh: Any, chip: chips.Chip | None) -> PlanRequest:
    """Return the program of the text encoder, of a step, or with `--cache` of each kind of step."""
    from benchmarks.plan import networks  # needs transformers, as the VAE does not

    config, counts = networks.transformer_config(args.model), (1,)
    if args.network == "prompt":
        tokens = config.get("max_text_seq_length", 226)  # diffusers' default
        works = [networks.prompt_work(args.model, vae.dtype, mesh, tokens=tokens, weights=args.weights)]
    else:
        patch = config.get("patch_size", 2)  # diffusers' default
        check_sides("a video", args.height, args.width, multiple=patch * vae.spatial_compression_ratio)
        # The size of the transformer's input: that of the video's latents.
        job = videos.Job(DECODE, args.frames, args.height, args.width)
        chunks, (_, height, width) = job.chunk_shapes(vae)
        latent_frames = chunks[-1].stop  # the last chunk ends with the last frame
        options = {
            **{"frames": latent_frames, "height": height, "width": width, "guided": not args.no_guidance},
            **{name: getattr(args, name) for name in ("parallel", "cache", "weights")},
        }
        step = functools.partial(networks.step_work, args.model, vae.dtype, mesh, chip, **options)
        # With a cache there are several kinds of steps, such as steps that skip blocks, and each kind has a
        # program. The keys are the number of a kind's first step, by which `step_work` finds the program; the
        # values are how many steps are of this kind. Without a cache all steps are of one kind, and a single
        # step is planned.
        steps_of_kind = {0: 1}
        if args.cache:
            steps_of_kind = networks.cached_steps(args.model, vae.dtype, args.cache, not args.no_guidance)
        if args.skips is not None:
            # A first-block cache decides at run time which steps skip, so the user gives their number. As in
            # the result of `cached_steps`, 0 stands for the steps that run all blocks, 1 for those that skip.
            steps_of_kind = {0: networks.STEPS - args.skips, 1: args.skips}
        works, counts = [step(step=first) for first in steps_of_kind], tuple(steps_of_kind.values())
        if args.cache:
            in_full, *skipping = counts
            kinds = (f"{count} of skipping step {kind}" for kind, count in enumerate(skipping, 1))
            works[0].about["steps"] = ", ".join((f"{in_full} in full", *kinds))
    return PlanRequest(
        works=works,
        counts=counts,
        mesh=mesh,
        chip=chip,
        about=works[0].about,
        job={"network": args.network, **_size(args)},
        weights=(networks.weight_bytes(works[0]),),
    )


def _pipeline(args: argparse.Namespace, vae: Any, mesh: Any, chip: chips.Chip | None) -> PlanRequest:
    """Return the programs that make a whole video, and the weights that are in memory beside each."""
    from benchmarks.plan import networks

    prompt, step = (
        _network(with_changes(args, network=network), vae, mesh, chip) for network in ("prompt", "step")
    )
    decoding = _video(args, vae, mesh, chip)
    # Bytes on each device.
    (text, transformer), decoder = (*prompt.weights, *step.weights), decoding.weights[0]
    weights = (text, transformer, videos.weight_bytes(vae))
    total, encoder = sum(weights), weights[-1] - decoder
    names = ("text_encoder", "transformer", "vae", "weights")
    return PlanRequest(
        works=[*prompt.works, *step.works, *decoding.works],
        # With guidance two prompts are encoded: the user's and the negative one.
        counts=(1 if args.no_guidance else 2, networks.STEPS, *decoding.counts),
        mesh=mesh,
        chip=chip,
        about={
            "pipeline": f"{args.model}, {args.frames} x {args.height} x {args.width}",
            "parallel": step.about["parallel"],
            **{f"{name}_GiB": size / GIB for name, size in zip(names, (*weights, total), strict=True)},
        },
        job=step.job
        | {"network": "pipeline", "tile": decoding.job["tile"]}
        | {name: getattr(args, name) for name in ("offload", "weights")},
        weights=weights,
        # The weights of a program's own network are its arguments, and so are not counted here. For decoding
        # these are the decoder's weights alone.
        other_weights=(total - text, total - transformer, *[total - decoder] * len(decoding.works)),
        own_weights=(0, 0, *[encoder] * len(decoding.works)),
    )


def _size(args: argparse.Namespace) -> dict[str, int]:
    return {name: getattr(args, name) for name in ("frames", "height", "width")}
