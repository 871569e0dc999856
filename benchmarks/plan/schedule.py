"""The compiler's final schedule of a Pallas kernel, and how many cycles it takes to run through.

libtpu writes the schedule as text, with a line for each bundle, the instructions that the core issues in one
cycle. Which bundles run, and how often, depends on scalar instructions alone: those that branches need are
run here, and bundles are counted. So iterations of the grid, loops inside, the first and last stages of the
pipeline and the blocks of `pl.when` count as often as they run.

A schedule has no bundles for waiting: the core itself waits. For each block of instructions, libtpu writes
the critical path too, the longest chain of instructions that wait for each other's results. A block takes as
long as its chain, if that is longer than its bundles. Waiting for memory and for other chips is not counted.

    0x6 LB: > { %s21_s2 = sadd.s32 1, %s22_s2  ;;  %24 = sbr.rel (!%p23_p0) target = $region5 } /* comment */

is the bundle at address 6, the beginning of a loop's body ("LB"), of an addition and a branch. `%s21_s2` is
the value named s21, in register s2; a name is given to one result, a register holds many in turn. A cell is a
register, or an allocation in scalar memory. A predicate is a cell that is true or false. An instruction with
a guard, `(!%p23_p0)` or `(%p23_p0)`, has effect only where the predicate is false, or true. A branch goes to
its target, the bundle with the comment "Start region 5".
"""

import bisect
import contextlib
import functools
import itertools
import operator
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from benchmarks.plan.chips import dump_directory
from benchmarks.plan.hlo import instructions

LONGEST = 20_000_000
"""Number of bundles with an operation or a branch after which a schedule is given up, as not known."""

WORD = 2**32
"""Number of values of a register, which has 32 bits."""

_BUNDLE = re.compile(r"^\s*(?P<address>0x[0-9a-f]+|0)\s+(?P<marker>[A-Z]{2})?\s*:[ >]*\{", re.M)
_REGION = re.compile(r"Start(?:/End empty)? region (\d+)")
# A division goes through a queue: "%9 = sdivrem.u32 %s1_s1, 6 /* kRem */", and then "%s2_s2 = spop.drf %9".
_TAKEN = re.compile(r"spop\.drf %(\d+)")
_REWRITTEN = (
    # Each core reads its number from memory: core 0 is followed.
    (re.compile(r"= sld \[[^/]*\] /\* core id \*/"), "= smov 0"),
    # Stores into and loads from an allocation in scalar memory, such as "#allocation9", are moves of "m9".
    (re.compile(r"%\w+ = sst\s*\[smem:\[#allocation(\d+)\w*\]\]"), r"%m\1_m\1 = smov"),
    (re.compile(r"= sld\s*\[smem:\[#allocation(\d+)\w*\]\]( \(!?%\w+\))?"), r"= smov\2 %m\1_m\1"),
    # Where both are asked for, the remainder follows the quotient. No other name of a value begins with "s0".
    (
        re.compile(r"%(\d+) = sdivrem\.u32 (.*?) /\* kDivAndRem \*/"),
        r"%s\1_s\1 = kDiv \2 ;; %s0\1_s0\1 = kRem \2",
    ),
    (re.compile(r"%(\d+) = sdivrem\.u32 (.*?) /\* (k\w+) \*/"), r"%s\1_s\1 = \3 \2"),
    (re.compile(r"/\*.*?\*/", re.S), ""),  # comments
)
"""Instructions of other forms, and the form of all others, "%NAME_CELL = OPCODE OPERANDS", that they get."""
_BRANCH = re.compile(
    r"sbr\.rel\s*(?:\((?P<not>!?)%(?P<condition>\w+)\))?,?\s*target = \$region(?P<region>\d+)"
)
# An opcode and its type: "sadd" and ".s32", or "scmp.lt" and ".s32.totalorder".
_SCALAR = re.compile(r"%([spm]\d+)_([spm]\d+) = ([a-z_]\w*(?:\.(?:eq|ne|lt|le|gt|ge)\b)?)([\w.]*)\s*(.*)")
_GUARD = re.compile(
    r"^\((?P<not>!?)%(?P<name>[sp]\d+)_(?P<register>[sp]\d+)(?:, (?P<old>%\w+|-?\d+))?\),?\s*"
)
_OPERAND = re.compile(r"%([spm]\d+)_([spm]\d+)|(?<![\w%#])(-?(?:0x[0-9a-f]+|\d+))(?!\w)")
_FILE = re.compile(r"\d+-(.+)-\d+-(final_bundles|critical-path)\.txt")
# A result's name: in a bundle "%s196_s15 = ", with its register, and in a critical path ", %s196 = ".
_RESULT = re.compile(r"%(\w+?)(?:_[a-z]+\d+)? = ")
_CHAIN = re.compile(r"Length to end: (\d+), ")
_PRODUCT = re.compile(r"= vmatmul\.(mubr\.)?(?:msk\.)?bf16")
_EQUIVALENT = re.compile(r"^key:(.*)\n.*\n.*\n((?: +\S+\n?)*)", re.M)


