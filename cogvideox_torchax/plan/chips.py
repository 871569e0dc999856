"""The published peaks of chips, and topologies of chips that libtpu simulates on a machine without TPUs."""

import importlib.util
import os
import re
from dataclasses import dataclass
from typing import Any


class PlanError(ValueError):
    """A plan that cannot be made; the message says what to change."""


@dataclass(frozen=True)
class Chip:
    """Published peaks of one device of a TPU.

    The sources are the generations' pages at cloud.google.com/tpu/docs (v5e, v5p, v6e, tpu7x). A device is a
    chip, except on tpu7x: there it is one of a chip's two cores, with half of the chip's arithmetic and
    memory.

    Attributes:
        flops: bfloat16 multiply-adds a second, times two.
        bandwidth: bytes a second between the device and its memory.
        memory: bytes that a program may use; on v6e without the part that the runtime keeps for itself.
    """

    flops: float
    bandwidth: float
    memory: float


GIB = 2**30

CHIPS = {
    "v5e": Chip(197e12, 0.82e12, 16 * GIB),
    "v5p": Chip(459e12, 2.77e12, 95 * GIB),
    "v6e": Chip(918e12, 1.64e12, 31.25 * GIB),
    "tpu7x": Chip(1153.5e12, 3.69e12, 96 * GIB),
}

HOST_FACTS = {
    # Without these libtpu asks a metadata server, which only Google's machines have.
    "TPU_ACCELERATOR_TYPE": "v6e-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_SKIP_MDS_QUERY": "1",
    # libtpu lets one process of a machine load it, because one process must own the chips. Planning opens no
    # chip, so several processes may plan.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
"""Variables of the environment that libtpu reads on a machine without TPUs; a user's own values are kept."""

GRIDS = {2: "1x2", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
"""The flat grids that a slice of v5e or v6e comes in, by its chips."""

CHIPS_OF_A_HOST = 8
"""The most chips of v5e or v6e that one host has. A pipeline runs on one host."""


def check_compiler() -> None:
    """Raise `PlanError` if libtpu, which has the TPU's compiler, is not installed."""
    if importlib.util.find_spec("libtpu") is None:
        raise PlanError("planning for a TPU needs its compiler: pip install 'cogvideox-torchax[tpu]'")


def topology_devices(name: str) -> list[Any]:
    """Return the devices of a TPU topology such as "v6e:2x4"; libtpu simulates them.

    This sets the variables of `HOST_FACTS` in `os.environ`. `PlanError` if libtpu is not installed, or does
    not know the topology.
    """
    from jax.experimental import topologies

    generation, _, grid = name.partition(":")
    if generation not in CHIPS or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)+", grid):
        raise PlanError(
            f"got topology {name!r}: it takes one of {', '.join(CHIPS)}, a colon and a grid, such as v6e:2x4"
        )
    check_compiler()
    for variable, value in HOST_FACTS.items():
        os.environ.setdefault(variable, value)
    # libtpu's hosts have grids of several chips along both axes. Into a grid with an axis of 1 only hosts of
    # one chip fit.
    bounds = {"chips_per_host_bounds": [1, 1, 1]} if "1" in grid.split("x") else {}
    try:
        return list(topologies.get_topology_desc(platform="tpu", topology_name=name, **bounds).devices)
    except Exception as error:
        reason = " ".join(str(error).split())[:300]  # libtpu's messages have many lines: one is enough
        raise PlanError(f"the installed libtpu does not take topology {name!r}: {reason}") from error
