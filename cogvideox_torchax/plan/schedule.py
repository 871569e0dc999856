"""The compiler's final schedule of a Pallas kernel, and how many cycles it takes to run through.

libtpu writes the schedule as text, a line for each bundle: what the core issues in one cycle. Which bundles
run, and how often, hangs on scalar instructions alone: those that branches need are run here, all else is
counted. So the grid's iterations, loops inside, the pipeline's first and last stages and what `pl.when`
guards count as often as they run. Nothing waits in this count: for memory, for a result of the matrix unit,
for another chip.
"""

import bisect
import functools
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cogvideox_torchax.plan.chips import Chip, dump_directory
from cogvideox_torchax.plan.hlo import instructions

LONGEST = 20_000_000
"""Steps after which a schedule is given up: it then counts as not known."""

WORD = 2**32

_BUNDLE = re.compile(r"^\s*(0x[0-9a-f]+|0)\s+([A-Z]{2})?\s*:[ >]*\{", re.M)
_REGION = re.compile(r"Start(?:/End empty)? region (\d+)")
_CORE = re.compile(r"= sld \[[^/]*\] /\* core id \*/")
_COMMENT = re.compile(r"/\*.*?\*/", re.S)
_BRANCH = re.compile(r"sbr\.rel\s*(?:\((!?)%(\w+)\))?,?\s*target = \$region(\d+)")
_SCALAR = re.compile(r"%([sp]\d+)_([sp]\d+) = ([a-z_]+[\w.]*)\s*(.*)")
_STORE = re.compile(r"= sst\s*(.*\])\s+%(s\d+)_(s\d+)")
_GUARD = re.compile(r"^\((!?)%([sp]\d+)_([sp]\d+)(?:, (%\w+|-?\d+))?\),?\s*")
_OPERAND = re.compile(r"%([sp]\d+)_([sp]\d+)|(?<![\w%#])(-?(?:0x[0-9a-f]+|\d+))(?!\w)")
_SLOT = re.compile(r"\[smem:\[(#allocation\w+)\]\]")
_FILE = re.compile(r"\d+-(.+)-\d+-final_bundles\.txt")
_EQUIVALENT = re.compile(r"^key:(.*)\n.*\n.*\n((?: +\S+\n?)*)", re.M)


class UnknownDumpError(ValueError):
    """A schedule's text that cannot be read, or not followed."""


@dataclass(frozen=True)
class Schedule:
    """The totals of a kernel's schedule.

    Attributes:
        cycles: bundles that run.
        assumed: branches that depend on data. The bundles they would skip are counted, except repairs of
            wrong numbers: a branch on a comparison of floats skips those.
    """

    cycles: int
    assumed: int


def compile_with_schedules(lowered: Any, chip: Chip | None) -> tuple[Any, dict[str, Schedule]]:
    """Compile the result of `jax.jit(...).lower(...)`.

    Args:
        lowered: for the devices of a topology, or of this machine.
        chip: what the topology is made of; None for a CPU.

    Returns:
        The compiled program, and the schedule of each of its Pallas kernels that has one, by the name of its
        instruction. No schedules for a CPU, nor where libtpu was loaded before `topology_devices`.
    """
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    if chip is None:
        return lowered.compile(), {}
    _forget()
    cached = jax.config.jax_enable_compilation_cache  # pyright: ignore[reportAttributeAccessIssue]
    try:
        # A program from the cache has no schedule.
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()
        compiled = lowered.compile()
    finally:
        jax.config.update("jax_enable_compilation_cache", cached)
        compilation_cache.reset_cache()
    kernels = [found.name for found in instructions(compiled.as_text()) if found.is_kernel]
    schedules = read_schedules(dump_directory(), kernels, chip.delay_slots)
    _forget()
    return compiled, schedules


def _forget() -> None:
    """Remove the dumps of programs that were compiled before."""
    for path in dump_directory().iterdir():
        path.unlink() if path.is_file() else shutil.rmtree(path)


def read_schedules(directory: Path, kernels: Iterable[str], delay_slots: int) -> dict[str, Schedule]:
    """Read the schedules that libtpu has written for kernels; missing or unreadable ones are left out.

    Args:
        directory: dump of one program.
        kernels: names of their instructions. The compiler schedules one of several alike.
        delay_slots: delay slots of the chip.
    """
    # Names begin with the time: of a kernel that was scheduled again, the last one counts.
    paths = sorted(directory.iterdir())
    written = {match[1]: path for path in paths if (match := _FILE.fullmatch(path.name))}
    alike: dict[str, str] = {}
    for path in directory.glob("*deduplication-map.txt"):
        for key, names in _EQUIVALENT.findall(path.read_text()):
            alike |= dict.fromkeys(names.split(), key)

    @functools.cache
    def schedule(path: Path) -> Schedule | None:
        try:
            return read_schedule(path.read_text(), delay_slots)
        except UnknownDumpError:
            return None

    found: dict[str, Schedule] = {}
    for kernel in kernels:
        path = written.get(kernel) or written.get(alike.get(kernel, ""))
        if path and (known := schedule(path)):
            found[kernel] = known
    return found


