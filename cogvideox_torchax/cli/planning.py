"""The work of `plan`: programs compiled, printed as they come, and kept as one document."""

import argparse
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax

from cogvideox_torchax import runtime
from cogvideox_torchax.cli import common
from cogvideox_torchax.files import reports
from cogvideox_torchax.plan import chips, jobs, models, report, summary, training
from cogvideox_torchax.vae.directions import DECODE, ENCODE
from cogvideox_torchax.vae.memory import parse_tiles
from cogvideox_torchax.versions import versions

Document = dict[str, Any]
"""A plan as JSON; `_document` builds it."""


def planned(args: argparse.Namespace) -> Document:
    """Compile the programs of `--network`, and print their figures; return the plan as a JSON document."""
    # First of all: libtpu writes the schedules of kernels only if `_chip_and_devices` is what loads it.
    chip, devices = _chip_and_devices(args)
    vae = models.weightless_vae(args.model, common.parse_dtype(args.dtype))
    # `_plan_network` plans the two other choices of --network, "step" and "prompt".
    plan = {"vae": _plan_vae, "train-step": _plan_train_step}.get(args.network, _plan_network)
    return plan(args, vae, chip, devices, {"dp": args.dp, "tp": args.tp})


def _plan_vae(args: argparse.Namespace, vae: Any, chip: Any, devices: Any, mesh: dict[str, int]) -> Document:
    """Print and return the plan of encoding or decoding, and what would fit if the video does not.

    Args:
        args: the command's options.
        vae: the model without weights, on the meta device.
        chip: the chip to plan for; None for a CPU.
        devices: the devices to compile for.
        mesh: the sizes of the mesh's axes "dp" and "tp".
    """
    if args.save_hlo:
        Path(args.save_hlo).mkdir(parents=True, exist_ok=True)
    # Height and width of a tile. `--tiling` without a size is "default", the model's own; None is no tiling.
    tile = args.tiling and (vae.tile_sample_min_height, vae.tile_sample_min_width)
    if args.tiling not in (None, "default"):
        tile = parse_tiles(args.tiling, vae.spatial_compression_ratio)
    job = jobs.Job(ENCODE if args.encode else DECODE, args.frames, args.height, args.width, tile)
    chunks, _input_shape = job.chunk_shapes(vae)
    # There are two programs at most: the first chunk's, and one for all later chunks.
    common.say(f"compiling for {min(len(chunks), 2)} of {len(chunks)} chunks; each can take minutes")
    plans = jobs.plan_programs(vae, job, devices, chip, backend=args.backend, **mesh)
    programs = list(_printed_programs(plans, chip, args.save_hlo and f"{args.save_hlo}/{job.direction}"))
    figures = summary.whole_video(job, len(chunks), job.tiles(vae), programs, chip)
    common.print_report(figures)
    layers = programs[-1].layers if args.layers else []  # of the later chunks, which are most of a video
    if layers:
        head, *cells = report.table(layers)  # rows of texts
        print(reports.table(head, cells))
    if chip and not figures["fits"] and not args.no_advice:  # a CPU has no chip, and so no limit of memory
        peak = max(program.peak_bytes for program in programs)
        common.say("it does not fit: compiling what would")
        changes = [  # each an option with which the video fits, or None
            jobs.largest_tile_that_fits(vae, job, devices, chip, peak, backend=args.backend, **mesh),
            jobs.smallest_mesh_that_fits(
                args.model, vae.dtype, job, args.topology, args.dp * args.tp, peak, backend=args.backend
            ),
        ]
        figures["would_fit"] = {change.what: change.peak_bytes / 2**30 for change in changes if change}  # GiB
        advice = {f"with {what}": f"{size:.2f} GiB" for what, size in figures["would_fit"].items()}
        common.print_report(advice or {"would fit": "nothing that was tried"})
    return _document(
        args, vars(job), programs, figures, backend=args.backend, layers=[vars(layer) for layer in layers]
    )


