"""The reader of compiled text (`compiled.as_text()`): instructions, arrays, cycles, collectives."""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
PALLAS = "tpu_custom_call"

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?(?P<name>\S+) = (?P<result>\(.*?\)|\S+) (?P<op>[a-z][\w-]*)\(")
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\]")
_SCOPE = re.compile(r'op_name="([^"]*)"')
_CALLED = re.compile(r"calls=%?([\w.\-]+)")
_CYCLES = re.compile(r'"?estimated_cycles"?:"(\d+)"')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_CALLS = re.compile(r"\b(calls|to_apply|body|condition)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{(.*?)\}")
_TRIPS = re.compile(r'"?known_trip_count"?:\{"n":"(\d+)"\}')
_GROUPS = re.compile(
    r"(?:replica_groups|source_target_pairs)=(\{\{.*?\}\}|\{\}|\[[^ ]*?\](?:T\([\d,]*\))?)(?:,|$)"
)
_IOTA = re.compile(r"\[([\d,]*)\]<=\[([\d,]*)\](?:T\(([\d,]*)\))?")
_STARTED = re.compile(r"-done\((?:\(.*\) |[^%]\S* )?%?([\w.\-]+)\)")
_OPERANDS = re.compile(r"operand_layout_constraints=\{(.*?\})\}")

LANES, SUBLANES = 128, 8

NO_ESTIMATE = 2**63 - 1
"""The compiler's cycle count for an instruction without an estimate (some copies on tpu7x)."""


