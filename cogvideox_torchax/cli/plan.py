"""`plan`: compiles for a TPU on a machine that has none, and says whether it fits and how long it takes."""

import argparse
import contextlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cogvideox_torchax.backends import Use, names
from cogvideox_torchax.cli import common
from cogvideox_torchax.vae.directions import DECODE, ENCODE
from cogvideox_torchax.vae.memory import parse_tiles
from cogvideox_torchax.versions import versions

if TYPE_CHECKING:
    from cogvideox_torchax.plan.jobs import Chip, Job, ProgramPlan
    from cogvideox_torchax.plan.programs import KernelTime
    from cogvideox_torchax.vae.torchax.autoencoder import AutoencoderKLCogVideoX

GIB = 2**30
BACKEND = "torchax"
ONLY = {
    **dict.fromkeys(("backend", "tiling", "no_advice", "layers", "encode", "save_hlo"), ("vae",)),
    **dict.fromkeys(("no_guidance", "split"), ("step",)),
}
"""Options that some networks alone have a use for."""


def add(subparsers: Any) -> argparse.ArgumentParser:
    command = common.add_command(
        subparsers,
        "plan",
        "compile for a TPU on a machine without one: does it fit, how long does it take",
        "cogvideox-torchax plan --model 5b --topology v6e:1x1 --frames 49 --height 480 --width 720",
    )
    command.add_argument(
        "--model", default="5b", metavar="2b|5b|1.5-5b|DIR_OR_ID", help="whose shapes to plan (default: 5b)"
    )
    command.add_argument(
        "--topology", default="v6e:1x1", help="generation and grid of chips (default: v6e:1x1)"
    )
    command.add_argument("--platform", choices=("tpu", "cpu"), default="tpu", help="cpu: no time, but quick")
    command.add_argument("--frames", type=int, default=49, help="frames of the video (default: 49)")
    command.add_argument("--height", type=int, default=480, help="in pixels (default: 480)")
    command.add_argument("--width", type=int, default=720, help="in pixels (default: 720)")
    command.add_argument("--dp", type=int, default=1, help="mesh: devices that a batch is split over")
    command.add_argument("--tp", type=int, default=1, help="mesh: devices that a width is split over")
    command.add_argument("--backend", choices=names(Use.PLAN), default=BACKEND, help="whose programs")
    command.add_argument(
        "--tiling",
        nargs="?",
        const="default",
        metavar="HEIGHTxWIDTH",
        help="plan a tile of the video, in pixels; without a size, the tile that enable_tiling() takes",
    )
    command.add_argument(
        "--no-advice", action="store_true", help="when it does not fit, do not compile what would"
    )
    command.add_argument("--layers", action="store_true", help="on a mesh: what each layer holds and moves")
    command.add_argument(
        "--network",
        choices=("vae", "step", "prompt", "train-step"),
        default="vae",
        help="the VAE, a step of the transformer, the text encoder, a step training the VAE (default: vae)",
    )
    command.add_argument(
        "--no-guidance", action="store_true", help="with --network step: without the second half of guidance"
    )
    command.add_argument(
        "--split",
        choices=("tokens", "channels"),
        help="with --network step: what is split over --tp (default: tokens, where it divides the heads)",
    )
    command.add_argument("--encode", action="store_true", help="plan encoding instead of decoding")
    command.add_argument("--dtype", default="bfloat16", help="of weights and activations (default: bfloat16)")
    command.add_argument("--save-hlo", metavar="DIR", help="keep the compiled text of each program there")
    command.add_argument("-o", "--output", metavar="FILE", help="write the plan there as JSON")
    command.add_argument("--json", action="store_true", help="print the plan as JSON, and the rest on stderr")
    return command


def check(args: argparse.Namespace) -> None:
    """Raises `ValueError` for options that have no effect beside the others."""
    for name, networks in ONLY.items():
        if args.network not in networks and getattr(args, name) not in (None, False, BACKEND):
            raise ValueError(f"--{name.replace('_', '-')} does not go with --network {args.network}")
    if args.layers and args.dp * args.tp == 1:
        raise ValueError("--layers tells what lies where on a mesh: pass --dp or --tp")
    if args.layers and args.backend == "flax":
        raise ValueError("--layers reads the names of PyTorch's modules: the Flax build's programs have none")


def run(args: argparse.Namespace) -> int:
    from cogvideox_torchax.files import reports

    check(args)
    if args.output:  # before the work, not after it
        reports.check_file(Path(args.output))
    with contextlib.redirect_stdout(sys.stderr) if args.json else contextlib.nullcontext():
        document = _planned(args)
    if args.output:
        reports.write_json(Path(args.output), document)
    if args.json:
        print(json.dumps(document))
    return 0


