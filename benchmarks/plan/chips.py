"""The published figures of chips, and devices that compilers simulate: TPUs by libtpu, GPUs by XLA itself."""

import atexit
import contextlib
import functools
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cogvideox_torchax.versions import installed


class PlanError(ValueError):
    """A plan that cannot be made; the message says what to change."""


@dataclass(frozen=True)
class Chip:
    """Published peaks of one device.

    The sources of TPUs are the generations' pages at cloud.google.com/tpu/docs (v5e, v5p, v6e, tpu7x). A
    device is a chip, except on tpu7x: there it is one of a chip's two cores, with half of the chip's
    arithmetic and memory.

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


@dataclass(frozen=True)
class TPU(Chip):
    """The peaks of one device of a TPU, and what estimates of times need.

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


GIB = 2**30

CHIPS = {
    "v5e": TPU(197e12, 0.82e12, 16 * GIB, 15e9, clock=1.5e9, link=50e9),
    "v5p": TPU(459e12, 2.77e12, 95 * GIB, 15e9, clock=1.75e9, link=100e9, wraps=4),
    "v6e": TPU(918e12, 1.64e12, 31.25 * GIB, 32e9, clock=1.75e9, link=100e9),
    "tpu7x": TPU(1153.5e12, 3.69e12, 96 * GIB, 16e9, clock=2.2e9, link=100e9, wraps=4, delay_slots=6),
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
CUDNN = 91_000
"""The version of cuDNN in `_TARGET`, as a number."""

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

GRIDS = {2: "1x2", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8"}
"""The flat grids of slices of v5e and v6e, by their chips, that are tried for what does not fit."""

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


def chip_of(topology: str) -> Chip:
    """Return the chip of a topology, "GENERATION:GRID" or one of `GPUS`."""
    return (CHIPS | GPUS)[topology.partition(":")[0]]


def check_compiler(topology: str) -> None:
    """Raise `PlanError` if the packages with the compiler for a topology are not installed."""
    on_gpu = topology in GPUS
    packages = ("jax-cuda13-plugin", "jax-cuda13-pjrt") if on_gpu else ("libtpu",)
    if missing := [package for package in packages if not installed(package)]:
        pinned = " ".join(f"{package}=={installed('jaxlib')}" for package in packages)
        command = f"--no-deps {pinned}" if on_gpu else "'cogvideox-torchax[tpu]'"
        raise PlanError(
            f"planning for a {'GPU' if on_gpu else 'TPU'} needs its compiler, which is in "
            f"{' and '.join(missing)}: pip install {command}"
        )


def topology_devices(name: str, *, schedules: bool = False) -> list[Any]:
    """Return the devices of a TPU topology such as "v6e:2x4", which libtpu simulates, or one of `GPUS`.

    For a TPU this sets the variables of `HOST_FACTS` in `os.environ`; for a GPU, JAX uses the CPU from here
    on. With `schedules`, libtpu dumps the schedules of kernels from here on, if this loads it. `PlanError` if
    the compiler is not installed, or does not know the topology.
    """
    import jax.experimental.topologies

    generation, _, grid = name.partition(":")
    if name not in GPUS and (generation not in CHIPS or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)+", grid)):
        raise PlanError(
            f"got {name!r}: a topology is one of {', '.join(CHIPS)}, a colon and a grid, such as v6e:2x4, "
            f"or a GPU: {', '.join(GPUS)}"
        )
    check_compiler(name)
    if name in GPUS:
        from jax._src.cudnn import fused_attention_stablehlo

        jax.config.update("jax_platforms", "cpu")  # else JAX's plugin for GPUs looks for one, and for cuDNN
        fused_attention_stablehlo.check_cudnn_version = lambda: CUDNN
        target = _TARGET.format(*_GPU_FACTS[name], name=name, **vars(GPUS[name]))
        platform, options = "cuda", {"topology": "1x1x1", "target_config": target}
    else:
        for variable, value in HOST_FACTS.items():
            os.environ.setdefault(variable, value)
        # libtpu's hosts have grids of several chips along both axes. Into a grid with an axis of 1 only hosts
        # of one chip fit.
        platform = "tpu"
        options = {"chips_per_host_bounds": [1, 1, 1]} if "1" in grid.split("x") else {}
    try:
        with _dumping_schedules() if schedules else contextlib.nullcontext():
            return list(
                jax.experimental.topologies.get_topology_desc(
                    platform=platform, topology_name=name, **options
                ).devices
            )
    except Exception as error:
        reason = " ".join(str(error).split())[:300]  # libtpu's messages have many lines: one is enough
        compiler = "jax-cuda13-plugin with jax-cuda13-pjrt" if name in GPUS else "libtpu"
        raise PlanError(f"the installed {compiler} does not take topology {name!r}: {reason}") from error


def topology_of(kind: str, coordinates: list[list[int]]) -> str:
    """Return the topology of real devices: the smallest grid around their chips, such as "v6e:2x4".

    `kind` is the devices' `device_kind` in JAX; `PlanError` if it is not in `DEVICE_KINDS`. `coordinates`
    has, for each device that is used, the coordinates (x, y, z) of its chip.
    """
    if kind not in DEVICE_KINDS:
        raise PlanError(f"got a device of kind {kind}: there are estimates for {', '.join(DEVICE_KINDS)}")
    generation = DEVICE_KINDS[kind]
    # JAX gives all chips three coordinates; v5e and v6e have two-dimensional grids.
    dimensions = 2 if generation in ("v5e", "v6e") else 3
    axes = list(zip(*coordinates, strict=True))[:dimensions]  # for each axis, all chips' coordinates on it
    return f"{generation}:{'x'.join(str(max(axis) - min(axis) + 1) for axis in axes)}"


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
