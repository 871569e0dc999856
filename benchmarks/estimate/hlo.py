"""What the estimates read off compiled text beyond `plan`: cycles, loops, and the groups of collectives.

The text is a list of computations: the entry, and the bodies of fusions, loops and branches. Each has a head
line and one line for each instruction.
"""

import functools
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from cogvideox_torchax.plan import hlo

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_CALLED = re.compile(r"calls=%?([\w.\-]+)")
_CYCLES = re.compile(r'"?estimated_cycles"?:"(\d+)"')
# One computation, or several: the branches of a conditional, "branch_computations={%one, %other}". Those of a
# conditional on a predicate are "true_computation=%one, false_computation=%other".
_RUNS = re.compile(r"\b(?:calls|to_apply|body|condition|[a-z]+_computations?)=(\{.*?\}|%?[\w.\-]+)")
_TRIPS = re.compile(r'"?known_trip_count"?:\{"n":"(\d+)"\}')
_GROUPS = re.compile(
    r"(?:replica_groups|source_target_pairs)=(\{\{.*?\}\}|\{\}|\[[^ ]*?\](?:T\([\d,]*\))?)(?:,|$)"
)
_IOTA = re.compile(r"\[([\d,]*)\]<=\[([\d,]*)\](?:T\(([\d,]*)\))?")
_STARTED = re.compile(r"-done\((?:\(.*\) |[^%]\S* )?%?([\w.\-]+)\)")
# Of "ROOT %NAME = TYPE OP(OPERANDS), ATTRIBUTES": whether it is a root, the type, and the operands.
_PARTS = re.compile(r"^\s*(ROOT )?%?\S+ = (\(.*?\)|\S+) [a-z][\w-]*\(([^)]*)")
_NAME = re.compile(r"%([\w.\-]+)")
# An array with its layout, such as "bf16[6,5]{1,0:T(8,128)(2,1)S(1)}": its axes from the minor one on, its
# tiles along these, and its memory, where "S(1)" is VMEM.
_LAYOUT = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\](?:\{([\d,]*)(?::(?:T\(([\d,]*)\))?([^}]*))?\})?")
NO_ESTIMATE = 2**63 - 1
"""The compiler's cycle count for an instruction without an estimate (some copies on tpu7x)."""


@dataclass(frozen=True)
class TimedInstruction(hlo.Instruction):
    """One instruction of a compiled program, and what its time depends on.

    Attributes:
        computation: name of the computation that the instruction is in.
        moved: bytes that it reads and writes in the chip's memory, as they are padded there; arrays in VMEM
            have none. Of an array that is only sliced, or updated in place, the slice or the update counts.
        called: name of the computation that a fusion calls (`calls=`), or None.
        cycles: the compiler's own estimate; 0 where it says that it has none, None where it says nothing.
        runs: names of all computations that it runs: the one it calls, a loop's body and condition, a
            conditional's branches, a reduction's function.
        trips: a loop's number of iterations, None if the compiler does not know it; 1 for other instructions.
        groups: a collective's groups of devices that exchange, by their index in the mesh; empty if all
            devices are one group. For a collective-permute each group is a pair (sender, receiver).
        started: name of the start that this instruction, the end of an asynchronous pair, waits for; None for
            other instructions.
    """

    computation: str
    moved: int
    called: str | None
    cycles: int | None
    runs: tuple[str, ...]
    trips: int | None
    groups: tuple[tuple[int, ...], ...]
    started: str | None


