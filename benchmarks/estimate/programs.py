"""The estimated time of one program: the compiler's cycles, schedules of Pallas kernels, collectives.

Every instruction of the compiled text has the compiler's own `estimated_cycles`; their sum over the clock is
its estimate. It leaves out the work inside a Pallas kernel, which the kernel's final schedule gives, and
communication, which is timed by the links.
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from benchmarks.estimate.chips import CHIPS, Chip, topology_devices
from benchmarks.estimate.hlo import TimedInstruction, instructions, tiled_bytes, times_run
from benchmarks.estimate.links import Links
from benchmarks.estimate.schedule import Schedule, compile_with_schedules
from cogvideox_torchax.plan.programs import ProgramPlan, Work, program_rows, read_program
from cogvideox_torchax.sharding import make_mesh

CONVOLUTION, COPY, OTHER, KERNEL = "convolutions", "copies", "other", "kernels"
"""Kinds of instructions by which a program's time is divided; matrix products are convolutions on a TPU."""

COPIES = ("copy", "slice", "pad", "broadcast", "transpose")
"""Opcodes that only move data."""


@dataclass(frozen=True)
class KernelTime:
    """The time of a program's Pallas kernels of one name, all together.

    Attributes:
        count: number of kernels that run; one in a loop counts once per trip.
        bytes_seconds: time to read their operands and write their results at the chip's bandwidth.
        schedule_seconds: cycles of their final schedules over the clock; None if one schedule is not known.
        seconds: for each kernel the larger of its two times, summed.
        by_bytes: number of kernels whose schedule is not known, and which count by bytes alone.
        assumed_branches: number of branches in their schedules that depend on data (`Schedule.assumed`).
    """

    count: int
    bytes_seconds: float
    schedule_seconds: float | None
    seconds: float
    by_bytes: int
    assumed_branches: int


@dataclass(kw_only=True)
class TimedPlan(ProgramPlan):
    """The figures of a program, with estimated times.

    Attributes:
        shares: the seconds by kind of instruction, without collectives.
        floor_s: the floor of the time, by FLOPs and bytes over the chip's peaks.
        kernel_times: times by the name of a Pallas kernel.
        collective_seconds: by kind, the time that the program waits for its collectives.
        open_loops: number of loops of unknown length, which count once.
    """

    shares: dict[str, float]
    floor_s: float
    kernel_times: dict[str, KernelTime] = field(default_factory=dict)
    collective_seconds: dict[str, float] = field(default_factory=dict)
    open_loops: int = 0

    @property
    def seconds(self) -> float:
        """The compiler's estimate, and of Pallas kernels the larger of the times of bytes and of schedule."""
        return sum(self.shares.values())

    @property
    def seconds_with_collectives(self) -> float:
        return self.seconds + sum(self.collective_seconds.values())

    def as_json(self) -> dict[str, Any]:
        """Return the figures for `json.dumps`, with the derived ones."""
        times = {"seconds": self.seconds, "seconds_with_collectives": self.seconds_with_collectives}
        return super().as_json() | times


def estimate_program(work: Work, mesh: Any, chip: Chip) -> TimedPlan:
    """Lower the program of `work` over a mesh of simulated chips, compile it, and return its figures."""
    start = time.perf_counter()
    compiled, schedules = compile_with_schedules(work.lowered(mesh), chip)  # schedules of the Pallas kernels
    return read_times(work, compiled, chip, time.perf_counter() - start, schedules)


def estimate_function(function: Any, topology: str, inputs: Any, name: str, frames: int) -> TimedPlan:
    """Return the figures of a function of arrays, by `jax.jit`, on one chip of a topology.

    `inputs` are structs of its arguments, with `shape` and `dtype`; `name` and `frames` are as for `Work`.
    """
    mesh = make_mesh(1, 1, devices=topology_devices(topology)[:1])
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), inputs)
    return estimate_program(
        Work(name, frames, function.lower, lambda: placed), mesh, CHIPS[topology.partition(":")[0]]
    )


def read_times(
    work: Work,
    compiled: Any,
    chip: Chip,
    compile_seconds: float,
    schedules: Mapping[str, Schedule],
) -> TimedPlan:
    """Return the figures and the times of a compiled program, the result of `.compile()`.

    `schedules` has the schedules of its Pallas kernels, by their instructions' names; a kernel without one is
    timed by its bytes alone.
    """
    plan = read_program(work, compiled, compile_seconds)
    found = list(instructions(plan.text))
    kernels = kernel_times(found, chip, schedules)
    shares = {kind: cycles / chip.clock for kind, cycles in cycles_by_kind(found).items()}
    if kernels:
        shares[KERNEL] = sum(kernel.seconds for kernel in kernels.values())
    return TimedPlan(
        **vars(plan),
        shares=shares,
        floor_s=plan.floor_seconds(chip),
        kernel_times=kernels,
        collective_seconds=_collective_seconds(found, compiled, chip, schedules),
        open_loops=sum(instruction.trips is None for instruction in found),  # of unknown length
    )


def _collective_seconds(
    found: list[TimedInstruction], compiled: Any, chip: Chip, schedules: Mapping[str, Schedule]
) -> dict[str, float]:
    """Return the seconds that a program waits for collectives, by kind.

    `found` are the instructions of `compiled`; `schedules` has those of Pallas kernels, by instruction.
    """
    if not any(instruction.collective for instruction in found):
        return {}

    def busy(instruction: TimedInstruction) -> float:
        if instruction.is_kernel:
            # The longer of its times by bytes in memory and by its schedule.
            return max(_kernel_seconds(instruction, chip, schedules.get(instruction.name)))
        return (instruction.cycles or 0) / chip.clock

    # The inputs have the program's mesh: collectives name devices by their index in it.
    shardings = jax.tree.leaves(compiled.input_shardings)
    mesh: Any = next(each.mesh for each in shardings if isinstance(each, jax.sharding.NamedSharding))
    places = tuple((*device.coords, device.core_on_chip) for device in mesh.devices.flat)
    return Links(places, chip).seconds(found, busy)


