"""The compiler's figures for one program: memory, estimated time, and its breakdown."""

import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import jax

from cogvideox_torchax.plan.chips import Chip
from cogvideox_torchax.plan.hlo import Instruction, collectives, instructions, times_run
from cogvideox_torchax.plan.links import Links
from cogvideox_torchax.plan.schedule import Schedule, compile_with_schedules

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


@dataclass
class Row:
    """A layer's sharding and communication in a compiled program.

    Attributes:
        layer: the module's name, or "(program)" for all instructions that belong to no layer.
        shape: the whole shape of its largest activation, (N, C, T, H, W) or a sequence (N, S, C).
        spec: the requested `PartitionSpec` of that activation.
        shards: number of devices that the compiled program splits the activation over, as the shapes of the
            program's arrays show; 1 if it is whole, None if no array has the whole or the split shape, as the
            compiler has fused the activation into another instruction.
        bytes_per_device: bytes of the largest result of the layer's instructions on one device.
        collectives: by kind, {"count": number, "bytes": bytes of their results on one device}.
    """

    layer: str
    shape: tuple[int, ...] | None = None
    spec: str = ""
    shards: int | None = None
    bytes_per_device: int = 0
    collectives: dict[str, dict[str, int]] = field(default_factory=dict)


@dataclass
class ProgramPlan:
    """The compiler's figures for one program, per device.

    Attributes:
        name: the program's name: "first" or "later" for a chunk's, "step" or "prompt" for a pipeline's.
        frames: number of input frames; of tokens for a prompt.
        flops: multiply-adds times two.
        bytes_accessed: traffic between the chip and its memory, as the compiler counts.
        seconds: the compiler's estimate, and for Pallas kernels, which it does not estimate, the larger of
            the times of their bytes and of their final schedule; without collectives. None for a CPU.
        kernels: number of Pallas kernels in the program.
        shares: the seconds by kind of instruction.
        floor_seconds: FLOPs over the chip's peak; None without a chip.
        argument_bytes, temp_bytes, output_bytes: memory; donated caches are in the arguments alone.
        collectives: by kind of collective, (number of them, bytes of their largest array).
        compile_seconds: seconds to compile on this machine.
        text: the compiled program's text.
        layers: each layer's sharding and communication; empty without a mesh.
        kernel_times: times by the name of a Pallas kernel.
        kernels_by_bytes: number of kernels whose schedule is not known, and which count by bytes alone.
        collective_seconds: by kind, the time that the program waits for its collectives; None if the links
            are not known.
        open_loops: number of loops of unknown length, which count once.
    """

    name: str
    frames: int
    flops: float
    bytes_accessed: float
    seconds: float | None
    kernels: int
    shares: dict[str, float]
    floor_seconds: float | None
    argument_bytes: int
    temp_bytes: int
    output_bytes: int
    collectives: dict[str, tuple[int, int]]
    compile_seconds: float
    text: str = field(default="", repr=False)
    layers: list[Row] = field(default_factory=list, repr=False)
    kernel_times: dict[str, KernelTime] = field(default_factory=dict)
    kernels_by_bytes: int = 0
    collective_seconds: dict[str, float] | None = None
    open_loops: int = 0

    @property
    def seconds_with_collectives(self) -> float | None:
        """`seconds` plus the time of waiting for collectives; None if one of the two is not known."""
        if self.seconds is None or self.collective_seconds is None:
            return None
        return self.seconds + sum(self.collective_seconds.values())

    @property
    def traffic(self) -> dict[str, dict[str, int]]:
        """The "count" and "bytes" of all layers' collectives, by kind, such as "all-reduce"."""
        total: dict[str, dict[str, int]] = {}
        for row in self.layers:
            for kind, of_layer in row.collectives.items():
                before = total.get(kind, {"count": 0, "bytes": 0})
                total[kind] = {key: before[key] + value for key, value in of_layer.items()}
        return total

    @property
    def peak_bytes(self) -> int:
        return self.argument_bytes + self.temp_bytes + self.output_bytes

    def as_json(self) -> dict[str, Any]:
        """Return the figures for `json.dumps`: without the program's text and layers, with derived sums."""
        values = asdict(self)
        del values["text"], values["layers"]
        return values | {
            "peak_bytes": self.peak_bytes,
            "seconds_with_collectives": self.seconds_with_collectives,
        }


@dataclass(frozen=True)
class Work:
    """A program to plan, or to run.

    Attributes:
        name, frames: as `ProgramPlan` has them.
        lower: lowers the program for arrays, or for `jax.ShapeDtypeStruct`s of their shapes.
        structs: returns the structs that `lower` takes: of weights, of inputs and, for a program with a
            cache, of the cache.
        program: the `runtime.Program` that is lowered; None for another function.
    """

    name: str
    frames: int
    lower: Callable[..., Any]
    structs: Callable[[], tuple[Any, ...]]
    program: Any = None


