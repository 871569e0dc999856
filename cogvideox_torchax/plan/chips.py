"""The published peaks of chips, and devices that compilers simulate: TPUs by libtpu, GPUs by XLA itself."""

import importlib.util
import os
import re
from dataclasses import dataclass
from typing import Any

from cogvideox_torchax import upstream


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
        host_link: bytes a second between the device and its host, one way. The generations' pages do not tell
            it: v5e, v5p and v6e are by "How To Scale Your Model" (jax-ml.github.io/scaling-book). For tpu7x
            nothing is published, and v6e's is assumed, which both cores share. GPUs' are half of what their
            data sheets have for both ways.
    """

    flops: float
    bandwidth: float
    memory: float
    host_link: float


GIB = 2**30

CHIPS = {
    "v5e": Chip(197e12, 0.82e12, 16 * GIB, 15e9),
    "v5p": Chip(459e12, 2.77e12, 95 * GIB, 15e9),
    "v6e": Chip(918e12, 1.64e12, 31.25 * GIB, 32e9),
    "tpu7x": Chip(1153.5e12, 3.69e12, 96 * GIB, 16e9),
}

GPUS = {
    "h100": Chip(989e12, 3.35e12, 80e9, 64e9),
    "h200": Chip(989e12, 4.8e12, 141e9, 64e9),
    "a100": Chip(312e12, 2.04e12, 80e9, 32e9),
    "l4": Chip(121e12, 0.3e12, 24e9, 32e9),
}
"""NVIDIA's GPUs by their data sheets: H100 SXM, H200 SXM, A100 80GB SXM and L4."""
_GPU_FACTS = {
    "h100": (9, 0, 2048, 233_472, 132, 128, 52_428_800, 1.98, 232_448),
    "h200": (9, 0, 2048, 233_472, 132, 128, 52_428_800, 1.98, 232_448),
    "a100": (8, 0, 2048, 167_936, 108, 64, 41_943_040, 1.41, 166_912),
    "l4": (8, 9, 1536, 102_400, 58, 128, 50_331_648, 2.04, 101_376),
}
"""Of a GPU, by NVIDIA's data sheets and its CUDA programming guide's table of compute capabilities.

These are the compute capability, major and minor; of each streaming multiprocessor the most threads, and
bytes of shared memory; the number of these, and of the float32 units of each; bytes of L2; the boost
clock in GHz; and the most shared memory of a block.
"""
_TARGET = """
gpu_device_info {{
  cuda_compute_capability {{ major: {0} minor: {1} }}
  threads_per_core_limit: {2} threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_core: {3} shared_memory_per_block: 49152 shared_memory_per_block_optin: {8}
  core_count: {4} fpus_per_core: {5} l2_cache_size: {6} clock_rate_ghz: {7}
  memory_bandwidth: {bandwidth:.0f} device_memory_size: {memory:.0f}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
runtime_version {{ major: 13 }}
device_description_str: "{name}, compute capability {0}.{1}"
"""
"""The text from which XLA knows a GPU; the choice of attention reads the capability off its last line."""

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

LARGEST = 32
"""The most chips of the slices of v5e and v6e that `plan` tries for a pipeline."""


def check_compiler() -> None:
    """Raise `PlanError` if libtpu, which has the TPU's compiler, is not installed."""
    if importlib.util.find_spec("libtpu") is None:
        raise PlanError("planning for a TPU needs its compiler: pip install 'cogvideox-torchax[tpu]'")


def topology_devices(name: str) -> list[Any]:
    """Return the devices of a TPU topology such as "v6e:2x4", which libtpu simulates, or one of `GPUS`.

    For a TPU this sets the variables of `HOST_FACTS` in `os.environ`; for a GPU, JAX uses the CPU from here
    on. `PlanError` if the compiler is not installed, or does not know the topology.
    """
    import jax.experimental.topologies

    generation, _, grid = name.partition(":")
    if name in GPUS:
        jax.config.update("jax_platforms", "cpu")  # else JAX's plugin for GPUs looks for one, and for cuDNN
        upstream.assume_cudnn(91_000)  # the version of `_TARGET`
        target = _TARGET.format(*_GPU_FACTS[name], name=name, **vars(GPUS[name]))
        platform, options = "cuda", {"topology": "1x1x1", "target_config": target}
    elif generation not in CHIPS or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)+", grid):
        raise PlanError(
            f"got {name!r}: a topology is one of {', '.join(CHIPS)}, a colon and a grid, such as v6e:2x4, "
            f"or a GPU: {', '.join(GPUS)}"
        )
    else:
        check_compiler()
        for variable, value in HOST_FACTS.items():
            os.environ.setdefault(variable, value)
        # libtpu's hosts have grids of several chips along both axes. Into a grid with an axis of 1 only hosts
        # of one chip fit.
        platform = "tpu"
        options = {"chips_per_host_bounds": [1, 1, 1]} if "1" in grid.split("x") else {}
    try:
        return list(
            jax.experimental.topologies.get_topology_desc(
                platform=platform, topology_name=name, **options
            ).devices
        )
    except Exception as error:
        reason = " ".join(str(error).split())[:300]  # libtpu's messages have many lines: one is enough
        compiler = "jax-cuda13-plugin with jax-cuda13-pjrt" if name in GPUS else "libtpu"
        raise PlanError(f"the installed {compiler} does not take topology {name!r}: {reason}") from error
