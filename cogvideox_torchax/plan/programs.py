"""The compiler's figures for one program, memory, work and communication, and those of the job of several."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from cogvideox_torchax.plan.chips import GIB, Chip
from cogvideox_torchax.plan.hlo import Traffic, collectives, instructions


@dataclass
class Row:
    """A layer's sharding and communication in a compiled program.

    Attributes:
        layer: the module's name, or "(program)" for all instructions that belong to no layer.
        shape: the whole shape of its largest activation, (N, C, T, H, W) or a sequence (N, S, C).
        spec: the requested `PartitionSpec` of that activation.
        shards: number of devices that the compiled program splits the activation over, 1 for a whole one.
            None if no array has the whole or the split shape, because the compiler has fused the activation
            away.
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
        flops: multiply-adds times two; of Pallas kernels only those that state theirs.
        bytes_accessed: traffic with the chip's memory, without that of most Pallas kernels.
        kernels: number of Pallas kernels in the program.
        argument_bytes, temp_bytes, output_bytes: memory; donated caches are in the arguments alone.
        collectives: the collectives by their kind.
        compile_seconds: seconds to compile on this machine.
        text: the compiled program's text.
        layers: each layer's sharding and communication; empty without a mesh.
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
    layers: list[Row] = field(default_factory=list, repr=False)

    @property
    def peak_bytes(self) -> int:
        return self.argument_bytes + self.temp_bytes + self.output_bytes

    def floor_seconds(self, chip: Chip) -> float:
        """Return the floor of the time: the larger of FLOPs and bytes over the chip's peaks."""
        return max(self.flops / chip.flops, self.bytes_accessed / chip.bandwidth)

    def as_json(self) -> dict[str, Any]:
        """Return the figures for `json.dumps`, with the peak and without the text and the layers."""
        values = asdict(self)
        del values["text"], values["layers"]
        return values | {"peak_bytes": self.peak_bytes}


@dataclass(frozen=True)
class Work:
    """A program to plan, or to run.

    Attributes:
        name, frames: as in `ProgramPlan`.
        lower: lowers the program for arrays, or for `jax.ShapeDtypeStruct`s of their shapes.
        structs: returns the structs that `lower` takes: of weights, of inputs and of the cache, if there is
            one.
        program: the `runtime.Program` that is lowered; None for another function.
        flops: FLOPs of a device, counted without the compiler, which does not see those of most Pallas
            kernels; 0 if nobody counted them.
    """

    name: str
    frames: int
    lower: Callable[..., Any]
    structs: Callable[[], tuple[Any, ...]]
    program: Any = None
    flops: float = 0.0

    def lowered(self, mesh: Any) -> Any:
        """Lower the program over a mesh, from which the kernels read the chip's kind."""
        with jax.set_mesh(mesh):
            return self.lower(*self.structs())


def compile_program(work: Work, mesh: Any) -> ProgramPlan:
    start = time.perf_counter()
    compiled = compile_afresh(work.lowered(mesh))
    return read_program(work, compiled, time.perf_counter() - start)


def compile_afresh(lowered: Any) -> Any:
    """Compile what `jax.jit(...).lower(...)` has returned, without JAX's compile cache.

    A program from the cache would have no time of compiling, and libtpu would dump nothing of it.
    """
    was_enabled = jax.config.jax_enable_compilation_cache  # pyright: ignore[reportAttributeAccessIssue]
    try:
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()  # JAX reads the option again only after a reset
        return lowered.compile()
    finally:
        jax.config.update("jax_enable_compilation_cache", was_enabled)
        compilation_cache.reset_cache()


def read_program(work: Work, compiled: Any, compile_seconds: float) -> ProgramPlan:
    """Return the figures of a compiled program, the result of `.compile()` on what `work` lowers to."""
    text = compiled.as_text()
    found = list(instructions(text))
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis()
    return ProgramPlan(
        name=work.name,
        frames=work.frames,
        flops=max(cost.get("flops", 0.0), work.flops),
        bytes_accessed=cost.get("bytes accessed", 0.0),
        kernels=sum(instruction.is_kernel for instruction in found),
        argument_bytes=memory.argument_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        # Results in the memory of donated inputs ("alias") are in the arguments already.
        output_bytes=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        collectives=collectives(found),
        compile_seconds=compile_seconds,
        text=text,
    )


# What `plan` prints


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
    """Return the peak memory of a device that runs the programs; `beside` is as for `job_figures`."""
    others = beside or (0,) * len(programs)
    return max(plan.peak_bytes + other for plan, other in zip(programs, others, strict=True))


def job_figures(
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
