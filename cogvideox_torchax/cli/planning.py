"""`plan`, once its options are checked: choose the programs, compile them, and print and return figures.

A `Work` is a program to compile, and a `ProgramPlan`, or *plan*, has the compiler's figures for it. A
`PlanRequest` has all programs of a command line.
"""

import argparse
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from cogvideox_torchax import runtime
from cogvideox_torchax.cli import common
from cogvideox_torchax.files import reports, whole
from cogvideox_torchax.plan import chips, jobs
from cogvideox_torchax.plan.programs import (
    ProgramPlan,
    Work,
    compile_program,
    peak_bytes,
    program_rows,
)
from cogvideox_torchax.sharding import make_mesh
from cogvideox_torchax.vae.directions import DECODE, ENCODE
from cogvideox_torchax.vae.memory import parse_tiles
from cogvideox_torchax.vae.sizes import check_sides
from cogvideox_torchax.versions import versions


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
        other_weights: for each program, the bytes of the weights of other networks that are on its device
            meanwhile; empty for none.
        own_weights: the same with offload, where these are the encoder's beside the decoder's programs; empty
            for what is no pipeline.
    """

    works: Sequence[Work]
    counts: Sequence[int]
    mesh: Any
    chip: chips.Chip | None
    about: dict[str, Any]
    job: dict[str, Any]
    other_weights: Sequence[int] = ()
    own_weights: Sequence[int] = ()

    @property
    def present_weights(self) -> Sequence[int]:
        """`other_weights`, or `own_weights` if the job is to be offloaded."""
        return self.own_weights if self.job.get("offload") else self.other_weights

    def figures(self, programs: Sequence[ProgramPlan]) -> dict[str, Any]:
        """Return the figures of the job, whose `programs` are compiled; of a pipeline also with offload.

        They are its peak memory, and for a chip whether it fits and the floor of its time. With offload a
        video moves each network's weights to the device once, and back, over the link to the host.
        """
        chip = self.chip
        figures = {**self.about, "peak_memory_GiB": peak_bytes(programs, self.other_weights) / chips.GIB}
        if chip:
            plans = zip(self.counts, programs, strict=True)
            floor = sum(count * plan.floor_seconds(chip) for count, plan in plans)
            is_fitting = peak_bytes(programs, self.present_weights) <= chip.memory
            figures |= {"memory_of_a_chip_GiB": chip.memory / chips.GIB, "fits": is_fitting}
            # Autotuning on a GPU chooses algorithms, and so the workspaces that these ask for.
            not_counted = {"not_counted": "workspaces of cuDNN and cuBLAS, on an H200 1.2 to 6.4 GB"}
            figures |= not_counted if chip in chips.GPUS.values() else {"floor_s": floor}
        if self.own_weights:
            figures["offload_peak_GiB"] = peak_bytes(programs, self.own_weights) / chips.GIB
        if self.own_weights and chip:
            figures["offload_moving_s"] = 2 * _bytes(self, "weights") / chip.host_link
        return figures


def planned(args: argparse.Namespace) -> dict[str, Any]:
    """Compile the programs of `--network`, and print their figures; return the plan as a JSON document."""
    request = requested(args)
    programs = compiled(args, request, lambda work: compile_program(work, request.mesh), program_rows)
    figures = request.figures(programs)
    common.print_report(figures)
    if request.chip:  # a CPU has no limit of memory, and no estimate of time
        # `ADVISERS` has, by network, the function that finds changes of the command line with which it fits.
        if args.network in ADVISERS and not figures["fits"] and not args.no_advice:
            common.say("it does not fit: compiling what would")
            changes = ADVISERS[args.network](args, request, request.chip, programs)
            figures["would_fit"] = {change.what: change.peak_bytes / chips.GIB for change in changes}
            advice = {f"with {what}": f"{size:.2f} GiB" for what, size in figures["would_fit"].items()}
            common.print_report(advice or {"would fit": "nothing that was tried"})
        common.say("for times: python -m benchmarks estimate, with these options, in a checkout (TPUs alone)")
    return document(args, request, jobs.FORMAT, programs, figures)


def compiled(
    args: argparse.Namespace,
    request: PlanRequest,
    compile_one: Callable[[Work], Any],
    rows: Callable[[Any, Any], dict[str, Any]],
) -> list[Any]:
    """Compile a request's programs, print each one's figures as soon as it is compiled, and return the plans.

    `compile_one` returns a program's plan. `rows` returns the figures to print of a plan and a chip.
    """
    if args.save_hlo:
        whole.make_directory(args.save_hlo)
    common.say(f"programs to compile: {len(request.works)}; each can take minutes")
    plans = []
    for work in request.works:
        plan = compile_one(work)
        print(f"{plan.name}, {plan.frames} {'tokens' if plan.name == 'prompt' else 'frames'} in")
        common.print_report(rows(plan, request.chip))
        if args.save_hlo:
            name = f"{request.job.get('direction', args.network)}_{plan.name}.hlo.txt"
            reports.write_text(Path(args.save_hlo) / name, plan.text)
        plans.append(plan)
    return plans


def requested(args: argparse.Namespace) -> PlanRequest:
    """Return the programs that the options of `plan` ask for; `ValueError` if they are not possible."""
    if args.platform == "tpu":
        devices = chips.topology_devices(args.topology)  # simulated: this machine need not have them
        # A topology is "GENERATION:GRID", or a GPU.
        chip = (chips.CHIPS | chips.GPUS)[args.topology.partition(":")[0]]
    else:
        devices, chip = jax.devices("cpu"), None
    vae = jobs.weightless_vae(args.model, common.parse_dtype(args.dtype))
    makers = {"vae": _requested_video, "pipeline": _requested_pipeline}
    make_request = makers.get(args.network, _requested_network)
    return make_request(args, vae, make_mesh(args.dp, args.tp, devices=devices), chip)


def _requested_video(args: argparse.Namespace, vae: Any, mesh: Any, chip: chips.Chip | None) -> PlanRequest:
    """Return the programs of the VAE that encode or decode a video, whole or in tiles."""
    # (height, width) of a tile. `--tiling` without a size is "default", the model's own; None is no tiling.
    tile = args.tiling and (vae.tile_sample_min_height, vae.tile_sample_min_width)
    if args.tiling not in (None, "default"):
        tile = parse_tiles(args.tiling, vae.spatial_compression_ratio)
    job = jobs.Job(ENCODE if args.encode else DECODE, args.frames, args.height, args.width, tile)
    chunks, tiles = len(job.chunk_shapes(vae)[0]), job.tiles(vae)
    video = f"{job.direction} {job.frames} x {job.height} x {job.width}"
    return PlanRequest(
        # There are at most two programs, the first chunk's and one for all later chunks: `counts` is cut to
        # one if there is one chunk. With tiles the counts make the job's floor too high, because tiles at the
        # edges are smaller.
        works=list(jobs.chunk_works(vae, job, mesh, args.backend)),
        counts=(tiles, tiles * (chunks - 1))[:chunks],
        mesh=mesh,
        chip=chip,
        about={"video": video, "chunks": chunks, "tiles": tiles},
        job=vars(job),
    )


def _requested_network(args: argparse.Namespace, vae: Any, mesh: Any, chip: chips.Chip | None) -> PlanRequest:
    """Return the program of the text encoder, of a step, or with `--cache` of each kind of step."""
    from cogvideox_torchax.plan import networks  # needs transformers, as the VAE does not

    counts: Sequence[int] = (1,)
    if args.network == "prompt":
        tokens = networks.transformer_config(args.model).get("max_text_seq_length", 226)  # diffusers' default
        works = [networks.prompt_work(args.model, vae.dtype, mesh, tokens=tokens, weights=args.weights)]
    else:
        patch = networks.transformer_config(args.model).get("patch_size", 2)  # diffusers' default
        check_sides("a video", args.height, args.width, multiple=patch * vae.spatial_compression_ratio)
        # The size of the transformer's input: that of the video's latents.
        chunks, (_, height, width) = jobs.Job(DECODE, args.frames, args.height, args.width).chunk_shapes(vae)
        latent_frames = chunks[-1].stop  # the last chunk ends with the last frame
        size = {"frames": latent_frames, "height": height, "width": width}
        options = {
            "guided": not args.no_guidance,
            **{name: getattr(args, name) for name in ("parallel", "cache", "weights")},
        }
        step = functools.partial(networks.step_work, args.model, vae.dtype, mesh, chip, **size, **options)
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
    return PlanRequest(
        works=works,
        counts=counts,
        mesh=mesh,
        chip=chip,
        about=networks.about(works[0], counts),
        job={name: getattr(args, name) for name in ("network", "frames", "height", "width")},
    )


def _requested_pipeline(
    args: argparse.Namespace, vae: Any, mesh: Any, chip: chips.Chip | None
) -> PlanRequest:
    """Return the programs that make a whole video, and the weights that are in memory beside each."""
    from cogvideox_torchax.plan import networks  # needs transformers, as the VAE does not

    prompt, step = (
        _requested_network(_with(args, network=network), vae, mesh, chip) for network in ("prompt", "step")
    )
    decoding = _requested_video(args, vae, mesh, chip)
    # Bytes of weights on each device.
    text_bytes, transformer_bytes = (networks.weight_bytes(request.works[0]) for request in (prompt, step))
    vae_bytes = sum(value.numel() * value.element_size() for value in vae.parameters())
    total_bytes = text_bytes + transformer_bytes + vae_bytes
    decoder_bytes = jobs.weight_bytes(vae, DECODE)
    return PlanRequest(
        works=[*prompt.works, *step.works, *decoding.works],
        # With guidance two prompts are encoded: the user's and the negative one.
        counts=(1 if args.no_guidance else 2, networks.STEPS, *decoding.counts),
        mesh=mesh,
        chip=chip,
        about={
            "pipeline": f"{args.model}, {args.frames} x {args.height} x {args.width}",
            "parallel": step.about["parallel"],
            "text_encoder_GiB": text_bytes / chips.GIB,
            "transformer_GiB": transformer_bytes / chips.GIB,
            "vae_GiB": vae_bytes / chips.GIB,
            "weights_GiB": total_bytes / chips.GIB,
        },
        job=step.job
        | {"network": "pipeline", "tile": decoding.job["tile"]}
        | {name: getattr(args, name) for name in ("offload", "weights")},
        # The weights of a program's own network are its arguments, and so are not counted here. For decoding
        # these are the decoder's weights alone.
        other_weights=(
            total_bytes - text_bytes,
            total_bytes - transformer_bytes,
            *[total_bytes - decoder_bytes] * len(decoding.works),
        ),
        own_weights=(0, 0, *[vae_bytes - decoder_bytes] * len(decoding.works)),
    )


def _with(args: argparse.Namespace, **changes: Any) -> argparse.Namespace:
    """Return a copy of a command's options with some of them changed."""
    return argparse.Namespace(**vars(args) | changes)