def instructions(text: str) -> Iterator[TimedInstruction]:
    """Yield the instructions of a compiled program's text, in the text's order."""
    computation = ""
    sizes: dict[str, int] = {}  # by an instruction's name: the bytes of its results in the chip's memory
    # The bytes that an instruction writes, by its name, and its computation's root, by the computation's.
    written: dict[str, int] = {}
    read = Counter[str]()  # by an instruction's name: the bytes of its results that others read
    parameters: dict[tuple[str, int], str] = {}  # names by (computation, index)
    for line in text.splitlines():
        if head := _COMPUTATION.match(line):
            computation = head[1]
        elif found := hlo.instruction(line):
            cycles = _number(_CYCLES, line)
            called = _first_group(_CALLED, line)
            root, type_, arguments = _PARTS.search(line).groups()  # pyright: ignore[reportOptionalMemberAccess]
            operands = _NAME.findall(arguments)
            size = sizes[found.name] = writes = bytes_in_memory(type_)
            reads = [sizes.get(operand, 0) for operand in operands]
            if found.op == "parameter":
                parameters[computation, int(arguments)] = found.name
            elif found.op in ("slice", "dynamic-slice"):
                reads = [size]
            elif found.op == "dynamic-update-slice":  # of an array, by the second operand
                reads[0], writes = 0, reads[1]
            elif found.op == "tuple":
                writes = sum(written.get(operand, 0) for operand in operands)
            elif called in written:
                reads = [min(whole, read[parameters[called, i]]) for i, whole in enumerate(reads)]
                writes = min(size, written[called])
            read.update(dict(zip(operands, reads, strict=False)))
            written[computation if root else found.name] = writes
            yield TimedInstruction(
                **vars(found),
                computation=computation,
                moved=sum(reads) + writes,
                called=called,
                cycles=0 if cycles == NO_ESTIMATE else cycles,
                runs=tuple(re.findall(r"[\w.\-]+", " ".join(_RUNS.findall(line)))),
                trips=_number(_TRIPS, line) if found.op == "while" else 1,
                groups=_groups(_first_group(_GROUPS, line) or ""),
                started=_first_group(_STARTED, line),
            )


def bytes_in_memory(types: str) -> int:
    """Return the bytes of a type's arrays in the chip's memory, in whole tiles; those in VMEM have none."""
    total = 0
    for dtype, shape, order, tile, rest in _LAYOUT.findall(types):
        sizes = _integers(shape)
        for axis, multiple in zip(_integers(order), reversed(_integers(tile)), strict=False):
            sizes[axis] = -(-sizes[axis] // multiple) * multiple
        total += 0 if "S(" in rest else hlo.ArrayType(dtype, tuple(sizes)).bytes
    return total


def times_run(found: Sequence[TimedInstruction]) -> dict[str, int]:
    """Return how often each computation, by its name, runs in one run of a program's instructions.

    A loop's body runs once per trip; a loop of unknown length counts as one trip. Several instructions may
    run one computation, such as the start and the end of an asynchronous pair: the most frequent one counts.
    """
    callers: dict[str, list[tuple[str, int]]] = {}  # by computation: (calling computation, trips)
    for instruction in found:
        for name in instruction.runs:
            callers.setdefault(name, []).append((instruction.computation, instruction.trips or 1))

    @functools.cache
    def count(name: str) -> int:
        return max((trips * count(caller) for caller, trips in callers.get(name, ())), default=1)

    return {instruction.computation: count(instruction.computation) for instruction in found}


def _groups(text: str) -> tuple[tuple[int, ...], ...]:
    """Parse a collective's groups of devices; empty for an empty text.

    The text lists them, "{{0,1},{2,3}}", or describes an array of them: "[4,2]<=[2,4]T(1,0)" is
    `arange(8).reshape(2, 4).transpose(1, 0).reshape(4, 2)`, 4 groups of 2. "T" may be missing.
    """
    if iota := _IOTA.match(text):
        # The numbers in the three pairs of brackets: [4, 2], [2, 4] and [1, 0]. Without "T" `order` is empty.
        result_shape, shape, order = map(_integers, iota.groups(default=""))
        devices = np.arange(math.prod(shape)).reshape(shape).transpose(order or range(len(shape)))
        return tuple(map(tuple, devices.reshape(-1, result_shape[-1]).tolist()))  # a group is a row
    return tuple(tuple(_integers(group)) for group in re.findall(r"\{([\d,]+)\}", text))


def _integers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def _first_group(pattern: re.Pattern[str], line: str) -> str | None:
    match = pattern.search(line)
    return match[1] if match else None


def _number(pattern: re.Pattern[str], line: str) -> int | None:
    text = _first_group(pattern, line)
    return int(text) if text else None
