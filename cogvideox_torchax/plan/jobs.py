"""Compiles the real chunk programs for a TPU on a machine that has none: does it fit, how long does it take.

libtpu carries the TPU's compiler. Every instruction of the text that it compiles to has the compiler's own
`estimated_cycles`; their sum over the clock is its estimate of the time. It leaves out the work
inside a Pallas kernel, which the kernel's final schedule gives, and communication, which is timed separately.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from cogvideox_torchax import backends, runtime
from cogvideox_torchax.plan.chips import CHIPS, GRIDS, Chip, topology_devices
from cogvideox_torchax.plan.models import weightless_vae
from cogvideox_torchax.plan.programs import ProgramPlan, Work, compile_program
from cogvideox_torchax.plan.report import layers
from cogvideox_torchax.sharding import make_mesh
from cogvideox_torchax.vae import chunks, tiling
from cogvideox_torchax.vae.directions import DECODE, ENCODE, Direction
from cogvideox_torchax.vae.sizes import SMALLEST_TILE, check_sides
from cogvideox_torchax.vae.torchax.autoencoder import AutoencoderKLCogVideoX

FORMAT = "cogvideox-torchax-plan/2"


@dataclass(frozen=True)
class Job:
    """A planned job: a direction, for a video of `frames` x `height` x `width` pixels.

    `tile` is the (height, width) in pixels of the tiles that the video is cut into, or None.
    """

    direction: Direction
    frames: int
    height: int
    width: int
    tile: tuple[int, int] | None = None

    def chunk_shapes(self, vae: AutoencoderKLCogVideoX) -> tuple[list[chunks.Chunk], tuple[int, int, int]]:
        """Return the chunks of the input, and the (channels, rows, columns) of one, of the largest tile's.

        Raises:
            SizeError: a video or a tile of a size that the model cannot take.
            ValueError: no frames.
        """
        scale = vae.spatial_compression_ratio
        check_sides("a video", self.height, self.width, multiple=scale)
        height, width = self.height, self.width
        if self.tile is not None:
            check_sides("tiles", *self.tile, multiple=scale, least=SMALLEST_TILE)
            height, width = min(height, self.tile[0]), min(width, self.tile[1])
        channels, frames = vae.config[self.direction.channels], self.frames
        if self.direction is DECODE:
            frames = sum(ENCODE.results(vae, frames))
            height, width = height // scale, width // scale
        return self.direction.chunks(vae, frames), (channels, height, width)

    def tiles(self, vae: AutoencoderKLCogVideoX) -> int:
        """Return the number of tiles of a picture; tiles at its edges are smaller."""
        if self.tile is None or (self.height <= self.tile[0] and self.width <= self.tile[1]):
            return 1
        scale = vae.spatial_compression_ratio
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
) -> Iterator[ProgramPlan]:
    """Compile the first and, if there is one, the later chunk program of a job.

    Args:
        vae: of `weightless_vae`, or any ported VAE; with more than one device it is placed on their mesh.
        job: the video.
        devices: of a topology, or of this machine.
        chip: the peaks to hold a program against; None for none.
        dp, tp: the mesh; one device where both are 1.
        backend: whose program, one of `backends.names(Use.PLAN)`.

    Raises:
        SizeError: a size that the model cannot take.
        BackendError: a build that is not installed.
    """
    mesh = make_mesh(dp, tp, devices=devices)
    for work in chunk_works(vae, job, mesh, backend):
        plan = compile_program(work, mesh, chip)
        plan.layers = layers(work.program, plan.text)
        yield plan


def chunk_works(vae: AutoencoderKLCogVideoX, job: Job, mesh: Any, backend: str = "torchax") -> Iterator[Work]:
    """Yield the first and, where there is one, the later chunk program of a job, over a mesh."""
    if mesh.size > 1:
        vae.place_on(mesh)
    pieces, (channels, *size) = job.chunk_shapes(vae)
    build = backends.backend(backend)
    program = build.program(vae, job.direction)
    if mesh.size == 1:
        program.place = runtime.Place(mesh.devices.item())
    dtype = runtime.jax_dtype(vae.dtype)
    given = [(build.axes.ordered((1, channels, piece.length, *size)), dtype) for piece in pieces[:2]]
    for name, piece, chunk, before in zip(("first", "later"), pieces, given, (None, *given), strict=False):
        structs = functools.partial(program.structs, chunk, before=before)
        yield Work(name, piece.length, program.lower, structs, program)


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
    """Return the largest tile of the picture's shape with which the job fits.

    A program's memory besides its weights grows with the pixels: this gives the tile's size, with a margin of
    a twentieth; the tile is then compiled, and made smaller until it fits.

    Args:
        vae, job, devices, chip: as `plan_programs` takes them.
        peak_bytes: peak memory of the job as it is.
        options: options of `plan_programs`.

    Returns:
        The tile, compiled; None if not even the smallest one fits.
    """
    scale, weights = vae.spatial_compression_ratio, _weight_bytes(vae, job.direction)
    height, width = job.tile or (job.height, job.width)
    while True:
        share = 0.95 * max(chip.memory - weights, 0) / (peak_bytes - weights)
        side = min(share, 0.9) ** 0.5
        height, width = (int(size * side) // scale * scale for size in (height, width))
        if min(height, width) < SMALLEST_TILE * scale:
            return None
        tiled = replace(job, tile=(height, width))
        peak_bytes = max(plan.peak_bytes for plan in plan_programs(vae, tiled, devices, chip, **options))
        if peak_bytes <= chip.memory:
            return Change(f"--tiling {height}x{width} ({tiled.tiles(vae)} tiles)", peak_bytes)


def smallest_mesh_that_fits(
    model: str | None,
    dtype: torch.dtype,
    job: Job,
    topology: str,
    tp: int,
    peak_bytes: int,
    **options: Any,
) -> Change | None:
    """Return the fewest chips of a topology's generation, a power of two, on which a job fits unchanged.

    Args:
        model, dtype: as `weightless_vae` takes them.
        job: as `plan_programs` takes it.
        topology: such as "v6e:1x1"; its generation's larger grids are tried.
        tp: number of chips that split the width so far.
        peak_bytes: peak memory of the job as it is.
        options: options of `plan_programs`.

    Returns:
        The mesh, compiled; None if 256 chips are not enough, or the generation comes in other grids.
    """
    generation, _, grid = topology.partition(":")
    chip, weights = CHIPS[generation], _weight_bytes(weightless_vae(model, dtype), job.direction)
    if grid.count("x") != 1:
        return None
    for count, name in GRIDS.items():
        if count <= tp or weights + (peak_bytes - weights) * tp / count > 1.1 * chip.memory:
            continue
        devices = topology_devices(f"{generation}:{name}")
        vae = weightless_vae(model, dtype)
        peak = max(plan.peak_bytes for plan in plan_programs(vae, job, devices, chip, tp=count, **options))
        if peak <= chip.memory:
            return Change(f"--topology {generation}:{name} --tp {count}", peak)
    return None


def _weight_bytes(vae: AutoencoderKLCogVideoX, direction: Direction) -> int:
    """Return the bytes of the encoder's or the decoder's weights."""
    network = getattr(vae, direction.network)
    return sum(value.numel() * value.element_size() for value in network.parameters())
