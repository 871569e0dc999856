"""Plans for the VAE: its chunk programs, compiled for a TPU that the machine lacks, and what makes them fit.

A program *fits* if its peak memory is at most a chip's. Models are built on torch's device "meta", without
weights: compiling needs only the weights' shapes.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from cogvideox_torchax import backends, runtime
from cogvideox_torchax.files.models import ModelError, locate
from cogvideox_torchax.plan.chips import CHIPS, GRIDS, Chip, topology_devices
from cogvideox_torchax.plan.programs import ProgramPlan, Work, compile_program
from cogvideox_torchax.sharding import make_mesh
from cogvideox_torchax.vae import checkpoint, tiling
from cogvideox_torchax.vae.axes import ordered
from cogvideox_torchax.vae.directions import DECODE, ENCODE, Direction
from cogvideox_torchax.vae.sizes import SMALLEST_TILE, check_sides
from cogvideox_torchax.vae.torchax.autoencoder import AutoencoderKLCogVideoX

FORMAT = "cogvideox-torchax-plan/3"

CONFIGS = {
    "2b": {"scaling_factor": 1.15258426},
    "5b": {"scaling_factor": 0.7},
    "1.5-5b": {"scaling_factor": 0.7, "invert_scale_latents": True},
}
"""Configs of the published VAEs where they differ from diffusers' defaults; this costs no time or memory."""


def weightless_vae(model: str, dtype: torch.dtype, device: str = "meta") -> AutoencoderKLCogVideoX:
    """Return the ported VAE without weights on the device "meta" of torch, or with random ones on another.

    `model` is a published config of `CONFIGS`, a directory or a hub id; `ModelError` if it has no config.
    """
    config = CONFIGS.get(model)
    if config is None:
        try:
            config = checkpoint.read_config(locate(model, "vae", files=("config.json",)))
        except ModelError as error:
            raise ModelError(f"{error}; of published models plan knows {', '.join(CONFIGS)}") from error
    return build(lambda: AutoencoderKLCogVideoX.from_config(config), dtype, device)


def build(make: Callable[[], Any], dtype: torch.dtype, device: str) -> Any:
    """Return the network `make()` in evaluation mode, built on a device of torch.

    torchax is off meanwhile, because it breaks building on "meta".
    """

    def make_network() -> Any:
        with torch.device(device):
            # Not the network's own `to`: diffusers overrides it with one that warns at every cast.
            return torch.nn.Module.to(make(), dtype).eval()

    return make_network()


