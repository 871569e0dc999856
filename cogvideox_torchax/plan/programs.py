"""The compiler's figures for memory, work and communication of programs."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from cogvideox_torchax.plan.chips import GIB, Chip
from cogvideox_torchax.plan.hlo import Traffic, collectives, instructions


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
    """

    name: str
    frames: int
    lower: Callable[..., Any]
    structs: Callable[[], tuple[Any, ...]]
    flops: float = 0.0

    def lowered(self, mesh: Any) -> Any:
        """Lower the program for a mesh, whose devices tell the kernels the kind of chip."""
        with jax.set_mesh(mesh):
            return self.lower(*self.structs())


def compile_program(work: Work, mesh: Any) -> ProgramPlan:
    start = time.perf_counter()
    compiled = compile_afresh(work.lowered(mesh))
    return read_program(work, compiled, time.perf_counter() - start)


def compile_afresh(lowered: Any) -> Any:
    """Compile what `jax.jit(...).lower(...)` has returned, without JAX's compile cache.

    For a program from the cache no compile time could be measured, and libtpu would dump no files.
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
    """Return the figures of `compiled`, JAX's compiled form of the program of `work`."""
    text = compiled.as_text()  # XLA's HLO
    parsed = list(instructions(text))
    # A compiler for GPUs counts no work.
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis() or {}
    return ProgramPlan(
        name=work.name,
        frames=work.frames,
        # The compiler's count lacks the FLOPs of most Pallas kernels, and `work.flops` may be 0.
        flops=max(cost.get("flops", 0.0), work.flops),
        bytes_accessed=cost.get("bytes accessed", 0.0),
        kernels=sum(instruction.is_kernel for instruction in parsed),
        argument_bytes=memory.argument_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        # A result in the memory of a donated argument ("alias") is not counted again: it is in
        # `argument_bytes`.
        output_bytes=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        collectives=collectives(parsed),
        compile_seconds=compile_seconds,
        text=text,
    )


# What `plan` prints


def program_rows(program: ProgramPlan, chip: Chip | None) -> dict[str, Any]:
    """Return the rows of a program's printed table, by name; with a TPU one row is the floor of the time."""
    rows: dict[str, Any] = {
        "TFLOP": program.flops / 1e12,
        "GB moved": program.bytes_accessed / 1e9 or "not counted",
        "arguments GiB": program.argument_bytes / GIB,
        "temporaries GiB": program.temp_bytes / GIB,
        "results GiB": program.output_bytes / GIB,
        "compiled in s": program.compile_seconds,
    }
    if chip and program.bytes_accessed:
        rows["floor ms (FLOPs and bytes over peaks)"] = 1e3 * program.floor_seconds(chip)
    if program.kernels:
        rows["Pallas kernels"] = program.kernels
    return rows | {
        kind: f"{traffic.count} of {traffic.bytes / 2**20:.2f} MiB, the largest {traffic.largest / 2**20:.2f}"
        for kind, traffic in program.collectives.items()
    }


def peak_bytes(programs: Sequence[ProgramPlan], other_weights: Sequence[int] = ()) -> int:
    """Return the peak memory of a device that runs the programs one after the other."""
    # For each program, the bytes of other networks' weights on its device; empty for none.
    others = other_weights or (0,) * len(programs)
    return max(plan.peak_bytes + other for plan, other in zip(programs, others, strict=True))
