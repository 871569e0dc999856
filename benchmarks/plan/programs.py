"""The figures of a compiled program: memory, work, communication, and for a TPU its estimated time.

Every instruction of a TPU's compiled text has the compiler's own `estimated_cycles`. They are taken for XLA's
products and convolutions alone: for instructions that only move data they are 2.5 to 4 times what published
programs take, so these count by their bytes. A Pallas kernel has its final schedule, and communication is
timed by the links.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import jax

from benchmarks.plan.chips import GIB, REACHED, TPU, Chip, chip_of, topology_devices
from benchmarks.plan.hlo import Instruction, Traffic, collectives, instructions, times_run
from benchmarks.plan.links import Links
from benchmarks.plan.schedule import Schedule, compile_afresh, compile_with_schedules
from cogvideox_torchax.sharding import make_mesh

PRODUCTS, MOVES, SCHEDULED, STREAMED = "products", "moves", "kernels", "kernels by bytes"
"""What the time of an instruction is bound by, and comes from.

`PRODUCTS` are XLA's products and convolutions, and fusions that contain one, by the compiler's cycles.
`MOVES` are all others of XLA, by bytes over the bandwidth that is reached. Kernels are `SCHEDULED` or
`STREAMED`, by what takes longer: the schedule, or the bytes.
"""


@dataclass(frozen=True)
class Work:
    """A program to plan, or to run.

    Attributes:
        name, frames: as in `ProgramPlan`.
        lower: lowers the program for arrays, or for `jax.ShapeDtypeStruct`s of their shapes.
        structs: returns the structs that `lower` takes: of the weights, of the inputs and, if there is one,
            of the cache.
        flops: a device's FLOPs by another count than the compiler's, which lacks those of most Pallas
            kernels; 0 for no other count.
        about: figures of a network that need no compiling, by the names that are printed: its layers, how it
            uses the mesh's axis "tp" and why, and with a cache the GiB on one device of the results that it
            keeps for the next step, which takes them as arguments.
    """

    name: str
    frames: int
    lower: Callable[..., Any]
    structs: Callable[[], tuple[Any, ...]]
    flops: float = 0.0
    about: dict[str, Any] = field(default_factory=dict)

    def lowered(self, mesh: Any) -> Any:
        """Lower the program for a mesh, whose devices tell the kernels the kind of chip."""
        with jax.set_mesh(mesh):
            return self.lower(*self.structs())


@dataclass
class ProgramPlan:
    """The compiler's figures for one program, per device.

    Attributes:
        name: the program's name: "first" or "later" for a chunk's, "step" or "prompt" for a pipeline's.
        frames: number of input frames; of tokens for a prompt.
        flops: FLOPs, a multiply-add as two; of the Pallas kernels only those that state theirs count.
        bytes_accessed: bytes read from and written to the chip's memory, without most Pallas kernels'.
        kernels: number of Pallas kernels in the program.
        argument_bytes, temp_bytes, output_bytes: memory of arguments, temporaries and results; a cache that
            is donated counts as an argument alone.
        collectives: the collectives by their kind.
        compile_seconds: seconds to compile on this machine.
        text: the compiled program's text.
    """

    name: str
    frames: int
    flops: float
    bytes_accessed: float
    kernels: int
    argument_bytes: int
    temp_bytes: int
    output_bytes: int
    collectives: dict[str, Traffic]
    compile_seconds: float
    text: str = field(default="", repr=False)

    @property
    def peak_bytes(self) -> int:
        return self.argument_bytes + self.temp_bytes + self.output_bytes

    def floor_seconds(self, chip: Chip) -> float:
        """Return the floor of the time: FLOPs or bytes over the chip's peak, whichever takes longer."""
        return max(self.flops / chip.flops, self.bytes_accessed / chip.bandwidth)

    def as_json(self) -> dict[str, Any]:
        """Return the figures for `json.dumps`, with the peak and without the text."""
        values = asdict(self)
        del values["text"]
        return values | {"peak_bytes": self.peak_bytes}


