"""Chips as the estimates know them: clocks and links, the generation of real devices, and libtpu's dumps."""

import atexit
import contextlib
import functools
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cogvideox_torchax.plan import chips


@dataclass(frozen=True)
class Chip(chips.Chip):
    """The peaks of one device of a TPU, and the units of the compiler's figures.

    The generations' pages publish the bandwidth of all of a chip's links in both directions: 400 GB/s for 4
    links on v5e, 800 for 4 on v6e, 1200 for 6 on v5p and tpu7x. A link's bandwidth one way is that over twice
    the number of links. Both cores of a tpu7x chip share its links. Its clock is not published: 2.2 GHz is
    its peak over v6e's multiply-adds a cycle, with which the compiler's cycles of a large product come to
    80 % of the peak (70 % on v6e).

    Attributes:
        clock: cycles a second.
        link: bytes a second of one link between two chips, one way.
        wraps: rule for the axes of a slice whose last chip is linked to its first, so that they are closed to
            rings. 16, for chips in two-dimensional grids: each axis of 16 chips is closed. 4, for
            three-dimensional grids: all axes are closed if the length of each is a multiple of 4, else none.
        delay_slots: number of bundles after a branch that run whether it is taken or not (`schedule`).
    """

    clock: float
    link: float
    wraps: int = 16
    delay_slots: int = 4


CHIPS = {
    "v5e": Chip(**vars(chips.CHIPS["v5e"]), clock=1.5e9, link=50e9),
    "v5p": Chip(**vars(chips.CHIPS["v5p"]), clock=1.75e9, link=100e9, wraps=4),
    "v6e": Chip(**vars(chips.CHIPS["v6e"]), clock=1.75e9, link=100e9),
    "tpu7x": Chip(**vars(chips.CHIPS["tpu7x"]), clock=2.2e9, link=100e9, wraps=4, delay_slots=6),
}

REACHED = 0.87
"""Part of a published bandwidth, of the memory or of a link, that published transfers of many MB reach.

A copy of 1 GiB on a tpu7x reaches 3.20 of 3.69 TB/s, and an exchange of 64 MiB on eight v6e 86.8 of 100 GB/s
(`calibration`).
"""
MESSAGE = 5e-6
"""Seconds that each message takes besides, whatever its size, by the published times of small exchanges."""

CORES_LINK = 6
"""Published speed of the interface between the two cores of a tpu7x chip, as a multiple of a link's."""

DEVICE_KINDS = {
    "TPU v5 lite": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU7x": "tpu7x",
}
"""The generation, a key of `CHIPS`, by a device's `device_kind` in JAX."""

FLAGS = "LIBTPU_INIT_ARGS"
"""Flags of libtpu, which it reads when it is loaded and not again."""
DUMP = "--xla_jf_dump_to="
"""Flag of libtpu, followed by the directory of its dumps."""
SCHEDULES = (
    "--xla_jf_dump_llo_text=true "
    "--xla_jf_dump_llo_pass_label_regex=critical-path$|final_bundles$|deduplication-map"
)
"""Flags of libtpu: its dumps are final schedules, their critical paths, and which instructions share one."""


def topology_of(kind: str, coordinates: list[list[int]]) -> str:
    """Return the topology of real devices: the smallest grid around their chips, such as "v6e:2x4".

    `kind` is the devices' `device_kind` in JAX; `PlanError` if it is not in `DEVICE_KINDS`. `coordinates`
    has, for each device that is used, the coordinates (x, y, z) of its chip.
    """
    if kind not in DEVICE_KINDS:
        raise chips.PlanError(
            f"got a device of kind {kind}: there are estimates for {', '.join(DEVICE_KINDS)}"
        )
    generation = DEVICE_KINDS[kind]
    # JAX gives all chips three coordinates; v5e and v6e have two-dimensional grids.
    dimensions = 2 if generation in ("v5e", "v6e") else 3
    axes = list(zip(*coordinates, strict=True))[:dimensions]  # for each axis, all chips' coordinates on it
    return f"{generation}:{'x'.join(str(max(axis) - min(axis) + 1) for axis in axes)}"


def topology_devices(name: str) -> list[Any]:
    """Return a TPU topology's devices, as `plan` does; libtpu then dumps the schedules of kernels."""
    with dumping_schedules():
        return chips.topology_devices(name)


@contextlib.contextmanager
def dumping_schedules() -> Iterator[None]:
    """Make libtpu, if it is first loaded in this `with` block, dump kernels' schedules to `dump_directory()`.

    The environment's flags are restored after the block: a child process gets none of them.
    """
    before = os.environ.get(FLAGS)
    # A user's own directory for dumps is kept; then no schedule is read.
    if DUMP not in (before or ""):
        os.environ[FLAGS] = f"{before or ''} {DUMP}{dump_directory()} {SCHEDULES}".strip()
    try:
        yield
    finally:
        os.environ.pop(FLAGS, None)
        if before is not None:
            os.environ[FLAGS] = before


@functools.cache
def dump_directory() -> Path:
    """Return the directory of libtpu's dumps: made by the first call, removed when the process ends."""
    path = tempfile.mkdtemp(prefix="cogvideox-torchax-schedules-")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return Path(path)
