"""The reader of compiled text (`compiled.as_text()`, XLA's HLO): instructions, arrays, cycles, collectives.

The text is a list of computations: the entry, and the bodies of fusions, loops and branches. Each has a head
line and one line for each instruction. On a mesh it is the program of one device.
"""

import functools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
PALLAS = 'custom_call_target="tpu_custom_call"'
"""The attribute of a custom call that runs a Pallas kernel."""

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?(?P<name>\S+) = (?P<result>\(.*?\)|\S+) (?P<op>[a-z][\w-]*)\(")
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\]")
_SCOPE = re.compile(r'op_name="([^"]*)"')
_CALLED = re.compile(r"calls=%?([\w.\-]+)")
_CYCLES = re.compile(r'"?estimated_cycles"?:"(\d+)"')
_RUNS = re.compile(r"\b(?:calls|to_apply|body|condition)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{(.*?)\}")
_TRIPS = re.compile(r'"?known_trip_count"?:\{"n":"(\d+)"\}')
_GROUPS = re.compile(
    r"(?:replica_groups|source_target_pairs)=(\{\{.*?\}\}|\{\}|\[[^ ]*?\](?:T\([\d,]*\))?)(?:,|$)"
)
_IOTA = re.compile(r"\[([\d,]*)\]<=\[([\d,]*)\](?:T\(([\d,]*)\))?")
_STARTED = re.compile(r"-done\((?:\(.*\) |[^%]\S* )?%?([\w.\-]+)\)")
_OPERANDS = re.compile(r"operand_layout_constraints=\{(.*?\})\}")

LANES, SUBLANES = 128, 8
"""Size of a TPU's tile along the last axis of an array, and along the axis before it."""

NO_ESTIMATE = 2**63 - 1
"""The compiler's cycle count for an instruction without an estimate (some copies on tpu7x)."""


