"""The work of `plan`: a command line becomes programs, which are compiled, printed and kept as a document."""

import argparse
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from cogvideox_torchax import runtime
from cogvideox_torchax.cli import common
from cogvideox_torchax.files import reports
from cogvideox_torchax.plan import chips, jobs, models, report, summary
from cogvideox_torchax.plan.programs import ProgramPlan, Work, compile_program
from cogvideox_torchax.sharding import make_mesh
from cogvideox_torchax.vae.directions import DECODE, ENCODE
from cogvideox_torchax.vae.memory import parse_tiles
from cogvideox_torchax.versions import versions


@dataclass(frozen=True)
class PlanRequest:
    """The programs to compile for a command line.

    Attributes:
        works: the programs.
        counts: number of times that each runs in the job.
        mesh: the devices to compile for.
        chip: the chip that they are; None for CPUs.
        about: figures of the job that need no compiling, by the names that are printed.
        job: the job, for the plan's JSON.
    """

    works: Sequence[Work]
    counts: Sequence[int]
    mesh: Any
    chip: chips.Chip | None
    about: dict[str, Any]
    job: dict[str, Any]


def planned(args: argparse.Namespace) -> dict[str, Any]:
    """Compile the programs of `--network`, and print their figures; return the plan as a JSON document."""
    request = requested(args)
    programs = compiled(args, request, lambda work: compile_program(work, request.mesh), summary.program_rows)
    figures = summary.of_job(request.about, request.counts, programs, request.chip)
    common.print_report(figures)
    rows = programs[-1].layers if args.layers else []  # of the later chunks, which are most of a video
    if rows:
        head, *cells = report.table(rows)  # rows of texts
        print(reports.table(head, cells))
    if request.chip:  # a CPU has no limit of memory, and no estimate of time
        if args.network == "vae" and not figures["fits"] and not args.no_advice:
            peak = max(program.peak_bytes for program in programs)
            figures["would_fit"] = _would_fit(args, request, request.chip, peak)
        common.say("for times: python -m benchmarks estimate, with these options, in a checkout")
    return document(args, request, jobs.FORMAT, programs, figures) | {"layers": [vars(row) for row in rows]}


def compiled(
    args: argparse.Namespace,
    request: PlanRequest,
    compile_one: Callable[[Work], Any],
    rows: Callable[[Any, Any], dict[str, Any]],
) -> list[Any]:
    """Compile a request's programs, and print the figures of each as it is there; return their plans.

    Args:
        args: the options of `plan`; `--save-hlo` keeps the compiled texts.
        request: the programs.
        compile_one: compiles a program, and returns its `ProgramPlan`.
        rows: returns the printed figures of such a plan on the request's chip.
    """
    if args.save_hlo:
        common.make_directory(args.save_hlo)
    common.say(f"programs to compile: {len(request.works)}; each can take minutes")
    plans = []
    for work in request.works:
        plan = compile_one(work)
        if work.program:
            plan.layers = report.layers(work.program, plan.text)
        print(f"{plan.name}, {plan.frames} {'tokens' if plan.name == 'prompt' else 'frames'} in")
        common.print_report(rows(plan, request.chip))
        if args.save_hlo:
            name = f"{request.job.get('direction', args.network)}_{plan.name}.hlo.txt"
            reports.write_text(Path(args.save_hlo) / name, plan.text)
        plans.append(plan)
    return plans


def requested(args: argparse.Namespace) -> PlanRequest:
    """Return the programs that the options of `plan` ask for.

    Raises:
        ValueError: a size, a model, a mesh or a topology that is not possible.
    """
    if args.platform == "tpu":
        devices = chips.topology_devices(args.topology)  # those of a slice that need not exist
        chip = chips.CHIPS[args.topology.partition(":")[0]]  # a topology is "GENERATION:GRID"
    else:
        devices, chip = jax.devices("cpu"), None
    vae = models.weightless_vae(args.model, common.parse_dtype(args.dtype))
    request = _requested_video if args.network == "vae" else _requested_network
    return request(args, vae, make_mesh(args.dp, args.tp, devices=devices), chip)