def _plan_network(
    args: argparse.Namespace, vae: Any, chip: Any, devices: Any, mesh: dict[str, int]
) -> Document:
    """Print and return the plan of the text encoder, of a denoising step, or with `--cache` of all steps.

    Args:
        args: the command's options.
        vae: the VAE, of which only the dtype and the compression ratios are used.
        chip: the chip to plan for; None for a CPU.
        devices: the devices to compile for.
        mesh: the sizes of the mesh's axes "dp" and "tp".
    """
    from cogvideox_torchax.plan import networks  # needs transformers, as the VAE does not

    runtime.enable()
    # Programs of 2 and of 3 layers give the figures of the whole network: a layer adds their difference.
    common.say("compiling 2 programs; each can take minutes")
    if args.network == "prompt":
        tokens = networks.transformer_config(args.model).get("max_text_seq_length", 226)  # diffusers' default
        plan = networks.plan_prompt(args.model, vae.dtype, devices, chip, tokens=tokens, **mesh)
    else:
        # The transformer's input is latents, and so are these sizes. A job checks the size of its video.
        chunks, (_, height, width) = jobs.Job(DECODE, args.frames, args.height, args.width).chunk_shapes(vae)
        options = {
            "frames": chunks[-1].stop,
            "height": height,
            "width": width,
            "guided": not args.no_guidance,
            "parallel": args.parallel,
            **mesh,
        }
        step = functools.partial(networks.plan_step, args.model, vae.dtype, devices, chip, **options)
        if args.cache:
            # A video has several kinds of steps: steps computed in full, and steps that skip some blocks.
            # `steps_of_kind` maps the index of each kind's first step to the number of steps of that kind.
            steps_of_kind = networks.cached_steps(args.model, vae.dtype, args.cache, not args.no_guidance)
            plans = [step(cache=args.cache, step=first) for first in steps_of_kind]
            if args.skips is not None:  # a first-block cache decides at run time: the user gives the number
                steps_of_kind = {0: networks.STEPS - args.skips, 1: args.skips}
            table = networks.cached_table(plans, list(steps_of_kind.values()), chip)
            return _print_and_document(args, [plan.program for plan in plans], table)
        plan = step()
    return _print_and_document(args, [plan.program], networks.network_table(plan, chip))


def _plan_train_step(
    args: argparse.Namespace, vae: Any, chip: Any, devices: Any, mesh: dict[str, int]
) -> Document:
    """Print and return the plan of the gradients of a step that trains the VAE.

    There are two programs, encoding and decoding, each with its backward pass.

    Args:
        args: the command's options.
        vae: the model without weights, on the meta device.
        chip: the chip to plan for; None for a CPU.
        devices: the devices to compile for.
        mesh: the sizes of the mesh's axes "dp" and "tp".
    """
    job = jobs.Job(ENCODE, args.frames, args.height, args.width)  # planned in both directions
    common.say("compiling 2 programs; each takes minutes")
    plans = list(_printed_programs(training.plan_train_step(vae, job, devices, chip, **mesh), chip))
    return _print_and_document(args, plans, training.training_table(plans, vae, chip))


def _print_and_document(args: argparse.Namespace, programs: list[Any], figures: dict[str, Any]) -> Document:
    """Print the figures of a network's plan; return the plan as a JSON document.

    `programs` are the plans of the compiled programs; `figures` are values by their printed names.
    """
    common.print_report(figures)
    job = {name: getattr(args, name) for name in ("network", "frames", "height", "width")}
    return _document(args, job, programs, figures)


def _document(
    args: argparse.Namespace, job: dict[str, Any], programs: list[Any], figures: dict[str, Any], **more: Any
) -> Document:
    """Return a plan as a JSON document.

    Args:
        args: the command's options.
        job: the network or direction that was planned, and the size of the video.
        programs: the plans of the compiled programs.
        figures: the printed figures, by name.
        more: further fields of the document.
    """
    return {
        "format": jobs.FORMAT,
        "job": job,
        "topology": args.topology if args.platform == "tpu" else "cpu",
        "mesh": {"dp": args.dp, "tp": args.tp},
        "dtype": args.dtype,
        "model": args.model,
        "versions": versions("torch", "torchax", "jax", "jaxlib", "libtpu", "diffusers"),
        "programs": [program.as_json() for program in programs],
        "summary": figures,
        "process_bytes": runtime.host_peak_bytes(),
        **more,
    }


def _chip_and_devices(args: argparse.Namespace) -> tuple[Any, list[Any]]:
    """Return the chip to plan for, None for a CPU, and the devices to compile for.

    The chip holds the peak rates and the memory of one device. A TPU's devices are those of `--topology`,
    which need not exist.
    """
    if args.platform == "tpu":
        devices = chips.topology_devices(args.topology)
        return chips.CHIPS[args.topology.partition(":")[0]], devices  # a topology is "GENERATION:GRID"
    return None, jax.devices("cpu")


def _printed_programs(plans: Iterable[Any], chip: Any, prefix: str | None = None) -> Iterator[Any]:
    """Print each program's figures as it is compiled, and yield the program's plan.

    Args:
        plans: the programs' plans; an iterator compiles a program at each step.
        chip: the chip to plan for, None for a CPU.
        prefix: path that the names of files for the compiled texts begin with; None for no files.
    """
    for plan in plans:
        print(f"{plan.name} chunk, {plan.frames} frames in")
        common.print_report(summary.program_rows(plan, chip))
        if prefix:
            reports.write_text(Path(f"{prefix}_{plan.name}.hlo.txt"), plan.text)
        yield plan