def _planned(args: argparse.Namespace) -> dict[str, Any]:
    """The plan as `benchmarks/` keeps it; prints it as it goes."""
    from cogvideox_torchax.files import reports
    from cogvideox_torchax.plan import jobs, models, report

    dtype = common.parse_dtype(args.dtype)
    vae = models.weightless_vae(args.model, dtype)
    if args.network == "train-step":
        return _planned_train_step(args, vae)
    if args.network != "vae":
        return _planned_network(args, vae)
    if args.save_hlo:
        Path(args.save_hlo).mkdir(parents=True, exist_ok=True)
    direction, tile = ENCODE if args.encode else DECODE, _tile(args.tiling, vae)
    job = jobs.Job(direction, args.frames, args.height, args.width, tile)
    pieces, _ = job.chunk_shapes(vae)
    chip, devices = _target(args)
    mesh = {"dp": args.dp, "tp": args.tp}
    programs = []
    count = min(len(pieces), 2)
    common.say(f"compiling {count} program{'s' * (count > 1)}; each can take minutes")
    planned = jobs.plan_programs(vae, job, devices, chip, backend=args.backend, **mesh)
    for program in planned:
        programs.append(program)
        _print_program(program, chip)
        if args.save_hlo:
            reports.write_text(Path(args.save_hlo) / f"{job.kind}_{program.name}.hlo.txt", program.text)
    summary = _summary(job, len(pieces), job.tiles(vae), programs, chip)
    common.print_report(summary, as_json=False)
    layers = programs[-1].layers if args.layers else []
    if layers:
        head, *cells = report.table(layers)
        print(reports.table(head, cells))
    if chip and not summary["fits"] and not args.no_advice:
        peak = max(program.peak_bytes for program in programs)
        common.say("it does not fit: compiling what would")
        whose = {"backend": args.backend}
        used = args.dp * args.tp
        changes = [
            jobs.smallest_tiling_that_fits(vae, job, devices, chip, peak, **whose, **mesh),
            jobs.smallest_mesh_that_fits(args.model, dtype, job, args.topology, used, peak, **whose),
        ]
        summary["would_fit"] = {change.what: change.peak_bytes / GIB for change in changes if change}
        advice = {f"with {what}": f"{size:.2f} GiB" for what, size in summary["would_fit"].items()}
        common.print_report(advice or {"would fit": "nothing that was tried"}, as_json=False)
    rows = [vars(row) for row in layers]
    return _document(args, vars(job), programs, summary, backend=args.backend, layers=rows)


def _target(args: argparse.Namespace) -> "tuple[Chip | None, list[Any]]":
    """The peaks to hold programs against, and the devices to compile them for."""
    from cogvideox_torchax.plan import chips

    if args.platform == "tpu":
        devices = chips.topology_devices(args.topology)
        return chips.CHIPS[args.topology.partition(":")[0]], devices
    import jax

    return None, jax.devices("cpu")


