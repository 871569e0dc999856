"""`plan`: compiles for a TPU on a machine that has none, and says whether it fits and how long it takes."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cogvideox_torchax.cli import common

if TYPE_CHECKING:
    from cogvideox_torchax.planner import Chip, Job, ProgramPlan

GIB = 2**30


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
    command.add_argument("--encode", action="store_true", help="plan encoding instead of decoding")
    command.add_argument("--dtype", default="bfloat16", help="of weights and activations (default: bfloat16)")
    command.add_argument("--save-hlo", metavar="DIR", help="keep the compiled text of each program there")
    command.add_argument("--json", metavar="FILE", help="write the plan there as JSON")
    return command


def run(args: argparse.Namespace) -> int:
    from cogvideox_torchax import planner

    common.quiet_libraries()
    job = planner.Job("encode" if args.encode else "decode", args.frames, args.height, args.width)
    vae = planner.hollow_vae(args.model, common.parse_dtype(args.dtype))
    pieces, _ = job.chunk_shapes(vae)
    chip, devices = None, []
    if args.platform == "tpu":
        devices = planner.topology_devices(args.topology)
        chip = planner.CHIPS[args.topology.partition(":")[0]]
    else:
        import jax

        devices = jax.devices("cpu")
    programs = []
    common.say(f"compiling {min(len(pieces), 2)} programs; each can take minutes")
    for program in planner.plan_programs(vae, job, devices, chip, dp=args.dp, tp=args.tp):
        programs.append(program)
        _print_program(program, chip)
        if args.save_hlo:
            Path(args.save_hlo).mkdir(parents=True, exist_ok=True)
            (Path(args.save_hlo) / f"{job.kind}_{program.name}.hlo.txt").write_text(program.text)
    summary = _summary(job, len(pieces), programs, chip)
    common.print_report(summary, as_json=False)
    if args.json:
        document = {
            "job": vars(job),
            "topology": args.topology if chip else "cpu",
            "mesh": {"dp": args.dp, "tp": args.tp},
            "dtype": args.dtype,
            "model": args.model,
            "versions": common.versions(),
            "programs": [program.as_json() for program in programs],
            "summary": summary,
        }
        Path(args.json).write_text(json.dumps(document, indent=1) + "\n")
    return 0


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
    for kind, (count, largest) in program.collectives.items():
        rows[kind] = f"{count}, the largest {largest / 2**20:.2f} MiB"
    common.print_report(rows, as_json=False)


def _summary(job: "Job", count: int, programs: "list[ProgramPlan]", chip: "Chip | None") -> dict[str, Any]:
    peak = max(program.peak_bytes for program in programs)
    summary: dict[str, Any] = {
        "video": f"{job.kind} {job.frames} x {job.height} x {job.width}",
        "chunks": count,
        "peak_memory_GiB": peak / GIB,
    }
    if chip:
        summary["fits"] = f"{'yes' if peak <= chip.memory else 'no'} ({chip.memory / GIB:.2f} GiB)"
        if peak > chip.memory:
            summary["try"] = "tiles (plan --height and --width of one tile), or fewer pixels a chip"
        seconds = [program.seconds or 0.0 for program in programs]
        summary["whole_video_s"] = seconds[0] + seconds[-1] * (count - 1)
    return summary
