"""Compiles the real chunk programs for a TPU on a machine that has none: does it fit, how long does it take.

libtpu carries the TPU's compiler. Every instruction of the text that it compiles to has the compiler's own
`estimated_cycles`; their sum over the clock is its estimate of the time. It leaves out what waits on other
chips, and what a Pallas kernel does inside: those are counted and shown apart.
"""

import importlib.util
import os
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from cogvideox_torchax import checkpoint, chunks, runtime
from cogvideox_torchax.sharding import make_mesh


class PlanError(ValueError):
    """A plan that cannot be made; the message says what to change."""


@dataclass(frozen=True)
class Chip:
    """Published peaks of one chip (cloud.google.com/tpu/docs), and the clock that the compiler counts in.

    Attributes:
        flops: bfloat16 multiply-adds a second, times two.
        bandwidth: bytes a second between the chip and its memory.
        memory: bytes that a program may use; what the v6e runtime keeps for itself is taken off.
        clock: cycles a second.
    """

    flops: float
    bandwidth: float
    memory: float
    clock: float


GIB = 2**30
CHIPS = {
    "v4": Chip(275e12, 1.2e12, 32 * GIB, 1.05e9),
    "v5e": Chip(197e12, 0.82e12, 16 * GIB, 1.5e9),
    "v5p": Chip(459e12, 2.77e12, 95 * GIB, 1.75e9),
    "v6e": Chip(918e12, 1.64e12, 31.25 * GIB, 1.75e9),
}

CONFIGS = {
    "2b": {"scaling_factor": 1.15258426},
    "5b": {"scaling_factor": 0.7},
    "1.5-5b": {"scaling_factor": 0.7, "invert_scale_latents": True},
}
"""The published VAEs, which differ in nothing that costs time: everything else is diffusers' default."""

COLLECTIVES = ("all-gather", "all-reduce", "collective-permute", "all-to-all", "reduce-scatter")
CONVOLUTION, COPY, OTHER = "convolutions", "copies", "other"


@dataclass
class ProgramPlan:
    """What the compiler says of one chunk program, a device.

    Attributes:
        name: "first" or "later" chunk.
        frames: input frames of the chunk.
        flops: multiply-adds times two.
        bytes_accessed: between the chip and its memory, as the compiler counts.
        seconds: the compiler's estimate; None where it gives no cycles (a CPU).
        kernels: Pallas kernels, which carry no estimate and are not part of `seconds`.
        shares: seconds by kind of instruction.
        floor_seconds: FLOPs over the chip's peak.
        argument_bytes, temp_bytes, output_bytes: memory; donated caches are in the arguments alone.
        collectives: kind to (count, largest result in bytes).
        compile_seconds: on this machine.
    """

    name: str
    frames: int
    flops: float
    bytes_accessed: float
    seconds: float | None
    kernels: int
    shares: dict[str, float]
    floor_seconds: float | None
    argument_bytes: int
    temp_bytes: int
    output_bytes: int
    collectives: dict[str, tuple[int, int]]
    compile_seconds: float
    text: str = field(default="", repr=False)

    @property
    def peak_bytes(self) -> int:
        return self.argument_bytes + self.temp_bytes + self.output_bytes

    def as_json(self) -> dict[str, Any]:
        values = asdict(self)
        del values["text"]
        return values | {"peak_bytes": self.peak_bytes}


def topology_devices(name: str) -> list[Any]:
    """The devices of a TPU topology such as "v6e:2x4", made up by libtpu on a machine without them.

    Raises:
        PlanError: no libtpu, or a topology that the installed one does not know.
    """
    from jax.experimental import topologies

    generation, _, grid = name.partition(":")
    if generation not in CHIPS or not re.fullmatch(r"\d+(x\d+)+", grid):
        raise PlanError(
            f"got topology {name!r}: it takes one of {', '.join(CHIPS)}, a colon and a grid, such as v6e:2x4"
        )
    if importlib.util.find_spec("libtpu") is None:
        raise PlanError("planning for a TPU needs its compiler: pip install 'cogvideox-torchax[tpu]'")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v6e-8")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    # A grid narrower than a host's own is made of hosts of one chip.
    narrow = generation != "v4" and "1" in grid.split("x")
    bounds = {"chips_per_host_bounds": [1, 1, 1]} if narrow else {}
    try:
        return list(topologies.get_topology_desc(platform="tpu", topology_name=name, **bounds).devices)
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise PlanError(f"the installed libtpu does not take topology {name!r}: {reason}") from error


def hollow_vae(model: str | None, dtype: torch.dtype) -> Any:
    """The ported VAE of a published config, a directory or a hub id, without its weights: shapes will do."""
    from diffusers.models.autoencoders.autoencoder_kl_cogvideox import AutoencoderKLCogVideoX

    from cogvideox_torchax.porting import port

    config = CONFIGS.get(model or "5b")
    if config is None:
        config = _config_of(str(model))

    def build() -> Any:
        with torch.device("meta"):
            vae: Any = AutoencoderKLCogVideoX.from_config(config)
        return torch.nn.Module.to(vae, dtype).eval()

    return port(runtime.without_torchax(build))


def _config_of(model: str) -> dict[str, Any]:
    from pathlib import Path

    from diffusers.models.autoencoders.autoencoder_kl_cogvideox import AutoencoderKLCogVideoX

    directory = Path(model)
    if directory.exists():
        inside = directory / "vae"
        return checkpoint.read_config(inside if inside.is_dir() else directory)
    try:
        return dict(AutoencoderKLCogVideoX.load_config(model, subfolder="vae"))  # pyright: ignore
    except OSError as error:
        raise PlanError(f"cannot read the config of {model}: {' '.join(str(error).split())[:200]}") from error