class UnknownDumpError(ValueError):
    """A schedule's text that cannot be read, or not followed."""


@dataclass(frozen=True)
class Schedule:
    """The totals of a kernel's schedule.

    Attributes:
        cycles: number of bundles that run, each as often as it does, and of each block what its critical path
            is longer.
        flops: FLOPs of its products of bfloat16, blocks that fill a matrix unit only in part counted as full.
        assumed: number of branches that depend on data. They count as not taken: the bundles that they may
            skip run. A branch on a comparison of floats counts as taken: in this package's kernels it skips a
            recomputation that is seldom needed, such as attention's with an exact maximum.
    """

    cycles: int
    flops: int
    assumed: int


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


def compile_with_schedules(lowered: Any, delay_slots: int) -> tuple[Any, dict[str, Schedule]]:
    """Compile what `jax.jit(...).lower(...)` has returned; return it with its Pallas kernels' schedules.

    The schedules are by the name of a kernel's instruction. There are none if libtpu was loaded before
    `chips.topology_devices` set its flags. `delay_slots` is as for `read_schedule`.
    """
    _empty_dump_directory()  # of the dumps of programs that were compiled before
    compiled = compile_afresh(lowered)
    kernels = [found.name for found in instructions(compiled.as_text()) if found.is_kernel]
    schedules = read_schedules(dump_directory(), kernels, delay_slots)
    _empty_dump_directory()
    return compiled, schedules


def _empty_dump_directory() -> None:
    for path in dump_directory().iterdir():
        path.unlink() if path.is_file() else shutil.rmtree(path)


def read_schedules(directory: Path, kernels: Iterable[str], delay_slots: int) -> dict[str, Schedule]:
    """Return the schedules that libtpu has written for kernels, by the name of a kernel's instruction.

    Missing and unreadable ones are left out. `delay_slots` is as for `read_schedule`.
    """
    # Names of files begin with the time: of two schedules of a kernel the later one replaces the earlier.
    written: dict[str, dict[str, Path]] = {}  # by kernel, its files by pass
    for path in sorted(directory.iterdir()):
        if match := _FILE.fullmatch(path.name):
            written.setdefault(match[1], {})[match[2]] = path
    # The compiler schedules one of several equal kernels. By each kernel's name: the scheduled one's name.
    scheduled: dict[str, str] = {}
    for path in directory.glob("*deduplication-map.txt"):
        for name, equal_names in _EQUIVALENT.findall(path.read_text()):
            scheduled |= dict.fromkeys(equal_names.split(), name)

    names = {kernel: kernel if kernel in written else scheduled.get(kernel, "") for kernel in kernels}
    known: dict[str, Schedule] = {}
    for name in written.keys() & names.values():
        with contextlib.suppress(UnknownDumpError, KeyError):  # `KeyError` where a file is not there
            bundles, paths = (written[name][kind] for kind in ("final_bundles", "critical-path"))
            known[name] = read_schedule(bundles.read_text(), paths.read_text(), delay_slots)
    return {kernel: known[name] for kernel, name in names.items() if name in known}


