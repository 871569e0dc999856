"""Time of collectives on the links between chips: bytes over the bandwidth that is reached, and messages.

A message goes from chip to chip along one axis after the other, the shorter way round where the axis is
closed to a ring. All groups of devices send at once; the link that carries the most bytes gives the time.
All-reduce, all-gather and reduce-scatter go round a ring of devices in both directions, half of the bytes
each way. Each round of a ring, and each other collective, takes `MESSAGE` besides. Collectives run one after
the other. An asynchronous collective overlaps with the instructions that the compiler scheduled between its
start and its end.
"""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.plan.chips import CORES_LINK, MESSAGE, REACHED, TPU
from benchmarks.plan.hlo import Instruction, times_run

Coordinates = tuple[int, ...]
"""Position of a device: its chip's coordinates, and last the core's number on the chip."""

SCATTERED = "all-reduce-scatter"
"""Prefix of a computation's name: it is an all-reduce and a slice of its result, a TPU's reduce-scatter."""


@dataclass(frozen=True)
class Links:
    """The links between the devices of a mesh.

    Attributes:
        places: position of each device, in the mesh's order: collectives name devices by this index.
        chip: the chip that all of them are.
    """

    places: tuple[Coordinates, ...]
    chip: TPU

    def seconds(self, found: Sequence[Instruction], busy: Callable[[Instruction], float]) -> dict[str, float]:
        """Return the seconds that a program waits for its collectives, by kind.

        Each computation is followed on its own: the chip runs its instructions in order, and the links send
        its collectives in order. `found` are the instructions in the order of their schedule. `busy` returns
        the seconds of one that is no collective.
        """
        runs = times_run(found)  # how often each computation runs
        waits: dict[str, float] = {}  # the result
        # The text has a computation's instructions one after another, so `groupby` gets them all at once.
        for computation, members in itertools.groupby(found, lambda instruction: instruction.computation):
            clock = free = 0.0  # the chip's time, and the time at which the links are free again
            sent: dict[str, tuple[str, float]] = {}  # by a collective's name: its kind, the time of its end
            for instruction in members:
                if instruction.collective:
                    kind, seconds = self._kind_and_seconds(instruction)
                    free = max(clock, free) + seconds
                    sent[instruction.name] = kind, free
                    if instruction.op.endswith("-start"):
                        continue  # the chip waits only at the end of the asynchronous pair
                # The collective that the chip waits for: this one, or the one whose asynchronous pair ends.
                awaited = instruction.name if instruction.collective else instruction.started
                if awaited not in sent:  # none: an instruction that computes
                    clock += busy(instruction)
                    continue
                kind, end = sent.pop(awaited)
                waits[kind] = waits.get(kind, 0.0) + runs[computation] * max(0.0, end - clock)
                clock = max(clock, end)
        return waits

    def _kind_and_seconds(self, instruction: Instruction) -> tuple[str, float]:
        """Return a collective's kind, such as "all-reduce", and the seconds of its messages.

        An all-reduce in a computation whose name begins with `SCATTERED` counts as a reduce-scatter: each
        device keeps only a part of the result.
        """
        kind, size = str(instruction.collective), instruction.bytes
        # Groups of device numbers; an instruction without groups has one of all devices.
        groups = instruction.groups or (tuple(range(len(self.places))),)
        if kind == "all-reduce" and instruction.computation.startswith(SCATTERED):
            kind, size = "reduce-scatter", size / len(groups[0])  # a device's part; groups are of one size
        return kind, self.collective_seconds(kind, size, groups)

    def collective_seconds(self, kind: str, size: float, groups: Sequence[Sequence[int]]) -> float:
        """Return the seconds of one collective.

        Args:
            kind: "all-reduce", "all-gather", "reduce-scatter", "all-to-all" or "collective-permute".
            size: bytes of its result on one device.
            groups: groups of devices that exchange, by their index in the mesh; all of one size. Those of a
                collective-permute are pairs (sender, receiver).
        """
        if kind == "collective-permute":
            return MESSAGE + size * self._seconds_per_byte(groups)
        count = len(groups[0])  # number of devices in each group
        if kind == "all-to-all":  # each device sends a part of its array to each other device
            messages = [pair for group in groups for pair in itertools.permutations(group, 2)]
            return MESSAGE + size / count * self._seconds_per_byte(messages)
        # The whole array goes round a ring of a group's devices in `count` parts. In each round every device
        # passes one part on, half of the part to each neighbour. An all-reduce is a reduce-scatter and then
        # an all-gather: twice the rounds.
        whole = size * count if kind == "reduce-scatter" else size
        rounds = (2 if kind == "all-reduce" else 1) * (count - 1)
        neighbours = [
            pair for ring in map(self._ring, groups) for pair in itertools.pairwise([*ring, ring[0]])
        ]
        # (sender, receiver) of all messages of a round, in both directions; each is half of a part.
        messages = neighbours + [(after, before) for before, after in neighbours]
        return rounds * (MESSAGE + whole / count / 2 * self._seconds_per_byte(messages))

    def _ring(self, group: Sequence[int]) -> list[int]:
        """Order a group of devices so that consecutive ones are neighbours, if possible last and first too.

        In a grid the order is down the first column, then from the last row to the first through the other
        columns, to and fro; with an even number of rows it ends beside its start. A group that is no grid
        keeps its order.
        """
        places = [self.places[device] for device in group]
        # Along each axis, the number of different coordinates that the devices have.
        lengths = [len(set(coordinates)) for coordinates in zip(*places, strict=True)]
        if math.prod(lengths) != len(group):  # no grid
            return list(group)
        grid = np.array(sorted(group, key=lambda device: self.places[device])).reshape(lengths)
        # The axis of the rows is first: one of even length, if there is one. Axes of one device come last.
        axes = sorted(range(grid.ndim), key=lambda axis: (lengths[axis] == 1, lengths[axis] % 2))
        # All other axes become the columns, as `_snake` lists them, from neighbour to neighbour.
        matrix = np.array([_snake(row) for row in grid.transpose(axes)])
        return [*matrix[:, 0].tolist(), *_snake(matrix[::-1, 1:])]

    def _seconds_per_byte(self, pairs: Iterable[Sequence[int]]) -> float:
        """Return the seconds of the busiest link if each pair (sender, receiver) sends one byte."""
        carried = Counter[Any]()  # by link, (axis, source chip, direction): the bytes that it carries
        for sender, receiver in pairs:
            carried.update(self._route(self.places[sender], self.places[receiver]))
        return max(
            (
                # No axis: the interface between a chip's two cores, `CORES_LINK` times as fast as a link.
                count / (REACHED * self.chip.link * (CORES_LINK if axis is None else 1))
                for (axis, _chip, _direction), count in carried.items()
            ),
            default=0.0,
        )

    def _route(self, sender: Coordinates, receiver: Coordinates) -> Iterable[tuple[Any, ...]]:
        """Yield the links that a message goes over, each as (axis, source chip, direction: 1 or -1).

        The message moves along one axis of the grid of chips after the other; a closed axis is a ring. The
        interface between a chip's two cores is a link too: its axis is None, its direction the core that it
        leads to.
        """
        *here, core = sender  # the chip's coordinates, then the number of its core
        *there, target_core = receiver
        if core != target_core:
            yield None, tuple(here), target_core
        for axis, (length, closed) in enumerate(self._axes):
            distance = there[axis] - here[axis]
            if closed and abs(distance) * 2 > length:  # the other way round the ring is shorter
                distance -= length if distance > 0 else -length
            step = 1 if distance > 0 else -1
            for _ in range(abs(distance)):
                yield axis, tuple(here), step
                here[axis] = (here[axis] + step) % length

    @functools.cached_property
    def _axes(self) -> list[tuple[int, bool]]:
        """(length, whether its last chip is linked to its first) of each axis of the chips' grid.

        `TPU.wraps` tells which axes have that link. If it is 16, each axis of 16 chips has one. For another
        number all axes have one if it divides every axis's length, else none.
        """
        # A place is a chip's coordinates, then a core. By axis: all chips' coordinates.
        *axes, _cores = zip(*self.places, strict=True)
        lengths = [max(coordinates) + 1 for coordinates in axes]
        if self.chip.wraps == 16:
            return [(length, length == 16) for length in lengths]
        all_closed = all(length % self.chip.wraps == 0 for length in lengths)
        return [(length, all_closed) for length in lengths]


def _snake(grid: Any) -> list[int]:
    """Return the numbers of an array, ordered so that consecutive ones are neighbours in it.

    Every second row is read backwards, at every depth of the array, so that no two rows are joined by a jump.
    """
    if grid.ndim == 0:
        return [int(grid)]
    return [number for index, row in enumerate(grid) for number in _snake(row)[:: -1 if index % 2 else 1]]
