"""The reader of compiled text (`compiled.as_text()`, XLA's HLO): instructions, arrays, collectives, loops.

The text is a list of computations: the entry, and the bodies of fusions, loops and branches. Each has a head
line and one line for each instruction. On a mesh it is the program of one device. The compiler's cycles,
layouts in tiles and groups of devices are those of a TPU's text.
"""

import functools
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
PALLAS = 'custom_call_target="tpu_custom_call"'
"""The attribute of a custom call that runs a Pallas kernel."""

# "ROOT %NAME = RESULT OP(OPERANDS), ATTRIBUTES": the result is one type, or a tuple of types in parentheses.
_INSTRUCTION = re.compile(
    r"^\s*(?P<root>ROOT )?%?(?P<name>\S+) = (?P<result>\(.*?\)|\S+) (?P<op>[a-z][\w-]*)\((?P<operands>[^)]*)"
)
# A type such as "bf16[6,5]{1,0:T(8,128)(2,1)S(1)}": its axes from the minor one on, its tiles along these,
# and its memory, where "S(1)" is VMEM. "pred" is XLA's name of bool.
_ARRAY = re.compile(
    r"\b(?P<dtype>pred|[a-z]+\d+\w*)\[(?P<shape>[\d,]*)\]"
    r"(?:\{(?P<order>[\d,]*)(?::(?:T\((?P<tile>[\d,]*)\))?(?P<rest>[^}]*))?\})?"
)
# JAX's name stack at an instruction's tracing, "outer/inner", which the line's metadata has as its `op_name`.
_SCOPE = re.compile(r'op_name="([^"]*)"')
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_CALLED = re.compile(r"calls=%?([\w.\-]+)")
_CYCLES = re.compile(r'"?estimated_cycles"?:"(\d+)"')
# One computation, or several: the branches of a conditional, "branch_computations={%one, %other}". Those of a
# conditional on a predicate are "true_computation=%one, false_computation=%other".
_RUNS = re.compile(r"\b(?:calls|to_apply|body|condition|[a-z]+_computations?)=(\{.*?\}|%?[\w.\-]+)")
_TRIPS = re.compile(r'"?known_trip_count"?:\{"n":"(\d+)"\}')
_CONDITION = re.compile(r"condition=%?([\w.\-]+)")
_GROUPS = re.compile(
    r"(?:replica_groups|source_target_pairs)=(\{\{.*?\}\}|\{\}|\[[^ ]*?\](?:T\([\d,]*\))?)(?:,|$)"
)
_IOTA = re.compile(r"\[([\d,]*)\]<=\[([\d,]*)\](?:T\(([\d,]*)\))?")
_STARTED = re.compile(r"-done\((?:\(.*\) |[^%]\S* )?%?([\w.\-]+)\)")
_NAME = re.compile(r"%([\w.\-]+)")
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


@dataclass(frozen=True)
class Instruction:
    """One instruction of a compiled program, and what its time depends on.

    Attributes:
        name: unique in the program.
        op: the opcode, such as "fusion", "custom-call" or "all-gather-start".
        results: the arrays that it returns, on one device.
        scope: JAX's name stack at its tracing, "outer/inner", which has module names; "" for none.
        is_kernel: whether it runs a Pallas kernel.
        computation: name of the computation that it is in.
        moved: bytes that it reads and writes in the chip's memory, as they are padded there; arrays in VMEM
            have none. Of an array that is only sliced, or updated in place, the slice or the update counts.
        called: name of the computation that a fusion calls (`calls=`), or None.
        cycles: the compiler's own estimate; 0 where it says that it has none, None where it says nothing.
        runs: names of all computations that it runs: the one it calls, a loop's body and condition, a
            conditional's branches, a reduction's function.
        trips: a loop's number of iterations: the compiler's, or the constant that its condition compares a
            counter with, as of JAX's scans, which count from 0 by 1; None if the text has neither. 1 for
            other instructions.
        groups: a collective's groups of devices that exchange, by their index in the mesh; empty if all
            devices are one group. For a collective-permute each group is a pair (sender, receiver).
        started: name of the start that this instruction, the end of an asynchronous pair, waits for; None for
            other instructions.
    """

    name: str
    op: str
    results: tuple[ArrayType, ...]
    scope: str
    is_kernel: bool
    computation: str
    moved: int
    called: str | None
    cycles: int | None
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
        # the two arrays. For a reduce-scatter it is the smaller one, because it is a part of the operand.
        if self.op == "reduce-scatter-start":
            return min(array.bytes for array in self.results if array.shape)  # scalars are no data
        return max(sizes, default=0)