@dataclass(kw_only=True)
class TimedPlan(ProgramPlan):
    """The figures of a program, with estimated times.

    Attributes:
        shares: the seconds by what they are bound by, without collectives.
        compiler_moves_s: seconds of the moves by the compiler's own cycles.
        floor_s: the floor of the time, by FLOPs and bytes over the chip's peaks.
        kernel_times: times by the name of a Pallas kernel.
        collective_seconds: by kind, the time that the program waits for its collectives.
        open_loops: number of loops of unknown length.
    """

    shares: dict[str, float]
    compiler_moves_s: float
    floor_s: float
    kernel_times: dict[str, dict[str, Any]] = field(default_factory=dict)
    collective_seconds: dict[str, float] = field(default_factory=dict)
    open_loops: int = 0

    @property
    def seconds(self) -> float:
        """The sum of `shares`; NaN if the schedule of a kernel or the length of a loop is not known."""
        return math.nan if self.open_loops else sum(self.shares.values())

    @property
    def seconds_with_collectives(self) -> float:
        return self.seconds + sum(self.collective_seconds.values())

    def as_json(self) -> dict[str, Any]:
        """Return the figures for `json.dumps`, with the derived ones; those that are not known are None."""
        times = {"seconds": self.seconds, "seconds_with_collectives": self.seconds_with_collectives}
        return jax.tree.map(_known, super().as_json() | times)


def compile_program(work: Work, mesh: Any, chip: Chip | None = None) -> Any:
    """Lower and compile a program for a mesh of simulated chips; return its figures by `read_program`."""
    start = time.perf_counter()
    lowered, schedules = work.lowered(mesh), {}
    if isinstance(chip, TPU):
        compiled, schedules = compile_with_schedules(lowered, chip.delay_slots)
    else:
        compiled = compile_afresh(lowered)
    return read_program(work, compiled, time.perf_counter() - start, chip, schedules)


def estimate_function(function: Any, topology: str, inputs: Any, name: str, frames: int) -> TimedPlan:
    """Return the figures of a function of arrays, by `jax.jit`, on one chip of a topology.

    `inputs` are structs of its arguments, with `shape` and `dtype`; `name` and `frames` are as for `Work`.
    """
    mesh = make_mesh(1, 1, devices=topology_devices(topology, schedules=True)[:1])
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), inputs)
    return compile_program(Work(name, frames, function.lower, lambda: placed), mesh, chip_of(topology))


def read_program(
    work: Work,
    compiled: Any,
    compile_seconds: float,
    chip: Chip | None = None,
    schedules: Mapping[str, Schedule] | None = None,
) -> ProgramPlan:
    """Return the figures of `compiled`, the program of `work` in JAX's compiled form; of a TPU a `TimedPlan`.

    `schedules` has the schedules of its Pallas kernels, by their instructions' names; the time of a kernel
    without one is not known.
    """
    text = compiled.as_text()  # XLA's HLO
    found = list(instructions(text))
    # A compiler for GPUs counts no work.
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis() or {}
    plan = ProgramPlan(
        name=work.name,
        frames=work.frames,
        # The compiler's count lacks the FLOPs of most Pallas kernels, and `work.flops` may be 0.
        flops=max(cost.get("flops", 0.0), work.flops),
        bytes_accessed=cost.get("bytes accessed", 0.0),
        kernels=sum(instruction.is_kernel for instruction in found),
        argument_bytes=memory.argument_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        # A result in the memory of a donated argument ("alias") is not counted again: it is in
        # `argument_bytes`.
        output_bytes=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        collectives=collectives(found),
        compile_seconds=compile_seconds,
        text=text,
    )
    return _timed(plan, found, compiled, chip, schedules or {}) if isinstance(chip, TPU) else plan


def _timed(
    plan: ProgramPlan, found: list[Instruction], compiled: Any, chip: TPU, schedules: Mapping[str, Schedule]
) -> TimedPlan:
    """Return a plan with the times of the program's instructions, `found`."""
    times = instruction_times(found, chip, schedules)
    runs = times_run(found)  # how often each computation runs
    shares: Any = Counter()
    compiler: Any = Counter()  # the same by the compiler's cycles
    for instruction in (each for each in found if each.name in times):
        kind, seconds = times[instruction.name]
        shares[kind] += runs[instruction.computation] * seconds
        compiler[kind] += runs[instruction.computation] * (instruction.cycles or 0) / chip.clock
    return TimedPlan(
        **vars(plan),
        shares=dict(shares),
        compiler_moves_s=compiler[MOVES],
        floor_s=plan.floor_seconds(chip),
        kernel_times=kernel_times(found, chip, schedules),
        collective_seconds=_collective_seconds(found, compiled, chip, times),
        open_loops=sum(instruction.trips is None for instruction in found),
    )


