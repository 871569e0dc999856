"""Memory: free bytes of a device, peak bytes of this process, and errors of exhausted memory."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from jax.sharding import Mesh

MEMINFO = Path("/proc/meminfo")

EXHAUSTED = (
    "resource_exhausted",
    "out of memory",
    "not enough memory",
    "can't allocate memory",
    "memoryerror",
)
"""Words in the messages of XLA, CUDA, PyTorch and Python for exhausted memory, in lower case."""


def out_of_memory(error: BaseException) -> bool:
    """Return whether an error reports exhausted memory, of the device or of the host."""
    text = f"{type(error).__name__}: {error}".lower()
    return any(words in text for words in EXHAUSTED)


def of_several_processes(mesh: "Mesh | None") -> bool:
    """Return whether a mesh has devices of more than one process."""
    return mesh is not None and len({device.process_index for device in mesh.devices.flat}) > 1


def free_memory(mesh: "Mesh | None" = None) -> int:
    """Return the free bytes of one device: of this process's first device, for a mesh too.

    One device stands for all. CPU devices share the host's free memory equally. For a mesh of several
    processes the result is the least that a process finds, and every process must call this.
    """
    local_bytes = _free_memory(1 if mesh is None else mesh.local_mesh.size)
    if not of_several_processes(mesh):
        return local_bytes
    from jax.experimental import multihost_utils

    # In MiB, which fit into 32 bits: JAX has no 64-bit integers by default.
    mebibytes = multihost_utils.process_allgather(np.asarray(local_bytes // 2**20, np.int32))
    return int(np.min(mebibytes)) * 2**20


def _free_memory(devices: int) -> int:
    """Return the free bytes of this process's first device.

    For a CPU device this is the host's free memory over `devices`, the number of CPU devices that share it.
    """
    import jax

    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:  # an accelerator; JAX has no statistics of a CPU
        return int(stats["bytes_limit"] - stats.get("bytes_in_use", 0))
    if not MEMINFO.is_file():  # off Linux: all memory of the machine
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // devices
    lines = MEMINFO.read_text().splitlines()  # such as "MemAvailable:   12345678 kB"
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")) // devices