Value = int | None
"""Value of a cell, a word or a predicate (0 or 1): None if it depends on data."""


@dataclass(frozen=True)
class _Operation:
    """A scalar instruction.

    Attributes:
        name: the name of its result, which no other result of a schedule has; for a store the allocation's
            name.
        cell: the cell that holds the result: a register, or an allocation in scalar memory.
        compute: function of the operands' values to the result; None for a phi, which does nothing, as the
            values that it joins are in its own register already.
        operands: pairs (name of the result that it depends on, cell to read). The name is "" for a cell whose
            value has no known name, and for a number, which takes the cell's place.
    """

    name: str
    cell: str
    compute: Callable[..., Value] | None
    operands: list[tuple[str, str | int]]


@dataclass(frozen=True)
class _Branch:
    """A branch, taken if its condition is true, or, if negated, false.

    Attributes:
        condition: an operand, as `_Operation` has them; the number 1 for a branch that is always taken.
        negated: whether the condition must be false.
        target: address of the bundle to go on at.
    """

    condition: tuple[str, str | int]
    negated: bool
    target: int


def read_schedule(text: str, paths: str, delay_slots: int) -> Schedule:
    """Count the cycles of a kernel's final schedule: follow its branches from the first bundle to the last.

    A bundle is the instructions that the core issues in one cycle. Only what branches depend on is computed.

    Args:
        text: libtpu's `final_bundles` dump of one kernel.
        paths: its `critical-path` dump of the same kernel.
        delay_slots: number of bundles behind a branch that run whether it is taken or not.

    Raises:
        UnknownDumpError: another text, a loop whose end depends on data, or more than `LONGEST` bundles to
            follow.
    """
    bundles, targets = _bundles(text)  # a bundle's index is its address; `targets` are where branches go
    operations: dict[int, list[_Operation]] = {}  # by the address of a bundle: its scalar instructions
    branches: dict[int, _Branch] = {}  # by the address of a bundle
    for address, bundle in enumerate(bundles):
        for instruction in bundle.split(";;"):
            if branch := _branch(instruction, targets):
                branches[address] = branch
            elif operation := _operation(instruction):
                operations.setdefault(address, []).append(operation)
    # Keep the operations that branches depend on. Phis (no `compute`) only connect names for `_needed`.
    needed = _needed((each for found in operations.values() for each in found), branches.values())
    for address, found in operations.items():
        operations[address] = [each for each in found if each.name in needed and each.compute]
    # The names of what is made of floats: a branch on such a comparison counts as taken (`Schedule.assumed`).
    float_conditions = {
        each.name for found in operations.values() for each in found if each.compute is _of_floats
    }
    runs, assumed = _follow(len(bundles), operations, branches, delay_slots, float_conditions)
    edges = sorted(
        {0, *(branch.target for branch in branches.values()), *(a + delay_slots + 1 for a in branches)}
    )
    waits = sum(runs[start] * wait for start, wait in _waits(bundles, paths, edges).items())
    # An instruction multiplies 16 rows by a matrix of 128 x 128, or of 256 x 256 where it is a "mubr".
    flops = sum(
        count * 2 * 16 * (256 if wide else 128) ** 2
        for count, bundle in zip(runs, bundles, strict=True)
        for wide in _PRODUCT.findall(bundle)
    )
    return Schedule(sum(runs) + waits, flops, assumed)