Value = int | bool | None
"""Value of a register: None if it depends on data."""


@dataclass(frozen=True)
class _Operation:
    """A scalar instruction.

    Attributes:
        name: of its result, given once in a schedule.
        target: the register or the slot of memory that holds it.
        compute: what becomes of the operands; None for nothing.
        operands: registers, slots and numbers.
        reads: the results that it takes.
    """

    name: str
    target: str
    compute: Callable[..., Value] | None
    operands: tuple[str | int, ...]
    reads: tuple[str, ...]


@dataclass(frozen=True)
class _Branch:
    """A branch: its condition's register and the name of the value there, None to branch always; its target.

    It is taken where the condition is true, or, if negated, where it is false.
    """

    register: str | None
    name: str | None
    negated: bool
    target: int


def read_schedule(text: str, delay_slots: int) -> Schedule:
    """Follow a final schedule from its first bundle to its last.

    Args:
        text: of libtpu's `final_bundles` dump of one kernel.
        delay_slots: bundles behind a branch that run whether it is taken or not.

    Raises:
        UnknownDumpError: another text, or a loop whose end hangs on data or is too far.
    """
    bundles, regions = _bundles(text)
    operations: dict[int, list[_Operation]] = {}
    branches: dict[int, _Branch] = {}
    for address, bundle in enumerate(bundles):
        for part in bundle.split(";;"):
            if match := _BRANCH.search(part):
                target = regions.get(match[3], regions.get(""))
                if target is None:
                    raise UnknownDumpError(f"a branch goes to region {match[3]}, which nothing starts")
                name, _, register = (match[2] or "").rpartition("_")
                branches[address] = _Branch(register or None, name or None, bool(match[1]), target)
            elif "sbr" in part:
                raise UnknownDumpError(f"got a branch of another form: {part.strip()[:80]}")
            elif operation := _operation(part):
                operations.setdefault(address, []).append(operation)
    _keep_what_branches_need(operations, branches)
    checks = {one.name for found in operations.values() for one in found if one.compute is _checked}
    return _follow(len(bundles), operations, branches, delay_slots, checks)


def _bundles(text: str) -> tuple[list[str], dict[str, int]]:
    """Return each bundle's instructions without comments, and the bundle that each region starts at."""
    starts = list(_BUNDLE.finditer(text))
    if not starts or [int(start[1], 16) for start in starts] != list(range(len(starts))):
        raise UnknownDumpError("got no bundles, or not one after the other")
    ends = [start.start() for start in starts[1:]] + [len(text)]
    bodies = [text[start.end() : end] for start, end in zip(starts, ends, strict=True)]
    regions = {number: index for index, body in enumerate(bodies) for number in _REGION.findall(body)}
    if starts[-1][2] == "PF":  # where a core that has nothing to do goes on: no region starts there
        regions[""] = len(bodies) - 1
    return [_COMMENT.sub("", _CORE.sub("= smov 0", body)) for body in bodies], regions


def _operation(part: str) -> _Operation | None:
    """Parse a scalar instruction; return None for any other."""
    if match := _STORE.search(part):
        slot = _SLOT.search(match[1])
        if slot is None or _GUARD.search(match[1]):
            return None
        return _Operation(slot[1], slot[1], _same, (match[3],), (match[2],))
    match = _SCALAR.search(part)
    if match is None:
        return None
    name, target, op, rest = match.groups()
    rest = rest.rstrip("} \n")
    guard = _GUARD.match(rest)
    rest = rest[guard.end() :] if guard else rest
    if op in ("sphi", "pphi"):  # all that it joins lie in one register already
        return _Operation(name, target, None, (), tuple(found[0] for found in _operands(rest) if found[0]))
    if op == "sld":
        slot = _SLOT.search(rest)
        compute, found = (_same, [(slot[1], slot[1])]) if slot else (_unknown, [])
    else:
        compute, found = _OPERATIONS.get(op.split(".")[0], _unknown), _operands(rest)
        if op.startswith("scmp."):
            compute = _checked if ".f32" in op else _COMPARISONS.get(op.split(".")[1], _unknown)
    operands, reads = tuple(found[1] for found in found), tuple(found[0] for found in found if found[0])
    if guard is None:
        return _Operation(name, target, compute, operands, reads)
    (old_name, old), *_ = _operands(guard[4] or "") or [("", target)]
    guarded = functools.partial(_guarded, bool(guard[1]), compute)
    return _Operation(name, target, guarded, (guard[3], old, *operands), (guard[2], old_name, *reads))


def _operands(text: str) -> list[tuple[str, str | int]]:
    """Return the names and registers, or "" and numbers, of a list of operands."""
    return [
        (name, register) if name else ("", int(number, 0) % WORD)
        for name, register, number in _OPERAND.findall(text)
    ]


def _signed(value: int) -> int:
    """Return a word of 32 bits as a signed number."""
    return value - WORD if value >= WORD // 2 else value


def _same(value: Value) -> Value:
    """Return an operand as it is."""
    return value


def _unknown(*_: Value) -> Value:
    """Return an unknown value, whatever the operands."""
    return None