@dataclass(frozen=True)
class Job:
    """A job to plan: encoding or decoding one video.

    Attributes:
        direction: `ENCODE`, or `DECODE` for the latents that encoding the video gives.
        frames, height, width: size of the video, in frames and pixels.
        tile: (height, width) in pixels of the tiles that the video is cut into; None for no tiling.
    """

    direction: Direction
    frames: int
    height: int
    width: int
    tile: tuple[int, int] | None = None

    def chunk_shapes(self, vae: AutoencoderKLCogVideoX) -> tuple[list[range], tuple[int, int, int]]:
        """Return each chunk's range of frames, and (channels, height, width) of the input of every chunk.

        The inputs are frames to encode, or latents to decode. With tiles the size is the largest tile's.
        `SizeError` if the model cannot take the size of the video or of a tile.
        """
        scale = vae.spatial_compression_ratio
        check_sides("a video", self.height, self.width, multiple=scale)
        height, width = self.height, self.width
        if self.tile is not None:
            check_sides("tiles", *self.tile, multiple=scale, least=SMALLEST_TILE)
            height, width = min(height, self.tile[0]), min(width, self.tile[1])
        channels, frames = vae.config[self.direction.channels_key], self.frames  # channels of the input
        if self.direction is DECODE:
            # Decoding takes the latents that encoding the video gives: fewer frames, of a smaller size.
            frames = sum(ENCODE.result_lengths(vae, frames))
            height, width = height // scale, width // scale
        return self.direction.chunks(vae, frames), (channels, height, width)

    def tiles(self, vae: AutoencoderKLCogVideoX) -> int:
        """Return the number of tiles of a frame, which overlap; the last ones of an axis may be smaller."""
        if self.tile is None or (self.height <= self.tile[0] and self.width <= self.tile[1]):
            return 1
        scale = vae.spatial_compression_ratio  # tiles are planned in latent pixels
        tile_height, tile_width = (side // scale for side in self.tile)
        rows = tiling.plan_axis(
            self.height // scale, tile=tile_height, overlap=vae.tile_overlap_factor_height
        )
        columns = tiling.plan_axis(
            self.width // scale, tile=tile_width, overlap=vae.tile_overlap_factor_width
        )
        return len(rows.spans) * len(columns.spans)


def plan_programs(
    vae: AutoencoderKLCogVideoX,
    job: Job,
    devices: list[Any],
    *,
    dp: int = 1,
    tp: int = 1,
    backend: str = "torchax",
) -> Iterator[ProgramPlan]:
    """Compile a job's programs, as `chunk_works` gives them, for a mesh of `devices`; yield each plan.

    Raises:
        SizeError: the model cannot take the size.
        BackendError: the backend is not installed.
    """
    mesh = make_mesh(dp, tp, devices=devices)
    for work in chunk_works(vae, job, mesh, backend):
        yield compile_program(work, mesh)


def chunk_works(vae: AutoencoderKLCogVideoX, job: Job, mesh: Any, backend: str = "torchax") -> Iterator[Work]:
    """Yield the program of a job's first chunk, and the one that all its later chunks share, if it has any.

    Args:
        vae: a ported VAE, with or without weights; it is placed on a mesh of more than one device.
        job: the direction, the video's size and its tiles.
        mesh: of `make_mesh`, of the devices to compile for.
        backend: name of the backend whose programs are compiled, one of `backends.names("plan")`.
    """
    if mesh.size > 1:
        vae.place_on(mesh)
    ranges, (channels, *size) = job.chunk_shapes(vae)  # each chunk's range of frames
    entry = backends.backend(backend)
    program = entry.program(vae, job.direction)
    if mesh.size == 1:  # otherwise `place_on` has chosen the program's devices
        program.place = runtime.Place(mesh.devices.item())
    first_chunk = None
    # `zip` ends after the second chunk: all later chunks have one length, and share a program.
    for name, frames in zip(("first", "later"), map(len, ranges), strict=False):
        # (shape, dtype) of a chunk of one video.
        chunk = ordered((1, channels, frames, *size), entry.axes), runtime.jax_dtype(vae.dtype)
        structs = functools.partial(program.structs, chunk, before=first_chunk)
        yield Work(name, frames, program.lower, structs)
        # The program of later chunks takes the cache that the first chunk's program returns. The cache's
        # shapes follow from those of the first chunk.
        first_chunk = chunk


@dataclass(frozen=True)
class Change:
    """A change that makes a job fit, as options of the command line, and the job's peak memory with it."""

    what: str
    peak_bytes: int


def largest_tile_that_fits(
    vae: AutoencoderKLCogVideoX,
    job: Job,
    devices: list[Any],
    chip: Chip,
    peak_bytes: int,
    **options: Any,
) -> Change | None:
    """Return the option `--tiling` for about the largest tile, in the picture's aspect ratio, that fits.

    A program's memory besides its weights grows with the pixels. That gives a first size of the tile, with a
    margin of a twentieth. The tile's programs are compiled, and the tile is made smaller until they fit.
    Return None if not even the smallest tile fits.

    Args:
        vae: the model without weights.
        job: the job that does not fit.
        devices: the devices to compile for.
        chip: the chip, whose memory is the limit.
        peak_bytes: peak memory of the job as it is, which is too much.
        options: further keywords of `plan_programs`: `dp`, `tp`, `backend`.
    """
    scale, weights = vae.spatial_compression_ratio, weight_bytes(vae, job.direction)
    height, width = job.tile or (job.height, job.width)
    while True:
        # `peak_bytes`, `height` and `width` are the last round's, at first the job's as it is.
        share_of_pixels = 0.95 * max(chip.memory - weights, 0) / (peak_bytes - weights)
        shrink = min(share_of_pixels, 0.9) ** 0.5  # of each side; at most 0.9, so that the tile gets smaller
        height, width = (int(size * shrink) // scale * scale for size in (height, width))
        if min(height, width) < SMALLEST_TILE * scale:  # `SMALLEST_TILE` is in latent pixels
            return None
        tiled = replace(job, tile=(height, width))
        peak_bytes = max(plan.peak_bytes for plan in plan_programs(vae, tiled, devices, **options))
        if peak_bytes <= chip.memory:
            return Change(f"--tiling {height}x{width} ({tiled.tiles(vae)} tiles)", peak_bytes)


def smallest_mesh_that_fits(
    model: str,
    dtype: torch.dtype,
    job: Job,
    topology: str,
    tp: int,
    peak_bytes: int,
    *,
    dp: int = 1,
    **options: Any,
) -> Change | None:
    """Return the smallest grid on which a job fits if all chips that `dp` leaves split the video's width.

    The grid is of the topology's generation. Return None if 256 chips are not enough, or for a generation
    whose grids `GRIDS` does not have (v5p, tpu7x).

    Args:
        model, dtype: as for `weightless_vae`.
        job: the job that does not fit.
        topology: the present grid, such as "v6e:1x1".
        tp: number of the grid's chips that split the width at present.
        peak_bytes: peak memory of the job at present, which is too much.
        dp: as for `plan_programs`; it stays as it is.
        options: a further keyword of `plan_programs`: `backend`.
    """
    generation, _, grid = topology.partition(":")
    if grid.count("x") != 1:  # a three-dimensional grid
        return None
    chip, vae = CHIPS[generation], weightless_vae(model, dtype)
    weights = weight_bytes(vae, job.direction)
    for count, name in GRIDS.items():
        larger_tp = count // dp
        # Skip a grid that splits the width no further than at present, or is clearly too small. Each chip has
        # all weights, and an even part of the other memory; 1.1 is a margin.
        if larger_tp <= tp or weights + (peak_bytes - weights) * tp / larger_tp > 1.1 * chip.memory:
            continue
        devices = topology_devices(f"{generation}:{name}")
        plans = plan_programs(vae, job, devices, dp=dp, tp=larger_tp, **options)
        peak = max(plan.peak_bytes for plan in plans)
        if peak <= chip.memory:
            return Change(f"--topology {generation}:{name} --tp {larger_tp}", peak)
    return None


def weight_bytes(vae: AutoencoderKLCogVideoX, direction: Direction) -> int:
    """Return the bytes of the encoder's or the decoder's weights, whichever the direction runs."""
    network = vae.encoder if direction is ENCODE else vae.decoder
    return sum(value.numel() * value.element_size() for value in network.parameters())
