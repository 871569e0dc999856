"""The figures of a program's plan, and of the whole video that its programs make."""

from collections.abc import Sequence
from typing import Any

from cogvideox_torchax.plan.chips import GIB, Chip
from cogvideox_torchax.plan.jobs import Job
from cogvideox_torchax.plan.programs import KernelTime, ProgramPlan


def program_rows(program: ProgramPlan, chip: Chip | None) -> dict[str, Any]:
    """Return the rows of a program's table, by their names; estimates of time if there is a chip."""
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
            f"{kind} {100 * seconds / program.seconds:.0f} %" for kind, seconds in program.shares.items()
        )
        rows |= {
            "estimate ms": 1e3 * program.seconds,
            "floor ms (FLOPs over peak)": 1e3 * program.floor_seconds,
            "share of peak": f"{100 * program.floor_seconds / program.seconds:.0f} %",
            "time goes to": shares,
        }
    rows |= {f"kernel {name} ms": _kernel_cell(kernel) for name, kernel in program.kernel_times.items()}
    if program.kernels_by_bytes:
        rows["kernels by bytes"] = f"{program.kernels_by_bytes}: their schedule is not known"
    if program.open_loops:
        rows["loops of unknown length"] = f"{program.open_loops}: counted once"
    if program.collective_seconds:
        rows["waiting for collectives ms"] = 1e3 * sum(program.collective_seconds.values())
    return rows | {
        kind: f"{count}, the largest {largest / 2**20:.2f} MiB"
        for kind, (count, largest) in program.collectives.items()
    }


def _kernel_cell(kernel: KernelTime) -> str:
    """Return a table's cell for the kernels of one name: their number, and two estimates of their time in ms.

    "by bytes" is the time to move their bytes, "by schedule" the time of the cycles in the compiler's
    schedules. `kernel.by_bytes` is the number of kernels without a known schedule, `kernel.assumed_branches`
    the number of branches that depend on data: each is assumed to be taken or not.
    """
    start = f"{kernel.count} of them, by bytes {1e3 * kernel.bytes_seconds:.2f}"
    if kernel.schedule_seconds is None:
        return f"{start}; by schedule not known for {kernel.by_bytes}"
    assumed = f", {kernel.assumed_branches} branches assumed" if kernel.assumed_branches else ""
    return f"{start}, by schedule {1e3 * kernel.schedule_seconds:.2f}{assumed}"


def whole_video(
    job: Job, count: int, tiles: int, programs: Sequence[ProgramPlan], chip: Chip | None
) -> dict[str, Any]:
    """Return the memory and the time of a whole job, by name.

    Args:
        job: the planned job.
        count: number of its chunks.
        tiles: number of tiles of a frame.
        programs: plans of the first chunk's program and, if there are later chunks, of their program.
        chip: the chip that the programs are compiled for; None for no time and no verdict.
    """
    peak = max(program.peak_bytes for program in programs)
    found: dict[str, Any] = {
        "video": f"{job.direction} {job.frames} x {job.height} x {job.width}",
        "chunks": count,
        "tiles": tiles,
        "peak_memory_GiB": peak / GIB,
    }
    if chip:
        found |= {"memory_of_a_chip_GiB": chip.memory / GIB, "fits": peak <= chip.memory}
        # Each chunk after the first runs the later program; the two are one if there is a single chunk. Tiles
        # at the edges are smaller: with tiles the times are upper bounds.
        first, later = programs[0], programs[-1]
        found["whole_video_s"] = tiles * ((first.seconds or 0.0) + (later.seconds or 0.0) * (count - 1))
        first_s, later_s = first.seconds_with_collectives, later.seconds_with_collectives
        if first_s is not None and later_s is not None:
            found["with_collectives_s"] = tiles * (first_s + later_s * (count - 1))
    return found