def _waits(bundles: list[str], paths: str, edges: list[int]) -> dict[int, int]:
    """Return, by the address at which a block begins, by how much its critical path is longer than the block.

    `edges` are the addresses at which blocks begin. A path goes to the block with most of its instructions,
    which have one name in both texts; only copies, which are added later, are renamed.
    """
    addresses = {name: address for address, bundle in enumerate(bundles) for name in _RESULT.findall(bundle)}
    waits: dict[int, int] = {}
    for path in paths.split("New basic block")[1:]:
        found = [addresses[name] for name in _RESULT.findall(path) if name in addresses]
        if found:  # not copies alone
            (block, _), *_ = Counter(bisect.bisect_right(edges, each) for each in found).most_common(1)
            start, end = (*edges, len(bundles))[block - 1 : block + 1]
            length = int(_CHAIN.findall(path)[0])  # the first instruction's
            waits[start] = max(waits.get(start, 0), length - (end - start))
    return waits


def _bundles(text: str) -> tuple[list[str], dict[str, int]]:
    """Cut a schedule into bundles: the instructions that are issued in one cycle.

    A region begins at a bundle that branches go to. A comment in that bundle has the region's number.

    Returns:
        The text of each bundle, without comments, at the index that is its address; and the address at which
        each region begins, by the region's number as text. The key "" has the address of a last bundle that
        branches go to by a number that no comment has.
    """
    heads = list(_BUNDLE.finditer(text))  # the beginning of each bundle: its address and its marker
    if not heads or [int(head["address"], 16) for head in heads] != list(range(len(heads))):
        raise UnknownDumpError("got no bundles, or not one after the other")
    ends = [head.start() for head in heads[1:]] + [len(text)]
    bodies = [text[head.end() : end] for head, end in zip(heads, ends, strict=True)]
    targets = {number: address for address, body in enumerate(bodies) for number in _REGION.findall(body)}
    # "PF" marks the bundle after a predicated region. If it is the last bundle, cores without work jump to
    # it, and the dump has no region number for it.
    if heads[-1]["marker"] == "PF":
        targets[""] = len(bodies) - 1
    taken: set[str] = set()  # divisions of which one result has left the queue

    def take(pop: re.Match[str]) -> str:
        """Return a move from a division's result, which has a cell of its own in place of the queue."""
        division = pop[1]
        cell = f"s0{division}" if division in taken else f"s{division}"
        taken.add(division)
        return f"smov %{cell}_{cell}"

    for pattern, form in ((_TAKEN, take), *_REWRITTEN):
        bodies = [pattern.sub(form, body) for body in bodies]
    return bodies, targets


def _branch(instruction: str, targets: dict[str, int]) -> _Branch | None:
    """Parse an instruction; return None if it is no branch.

    `targets` has the addresses of the bundles that branches go to, by the number in the branch's text. The
    key "", if there is one, is for numbers that have no key. `UnknownDumpError` for a branch of another form,
    or to a number without an address.
    """
    if match := _BRANCH.search(instruction):
        target = targets.get(match["region"], targets.get(""))
        if target is None:
            raise UnknownDumpError(f"a branch goes to region {match['region']}, which nothing starts")
        # "p23_p0" is the value p23 in register p0; "" for a branch that is always taken.
        name, _, register = (match["condition"] or "").rpartition("_")
        return _Branch((name, register or 1), negated=bool(match["not"]), target=target)
    if "sbr" in instruction:  # the opcode of all branches
        raise UnknownDumpError(f"got a branch of another form: {instruction.strip()[:80]}")
    return None


def _operation(instruction: str) -> _Operation | None:
    """Parse an instruction of a cycle; return None if it is no scalar instruction.

    A guard, a predicate in parentheses before the operands, decides whether the instruction has effect.
    """
    match = _SCALAR.search(instruction)
    if match is None:
        return None
    # `name` is the result's name, and `cell` gets the result: a register, or an allocation in scalar memory.
    # `op` is the opcode with its comparison, `type_` the suffix such as ".f32", `rest` the guard and the
    # operands.
    name, cell, op, type_, rest = match.groups()
    guard = _GUARD.match(rest)
    # An operand is (name of the result that it reads, the result's cell), or ("", number).
    operands = _operands(rest[guard.end() :] if guard else rest)
    compute = _of_floats if ".f32" in type_ else _OPERATIONS.get(op, _unknown)
    if guard and compute:  # a phi, which does nothing, has no function
        # The result if the instruction has no effect: the guard may name it; else the cell keeps its value,
        # whose name is not known.
        old, *_ = _operands(guard["old"] or "") or [("", cell)]
        compute = functools.partial(_guarded, bool(guard["not"]), compute)
        operands = [(guard["name"], guard["register"]), old, *operands]
    return _Operation(name, cell, compute, operands)