@dataclass(frozen=True)
class ArrayType:
    """An array of a compiled program: XLA's name of its dtype, and its shape on one device."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Bytes without padding."""
        bits = re.search(r"\d+", self.dtype)  # "bf16" has 16; a bool, "pred", names none and takes a byte
        return math.ceil(math.prod(self.shape) * (int(bits[0]) if bits else 8) / 8)

    @property
    def tiled_bytes(self) -> int:
        """Bytes in the layout of a TPU's kernels: row-major, in tiles of up to 8 rows and 128 columns.

        Columns are the last axis, rows the axis before it; both are padded to whole tiles.
        """
        *outer, rows, columns = [1, 1, *self.shape]  # a scalar or a vector has axes of 1 before it
        tile_rows = min(SUBLANES, 1 << (rows - 1).bit_length())  # with few rows the next power of two
        padded_rows, padded_columns = -(-rows // tile_rows) * tile_rows, -(-columns // LANES) * LANES
        return ArrayType(self.dtype, (*outer, padded_rows, padded_columns)).bytes


@dataclass(frozen=True)
class Instruction:
    """One instruction of a compiled program.

    Attributes:
        name: unique in the program.
        op: the opcode, such as "fusion", "custom-call" or "all-gather-start".
        results: the arrays that it returns, on one device.
        operands: a custom call's input arrays; empty for other instructions, whose text has no input types.
        scope: the name stack that it was traced under, with the module's name; "" for none.
        computation: name of the computation that the instruction is in.
        called: name of the computation that a fusion calls (`calls=`), or None.
        cycles: the compiler's own estimate, or None.
        is_kernel: whether it runs a Pallas kernel.
        runs: names of all computations that it runs: the one it calls, a loop's body and condition, a
            conditional's branches, a reduction's function.
        trips: a loop's number of iterations, None if the compiler does not know it; 1 for other instructions.
        groups: a collective's groups of devices that exchange, by their index in the mesh; empty if all
            devices are one group. For a collective-permute each group is a pair (sender, receiver).
        started: name of the start that this instruction, the end of an asynchronous pair, waits for; None for
            other instructions.
    """

    name: str
    op: str
    results: tuple[ArrayType, ...]
    operands: tuple[ArrayType, ...]
    scope: str
    computation: str
    called: str | None
    cycles: int | None
    is_kernel: bool
    runs: tuple[str, ...]
    trips: int | None
    groups: tuple[tuple[int, ...], ...]
    started: str | None

    @property
    def collective(self) -> str | None:
        """The kind of collective, one of `COLLECTIVES`; None for other instructions.

        An asynchronous pair, such as "all-gather-start" and "all-gather-done", is one collective: its start.
        """
        kind = self.op.removesuffix("-start")
        return kind if kind in COLLECTIVES else None

    @property
    def bytes(self) -> int:
        """Bytes of its result on one device."""
        sizes = [array.bytes for array in self.results]
        if not self.op.endswith("-start"):
            return sum(sizes)
        # The start of an asynchronous pair returns its operand beside its result. The result is the larger of
        # the two arrays; for a reduce-scatter it is the smaller one, as a device keeps a part of the operand.
        if self.op == "reduce-scatter-start":
            return min(array.bytes for array in self.results if array.shape)  # scalars are no data
        return max(sizes, default=0)


def instructions(text: str) -> Iterator[Instruction]:
    """Yield the instructions of a compiled program's text, in the text's order."""
    computation = ""
    for line in text.splitlines():
        if head := _COMPUTATION.match(line):
            computation = head[1]
        elif match := _INSTRUCTION.match(line):
            cycles = _number(_CYCLES, line)
            branches = _first_group(_BRANCHES, line) or ""  # a conditional's, such as "%one, %other"
            yield Instruction(
                name=match["name"],
                op=match["op"],
                results=_arrays(match["result"]),
                operands=_arrays(_first_group(_OPERANDS, line) or ""),
                scope=_first_group(_SCOPE, line) or "",
                computation=computation,
                called=_first_group(_CALLED, line),
                cycles=None if cycles == NO_ESTIMATE else cycles,
                is_kernel=match["op"] == "custom-call" and PALLAS in line,
                runs=(*_RUNS.findall(line), *re.findall(r"[\w.\-]+", branches)),
                trips=_number(_TRIPS, line) if match["op"] == "while" else 1,
                groups=_groups(_first_group(_GROUPS, line) or ""),
                started=_first_group(_STARTED, line),
            )


def _groups(text: str) -> tuple[tuple[int, ...], ...]:
    """Parse a collective's groups of devices; empty for an empty text.

    The text lists them, "{{0,1},{2,3}}", or describes an array of them: "[4,2]<=[2,4]T(1,0)" is
    `arange(8).reshape(2, 4).transpose(1, 0).reshape(4, 2)`, 4 groups of 2. "T" may be missing.
    """
    if iota := _IOTA.match(text):
        # The numbers in the three pairs of brackets: [4, 2], [2, 4] and [1, 0]. Without "T" `order` is empty.
        result_shape, shape, order = map(_integers, iota.groups(default=""))
        axes = order or range(len(shape))
        devices = np.arange(math.prod(shape)).reshape(shape).transpose(axes)
        return tuple(map(tuple, devices.reshape(-1, result_shape[-1]).tolist()))  # a group is a row
    return tuple(tuple(_integers(group)) for group in re.findall(r"\{([\d,]+)\}", text))


def _integers(text: str) -> list[int]:
    """Parse numbers, such as "2,4"; an empty text has none."""
    return [int(number) for number in text.split(",") if number]


def times_run(found: Sequence[Instruction]) -> dict[str, int]:
    """Return how often each computation, by its name, runs in one run of the program.

    A loop's body runs once per trip; a loop of unknown length counts as one trip. Several instructions may
    run one computation, such as the start and the end of an asynchronous pair. The most frequent of these
    instructions gives the computation's count; their counts are not summed.

    Args:
        found: all instructions of the program.
    """
    callers: dict[str, list[tuple[str, int]]] = {}  # by computation: (calling computation, trips)
    for instruction in found:
        for name in instruction.runs:
            callers.setdefault(name, []).append((instruction.computation, instruction.trips or 1))

    @functools.cache
    def count(name: str) -> int:
        """Return how often a computation runs: its caller's count times the trips; 1 for the entry."""
        return max((trips * count(caller) for caller, trips in callers.get(name, ())), default=1)

    return {instruction.computation: count(instruction.computation) for instruction in found}


def _first_group(pattern: re.Pattern[str], line: str) -> str | None:
    """Return the text that a pattern's first group matches in a line; None without a match."""
    match = pattern.search(line)
    return match[1] if match else None


def _number(pattern: re.Pattern[str], line: str) -> int | None:
    """Return the number that a pattern's first group matches in a line; None without a match."""
    text = _first_group(pattern, line)
    return int(text) if text else None


def _arrays(types: str) -> tuple[ArrayType, ...]:
    """Parse types, such as "(bf16[2,3]{1,0}, f32[])", into arrays."""
    return tuple(ArrayType(dtype, tuple(_integers(shape))) for dtype, shape in _ARRAY.findall(types))


@dataclass(frozen=True)
class Traffic:
    """The collectives of one kind, on one device.

    Attributes:
        count: number of instructions.
        bytes: bytes of their results, summed.
        largest: bytes of the largest array of any of them.
    """

    count: int
    bytes: int
    largest: int


def collectives(found: Iterable[Instruction]) -> dict[str, Traffic]:
    """Return a device's communication by kind of collective; one inside a loop counts once.

    Args:
        found: instructions of a program, or of a part of it.
    """
    by_kind: dict[str, list[Instruction]] = {}
    for instruction in found:
        if instruction.collective:
            by_kind.setdefault(instruction.collective, []).append(instruction)
    return {
        kind: Traffic(
            count=len(of_kind),
            bytes=sum(instruction.bytes for instruction in of_kind),
            largest=max((array.bytes for each in of_kind for array in each.results), default=0),
        )
        for kind, of_kind in by_kind.items()
    }
