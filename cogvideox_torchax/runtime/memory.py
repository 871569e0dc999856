"""Memory: errors of exhausted memory; and the question whether a mesh has devices of several processes."""

from jax.sharding import Mesh

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


def of_several_processes(mesh: Mesh | None) -> bool:
    """Return whether a mesh has devices of more than one process."""
    return mesh is not None and len({device.process_index for device in mesh.devices.flat}) > 1
