"""Memory: how much the device that computes has, what this process took, whether an error says it ran out."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from jax.sharding import Mesh

EXHAUSTED = ("RESOURCE_EXHAUSTED", "out of memory", "not enough memory", "Ran out of memory")
"""What XLA, CUDA and PyTorch write when there is no more."""


def out_of_memory(error: BaseException) -> bool:
    """Whether memory, of the device or of the host, is what an error is about."""
    return isinstance(error, MemoryError) or any(words in str(error) for words in EXHAUSTED)


def of_several_processes(mesh: "Mesh | None") -> bool:
    """Whether a mesh has devices of more than one process."""
    return mesh is not None and len({device.process_index for device in mesh.devices.flat}) > 1


def free_memory(mesh: "Mesh | None" = None) -> int:
    """Bytes that a program may still take: of JAX's first device here, of the host where that is a CPU.

    Over a mesh of several processes it is the least of theirs; each of them has to ask.
    """
    own = _free_memory()
    if not of_several_processes(mesh):
        return own
    from jax.experimental import multihost_utils

    mebibytes = multihost_utils.process_allgather(np.asarray(own // 2**20, np.int32))
    return int(np.min(mebibytes)) * 2**20


def _free_memory() -> int:
    import jax

    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"] - stats.get("bytes_in_use", 0))
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def host_peak_bytes() -> int | None:
    """The most memory this process has held; None off Linux. (`getrusage` counts the parent's too.)"""
    status = Path("/proc/self/status")
    if not status.is_file():
        return None
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024