def instructions(text: str) -> Iterator[Instruction]:
    """Yield the instructions of a compiled program's text, in the text's order."""
    computation = ""
    sizes: dict[str, int] = {}  # by an instruction's name: the bytes of its results in the chip's memory
    # The bytes that an instruction writes, by its name, and its computation's root, by the computation's.
    written: dict[str, int] = {}
    read = Counter[str]()  # by an instruction's name: the bytes of its results that others read
    parameters: dict[tuple[str | None, int], str] = {}  # names by (computation, index)
    numbers: dict[str, int] = {}  # constants by name
    bounds: dict[str | None, int] = {}  # by a computation whose root is "counter < constant": the constant
    for line in text.splitlines():
        if head := _COMPUTATION.match(line):
            computation = head[1]
        elif found := _INSTRUCTION.match(line):
            name, op, type_ = found["name"], found["op"], found["result"]
            called, cycles = _first_group(_CALLED, line), _number(_CYCLES, line)
            operands = _NAME.findall(found["operands"])
            size = sizes[name] = writes = bytes_in_memory(type_)
            reads = [sizes.get(operand, 0) for operand in operands]
            if op == "parameter":
                parameters[computation, int(found["operands"])] = name
            elif op == "constant" and found["operands"].isdigit():
                numbers[name] = int(found["operands"])
            elif op == "compare" and found["root"] and "direction=LT" in line and operands[-1] in numbers:
                bounds[computation] = numbers[operands[-1]]
            elif op in ("slice", "dynamic-slice"):
                reads = [size]
            elif op == "dynamic-update-slice":  # of an array, by the second operand
                reads[0], writes = 0, reads[1]
            elif op == "tuple":
                writes = sum(written.get(operand, 0) for operand in operands)
            elif called in written:
                reads = [min(whole, read[parameters.get((called, i), "")]) for i, whole in enumerate(reads)]
                writes = min(size, written[called])
            read.update(dict(zip(operands, reads, strict=False)))
            written[computation if found["root"] else name] = writes
            yield Instruction(
                name=name,
                op=op,
                results=tuple(
                    ArrayType(array["dtype"], tuple(_integers(array["shape"])))
                    for array in _ARRAY.finditer(type_)
                ),
                scope=_first_group(_SCOPE, line) or "",
                is_kernel=op == "custom-call" and PALLAS in line,
                computation=computation,
                moved=sum(reads) + writes,
                called=called,
                cycles=0 if cycles == NO_ESTIMATE else cycles,
                runs=tuple(re.findall(r"[\w.\-]+", " ".join(_RUNS.findall(line)))),
                trips=_trips(line, bounds) if op == "while" else 1,
                groups=_groups(_first_group(_GROUPS, line) or ""),
                started=_first_group(_STARTED, line),
            )


def bytes_in_memory(types: str) -> int:
    """Return the bytes of a type's arrays in the chip's memory, in whole tiles; those in VMEM have none."""
    total = 0
    for array in _ARRAY.finditer(types):
        sizes = _integers(array["shape"])
        order, tile = _integers(array["order"] or ""), _integers(array["tile"] or "")
        for axis, multiple in zip(order, reversed(tile), strict=False):
            sizes[axis] = -(-sizes[axis] // multiple) * multiple
        in_vmem = "S(" in (array["rest"] or "")
        total += 0 if in_vmem else ArrayType(array["dtype"], tuple(sizes)).bytes
    return total


@dataclass(frozen=True)
class Traffic:
    """The collectives of one kind on one device: their number and bytes, and those of the largest array."""

    count: int
    bytes: int
    largest: int


def collectives(found: Iterable[Instruction]) -> dict[str, Traffic]:
    """Sum up the collectives in a device's instructions, by their kind; one inside a loop counts once."""
    by_kind: dict[str, list[Instruction]] = {}
    for instruction in found:
        if instruction.collective:
            by_kind.setdefault(instruction.collective, []).append(instruction)
    return {
        kind: Traffic(
            count=len(same_kind),
            bytes=sum(instruction.bytes for instruction in same_kind),
            largest=max((array.bytes for each in same_kind for array in each.results), default=0),
        )
        for kind, same_kind in by_kind.items()
    }


def times_run(found: Sequence[Instruction]) -> dict[str, int]:
    """Return how often each computation, by its name, runs in one run of a program's instructions.

    A loop's body runs once per trip, or once if the number of trips is not known. Several instructions may
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


def _trips(line: str, bounds: Mapping[str | None, int]) -> int | None:
    known = _number(_TRIPS, line)
    return bounds.get(_first_group(_CONDITION, line)) if known is None else known


def _number(pattern: re.Pattern[str], line: str) -> int | None:
    text = _first_group(pattern, line)
    return int(text) if text else None
