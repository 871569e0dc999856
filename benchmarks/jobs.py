"""The jobs that are measured, the ways to run each, and sizes, of which the first that fits is taken."""

import statistics
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, NamedTuple


class Size(NamedTuple):
    """A model and a video in pixels.

    The model is "5b" or "2b" for published shapes with random weights, `TWO_LAYERS` for a part of 5b, "small"
    for the bundled VAE and small networks, or a VAE's directory or hub id.
    """

    model: str
    frames: int
    height: int
    width: int

    @property
    def video(self) -> str:
        return f"{self.frames} x {self.height} x {self.width}"

    @property
    def name(self) -> str:
        return f"{self.model}, {self.video}"


TWO_LAYERS = "5b of 2 layers"
"""The name of 5b's transformer with two of its layers."""


class Budget(NamedTuple):
    """Number of runs of a measurement.

    Attributes:
        warmups: runs that do not count.
        runs: largest number of measured runs.
        fewest: number of runs that are measured even beyond `seconds`.
        seconds: time after which no further run begins.
    """

    warmups: int = 2
    runs: int = 20
    fewest: int = 3
    seconds: float = 5.0


def spread(times: list[float]) -> dict[str, Any]:
    """Return times in seconds, their median and extremes, and how many there are."""
    return {
        "median_s": statistics.median(times),
        "min_s": min(times),
        "max_s": max(times),
        "runs": len(times),
        "all_s": times,
    }


KERNELS_OFF = "torchax, kernels off"
BACKENDS = ("torchax", "flax", "torchax-stock", "torch", "torch-compile")
"""Backends that are compared; "torch-compile" is "torch" with its networks compiled by PyTorch."""
WAYS = ("torchax", KERNELS_OFF, *BACKENDS[1:])
"""Ways to run a job: the port, the port with XLA doing its kernels' work, and its peers, other backends."""
STOCK_WAYS = ("torchax-stock", "torch", "torch-compile")
"""Peers that run diffusers' own modules: they need not keep this project's bounds of errors."""
KERNELS = (
    *("norm_conv3d", "upsample", "group_norm", "spatial_norm"),
    *("attention", "qk_norm_rope", "adaptive_layer_norm", "linear_gelu", "gated_linear"),
)
"""The ops of `jax_kernels` with a kernel of their own: the VAE's four, then the transformer's."""


@dataclass(frozen=True)
class JobRow:
    """A row of `JOBS`: the sizes, the kernels and the ways of a job.

    Attributes:
        small: the size for a CPU, and the last resort where memory runs out.
        published: sizes for an accelerator, the largest first.
        checked: the size at which an accelerator's results are compared with PyTorch in float32 on its host.
        kernels: names of the kernels that the job may run.
        peers: the ways besides the port's own two.
        quick: the only size of a quick run on an accelerator; None for a job that a quick run leaves out.
    """

    small: Size
    published: tuple[Size, ...]
    checked: Size
    kernels: tuple[str, ...] = KERNELS[:4]
    peers: tuple[str, ...] = WAYS[2:]
    quick: Size | None = None


_CHUNKS = JobRow(
    Size("small", 17, 32, 48),
    (Size("5b", 17, 480, 720), Size("5b", 17, 320, 480), Size("5b", 17, 160, 240)),
    Size("5b", 17, 96, 128),
)
_NETWORK = Size("small", 9, 64, 96)
"""The size of a transformer and a text encoder that a CPU can run."""
JOBS = {
    "kernels": JobRow(
        Size("small", 4, 32, 64),
        (Size("5b", 49, 480, 720), Size("5b", 17, 160, 240)),
        Size("small", 4, 128, 256),  # large enough for every kernel to be used
        peers=(),
        quick=Size("5b", 17, 160, 240),
    ),
    "decode": replace(_CHUNKS, quick=Size("5b", 9, 160, 240)),  # a chunk
    "encode": _CHUNKS,
    "still": JobRow(Size("small", 1, 32, 48), (Size("5b", 1, 480, 720),), Size("5b", 1, 96, 128)),
    "train": JobRow(
        Size("small", 5, 32, 32),
        (Size("5b", 9, 256, 256), Size("5b", 1, 64, 64)),
        Size("5b", 1, 64, 64),
        peers=("torch", "torch-compile"),
    ),
    "step": JobRow(
        _NETWORK,
        (Size("5b", 49, 480, 720), Size("2b", 49, 480, 720), Size("2b", 17, 160, 240)),
        _NETWORK,
        KERNELS[4:],
        STOCK_WAYS,
        quick=Size(TWO_LAYERS, 49, 480, 720),
    ),
    "prompt": JobRow(_NETWORK, (Size("5b", 49, 480, 720),), _NETWORK, (), STOCK_WAYS),
}
"""By name: all kernels, each alone; the VAE decodes or encodes a video, or decodes a still; a step training
the VAE; a denoising step; the encoding of a prompt."""


def row(job: str) -> JobRow:
    """Return a job's row in `JOBS`; a job "kernels OP", which runs one kernel, has the row of "kernels"."""
    return JOBS[job.partition(" ")[0]]


def kernels_used(job: str, platform: str) -> tuple[str, ...]:
    """Return the names of the kernels that a job may run on JAX's platform "tpu", "gpu" or "cpu".

    A TPU has all kernels, a GPU cuDNN's attention alone, a CPU none.
    """
    _kernels, _, op = job.partition(" ")  # the job "kernels OP" runs one kernel; other jobs have no `op`
    names = (op,) if op else row(job).kernels
    return tuple(name for name in names if platform == "tpu" or (platform == "gpu" and name == "attention"))


def sizes(job: str, on_cpu: bool, quick: bool = False) -> tuple[Size, ...]:
    """Return the sizes to try for a job, the largest first; where JAX is on a CPU only the small size."""
    published = (row(job).quick,) if quick else row(job).published
    return (row(job).small,) if on_cpu else (*filter(None, published), row(job).small)


def checked(job: str, on_cpu: bool) -> Size:
    """Return the size at which a job is compared with PyTorch, which runs in float32 on the host's CPU.

    If JAX is on the CPU too (`on_cpu`), it is the small size.
    """
    return row(job).small if on_cpu else row(job).checked


def ways(job: str, device: dict[str, Any], several: bool) -> tuple[str, ...]:
    """Return the ways in which a job can be run: names of `WAYS`, such as "torchax" or "torch-compile".

    `device` is a description by `measure.probe`. With `several` devices, a mesh, diffusers' own modules do
    not run.
    """
    no_torch = several or device["torch"] is None
    left_out = {  # by way, whether it cannot be run, or is the same as another way
        KERNELS_OFF: not kernels_used(job, device["platform"]),  # then the same as "torchax"
        "torchax-stock": several,  # stock modules treat the padding of an uneven width as picture
        "torch": no_torch,
        "torch-compile": no_torch or device["torch"] == "cpu",
    }
    return tuple(way for way in ("torchax", KERNELS_OFF, *row(job).peers) if not left_out.get(way))


def all_jobs(chosen: Collection[str], several: bool) -> list[str]:
    """Return the jobs of a run: "kernels" becomes a job "kernels OP" for each kernel.

    `chosen` are names of `JOBS`. On `several` devices "kernels" is dropped, because a kernel runs on one.
    """
    kernels = [f"kernels {name}" for name in KERNELS] if "kernels" in chosen and not several else []
    return kernels + [name for name in JOBS if name in chosen and name != "kernels"]