def _checked(*_: Value) -> Value:
    """Return an unknown value, as `_unknown`: as another function it marks a comparison of floats."""
    return None


def _guarded(negated: bool, compute: Callable[..., Value], guard: Value, old: Value, *values: Value) -> Value:
    """Return what an instruction gives under a guard: where the guard is false, the register's old value."""
    if guard is None:
        return None
    return compute(*values) if bool(guard) is not negated else old


def _known(function: Callable[..., Any], *values: Value) -> Value:
    """Return a function's result as a word; unknown where an operand is."""
    return None if None in values else function(*values) % WORD


def _compared(function: Callable[[int, int], bool], *values: Value) -> Value:
    """Return a comparison of signed numbers; unknown where one is."""
    one, other = values
    return None if one is None or other is None else function(_signed(one), _signed(other))


def _or(*values: Value) -> Value:
    return True if True in values else None if None in values else False


def _not(value: Value) -> Value:
    return None if value is None else not value


def _and(*values: Value) -> Value:
    return _not(_or(*map(_not, values)))


_OPERATIONS: dict[str, Callable[..., Value]] = {
    "smov": _same,
    "pmov": _same,
    "sadd": functools.partial(_known, lambda a, b: a + b),
    "ssub": functools.partial(_known, lambda a, b: a - b),
    "smin": functools.partial(_known, min),
    "smax": functools.partial(_known, max),
    "smul": functools.partial(_known, lambda a, b: a * b),
    "sand": functools.partial(_known, lambda a, b: a & b),
    "sor": functools.partial(_known, lambda a, b: a | b),
    "sxor": functools.partial(_known, lambda a, b: a ^ b),
    "sshll": functools.partial(_known, lambda a, b: a << b),
    "sshrl": functools.partial(_known, lambda a, b: a >> b),
    "sshra": functools.partial(_known, lambda a, b: _signed(a) >> b),
    "scalar_select": lambda guard, one, other: None if guard is None else one if guard else other,
    "por": _or,
    "pand": _and,
    "pneg": _not,
    "pnand": lambda *values: _not(_and(*values)),
}

_COMPARISONS: dict[str, Callable[..., Value]] = {
    "eq": functools.partial(_compared, lambda a, b: a == b),
    "ne": functools.partial(_compared, lambda a, b: a != b),
    "lt": functools.partial(_compared, lambda a, b: a < b),
    "le": functools.partial(_compared, lambda a, b: a <= b),
    "gt": functools.partial(_compared, lambda a, b: a > b),
    "ge": functools.partial(_compared, lambda a, b: a >= b),
}


def _keep_what_branches_need(operations: dict[int, list[_Operation]], branches: dict[int, _Branch]) -> None:
    """Remove the operations whose results no branch depends on: the others alone are followed."""
    sources: dict[str, set[str]] = {}
    for found in operations.values():
        for operation in found:
            sources.setdefault(operation.name, set()).update(operation.reads)
    needed: set[str] = set()
    waiting = [branch.name for branch in branches.values() if branch.name]
    while waiting:
        if (name := waiting.pop()) not in needed:
            needed.add(name)
            waiting += sources.get(name, ())
    for address, found in list(operations.items()):
        operations[address] = [one for one in found if one.name in needed and one.compute is not None]


def _follow(
    count: int,
    operations: dict[int, list[_Operation]],
    branches: dict[int, _Branch],
    delay_slots: int,
    checks: set[str],
) -> Schedule:
    """Return the bundles that run, and the number of branches that depend on data."""
    state: dict[str | int, Value] = {}
    assumed: set[int] = set()
    events = sorted({*operations, *branches})
    index_of = [bisect.bisect_left(events, address) for address in range(count)]
    cycles = steps = first = index = 0

    def execute(address: int) -> None:
        """Run the operations of a bundle."""
        found = operations.get(address, ())
        # All of a bundle's instructions read before any of them writes.
        results = [
            one.compute(*(value if isinstance(value, int) else state.get(value) for value in one.operands))
            for one in found
            if one.compute
        ]
        for operation, result in zip(found, results, strict=True):
            state[operation.target] = result

    while index < len(events):
        address = events[index]
        branch = branches.get(address)
        goes = _goes(branch, state) if branch else False
        execute(address)
        index += 1
        steps += 1
        if steps > LONGEST:
            raise UnknownDumpError(f"it takes more than {LONGEST} steps")
        if branch is None or goes is False:
            continue
        if goes is None:
            if branch.target <= address:
                raise UnknownDumpError("the end of a loop hangs on data")
            assumed.add(address)
            if branch.name not in checks:
                continue
        last = min(address + delay_slots, count - 1)
        while index < len(events) and events[index] <= last:
            execute(events[index])
            index += 1
        cycles += last - first + 1
        first, index = branch.target, index_of[branch.target]
    return Schedule(cycles + count - first, len(assumed))


def _goes(branch: _Branch, state: dict[str | int, Value]) -> bool | None:
    """Return whether a branch is taken; None where that depends on data."""
    if branch.register is None:
        return True
    guard = state.get(branch.register)
    return None if guard is None else bool(guard) is not branch.negated