def _video_would_fit(
    args: argparse.Namespace, request: PlanRequest, chip: chips.Chip, programs: Sequence[ProgramPlan]
) -> list[jobs.Change]:
    """Return the changes of which each alone makes a video fit: tiles, and a larger slice."""
    vae, job = jobs.weightless_vae(args.model, common.parse_dtype(args.dtype)), jobs.Job(**request.job)
    options = {"dp": args.dp, "backend": args.backend}
    devices, peak = list(request.mesh.devices.flat), peak_bytes(programs)
    changes = [  # each an option with which the video fits, or None
        jobs.largest_tile_that_fits(vae, job, devices, chip, peak, tp=args.tp, **options),
        jobs.smallest_mesh_that_fits(args.model, vae.dtype, job, args.topology, args.tp, peak, **options),
    ]
    return [change for change in changes if change]


def _pipeline_would_fit(
    args: argparse.Namespace, request: PlanRequest, chip: chips.Chip, programs: Sequence[ProgramPlan]
) -> list[jobs.Change]:
    """Return the changes of which each alone makes a pipeline fit.

    They are offload, with tiles where a chunk alone does not fit; the prompt on the host; a larger slice.
    """
    changes = []
    if change := _with_offload(args, request, chip, programs):
        changes.append(change)
    # The first of `programs`, the request's plans, is the text encoder's, and would not run. The weights of
    # the text encoder are in the `other_weights` of all later programs, and would not be in memory either.
    without_text = peak_bytes(programs[1:], request.other_weights[1:]) - _bytes(request, "text_encoder")
    if without_text <= chip.memory and not args.offload:
        changes.append(jobs.Change("the prompt encoded on the host", int(without_text)))
    present_peak, present_bytes = peak_bytes(programs, request.present_weights), _present_bytes(request)
    generation = args.topology.partition(":")[0]  # a topology is "GENERATION:GRID"
    # `GRIDS` has the flat grids by their number of chips. Grids of other generations have three axes.
    is_flat = args.topology.count("x") == 1
    dp = 1 if args.no_guidance else 2  # each pass of guidance on devices of its own
    for num_chips, grid in chips.GRIDS.items() if is_flat else ():
        if not request.mesh.size < num_chips <= chips.LARGEST:
            continue
        larger = _with(args, topology=f"{generation}:{grid}", dp=dp, tp=num_chips // dp)
        on_grid = requested(larger)
        # Nothing is compiled for a grid on which the pipeline clearly does not fit. The memory that is not
        # weights, such as activations, is split over the devices; 1.1 is a margin.
        other_bytes = (present_peak - present_bytes) * request.mesh.size / num_chips
        if _present_bytes(on_grid) + other_bytes > 1.1 * chip.memory:
            continue
        plans = compiled(larger, on_grid, functools.partial(compile_program, mesh=on_grid.mesh), program_rows)
        peak = peak_bytes(plans, on_grid.present_weights)
        if peak <= chip.memory:
            return [*changes, jobs.Change(f"--topology {larger.topology} --dp {dp} --tp {larger.tp}", peak)]
    return changes


def _with_offload(
    args: argparse.Namespace, request: PlanRequest, chip: chips.Chip, programs: Sequence[ProgramPlan]
) -> jobs.Change | None:
    """Return the offload with which a pipeline fits, with tiles if only the VAE's chunks do not fit."""
    peak = peak_bytes(programs, request.own_weights)
    if peak <= chip.memory:
        return jobs.Change("--offload", peak)
    # The first two of `programs`, the text encoder's and a step's, have no tiles.
    others_peak, decoding_peak = peak_bytes(programs[:2]), peak_bytes(programs[2:])
    if others_peak > chip.memory:
        return None
    vae = jobs.weightless_vae(args.model, common.parse_dtype(args.dtype))
    job = jobs.Job(DECODE, *(request.job[name] for name in ("frames", "height", "width", "tile")))
    beside = request.own_weights[-1]
    tiles = jobs.largest_tile_that_fits(
        *(vae, job, list(request.mesh.devices.flat)),
        replace(chip, memory=chip.memory - beside),
        decoding_peak,
        dp=args.dp,
        tp=args.tp,
    )
    return tiles and jobs.Change(f"--offload {tiles.what}", max(others_peak, tiles.peak_bytes + beside))


def _present_bytes(request: PlanRequest) -> float:
    """Return the bytes of a pipeline's weights that are in memory together; with offload, of the largest."""
    if not request.job["offload"]:
        return _bytes(request, "weights")
    return max(_bytes(request, name) for name in ("text_encoder", "transformer", "vae"))


def _bytes(request: PlanRequest, what: str) -> float:
    """Return the bytes of a pipeline's weights: all "weights", or those of one network, by its name."""
    return request.about[f"{what}_GiB"] * chips.GIB


ADVISERS = {"vae": _video_would_fit, "pipeline": _pipeline_would_fit}
"""By a value of `--network`: the function that returns the changes that make it fit."""


def document(
    args: argparse.Namespace,
    request: PlanRequest,
    format_name: str,
    programs: Sequence[ProgramPlan],
    figures: dict[str, Any],
) -> dict[str, Any]:
    """Return a plan as a JSON document: the options, the programs and the printed figures."""
    return {
        "format": format_name,
        "job": request.job,
        "topology": args.topology if args.platform == "tpu" else "cpu",
        "mesh": {"dp": args.dp, "tp": args.tp},
        "backend": args.backend,
        "dtype": args.dtype,
        "model": args.model,
        "versions": versions("torch", "torchax", "jax", "jaxlib", "libtpu", "diffusers"),
        "counts": list(request.counts),
        "programs": [program.as_json() for program in programs],
        "summary": figures,
        "process_bytes": runtime.host_peak_bytes(),
    }
