"""The figures that `plan` prints: of a program, and of the job that its programs make."""

from collections.abc import Sequence
from typing import Any

from cogvideox_torchax.plan.chips import GIB, Chip
from cogvideox_torchax.plan.programs import ProgramPlan


def program_rows(program: ProgramPlan, chip: Chip | None) -> dict[str, Any]:
    """Return the rows of a program's table, by their names; the floor of its time if there is a chip."""
    rows: dict[str, Any] = {
        "TFLOP": program.flops / 1e12,
        "GB moved": program.bytes_accessed / 1e9,
        "arguments GiB": program.argument_bytes / GIB,
        "temporaries GiB": program.temp_bytes / GIB,
        "results GiB": program.output_bytes / GIB,
        "compiled in s": program.compile_seconds,
    }
    if chip:
        rows["floor ms (FLOPs and bytes over peaks)"] = 1e3 * program.floor_seconds(chip)
    if program.kernels:
        rows["Pallas kernels"] = program.kernels
    return rows | {
        kind: f"{traffic.count} of {traffic.bytes / 2**20:.2f} MiB, the largest {traffic.largest / 2**20:.2f}"
        for kind, traffic in program.collectives.items()
    }


def peak_bytes(programs: Sequence[ProgramPlan], beside: Sequence[int] = ()) -> int:
    """Return the peak memory of a device that runs the programs; `beside` is as for `of_job`."""
    others = beside or (0,) * len(programs)
    return max(plan.peak_bytes + other for plan, other in zip(programs, others, strict=True))


def of_job(
    about: dict[str, Any],
    counts: Sequence[int],
    programs: Sequence[ProgramPlan],
    chip: Chip | None,
    beside: Sequence[int] = (),
) -> dict[str, Any]:
    """Return the figures of a job: its peak memory, and for a chip whether it fits and the floor of its time.

    Args:
        about: the figures that come first.
        counts: number of times that each program runs in the job.
        programs: the programs' plans.
        chip: the chip that the programs are compiled for, or None.
        beside: for each program, the bytes of other networks' weights on its device; empty for none.
    """
    peak = peak_bytes(programs, beside)
    figures = {**about, "peak_memory_GiB": peak / GIB}
    if chip:
        floor = sum(count * plan.floor_seconds(chip) for count, plan in zip(counts, programs, strict=True))
        figures |= {"memory_of_a_chip_GiB": chip.memory / GIB, "fits": peak <= chip.memory, "floor_s": floor}
    return figures