def _requested_video(args: argparse.Namespace, vae: Any, mesh: Any, chip: chips.Chip | None) -> PlanRequest:
    """Return the programs that encode or decode a video; `vae` is the model without weights."""
    # Height and width of a tile. `--tiling` without a size is "default", the model's own; None is no tiling.
    tile = args.tiling and (vae.tile_sample_min_height, vae.tile_sample_min_width)
    if args.tiling not in (None, "default"):
        tile = parse_tiles(args.tiling, vae.spatial_compression_ratio)
    job = jobs.Job(ENCODE if args.encode else DECODE, args.frames, args.height, args.width, tile)
    chunks, tiles = len(job.chunk_shapes(vae)[0]), job.tiles(vae)
    video = f"{job.direction} {job.frames} x {job.height} x {job.width}"
    return PlanRequest(
        # There are two programs at most: the first chunk's, and one for all later chunks. Tiles at the edges
        # are smaller: with tiles the sums over the counts are too high.
        works=list(jobs.chunk_works(vae, job, mesh, args.backend)),
        counts=(tiles, tiles * (chunks - 1))[:chunks],
        mesh=mesh,
        chip=chip,
        about={"video": video, "chunks": chunks, "tiles": tiles},
        job=vars(job),
    )


def _requested_network(args: argparse.Namespace, vae: Any, mesh: Any, chip: chips.Chip | None) -> PlanRequest:
    """Return the program of the text encoder, of a denoising step, or with `--cache` of each kind of step.

    Of `vae` only the dtype and the compression ratios are used.
    """
    from cogvideox_torchax.plan import networks  # needs transformers, as the VAE does not

    runtime.enable()
    counts: Sequence[int] = (1,)
    if args.network == "prompt":
        tokens = networks.transformer_config(args.model).get("max_text_seq_length", 226)  # diffusers' default
        works = [networks.prompt_work(args.model, vae.dtype, mesh, tokens=tokens)]
    else:
        # The transformer's input is latents, and so are these sizes. A job checks the size of its video.
        chunks, (_, height, width) = jobs.Job(DECODE, args.frames, args.height, args.width).chunk_shapes(vae)
        size = {"frames": chunks[-1].stop, "height": height, "width": width}
        options = {"guided": not args.no_guidance, "parallel": args.parallel, "cache": args.cache}
        step = functools.partial(networks.step_work, args.model, vae.dtype, mesh, chip, **size, **options)
        # By the number of the first step of a kind, such as those that skip blocks: the steps of that kind.
        kinds = {0: 1}
        if args.cache:
            kinds = networks.cached_steps(args.model, vae.dtype, args.cache, not args.no_guidance)
        if args.skips is not None:  # a first-block cache decides at run time: the user gives the number
            kinds = {0: networks.STEPS - args.skips, 1: args.skips}
        works, counts = [step(step=first) for first in kinds], tuple(kinds.values())
    return PlanRequest(
        works=works,
        counts=counts,
        mesh=mesh,
        chip=chip,
        about=networks.about(works[0], counts),
        job={name: getattr(args, name) for name in ("network", "frames", "height", "width")},
    )


def _would_fit(
    args: argparse.Namespace, request: PlanRequest, chip: chips.Chip, peak: int
) -> dict[str, float]:
    """Print and return what would make a video fit: peak memory in GiB, by the option that does it.

    `peak` is the peak memory in bytes of a chip with the given options.
    """
    common.say("it does not fit: compiling what would")
    vae, job = models.weightless_vae(args.model, common.parse_dtype(args.dtype)), jobs.Job(**request.job)
    options = {"dp": args.dp, "backend": args.backend}
    devices = list(request.mesh.devices.flat)
    changes = [  # each an option with which the video fits, or None
        jobs.largest_tile_that_fits(vae, job, devices, chip, peak, tp=args.tp, **options),
        jobs.smallest_mesh_that_fits(args.model, vae.dtype, job, args.topology, args.tp, peak, **options),
    ]
    found = {change.what: change.peak_bytes / chips.GIB for change in changes if change}
    advice = {f"with {what}": f"{size:.2f} GiB" for what, size in found.items()}
    common.print_report(advice or {"would fit": "nothing that was tried"})
    return found


def document(
    args: argparse.Namespace,
    request: PlanRequest,
    format_name: str,
    programs: Sequence[ProgramPlan],
    figures: dict[str, Any],
) -> dict[str, Any]:
    """Return a plan as a JSON document of a format, of the options, the programs and the printed figures."""
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