def compile_program(work: Work, mesh: Any, chip: Chip | None) -> ProgramPlan:
    """Lower the program of `work` over a mesh, compile it, and return its figures.

    The peaks of `chip` give the times; None for no times.
    """
    start = time.perf_counter()
    with jax.set_mesh(mesh):  # lowering a kernel for a TPU reads the chip's kind from the mesh
        lowered = work.lower(*work.structs())
    compiled, schedules = compile_with_schedules(lowered, chip)  # schedules of the Pallas kernels
    return read_program(work.name, work.frames, compiled, chip, time.perf_counter() - start, schedules)


def read_program(
    name: str,
    frames: int,
    compiled: Any,
    chip: Chip | None,
    compile_seconds: float,
    schedules: Mapping[str, Schedule] | None = None,
) -> ProgramPlan:
    """Return the figures of a compiled program.

    Args:
        name, frames, compile_seconds: facts of the program, to go into the plan.
        compiled: the result of `.compile()`.
        chip: the chip whose peaks apply; None, on a CPU, for no times.
        schedules: schedules of its Pallas kernels, by their instructions' names; a kernel without one is
            timed by its bytes only.
    """
    text = compiled.as_text()
    found = list(instructions(text))
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis()
    flops = cost.get("flops", 0.0)
    times: dict[str, KernelTime] = {}
    shares: dict[str, float] = {}  # seconds by kind of instruction
    if chip:
        shares = {kind: count / chip.clock for kind, count in cycles_by_kind(found).items()}
        times = kernel_times(found, chip, schedules or {})
        if times:
            shares[KERNEL] = sum(time.seconds for time in times.values())
    return ProgramPlan(
        name=name,
        frames=frames,
        flops=flops,
        bytes_accessed=cost.get("bytes accessed", 0.0),
        seconds=sum(shares.values()) if shares else None,
        kernels=sum(instruction.is_kernel for instruction in found),
        shares=shares,
        floor_seconds=flops / chip.flops if chip else None,
        argument_bytes=memory.argument_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        # Results in the memory of donated inputs ("alias") are in the arguments already.
        output_bytes=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        collectives={kind: (traffic.count, traffic.largest) for kind, traffic in collectives(found).items()},
        compile_seconds=compile_seconds,
        text=text,
        kernel_times=times,
        kernels_by_bytes=sum(time.by_bytes for time in times.values()),
        collective_seconds=_collective_seconds(found, compiled, chip, schedules or {}) if chip else None,
        open_loops=sum(instruction.trips is None for instruction in found),  # of unknown length
    )


def _collective_seconds(
    found: list[Instruction], compiled: Any, chip: Chip, schedules: Mapping[str, Schedule]
) -> dict[str, float] | None:
    """Return the seconds that a program waits for collectives, by kind; None if the links are not known.

    `found` are the instructions of `compiled`; `schedules` has those of Pallas kernels, by instruction.
    """
    if not any(instruction.collective for instruction in found):
        return {}

    def busy(instruction: Instruction) -> float:
        """Return the seconds of an instruction that is no collective."""
        if instruction.is_kernel:
            # The longer of its times by bytes in memory and by its schedule.
            return max(_kernel_seconds(instruction, chip, schedules.get(instruction.name)))
        return (instruction.cycles or 0) / chip.clock

    # The inputs have the program's mesh: collectives name devices by their index in it.
    shardings = jax.tree.leaves(compiled.input_shardings)
    mesh: Any = next(each.mesh for each in shardings if isinstance(each, jax.sharding.NamedSharding))
    links = Links.from_devices(mesh.devices.flat, chip)
    return links.seconds(found, busy) if links else None


def cycles_by_kind(found: list[Instruction]) -> Counter[str]:
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
    found: list[Instruction], chip: Chip, schedules: Mapping[str, Schedule]
) -> dict[str, KernelTime]:
    """Return the summed times of a program's Pallas kernels by name, without the number of each.

    Args:
        found: the program's instructions.
        chip: the chip whose peaks apply.
        schedules: compiled schedules by kernels' names with their numbers; a kernel without one counts by
            bytes alone.
    """
    runs = times_run(found)  # how often each computation runs
    total: dict[str, KernelTime] = {}
    for kernel in (instruction for instruction in found if instruction.is_kernel):
        count, schedule = runs[kernel.computation], schedules.get(kernel.name)
        # Of all runs: by bytes read and written, and by the compiled schedule, 0 without one.
        bytes_seconds, schedule_seconds = (
            count * seconds for seconds in _kernel_seconds(kernel, chip, schedule)
        )
        name = re.sub(r"[.\d]+$", "", kernel.name)  # without the number that tells equal names apart
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


def _kernel_seconds(kernel: Instruction, chip: Chip, schedule: Schedule | None) -> tuple[float, float]:
    """Return the seconds of one run of a kernel: (by its bytes in memory, by its schedule).

    The seconds by the schedule are 0 if `schedule` is None, not known.
    """
    tiled_bytes = sum(array.tiled_bytes for array in (*kernel.results, *kernel.operands))
    return tiled_bytes / chip.bandwidth, schedule.cycles / chip.clock if schedule else 0.0