def _operands(text: str) -> list[tuple[str, str | int]]:
    """Parse operands, such as "%s7_s3, -1", into pairs: (name of a value, its register), or ("", number)."""
    return [
        # A negative number is taken as the 32-bit word (two's complement) that a register would hold.
        (name, register) if name else ("", int(number, 0) % WORD)
        for name, register, number in _OPERAND.findall(text)
    ]


def _signed(value: int) -> int:
    """Return the signed number (two's complement) that a register's word stands for."""
    return value - WORD if value >= WORD // 2 else value


def _unknown(*_: Value) -> Value:
    """Return an unknown value, whatever the operands."""
    return None


def _of_floats(*_: Value) -> Value:
    """Return an unknown value, whatever the operands: floats are not followed.

    It is not `_unknown` itself, because `read_schedule` recognizes comparisons of floats by this function.
    """
    return None


def _guarded(negated: bool, compute: Callable[..., Value], guard: Value, old: Value, *values: Value) -> Value:
    """Return the result of an instruction with a guard, whose predicate is the value `guard`.

    It has effect if the guard is true, or with `negated` if it is false; otherwise the result is `old`. An
    unknown guard makes the result unknown.
    """
    if guard is None:
        return None
    return compute(*values) if bool(guard) is not negated else old


def _known(function: Callable[..., int], *values: Value) -> Value:
    """Return a function's result as a word of 32 bits; None, unknown, if an operand is unknown."""
    return None if None in values else function(*values) % WORD


def _compared(function: Callable[[int, int], bool], *values: Value) -> Value:
    """Return the comparison of two words as signed numbers; None, unknown, if one of the words is unknown."""
    return _known(lambda *words: function(*map(_signed, words)), *values)


def _joined(decisive: int, *values: Value) -> Value:
    """Join predicates by "or", for which 1 is decisive, or by "and", for which 0 is.

    The result is `decisive` if one of them is, else None, unknown, if one of them is unknown.
    """
    return decisive if decisive in values else None if None in values else 1 - decisive


