"""The VAE's programs, to be compiled for devices that the machine lacks: of chunks, and of a training step.

Models are built on torch's device "meta", without weights: compiling needs only the weights' shapes. A step
that trains the VAE has a program for each direction, with its forward and backward pass, in which blocks are
recomputed (gradient checkpointing). A torch loop runs the same chunks one after another.
"""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import torch

from benchmarks.plan.programs import Work
from cogvideox_torchax import backends, runtime
from cogvideox_torchax.arrays import places
from cogvideox_torchax.files.models import ModelError, locate
from cogvideox_torchax.vae import checkpoint, tiling
from cogvideox_torchax.vae.directions import DECODE, ENCODE, NCTHW, NTHWC, Direction
from cogvideox_torchax.vae.sizes import SMALLEST_TILE, check_sides
from cogvideox_torchax.vae.torchax.autoencoder import AutoencoderKLCogVideoX
from cogvideox_torchax.vae.torchax.networks import chunk_network, stock_of

CONFIGS = {
    "2b": {"scaling_factor": 1.15258426},
    "5b": {"scaling_factor": 0.7},
    "1.5-5b": {"scaling_factor": 0.7, "invert_scale_latents": True},
}
"""Configs of the published VAEs where they differ from diffusers' defaults; this costs no time or memory."""
BACKENDS = ("torchax", "flax", "torchax-stock")
"""The backends that JAX compiles; "torchax-stock" runs diffusers' own modules."""


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
    """Return the network `make()` in evaluation mode, built on a device of torch."""
    with torch.device(device):
        # Not the network's own `to`: diffusers overrides it with one that warns at every cast.
        return torch.nn.Module.to(make(), dtype).eval()


def weight_bytes(network: torch.nn.Module) -> int:
    return sum(value.numel() * value.element_size() for value in network.parameters())


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
        overlaps = vae.tile_overlap_factor_height, vae.tile_overlap_factor_width
        return math.prod(
            len(tiling.plan_axis(size // scale, tile=tile // scale, overlap=overlap).spans)
            for size, tile, overlap in zip((self.height, self.width), self.tile, overlaps, strict=True)
        )


def chunk_works(vae: AutoencoderKLCogVideoX, job: Job, mesh: Any, backend: str = "torchax") -> Iterator[Work]:
    """Yield the program of a job's first chunk, and the one that all its later chunks share, if it has any.

    Args:
        vae: a ported VAE, with or without weights; it is placed on a mesh of more than one device.
        job: the direction, the video's size and its tiles.
        mesh: of `make_mesh`, of the devices to compile for.
        backend: name of the backend whose programs are compiled, one of `BACKENDS`.

    Raises:
        SizeError: the model cannot take the size.
        BackendError: the backend is not installed.
    """
    ranges, (channels, *size) = job.chunk_shapes(vae)  # each chunk's range of frames
    program, axes = chunk_program(vae, job.direction, mesh, backend)
    first_chunk = None
    # `zip` ends after the second chunk: all later chunks have one length, and share a program.
    for name, frames in zip(("first", "later"), map(len, ranges), strict=False):
        lengths = dict(zip(NCTHW, (1, channels, frames, *size), strict=True))  # of one video
        chunk = tuple(lengths[axis] for axis in axes), runtime.jax_dtype(vae.dtype)
        structs = functools.partial(program.structs, chunk, before=first_chunk)
        yield Work(name, frames, program.lower, structs)
        # The program of later chunks takes the cache that the first chunk's program returns. The cache's
        # shapes follow from those of the first chunk.
        first_chunk = chunk


def chunk_program(
    vae: AutoencoderKLCogVideoX, direction: Direction, mesh: Any, backend: str = "torchax"
) -> tuple[Any, str]:
    """Return a program of a direction's chunks, and the order of the axes of the chunks that it takes.

    The arguments are those of `chunk_works`. On a mesh the results of the stock program would be wrong,
    because diffusers' modules do not leave out the padding of a width that the devices do not divide. It is
    only compiled.
    """
    if mesh.size > 1:
        vae.place_on(mesh)
    if backend == "flax":
        backends.backend(backend)  # raises if Flax is not installed
        from cogvideox_torchax.vae.nnx.autoencoder import FlaxAutoencoderKLCogVideoX
        from cogvideox_torchax.vae.nnx.config import FlaxAutoencoderKLCogVideoXConfig

        # A Flax model of the same config, without weights, has the program.
        config = FlaxAutoencoderKLCogVideoXConfig.from_dict(dict(vae.config))
        dtype = runtime.jax_dtype(vae.dtype)
        weightless = FlaxAutoencoderKLCogVideoX.weightless(config, dtype=dtype, param_dtype=dtype)
        weightless.mesh = vae.mesh  # which `placement` reads
        network, structs = weightless.network(direction)
        network = replace(network, weights=structs)
        program: Any = places.ArrayProgram(network, weightless.placement(direction))
    else:
        network = chunk_network(stock_of(vae) if backend == "torchax-stock" else vae, direction)
        program = runtime.Program(network, vae.program(direction).place)  # one that the model does not keep
    if mesh.size == 1:  # otherwise `place_on` has chosen the program's devices
        program.place = places.Place(mesh.devices.item())
    return program, NTHWC if backend == "flax" else NCTHW


def gradient_works(vae: AutoencoderKLCogVideoX, job: Job, mesh: Any) -> Iterator[Work]:
    """Yield the program of each direction's gradients.

    `vae` has no weights; it is set to train, and placed on a mesh of more than one device. `job` is the
    video, whose direction is not read; a batch has a video for each device of the mesh's "dp".
    """
    trained: Any = vae.train()  # diffusers wraps the next method in a way that pyright cannot follow
    trained.enable_gradient_checkpointing()
    for direction in Direction:
        chunks, (channels, *size) = replace(job, direction=direction).chunk_shapes(vae)
        lengths = [len(chunk) for chunk in chunks]  # numbers of frames
        program, _axes = chunk_program(vae, direction, mesh)
        # The input x is a video for each device on the axis "dp".
        shape, dtype = (mesh.shape["dp"], channels, sum(lengths), *size), runtime.jax_dtype(vae.dtype)
        weights, _input, _cache = program.structs((shape, dtype))
        # All weights have one sharding: they are whole on every device. So is x: `run_video` splits each of
        # its chunks over the mesh.
        replicated = next(iter(weights.values())).sharding
        x = jax.ShapeDtypeStruct(shape, dtype, sharding=replicated)

        # Defaults keep this direction's program and lengths: it may be traced after the loop has gone on.
        def gradients(weights: Any, x: Any, program: Any = program, lengths: Any = lengths) -> Any:
            """Return the gradients of weights and input `x`, for half the sum of the result's squares."""
            result, pull_back = jax.vjp(lambda *inputs: program.run_video(*inputs, lengths), weights, x)
            return pull_back(result)  # the loss's gradient with respect to the result is the result itself

        structs = functools.partial(tuple, (weights, x))  # a function that returns the pair
        yield Work(f"train {direction}", sum(lengths), jax.jit(gradients).lower, structs)