def _collective_seconds(
    found: list[Instruction], compiled: Any, chip: TPU, times: Mapping[str, tuple[str, float]]
) -> dict[str, float]:
    """Return the seconds that a program waits for collectives, by kind.

    `found` are the instructions of `compiled`; `times` are those of `instruction_times`.
    """
    if not any(instruction.collective for instruction in found):
        return {}
    # The inputs have the program's mesh: collectives name devices by their index in it.
    shardings = jax.tree.leaves(compiled.input_shardings)
    mesh: Any = next(each.mesh for each in shardings if isinstance(each, jax.sharding.NamedSharding))
    places = tuple((*device.coords, device.core_on_chip) for device in mesh.devices.flat)
    return Links(places, chip).seconds(found, lambda each: times.get(each.name, ("", 0.0))[1])


def instruction_times(
    found: Sequence[Instruction], chip: TPU, schedules: Mapping[str, Schedule]
) -> dict[str, tuple[str, float]]:
    """Return, by an instruction's name, what one run of it is bound by, and its seconds.

    Instructions without an estimate of the compiler take no time: parameters, the insides of fusions.
    Collectives are not in it. `schedules` is as for `read_program`.
    """
    # Names of the computations that contain a convolution.
    convolving = {instruction.computation for instruction in found if instruction.op == "convolution"}
    times: dict[str, tuple[str, float]] = {}
    for instruction in found:
        if instruction.is_kernel:
            by_bytes, by_schedule = _kernel_seconds(instruction, chip, schedules.get(instruction.name))
            # A schedule that is not known, NaN, is not less than any time.
            kind = STREAMED if by_bytes > by_schedule else SCHEDULED
            times[instruction.name] = kind, by_bytes if kind == STREAMED else by_schedule
        elif instruction.cycles is None or instruction.collective:
            continue
        elif instruction.op == "convolution" or instruction.called in convolving:
            times[instruction.name] = PRODUCTS, instruction.cycles / chip.clock
        else:
            times[instruction.name] = MOVES, instruction.moved / (REACHED * chip.bandwidth)
    return times


def kernel_times(
    found: list[Instruction], chip: TPU, schedules: Mapping[str, Schedule]
) -> dict[str, dict[str, Any]]:
    """Return figures of a program's Pallas kernels, by name without the number of each.

    Of all kernels of one name together they are:

        count: number of kernels that run; one in a loop counts once per trip.
        bytes_seconds: time to read their operands and write their results.
        schedule_seconds: cycles of their final schedules over the clock, or, if longer, their products at the
            peak of the matrix units; NaN if one schedule is not known.
        seconds: for each kernel the larger of its two times, summed; NaN if one is not known.
        unknown: number of kernels whose schedule is not known.
        assumed_branches: number of branches in their schedules that depend on data (`Schedule.assumed`).

    `schedules` is as for `read_program`.
    """
    runs, total = times_run(found), dict[str, Any]()  # how often each computation runs; the sums
    for kernel in (instruction for instruction in found if instruction.is_kernel):
        count, schedule = runs[kernel.computation], schedules.get(kernel.name)
        by_bytes, by_schedule = _kernel_seconds(kernel, chip, schedule)
        figures = {
            "count": count,
            "bytes_seconds": count * by_bytes,
            "schedule_seconds": count * by_schedule,
            # NaN if the schedule is not known.
            "seconds": count * (by_bytes if by_bytes > by_schedule else by_schedule),
            "unknown": 0 if schedule else count,
            "assumed_branches": schedule.assumed if schedule else 0,
        }
        # JAX adds a number after a dot, and from 0.12 on more: `upsampled.4`, `upsampled.4.refs_3_...`.
        total.setdefault(kernel.name.partition(".")[0], Counter()).update(figures)
    return {name: dict(figures) for name, figures in total.items()}