_OPERATIONS: dict[str, Callable[..., Value] | None] = {
    "sphi": None,
    "pphi": None,
    "smov": lambda value=None: value,  # an allocation's address, such as "[#allocation9]", is no operand
    "pmov": lambda value: value,
    "sadd": functools.partial(_known, operator.add),
    "ssub": functools.partial(_known, operator.sub),
    "smin": functools.partial(_known, min),
    "smax": functools.partial(_known, max),
    "smul": functools.partial(_known, operator.mul),
    "smulhi": functools.partial(_known, lambda a, b: a * b // WORD),
    "kDiv": functools.partial(_known, lambda a, b: a // b if b else 0),
    "kRem": functools.partial(_known, lambda a, b: a % b if b else 0),
    "sand": functools.partial(_known, operator.and_),
    "sor": functools.partial(_known, operator.or_),
    "sxor": functools.partial(_known, operator.xor),
    "sshll": functools.partial(_known, operator.lshift),
    "sshrl": functools.partial(_known, operator.rshift),
    "sshra": functools.partial(_known, lambda a, b: _signed(a) >> b),
    "scalar_select": lambda chosen, one, other: None if chosen is None else one if chosen else other,
    "por": functools.partial(_joined, 1),
    "pand": functools.partial(_joined, 0),
    "pneg": functools.partial(_known, operator.not_),
    "pnand": lambda *values: _known(operator.not_, _joined(0, *values)),
    "scmp.eq": functools.partial(_compared, operator.eq),
    "scmp.ne": functools.partial(_compared, operator.ne),
    "scmp.lt": functools.partial(_compared, operator.lt),
    "scmp.le": functools.partial(_compared, operator.le),
    "scmp.gt": functools.partial(_compared, operator.gt),
    "scmp.ge": functools.partial(_compared, operator.ge),
}
"""Functions of the operands' values to the result, by opcode. A phi has none, see `_Operation`."""


def _needed(operations: Iterable[_Operation], branches: Iterable[_Branch]) -> set[str]:
    """Return the names of the results that branches depend on, directly or through other operations."""
    sources: dict[str, set[str]] = {}  # by a result's name, the names of the results that it is made from
    for operation in operations:
        sources.setdefault(operation.name, set()).update(read for read, _ in operation.operands)
    needed: set[str] = set()
    waiting = [name for name, _ in (branch.condition for branch in branches)]
    while waiting:
        if (name := waiting.pop()) not in needed:
            needed.add(name)
            waiting += sources.get(name, ())
    return needed


def _follow(
    count: int,
    operations: dict[int, list[_Operation]],
    branches: dict[int, _Branch],
    delay_slots: int,
    float_conditions: set[str],
) -> tuple[list[int], int]:
    """Run a schedule's branches and the operations that they need.

    Return how often each bundle runs, by its address, and the number of branches that depend on data.

    Args:
        count: number of bundles (the instructions that the core issues in one cycle).
        operations: by a bundle's address, the operations that branches need.
        branches: branches by their bundle's address.
        delay_slots: number of bundles behind a branch that run whether it is taken or not.
        float_conditions: names of the results of comparisons of floats, among others, which are not computed.
            A branch forward on one of them counts as taken.

    Raises:
        UnknownDumpError: a loop whose end depends on data, or more than `LONGEST` bundles to follow.
    """
    values: dict[str, Value] = {}  # by cell: a register, or an allocation in scalar memory
    assumed: set[int] = set()  # addresses of branches that depend on data
    stops = sorted({*operations, *branches})  # addresses of the bundles to follow; the others only count
    next_stop = followed = 0  # index in `stops` of the bundle to follow next, and number of those followed
    # `start` is where the last jump went. The bundles from there on are added at the next jump, or at the
    # end, to `changes`: by address, how much more often its bundle runs than the one before it.
    changes, start = Counter[int](), 0

    def value(operand: tuple[str, str | int]) -> Value:
        """Return the value of an operand: a number, or a cell's."""
        _, cell = operand
        return cell if isinstance(cell, int) else values.get(cell)

    def execute(address: int) -> None:
        # All of a bundle's instructions read before any of them writes.
        results = {
            operation.cell: operation.compute(*map(value, operation.operands))
            for operation in operations.get(address, ())
            if operation.compute  # without one it changes nothing
        }
        values.update(results)

    while next_stop < len(stops):
        address = stops[next_stop]
        branch = branches.get(address)
        # A branch reads its condition before the bundle's operations write their results. The condition is
        # None if it is not known.
        condition = value(branch.condition) if branch else None
        execute(address)
        next_stop += 1
        followed += 1
        if followed > LONGEST:
            raise UnknownDumpError(f"it takes more than {LONGEST} steps")
        if branch is None or (condition is not None and bool(condition) is branch.negated):  # not taken
            continue
        if condition is None:
            if branch.target <= address:  # a jump back
                raise UnknownDumpError("the end of a loop hangs on data")
            assumed.add(address)
            if branch.condition[0] not in float_conditions:
                continue  # as not taken, see `Schedule.assumed`
        last = min(address + delay_slots, count - 1)  # the delay slots run before the jump
        for slot in stops[next_stop : bisect.bisect_right(stops, last)]:
            execute(slot)
        changes[start] += 1
        changes[last + 1] -= 1
        start = branch.target
        next_stop = bisect.bisect_left(stops, start)  # the first from there on
    changes[start] += 1
    return list(itertools.accumulate(changes[address] for address in range(count))), len(assumed)