@dataclass(frozen=True)
class ArrayType:
    """An array of a compiled program: XLA's name of its dtype, and its shape on one device."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return _bytes(self.dtype, self.shape)

    @property
    def tiled_bytes(self) -> int:
        """Bytes in the layout of a TPU's kernels: row-major, in tiles of 128 lanes and up to 8 sublanes."""
        *outer, sublanes, lanes = [1, 1, *self.shape]
        tile = min(SUBLANES, 1 << (sublanes - 1).bit_length())
        return _bytes(self.dtype, (*outer, -(-sublanes // tile) * tile, -(-lanes // LANES) * LANES))


def _bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the bytes of an array of XLA's dtype, such as bf16, and shape."""
    bits = re.search(r"\d+", dtype)  # a bool, "pred", has none and takes a byte
    return math.ceil(math.prod(shape) * (int(bits[0]) if bits else 8) / 8)


@dataclass(frozen=True)
class Instruction:
    """One instruction of a compiled program.

    Attributes:
        name: its own, which no other instruction of the program has.
        op: what it does.
        results: the arrays that it gives, on one device.
        operands: the arrays that it takes, where the text says their types: of custom calls alone.
        scope: the name that it was traced under, "" for none.
        computation: the computation that it stands in.
        called: the computation that it calls, or None.
        cycles: the compiler's own estimate, or None.
        target: of a custom call, or None.
        runs: the computations that it runs, with the bodies of a loop or of a branch.
        trips: of a loop, where the compiler knows them; 1 for any other instruction, None for other loops.
        groups: of a collective, the devices that exchange, by their place in the mesh; of a permutation the
            pairs of sender and receiver. Empty where all do.
        started: of the end of an asynchronous pair, the name of its start; else None.
    """

    name: str
    op: str
    results: tuple[ArrayType, ...]
    operands: tuple[ArrayType, ...]
    scope: str
    computation: str
    called: str | None
    cycles: int | None
    target: str | None
    runs: tuple[str, ...]
    trips: int | None
    groups: tuple[tuple[int, ...], ...]
    started: str | None

    @property
    def collective(self) -> str | None:
        """The kind of collective, or None; of an asynchronous pair the start is one, and the end is not."""
        kind = self.op.removesuffix("-start")
        return kind if kind in COLLECTIVES else None

    @property
    def is_kernel(self) -> bool:
        """True if it runs a Pallas kernel."""
        return self.op == "custom-call" and self.target == PALLAS

    @property
    def bytes(self) -> int:
        """Bytes of its result; the start of an asynchronous pair includes its operand, which is no larger."""
        sizes = [array.bytes for array in self.results]
        return max(sizes, default=0) if self.op.endswith("-start") else sum(sizes)


def instructions(text: str) -> Iterator[Instruction]:
    """Yield the instructions of a compiled program's text, in its order."""
    computation = ""
    for line in text.splitlines():
        if opened := _COMPUTATION.match(line):
            computation = opened[1]
        elif match := _INSTRUCTION.match(line):
            cycles = _found(_CYCLES, line)
            yield Instruction(
                name=match["name"],
                op=match["op"],
                results=_arrays(match["result"]),
                operands=_arrays(_found(_OPERANDS, line) or ""),
                scope=_found(_SCOPE, line) or "",
                computation=computation,
                called=_found(_CALLED, line),
                cycles=None if cycles is None or int(cycles) == NO_ESTIMATE else int(cycles),
                target=_found(_TARGET, line),
                runs=_runs(line),
                trips=_trips(match["op"], line),
                groups=_groups(_found(_GROUPS, line) or ""),
                started=_found(_STARTED, line),
            )


def _runs(line: str) -> tuple[str, ...]:
    """Return the computations that an instruction names as its callees, bodies and branches."""
    named = [name for _, name in _CALLS.findall(line)]
    return (*named, *(name.strip(" %") for name in (_found(_BRANCHES, line) or "").split(",") if name))


def _trips(op: str, line: str) -> int | None:
    """Return how often an instruction runs what it calls: a loop's trips, None where not known, else 1."""
    if op != "while":
        return 1
    trips = _found(_TRIPS, line)
    return int(trips) if trips else None


def _groups(text: str) -> tuple[tuple[int, ...], ...]:
    """Parse the groups of devices of a collective.

    They stand as "{{0,1},{2,3}}", or as "[2,2]<=[4]": all devices in order, their axes permuted as "T" says.
    """
    if iota := _IOTA.match(text):
        sizes, shape, order = ([int(size) for size in part.split(",") if size] for part in iota.groups(""))
        strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        axes = order or range(len(shape))
        places = [0]
        for axis in axes:
            places = [place + index * strides[axis] for place in places for index in range(shape[axis])]
        size = sizes[-1]
        return tuple(tuple(places[start : start + size]) for start in range(0, len(places), size))
    found = re.findall(r"\{([\d,]+)\}", text)
    return tuple(tuple(map(int, group.split(","))) for group in found)


def times_run(found: Sequence[Instruction]) -> dict[str, int]:
    """Return how often each computation runs in one run of the program: a loop's body once per trip.

    A loop of unknown length counts once. A computation that several instructions run, such as the start and
    the end of an asynchronous pair, counts for the instruction that runs most.
    """
    callers: dict[str, list[tuple[str, int]]] = {}
    for instruction in found:
        for name in instruction.runs:
            callers.setdefault(name, []).append((instruction.computation, instruction.trips or 1))
    times: dict[str, int] = {}

    def count(name: str) -> int:
        """Return how often a computation runs, once its callers are counted."""
        if name not in times:
            times[name] = max((trips * count(caller) for caller, trips in callers.get(name, ())), default=1)
        return times[name]

    for instruction in found:
        count(instruction.computation)
    return times


def _found(pattern: re.Pattern[str], line: str) -> str | None:
    """Return what a pattern's group matches in a line; None where nothing does."""
    match = pattern.search(line)
    return match[1] if match else None


def _arrays(types: str) -> tuple[ArrayType, ...]:
    """Return the arrays of a text of types, such as a tuple's."""
    return tuple(
        ArrayType(dtype, tuple(int(size) for size in sizes.split(",") if size))
        for dtype, sizes in _ARRAY.findall(types)
    )


@dataclass(frozen=True)
class Traffic:
    """The collectives of one kind: how many, their bytes on one device, and the largest array's bytes."""

    count: int
    bytes: int
    largest: int


def collectives(found: Iterable[Instruction]) -> dict[str, Traffic]:
    """Return a device's communication, by kind of collective."""
    total: dict[str, Traffic] = {}
    for instruction in found:
        if instruction.collective:
            before = total.get(instruction.collective, Traffic(0, 0, 0))
            total[instruction.collective] = Traffic(
                before.count + 1,
                before.bytes + instruction.bytes,
                max([before.largest, *(array.bytes for array in instruction.results)]),
            )
    return total