def _kernel_seconds(kernel: Instruction, chip: TPU, schedule: Schedule | None) -> tuple[float, float]:
    """Return the seconds of one run of a kernel: (by its bytes in memory, by its schedule).

    The second is NaN if `schedule` is None, not known. No schedule runs its products faster than the units'
    peak, though the compiler's may ask for that (on v5e by up to 14 %).
    """
    by_schedule = max(schedule.cycles / chip.clock, schedule.flops / chip.flops) if schedule else math.nan
    return kernel.moved / (REACHED * chip.bandwidth), by_schedule


def _known(value: Any) -> Any:
    """Return a figure, or None for NaN, one that is not known."""
    return None if value != value else value


def peak_bytes(plans: Sequence[ProgramPlan], other_weights: Sequence[int] = ()) -> int:
    """Return the peak memory of a device that runs the programs one after the other."""
    # For each program, the bytes of other networks' weights on its device; empty for none.
    others = other_weights or (0,) * len(plans)
    return max(plan.peak_bytes + other for plan, other in zip(plans, others, strict=True))


def times(counts: Sequence[int], plans: Sequence[TimedPlan]) -> dict[str, float]:
    """Return the estimated seconds of a job, without and with collectives.

    `counts` are the numbers of times that the programs run in it.
    """
    runs = list(zip(counts, plans, strict=True))
    alone = sum(count * plan.seconds for count, plan in runs)
    together = sum(count * plan.seconds_with_collectives for count, plan in runs)
    times = {"estimate_s": alone, "collectives_s": together - alone, "with_collectives_s": together}
    return {name: _known(seconds) for name, seconds in times.items()}


# What is printed


def program_rows(plan: ProgramPlan, chip: Chip | None) -> dict[str, Any]:
    """Return the rows of a program's printed table, by name; with a chip one row is the floor of the time."""
    rows: dict[str, Any] = {
        "TFLOP": plan.flops / 1e12,
        "GB moved": plan.bytes_accessed / 1e9 or "not counted",
        "arguments GiB": plan.argument_bytes / GIB,
        "temporaries GiB": plan.temp_bytes / GIB,
        "results GiB": plan.output_bytes / GIB,
        "compiled in s": plan.compile_seconds,
    }
    if chip and plan.bytes_accessed:
        rows["floor ms (FLOPs and bytes over peaks)"] = 1e3 * plan.floor_seconds(chip)
    if plan.kernels:
        rows["Pallas kernels"] = plan.kernels
    for kind, traffic in plan.collectives.items():
        sizes = (size / 2**20 for size in (traffic.bytes, traffic.largest))
        rows[kind] = "{} of {:.2f} MiB, the largest {:.2f}".format(traffic.count, *sizes)
    # The seconds are 0 where the compiler estimates none.
    return rows | _time_rows(plan) if isinstance(plan, TimedPlan) and plan.seconds else rows


def _time_rows(plan: TimedPlan) -> dict[str, Any]:
    if plan.open_loops:
        return {"estimate ms": f"none: the text does not tell how often {plan.open_loops} loops run"}
    shares = ", ".join(
        f"{kind} {100 * seconds / plan.seconds:.0f} %" for kind, seconds in plan.shares.items()
    )
    rows: dict[str, Any] = {
        "estimate ms": 1e3 * plan.seconds,
        "floor over estimate": f"{100 * plan.floor_s / plan.seconds:.0f} %",
        "time goes to": shares,
        **{f"kernel {name} ms": _kernel_cell(kernel) for name, kernel in plan.kernel_times.items()},
    }
    if moves := plan.shares.get(MOVES):
        rows["moves ms"] = f"{1e3 * moves:.2f}, by the compiler's cycles {1e3 * plan.compiler_moves_s:.2f}"
    if plan.collective_seconds:
        rows["waiting for collectives ms"] = 1e3 * sum(plan.collective_seconds.values())
    return rows


def _kernel_cell(kernel: dict[str, Any]) -> str:
    """Return a cell for the kernels of one name: their number, and the ms by bytes and by their schedules."""
    start = f"{kernel['count']} of them, by bytes {1e3 * kernel['bytes_seconds']:.2f}"
    if kernel["unknown"]:
        return f"{start}; by schedule not known for {kernel['unknown']}, so no estimate"
    branches = kernel["assumed_branches"]
    assumed = f", {branches} branches assumed" if branches else ""
    return f"{start}, by schedule {1e3 * kernel['schedule_seconds']:.2f}{assumed}"