@dataclass(frozen=True)
class Job:
    """What is planned: "decode" or "encode" of a video of `frames` x `height` x `width`, or of one tile."""

    kind: str
    frames: int
    height: int
    width: int

    def chunk_shapes(self, vae: Any) -> tuple[list[chunks.Chunk], tuple[int, int, int]]:
        """The chunks of the input, and its channels, rows and columns."""
        scale = vae.spatial_scale
        if self.height % scale or self.width % scale:
            raise PlanError(f"got {self.height} x {self.width} pixels: both must be multiples of {scale}")
        encoding = chunks.plan(self.frames, vae.num_sample_frames_batch_size)
        if self.kind == "encode":
            return encoding, (vae.config["in_channels"], self.height, self.width)
        latent_frames = sum(chunks.encoded_length(chunk.length) for chunk in encoding)
        decoding = chunks.plan(latent_frames, vae.num_latent_frames_batch_size)
        return decoding, (vae.config["latent_channels"], self.height // scale, self.width // scale)


def plan_programs(
    vae: Any, job: Job, devices: list[Any], chip: Chip | None, *, dp: int = 1, tp: int = 1
) -> Iterator[ProgramPlan]:
    """Compiles the first and, where there is one, the later chunk program of a job.

    Args:
        vae: of `hollow_vae`, or any ported VAE; with more than one device it is placed on their mesh.
        job: the video.
        devices: of a topology, or of this machine.
        chip: the peaks to hold a program against; None for none.
        dp, tp: the mesh; one device where both are 1.
    """
    import jax
    from jax.sharding import SingleDeviceSharding

    if dp * tp > 1:
        vae.place_on(make_mesh(dp, tp, devices=devices))
    program = vae.program(job.kind)
    pieces, (channels, rows, columns) = job.chunk_shapes(vae)

    def on_one(struct: Any) -> Any:
        return jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=SingleDeviceSharding(devices[0]))

    place = (lambda struct: struct) if dp * tp > 1 else on_one
    inputs = []
    for piece in pieces[:2]:
        shape = (1, channels, piece.length, rows, columns)
        weights, chunk = program.structs(shape, runtime.jax_dtype(vae.dtype))
        inputs.append(jax.tree.map(place, chunk))
    weights = jax.tree.map(place, weights)
    cache = jax.tree.map(place, program.cache_structs(weights, inputs[0]))
    for name, piece, chunk, carried in zip(("first", "later"), pieces, inputs, (None, cache), strict=False):
        start = time.perf_counter()
        compiled = program.lower(weights, chunk, carried).compile()
        yield read_program(name, piece.length, compiled, chip, time.perf_counter() - start)


def read_program(
    name: str, frames: int, compiled: Any, chip: Chip | None, compile_seconds: float
) -> ProgramPlan:
    """Reads off a compiled program what it costs; see `ProgramPlan`."""
    text = compiled.as_text()
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis()
    cycles = cycles_by_kind(text)
    clock = chip.clock if chip else 1.0
    kernels = text.count('custom_call_target="tpu_custom_call"')
    return ProgramPlan(
        name=name,
        frames=frames,
        flops=cost.get("flops", 0.0),
        bytes_accessed=cost.get("bytes accessed", 0.0),
        seconds=sum(cycles.values()) / clock if chip and cycles else None,
        kernels=kernels,
        shares={kind: count / clock for kind, count in cycles.items()},
        floor_seconds=cost.get("flops", 0.0) / chip.flops if chip else None,
        argument_bytes=memory.argument_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        output_bytes=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        collectives=collectives(text),
        compile_seconds=compile_seconds,
        text=text,
    )


def cycles_by_kind(text: str) -> Counter[str]:
    """The compiler's cycles of every instruction of a compiled text, by convolutions, copies and the rest.

    An instruction inside a loop is counted once; the VAE's programs have no loops.
    """
    convolving = {
        match.group(1)
        for match in re.finditer(r"^%?([\w.\-]+) \([^\n]*\{\n((?:(?!^\}).*\n)*)", text, re.MULTILINE)
        if " convolution(" in match.group(2)
    }
    counted: Counter[str] = Counter()
    for line in text.splitlines():
        cycles = re.search(r'estimated_cycles":"(\d+)"', line)
        if not cycles:
            continue
        opcode = re.search(r"= .*? ([a-z\-]+)\(", line)
        called = re.search(r"calls=%?([\w.\-]+)", line)
        kind = OTHER
        if " convolution(" in line or (called and called.group(1) in convolving):
            kind = CONVOLUTION
        elif opcode and opcode.group(1) in ("copy", "slice", "pad", "broadcast", "transpose"):
            kind = COPY
        counted[kind] += int(cycles.group(1))
    return counted


def collectives(text: str) -> dict[str, tuple[int, int]]:
    """Of each kind of collective in a compiled text: how many, and the bytes of the largest result."""
    found: dict[str, tuple[int, int]] = {}
    for line in text.splitlines():
        match = re.search(rf"= (.*?) ({'|'.join(COLLECTIVES)})(?:-start)?\(", line)
        if not match:
            continue
        sizes = [_bytes_of(dtype, shape) for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", match.group(1))]
        count, largest = found.get(match.group(2), (0, 0))
        found[match.group(2)] = (count + 1, max([largest, *sizes]))
    return found


def _bytes_of(dtype: str, shape: str) -> int:
    width = int(re.sub(r"\D", "", dtype) or 8) / 8
    return int(width * np.prod([int(side) for side in shape.split(",") if side] or [1]))
