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
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch

from cogvideox_torchax import chunks, runtime, tiling
from cogvideox_torchax.autoencoder import AutoencoderKLCogVideoX
from cogvideox_torchax.hollow import PlanError, chunk_program, hollow_vae
from cogvideox_torchax.sharding import Row, ShardedProgram, layers, make_mesh


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

FORMAT = "cogvideox-torchax-plan/1"

GRIDS = {2: "1x2", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
"""The flat grids that a slice of v5e or v6e comes in, by its chips."""

COLLECTIVES = ("all-gather", "all-reduce", "collective-permute", "all-to-all", "reduce-scatter")
CONVOLUTION, COPY, OTHER, KERNEL = "convolutions", "copies", "other", "kernels"


@dataclass
class ProgramPlan:
    """What the compiler says of one chunk program, a device.

    Attributes:
        name: "first" or "later" chunk.
        frames: input frames of the chunk.
        flops: multiply-adds times two.
        bytes_accessed: between the chip and its memory, as the compiler counts.
        seconds: the compiler's estimate, and for Pallas kernels, of which it gives none, the bytes that they
            take and give over the chip's bandwidth; None where there are no cycles (a CPU).
        kernels: Pallas kernels in the program.
        shares: seconds by kind of instruction.
        floor_seconds: FLOPs over the chip's peak.
        argument_bytes, temp_bytes, output_bytes: memory; donated caches are in the arguments alone.
        collectives: kind to (count, largest result in bytes).
        compile_seconds: on this machine.
        text: of the compiled program.
        layers: what each layer holds and moves, on a mesh.
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
    layers: list[Row] = field(default_factory=list, repr=False)

    @property
    def peak_bytes(self) -> int:
        return self.argument_bytes + self.temp_bytes + self.output_bytes

    def as_json(self) -> dict[str, Any]:
        values = asdict(self)
        del values["text"], values["layers"]
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
    # libtpu locks itself to one process of a machine, for the chips' sake: planning opens none.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    # A grid narrower than a host's own is made of hosts of one chip.
    narrow = generation != "v4" and "1" in grid.split("x")
    bounds = {"chips_per_host_bounds": [1, 1, 1]} if narrow else {}
    try:
        return list(topologies.get_topology_desc(platform="tpu", topology_name=name, **bounds).devices)
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise PlanError(f"the installed libtpu does not take topology {name!r}: {reason}") from error


@dataclass(frozen=True)
class Job:
    """What is planned: "decode" or "encode" of a video of `frames` x `height` x `width` pixels.

    `tile`, where it is given, is the (height, width) in pixels of the tiles that the video is cut into.
    """

    kind: str
    frames: int
    height: int
    width: int
    tile: tuple[int, int] | None = None

    def chunk_shapes(self, vae: AutoencoderKLCogVideoX) -> tuple[list[chunks.Chunk], tuple[int, int, int]]:
        """The chunks of the input, and the channels, rows and columns of one (of the largest tile's).

        Raises:
            PlanError: a video or a tile of a size that the model cannot take.
        """
        scale = vae.spatial_scale
        if self.height % scale or self.width % scale or min(self.frames, self.height, self.width) < 1:
            raise PlanError(
                f"got {self.frames} frames of {self.height} x {self.width} pixels: height and width must be "
                f"multiples of {scale}, and all of them at least 1"
            )
        height, width = self.height, self.width
        if self.tile is not None:
            if min(self.tile) < 1 or any(side % scale for side in self.tile):
                raise PlanError(
                    f"got tiles of {self.tile[0]} x {self.tile[1]} pixels: both must be multiples of {scale}"
                )
            height, width = min(height, self.tile[0]), min(width, self.tile[1])
        encoding = chunks.plan(self.frames, vae.num_sample_frames_batch_size)
        if self.kind == "encode":
            return encoding, (vae.config["in_channels"], height, width)
        latent_frames = sum(chunks.encoded_length(chunk.length) for chunk in encoding)
        decoding = chunks.plan(latent_frames, vae.num_latent_frames_batch_size)
        return decoding, (vae.config["latent_channels"], height // scale, width // scale)

    def tiles(self, vae: AutoencoderKLCogVideoX) -> int:
        """How many tiles a picture is cut into; those at its edges are smaller."""
        if self.tile is None or (self.height <= self.tile[0] and self.width <= self.tile[1]):
            return 1
        scale = vae.spatial_scale
        overlaps = (vae.tile_overlap_factor_height, vae.tile_overlap_factor_width)
        spans = [
            tiling.plan_axis(size // scale, tile=side // scale, overlap=overlap).spans
            for size, side, overlap in zip((self.height, self.width), self.tile, overlaps, strict=True)
        ]
        return len(spans[0]) * len(spans[1])


def plan_programs(
    vae: AutoencoderKLCogVideoX,
    job: Job,
    devices: list[Any],
    chip: Chip | None,
    *,
    dp: int = 1,
    tp: int = 1,
    backend: str = "torchax",
    only_last: bool = False,
) -> Iterator[ProgramPlan]:
    """Compiles the first and, where there is one, the later chunk program of a job.

    Args:
        vae: of `hollow_vae`, or any ported VAE; with more than one device it is placed on their mesh.
        job: the video.
        devices: of a topology, or of this machine.
        chip: the peaks to hold a program against; None for none.
        dp, tp: the mesh; one device where both are 1.
        backend: whose program, one of `hollow.BACKENDS`.
        only_last: without the first chunk's program where there is a later one.

    Raises:
        PlanError: a size that the model cannot take, or a build that is not installed.
    """
    import jax
    from jax.sharding import SingleDeviceSharding

    if dp * tp > 1:
        vae.place_on(make_mesh(dp, tp, devices=devices))
    pieces, (channels, rows, columns) = job.chunk_shapes(vae)
    program = chunk_program(vae, job.kind, backend)

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
    planned = list(zip(("first", "later"), pieces, inputs, (None, cache), strict=False))
    for name, piece, chunk, carried in planned[-1:] if only_last else planned:
        start = time.perf_counter()
        compiled = program.lower(weights, chunk, carried).compile()
        plan = read_program(name, piece.length, compiled, chip, time.perf_counter() - start)
        if isinstance(program, ShardedProgram):
            plan.layers = layers(program, plan.text)
        yield plan


@dataclass(frozen=True)
class Change:
    """A change that makes a job fit, and the memory that its largest program then takes."""

    what: str
    peak_bytes: int


def smallest_tiling_that_fits(
    vae: AutoencoderKLCogVideoX,
    job: Job,
    devices: list[Any],
    chip: Chip,
    peak_bytes: int,
    **options: Any,
) -> Change | None:
    """The largest tile, of the picture's own shape, with which a job that does not fit does.

    What a program holds besides its weights grows with the pixels: by that rule the tile is sized, a
    twentieth on the safe side, then compiled, and made smaller until it fits.

    Args:
        vae, job, devices, chip: as `plan_programs` takes them.
        peak_bytes: of the job as it stands.
        options: of `plan_programs`.

    Returns:
        The tile, compiled; None where not even a tile of one latent pixel fits.
    """
    scale, weights = vae.spatial_scale, _weight_bytes(vae, job.kind)
    height, width = job.tile or (job.height, job.width)
    while True:
        share = 0.95 * max(chip.memory - weights, 0) / (peak_bytes - weights)
        side = min(share, 0.9) ** 0.5
        height, width = (int(size * side) // scale * scale for size in (height, width))
        if min(height, width) < scale:
            return None
        tiled = replace(job, tile=(height, width))
        (smaller,) = plan_programs(vae, tiled, devices, chip, only_last=True, **options)
        peak_bytes = smaller.peak_bytes
        if peak_bytes <= chip.memory:
            return Change(f"--tiling {height}x{width} ({tiled.tiles(vae)} tiles)", peak_bytes)


def smallest_mesh_that_fits(
    model: str | None,
    dtype: torch.dtype,
    job: Job,
    topology: str,
    tp: int,
    peak_bytes: int,
    backend: str = "torchax",
) -> Change | None:
    """The fewest chips of a topology's generation, a power of two, over which a job fits as it is.

    Args:
        model, dtype: as `hollow_vae` takes them.
        job, backend: as `plan_programs` takes them.
        topology: such as "v6e:1x1"; its generation's larger grids are tried.
        tp: over how many chips the width was split.
        peak_bytes: of the job as it stands.

    Returns:
        The mesh, compiled; None where 256 chips are not enough, or the generation comes in other grids.
    """
    generation, _, grid = topology.partition(":")
    chip, weights = CHIPS[generation], _weight_bytes(hollow_vae(model, dtype), job.kind)
    if grid.count("x") != 1:
        return None
    for count, name in GRIDS.items():
        if count <= tp or weights + (peak_bytes - weights) * tp / count > 1.1 * chip.memory:
            continue
        devices = topology_devices(f"{generation}:{name}")
        options = {"tp": count, "backend": backend, "only_last": True}
        (smaller,) = plan_programs(hollow_vae(model, dtype), job, devices, chip, **options)
        if smaller.peak_bytes <= chip.memory:
            return Change(f"--topology {generation}:{name} --tp {count}", smaller.peak_bytes)
    return None


def _weight_bytes(vae: AutoencoderKLCogVideoX, kind: str) -> int:
    network = vae.encoder if kind == "encode" else vae.decoder
    return sum(value.numel() * value.element_size() for value in network.parameters())


def read_program(
    name: str,
    frames: int,
    compiled: Any,
    chip: Chip | None,
    compile_seconds: float,
    *,
    count_kernels: bool = True,
) -> ProgramPlan:
    """Reads off a compiled program what it costs; see `ProgramPlan`.

    Without `count_kernels` the Pallas kernels are left out of its seconds: their bytes say little of one that
    computes.
    """
    text = compiled.as_text()
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis()
    kernels = kernel_bytes(text)
    shares: dict[str, float] = {}
    if chip:
        shares = {kind: count / chip.clock for kind, count in cycles_by_kind(text).items()}
        if shares and kernels and count_kernels:
            shares[KERNEL] = sum(kernels) / chip.bandwidth
    return ProgramPlan(
        name=name,
        frames=frames,
        flops=cost.get("flops", 0.0),
        bytes_accessed=cost.get("bytes accessed", 0.0),
        seconds=sum(shares.values()) if shares else None,
        kernels=len(kernels),
        shares=shares,
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


def kernel_bytes(text: str) -> list[int]:
    """What each Pallas kernel of a compiled text takes and gives, in bytes of whole tiles."""
    found = []
    for line in text.splitlines():
        call = re.search(r"= (.*?) custom-call\(.*?operand_layout_constraints=\{(.*?\})\}", line)
        if call and 'custom_call_target="tpu_custom_call"' in line:
            arrays = re.findall(r"(\w+)\[([\d,]*)\]", f"{call[1]} {call[2]}")
            found.append(sum(_tiled_bytes(dtype, shape) for dtype, shape in arrays))
    return found


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


def _tiled_bytes(dtype: str, shape: str) -> int:
    """Of an array as a TPU's kernels have it: row-major, in tiles of 128 lanes and up to 8 sublanes."""
    *outer, sublanes, lanes = [1, 1, *(int(side) for side in shape.split(",") if side)]
    tile = min(8, 1 << (sublanes - 1).bit_length())
    padded = [*outer, -(-sublanes // tile) * tile, -(-lanes // 128) * 128]
    return _bytes_of(dtype, ",".join(map(str, padded)))
