"""Memory of the device that computes: how much there is, and whether an error says that it ran out."""

from pathlib import Path

EXHAUSTED = ("RESOURCE_EXHAUSTED", "out of memory", "not enough memory", "Ran out of memory")
"""What XLA, CUDA and PyTorch write when there is no more."""


def out_of_memory(error: BaseException) -> bool:
    """Whether memory, of the device or of the host, is what an error is about."""
    return isinstance(error, MemoryError) or any(words in str(error) for words in EXHAUSTED)


def free_memory() -> int:
    """Bytes that a program may still take: of JAX's first device here, of the host where that is a CPU."""
    import jax

    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"] - stats.get("bytes_in_use", 0))
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
