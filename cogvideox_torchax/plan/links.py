"""Time of collectives on the links between chips: bytes over bandwidth, nothing else.

Messages go from chip to chip along one axis after the other, the shorter way round where an axis is closed;
all groups send at once; the link that carries most decides. Sums and gathers go round a ring in both
directions, half of the bytes each way. Collectives run one after the other, and no latency is counted. An
asynchronous one overlaps with the instructions that the compiler scheduled between its start and its end.
"""

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from cogvideox_torchax.plan.chips import CORES_LINK, Chip
from cogvideox_torchax.plan.hlo import Instruction, times_run

Coordinates = tuple[int, ...]
"""Position of a device: its chip's coordinates and its core's number."""

SCATTERED = "all-reduce-scatter"
"""Computations so called sum and keep a part of the sum: TPUs' form of a reduce-scatter."""


@dataclass(frozen=True)
class Links:
    """The links between the devices of a mesh.

    Attributes:
        places: of the devices, in the mesh's order.
        chip: of all of them.
    """

    places: tuple[Coordinates, ...]
    chip: Chip

    @classmethod
    def from_devices(cls, devices: Iterable[Any], chip: Chip) -> "Links | None":
        """Return the links of JAX's devices; None without coordinates, or if the chip's links are unknown."""
        devices = list(devices)
        if chip.link is None or not all(hasattr(device, "coords") for device in devices):
            return None
        return cls(tuple((*device.coords, device.core_on_chip) for device in devices), chip)

    def seconds(self, found: Sequence[Instruction], busy: Callable[[Instruction], float]) -> dict[str, float]:
        """Return the time that a program waits for its collectives, by kind.

        Args:
            found: instructions in the order of their schedule.
            busy: returns the seconds of an instruction that is no collective.
        """
        times, total = times_run(found), dict[str, float]()
        for computation, own in itertools.groupby(found, lambda instruction: instruction.computation):
            clock = free = 0.0  # of the chip; when the links have sent everything so far
            sent: dict[str, tuple[str, float]] = {}
            for instruction in own:
                if instruction.collective:
                    kind, seconds = self._one(instruction)
                    free = max(clock, free) + seconds
                    sent[instruction.name] = kind, free
                if instruction.collective and not instruction.op.endswith("-start"):
                    kind, end = sent.pop(instruction.name)
                elif instruction.started in sent:
                    kind, end = sent.pop(instruction.started)
                else:
                    clock += 0.0 if instruction.collective else busy(instruction)
                    continue
                total[kind] = total.get(kind, 0.0) + times[computation] * max(0.0, end - clock)
                clock = max(clock, end)
        return total

    def _one(self, instruction: Instruction) -> tuple[str, float]:
        """Return a collective's kind and its seconds; a sum of which parts are kept is a reduce-scatter."""
        kind, size = str(instruction.collective), instruction.bytes
        groups = instruction.groups or (tuple(range(len(self.places))),)
        if kind == "collective-permute":
            return kind, size * self._slowest(groups)
        if kind == "all-reduce" and instruction.computation.startswith(SCATTERED):
            kind, size = "reduce-scatter", size / len(groups[0])
        return kind, self.collective_seconds(kind, size, groups)

    def collective_seconds(self, kind: str, size: float, groups: Sequence[Sequence[int]]) -> float:
        """Return the time of one collective.

        Args:
            kind: "all-reduce", "all-gather", "reduce-scatter" or "all-to-all".
            size: bytes of its result on one device.
            groups: groups of devices that exchange, by their place in the mesh; all of one size.
        """
        count = len(groups[0])
        if kind == "all-to-all":
            pairs = [pair for group in groups for pair in itertools.permutations(group, 2)]
            return size / count * self._slowest(pairs)
        whole = size * count if kind == "reduce-scatter" else size
        rounds = (2 if kind == "all-reduce" else 1) * (count - 1)
        steps = [
            pair
            for group in groups
            for one, other in itertools.pairwise([*self._ring(group), self._ring(group)[0]])
            for pair in ((one, other), (other, one))
        ]
        return rounds * whole / count / 2 * self._slowest(steps)

    def _ring(self, group: Sequence[int]) -> list[int]:
        """Order a group so that neighbours lie side by side; if possible, last and first too.

        A grid with an even number of rows runs along the first column, and back through the rest of each row.
        """
        axes = [sorted(set(values)) for values in zip(*(self.places[one] for one in group), strict=True)]
        at = {self.places[one]: one for one in group}
        if len(at) != len(list(itertools.product(*axes))):
            return list(group)
        ranked = sorted(
            (axis for axis in range(len(axes)) if len(axes[axis]) > 1), key=lambda a: len(axes[a]) % 2
        )
        if len(ranked) < 2:
            return sorted(group, key=lambda one: self.places[one])
        first, *rest = ranked
        columns = _snake([len(axes[axis]) for axis in rest])

        def device(row: int, column: tuple[int, ...]) -> int:
            place = [values[0] for values in axes]
            place[first] = axes[first][row]
            for axis, index in zip(rest, column, strict=True):
                place[axis] = axes[axis][index]
            return at[tuple(place)]

        rows = range(len(axes[first]))
        back = [
            device(row, column)
            for turn, row in enumerate(reversed(rows))
            for column in (columns[1:] if turn % 2 == 0 else columns[:0:-1])
        ]
        return [device(row, columns[0]) for row in rows] + back

    def _slowest(self, pairs: Iterable[Sequence[int]]) -> float:
        """Return the seconds that the busiest link takes where each pair of devices sends one byte."""
        carried = Counter[Any]()
        for one, other in pairs:
            carried.update(self._route(self.places[one], self.places[other]))
        link = self.chip.link or float("inf")
        return max(
            (count / (link * (CORES_LINK if axis is None else 1)) for (axis, *_), count in carried.items()),
            default=0.0,
        )

    def _route(self, one: Coordinates, other: Coordinates) -> Iterable[tuple[Any, ...]]:
        """Return the links of a message: each its axis (None between cores), source chip and direction."""
        *here, core = one
        *there, target = other
        if core != target:
            yield None, tuple(here), target
        for axis, (length, closed) in enumerate(self._axes):
            distance = there[axis] - here[axis]
            if closed and abs(distance) * 2 > length:
                distance -= length if distance > 0 else -length
            step = 1 if distance > 0 else -1
            for _ in range(abs(distance)):
                yield axis, tuple(here), step
                here[axis] = (here[axis] + step) % length

    @functools.cached_property
    def _axes(self) -> list[tuple[int, bool]]:
        """The length of each axis of the slice, and whether it is closed to a ring."""
        lengths = [max(values) + 1 for values in zip(*(place[:-1] for place in self.places), strict=True)]
        wraps = self.chip.wraps
        flat = wraps == 16
        all_closed = not flat and all(length % wraps == 0 for length in lengths)
        return [(length, length == wraps if flat else all_closed) for length in lengths]


def _snake(lengths: Sequence[int]) -> list[tuple[int, ...]]:
    """Return all places of a grid in an order in which each lies beside the one before."""
    if not lengths:
        return [()]
    inner = _snake(lengths[1:])
    return [
        (index, *place)
        for index in range(lengths[0])
        for place in (inner if index % 2 == 0 else reversed(inner))
    ]