def cycles_by_kind(found: list[TimedInstruction]) -> Counter[str]:
    """Sum the compiler's cycles of a program's instructions, by `CONVOLUTION`, `COPY` and `OTHER`.

    An instruction inside a loop counts once per trip; a fusion that contains a convolution is a convolution.
    """
    runs = times_run(found)  # how often each computation runs
    # Names of the computations that contain a convolution.
    convolving = {instruction.computation for instruction in found if instruction.op == "convolution"}
    counted: Counter[str] = Counter()
    for instruction in found:
        if instruction.cycles is None:
            continue
        if instruction.op == "convolution" or instruction.called in convolving:
            kind = CONVOLUTION
        else:
            kind = COPY if instruction.op in COPIES else OTHER
        counted[kind] += runs[instruction.computation] * instruction.cycles
    return counted


def kernel_times(
    found: list[TimedInstruction], chip: Chip, schedules: Mapping[str, Schedule]
) -> dict[str, KernelTime]:
    """Return the summed times of a program's Pallas kernels by name, without the number of each.

    `schedules` is as for `read_times`.
    """
    runs = times_run(found)  # how often each computation runs
    total: dict[str, KernelTime] = {}
    for kernel in (instruction for instruction in found if instruction.is_kernel):
        count, schedule = runs[kernel.computation], schedules.get(kernel.name)
        # Of all runs: by bytes read and written, and by the compiled schedule, 0 without one.
        bytes_seconds, schedule_seconds = (
            count * seconds for seconds in _kernel_seconds(kernel, chip, schedule)
        )
        # JAX adds a number after a dot, and from 0.12 on more: `upsampled.4`, `upsampled.4.refs_3_...`.
        name = kernel.name.partition(".")[0]
        before = total.get(name, KernelTime(0, 0.0, 0.0, 0.0, 0, 0))  # the sum so far, first zeros
        schedule_total = before.schedule_seconds  # None, unknown, once a kernel has no schedule
        if schedule_total is not None:
            schedule_total = schedule_total + schedule_seconds if schedule else None
        total[name] = KernelTime(
            count=before.count + count,
            bytes_seconds=before.bytes_seconds + bytes_seconds,
            schedule_seconds=schedule_total,
            seconds=before.seconds + max(bytes_seconds, schedule_seconds),
            by_bytes=before.by_bytes + (0 if schedule else count),
            assumed_branches=before.assumed_branches + (schedule.assumed if schedule else 0),
        )
    return total


def _kernel_seconds(kernel: TimedInstruction, chip: Chip, schedule: Schedule | None) -> tuple[float, float]:
    """Return the seconds of one run of a kernel: (by its bytes in memory, by its schedule).

    The seconds by the schedule are 0 if `schedule` is None, not known.
    """
    moved = sum(map(tiled_bytes, (*kernel.results, *kernel.operands)))
    return moved / chip.bandwidth, schedule.cycles / chip.clock if schedule else 0.0


# What is printed


def timed_rows(plan: TimedPlan, chip: Chip) -> dict[str, Any]:
    shares = ", ".join(
        f"{kind} {100 * seconds / plan.seconds:.0f} %" for kind, seconds in plan.shares.items()
    )
    rows = program_rows(plan, chip) | {
        "estimate ms": 1e3 * plan.seconds,
        "floor over estimate": f"{100 * plan.floor_s / plan.seconds:.0f} %",
        "time goes to": shares,
    }
    rows |= {f"kernel {name} ms": _kernel_cell(kernel) for name, kernel in plan.kernel_times.items()}
    if by_bytes := sum(kernel.by_bytes for kernel in plan.kernel_times.values()):
        rows["kernels by bytes"] = f"{by_bytes}: their schedule is not known"
    if plan.open_loops:
        rows["loops of unknown length"] = f"{plan.open_loops}: counted once"
    if plan.collective_seconds:
        rows["waiting for collectives ms"] = 1e3 * sum(plan.collective_seconds.values())
    return rows


def times(counts: Sequence[int], plans: Sequence[TimedPlan]) -> dict[str, float]:
    """Return the estimated seconds of a job, without and with collectives.

    `counts` are the numbers of times that the programs run in it.
    """
    runs = list(zip(counts, plans, strict=True))
    alone = sum(count * plan.seconds for count, plan in runs)
    together = sum(count * plan.seconds_with_collectives for count, plan in runs)
    return {"estimate_s": alone, "collectives_s": together - alone, "with_collectives_s": together}


def _kernel_cell(kernel: KernelTime) -> str:
    """Return a cell for the kernels of one name: their number, and the ms by bytes and by their schedules.

    `kernel.by_bytes` of them have no known schedule. `kernel.assumed_branches` branches depend on data, and
    are assumed to be taken or not.
    """
    start = f"{kernel.count} of them, by bytes {1e3 * kernel.bytes_seconds:.2f}"
    if kernel.schedule_seconds is None:
        return f"{start}; by schedule not known for {kernel.by_bytes}"
    assumed = f", {kernel.assumed_branches} branches assumed" if kernel.assumed_branches else ""
    return f"{start}, by schedule {1e3 * kernel.schedule_seconds:.2f}{assumed}"
