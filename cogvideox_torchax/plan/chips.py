"""Chips: their published peaks, and the topologies that libtpu makes of them on a machine without any."""

import atexit
import contextlib
import functools
import importlib.util
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class PlanError(ValueError):
    """A plan that cannot be made; the message says what to change."""


@dataclass(frozen=True)
class Chip:
    """Published peaks of one device of a TPU, and the units of the compiler's figures.

    The sources are the generations' pages at cloud.google.com/tpu/docs (v5e, v5p, v6e, tpu7x). They publish
    the bandwidth of all of a chip's links in both directions: 400 GB/s for 4 links on v5e, 800 for 4 on v6e,
    1200 for 6 on v5p and tpu7x. A link's bandwidth one way is that over twice the number of links.

    A device is a chip, except on tpu7x, where it is one of a chip's two cores: a core has half of the chip's
    arithmetic and memory, and both cores share its links. tpu7x's clock is not published: 2.2 GHz is its peak
    over v6e's multiply-adds a cycle, with which the compiler's cycles of a large product come to 80 % of the
    peak (70 % on v6e).

    Attributes:
        flops: bfloat16 multiply-adds a second, times two.
        bandwidth: bytes a second between the device and its memory.
        memory: bytes that a program may use; on v6e without the part that the runtime keeps for itself.
        clock: cycles a second.
        link: bytes a second of one link between two chips, one way; None where it is not known.
        wraps: rule for the axes of a slice whose last chip is linked to its first, so that they are closed to
            rings. 16, for chips in two-dimensional grids: each axis of 16 chips is closed. 4, for
            three-dimensional grids: all axes are closed if the length of each is a multiple of 4, else none.
        delay_slots: number of bundles after a branch that run whether it is taken or not (`plan.schedule`).
    """

    flops: float
    bandwidth: float
    memory: float
    clock: float
    link: float | None = None
    wraps: int = 16
    delay_slots: int = 4


GIB = 2**30

CHIPS = {
    "v5e": Chip(197e12, 0.82e12, 16 * GIB, 1.5e9, link=50e9),
    "v5p": Chip(459e12, 2.77e12, 95 * GIB, 1.75e9, link=100e9, wraps=4),
    "v6e": Chip(918e12, 1.64e12, 31.25 * GIB, 1.75e9, link=100e9),
    "tpu7x": Chip(1153.5e12, 3.69e12, 96 * GIB, 2.2e9, link=100e9, wraps=4, delay_slots=6),
}

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

HOST_FACTS = {
    # Facts of the host: without them libtpu asks a metadata server, which only Google's machines have.
    "TPU_ACCELERATOR_TYPE": "v6e-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_SKIP_MDS_QUERY": "1",
    # libtpu locks itself to one process of a machine, as one process must own the chips: planning opens none.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
"""Variables of the environment that libtpu reads on a machine without TPUs; a user's own values are kept."""

DUMP = "--xla_jf_dump_to="
"""Flag of libtpu, followed by the directory of its dumps."""
SCHEDULES = "--xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=final_bundles|deduplication-map"
"""Flags of libtpu: its dumps are final schedules, and which instructions share one."""

GRIDS = {2: "1x2", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
"""The flat grids that a slice of v5e or v6e comes in, by its chips."""


def topology_of(kind: str, coordinates: list[list[int]]) -> str:
    """Return the topology of real devices: the smallest grid around their chips, such as "v6e:2x4".

    Args:
        kind: the devices' `device_kind` in JAX.
        coordinates: for each device that is used, the coordinates (x, y, z) of its chip.

    Raises:
        PlanError: a kind that is not in `DEVICE_KINDS`.
    """
    if kind not in DEVICE_KINDS:
        raise PlanError(f"plan knows {', '.join(DEVICE_KINDS)}, not {kind}")
    generation = DEVICE_KINDS[kind]
    # JAX gives all chips three coordinates; v5e and v6e have two-dimensional grids.
    dimensions = 2 if generation in ("v5e", "v6e") else 3
    axes = list(zip(*coordinates, strict=True))[:dimensions]  # for each axis, all chips' coordinates on it
    return f"{generation}:{'x'.join(str(max(axis) - min(axis) + 1) for axis in axes)}"


def check_compiler() -> None:
    """Raise `PlanError` where there is no libtpu."""
    if importlib.util.find_spec("libtpu") is None:
        raise PlanError("planning for a TPU needs its compiler: pip install 'cogvideox-torchax[tpu]'")


def topology_devices(name: str) -> list[Any]:
    """Return the devices of a TPU topology such as "v6e:2x4"; libtpu simulates them.

    Variables that libtpu needs on a machine without TPUs are set in `os.environ`; a user's values are kept.

    Raises:
        PlanError: no libtpu, or a topology that the installed one does not know.
    """
    from jax.experimental import topologies

    generation, _, grid = name.partition(":")
    if generation not in CHIPS or not re.fullmatch(r"\d+(x\d+)+", grid):
        raise PlanError(
            f"got topology {name!r}: it takes one of {', '.join(CHIPS)}, a colon and a grid, such as v6e:2x4"
        )
    check_compiler()
    for variable, value in HOST_FACTS.items():
        os.environ.setdefault(variable, value)
    # A grid with an axis of 1 is narrower than a host's own grid of chips: it is made of hosts of one chip.
    bounds = {"chips_per_host_bounds": [1, 1, 1]} if "1" in grid.split("x") else {}
    try:
        with _dumping_schedules():  # the first call loads libtpu, which reads its flags then
            return list(topologies.get_topology_desc(platform="tpu", topology_name=name, **bounds).devices)
    except Exception as error:
        reason = " ".join(str(error).split())[:300]  # libtpu's messages have many lines: one is enough
        raise PlanError(f"the installed libtpu does not take topology {name!r}: {reason}") from error


@contextlib.contextmanager
def _dumping_schedules() -> Iterator[None]:
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