def _planned_network(args: argparse.Namespace, vae: "AutoencoderKLCogVideoX") -> dict[str, Any]:
    """The plan of a pipeline's transformer or of its text encoder."""
    from cogvideox_torchax import runtime
    from cogvideox_torchax.plan import networks

    chip, devices = _target(args)  # first: what loads libtpu else has no kernel's schedule written
    runtime.enable()
    mesh, dtype = {"dp": args.dp, "tp": args.tp}, common.parse_dtype(args.dtype)
    common.say("compiling 2 programs; each can take minutes")
    if args.network == "prompt":
        tokens = networks.transformer_config(args.model).get("max_text_seq_length", 226)
        plan = networks.plan_prompt(dtype, devices, chip, tokens=tokens, **mesh)
    else:
        scale, frames = vae.spatial_scale, (args.frames - 1) // vae.config["temporal_compression_ratio"] + 1
        size = {"frames": frames, "height": args.height // scale, "width": args.width // scale}
        guided = not args.no_guidance
        options = {"guided": guided, "split": args.split}
        plan = networks.plan_step(args.model, dtype, devices, chip, **options, **size, **mesh)
    table = networks.table(plan, chip)
    common.print_report(table, as_json=False)
    return _document(args, _network_job(args), [plan.program], table)


def _planned_train_step(args: argparse.Namespace, vae: "AutoencoderKLCogVideoX") -> dict[str, Any]:
    """The plan of one step that trains the VAE."""
    from cogvideox_torchax.plan import jobs, training

    job = jobs.Job(ENCODE, args.frames, args.height, args.width)
    chip, devices = _target(args)
    common.say("compiling 2 programs; each takes minutes")
    plans = []
    for plan in training.plan_train_step(vae, job, devices, chip, dp=args.dp, tp=args.tp):
        plans.append(plan)
        _print_program(plan, chip)
    table = training.table(plans, vae, chip)
    common.print_report(table, as_json=False)
    return _document(args, _network_job(args), plans, table)


def _network_job(args: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(args, name) for name in ("network", "frames", "height", "width")}


def _document(
    args: argparse.Namespace,
    job: dict[str, Any],
    programs: "list[ProgramPlan]",
    summary: dict[str, Any],
    **more: Any,
) -> dict[str, Any]:
    from cogvideox_torchax import runtime
    from cogvideox_torchax.plan import jobs

    return {
        "format": jobs.FORMAT,
        "job": job,
        "topology": args.topology if args.platform == "tpu" else "cpu",
        "mesh": {"dp": args.dp, "tp": args.tp},
        "dtype": args.dtype,
        "model": args.model,
        "versions": versions("torch", "torchax", "jax", "jaxlib", "libtpu", "diffusers"),
        "programs": [program.as_json() for program in programs],
        "summary": summary,
        "process_bytes": runtime.host_peak_bytes(),
        **more,
    }


def _tile(text: str | None, vae: "AutoencoderKLCogVideoX") -> tuple[int, int] | None:
    if text is None:
        return None
    if text == "default":
        return vae.tile_sample_min_height, vae.tile_sample_min_width
    return parse_tiles(text, vae.spatial_scale)


def _print_program(program: "ProgramPlan", chip: "Chip | None") -> None:
    print(f"{program.name} chunk, {program.frames} frames in")
    rows: dict[str, Any] = {
        "TFLOP": program.flops / 1e12,
        "GB moved": program.bytes_accessed / 1e9,
        "arguments GiB": program.argument_bytes / GIB,
        "temporaries GiB": program.temp_bytes / GIB,
        "results GiB": program.output_bytes / GIB,
        "compiled in s": program.compile_seconds,
    }
    if chip and program.seconds and program.floor_seconds is not None:
        shares = ", ".join(
            f"{kind} {100 * part / program.seconds:.0f} %" for kind, part in program.shares.items()
        )
        rows |= {
            "estimate ms": 1e3 * program.seconds,
            "floor ms (FLOPs over peak)": 1e3 * program.floor_seconds,
            "share of peak": f"{100 * program.floor_seconds / program.seconds:.0f} %",
            "time goes to": shares,
        }
    for name, kernel in program.kernel_times.items():
        rows[f"kernel {name} ms"] = _kernel(kernel)
    if program.kernels_by_bytes:
        rows["kernels by bytes"] = f"{program.kernels_by_bytes}: their schedule is not known"
    if program.open_loops:
        rows["loops of unknown length"] = f"{program.open_loops}: counted once"
    if program.collective_seconds:
        rows["collectives ms, no overlap"] = 1e3 * sum(program.collective_seconds.values())
    for kind, (count, largest) in program.collectives.items():
        rows[kind] = f"{count}, the largest {largest / 2**20:.2f} MiB"
    common.print_report(rows, as_json=False)


def _kernel(kernel: "KernelTime") -> str:
    by_bytes = f"{kernel.count} of them, by bytes {1e3 * kernel.bytes_seconds:.2f}"
    if kernel.schedule_seconds is None:
        return f"{by_bytes}; by schedule not known for {kernel.by_bytes}"
    assumed = f", {kernel.assumed_branches} branches assumed" if kernel.assumed_branches else ""
    return f"{by_bytes}, by schedule {1e3 * kernel.schedule_seconds:.2f}{assumed}"


def _summary(
    job: "Job", count: int, tiles: int, programs: "list[ProgramPlan]", chip: "Chip | None"
) -> dict[str, Any]:
    peak = max(program.peak_bytes for program in programs)
    summary: dict[str, Any] = {
        "video": f"{job.kind} {job.frames} x {job.height} x {job.width}",
        "chunks": count,
        "tiles": tiles,
        "peak_memory_GiB": peak / GIB,
    }
    if chip:
        summary |= {"memory_of_a_chip_GiB": chip.memory / GIB, "fits": peak <= chip.memory}
        seconds = [program.seconds or 0.0 for program in programs]
        # Tiles at the edges are smaller: with tiles this is an upper bound.
        summary["whole_video_s"] = tiles * (seconds[0] + seconds[-1] * (count - 1))
        whole = [program.seconds_with_collectives for program in programs]
        if whole[0] is not None and whole[-1] is not None:
            summary["with_collectives_s"] = tiles * (whole[0] + whole[-1] * (count - 1))
    return summary
