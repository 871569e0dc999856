"""The reader of compiled text (`compiled.as_text()`, XLA's HLO): instructions, arrays, collectives.

The text has a line for each instruction. On a mesh it is the program of one device.
"""

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
PALLAS = 'custom_call_target="tpu_custom_call"'
"""The attribute of a custom call that runs a Pallas kernel."""

# "%NAME = RESULT OP(...": the result is one type, or a tuple of types in parentheses.
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?(?P<name>\S+) = (?P<result>\(.*?\)|\S+) (?P<op>[a-z][\w-]*)\(")
# A type such as "bf16[2,3]"; "pred" is XLA's name of bool.
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\]")
# JAX's name stack at an instruction's tracing, "outer/inner", which the line's metadata has as its `op_name`.
_SCOPE = re.compile(r'op_name="([^"]*)"')


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
    """One instruction of a compiled program.

    Attributes:
        name: unique in the program.
        op: the opcode, such as "fusion", "custom-call" or "all-gather-start".
        results: the arrays that it returns, on one device.
        scope: JAX's name stack at its tracing, "outer/inner", which has module names; "" for none.
        line: its line in the program's text.
    """

    name: str
    op: str
    results: tuple[ArrayType, ...]
    scope: str
    line: str

    @property
    def is_kernel(self) -> bool:
        return self.op == "custom-call" and PALLAS in self.line

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
    return filter(None, map(instruction, text.splitlines()))


def instruction(line: str) -> Instruction | None:
    """Parse a line of a program's text; return None if it has no instruction."""
    match, scope = _INSTRUCTION.match(line), _SCOPE.search(line)
    if match is None:
        return None
    return Instruction(match["name"], match["op"], arrays(match["result"]), scope[1] if scope else "", line)


def arrays(types: str) -> tuple[ArrayType, ...]:
    """Parse types, such as "(bf16[2,3]{1,0}, f32[])", into arrays."""
    return tuple(
        ArrayType(dtype, tuple(int(size) for size in shape.split(",") if size))
        for dtype, shape in _ARRAY.findall(types)
    )


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
