"""Tiles that are chosen by the free memory, or after memory has run out.

The TPU's compiler has told the memory of the programs of CogVideoX-5b at 480 x 720 in bfloat16. The tables
below have the bytes that these programs take for each pixel of a frame. Other models are estimated in
proportion to their channels and to the bytes of their numbers.

In this file, `vae` is the model, `direction` is `ENCODE` or `DECODE`, and `height` and `width` are the size
of the frames in pixels. `frames` is the number of frames of the whole input, a video or latents, and `scale`
is the number of a video's pixels for each latent pixel, along one axis.
"""

import contextlib
import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from cogvideox_torchax import runtime
from cogvideox_torchax.sharding import of_several_processes
from cogvideox_torchax.vae.directions import DECODE, ENCODE, Direction
from cogvideox_torchax.vae.sizes import SMALLEST_TILE, parse_size

EXHAUSTED = (
    "resource_exhausted",
    "out of memory",
    "not enough memory",
    "can't allocate memory",
    "memoryerror",
)
"""Words in the messages of XLA, CUDA, PyTorch and Python for exhausted memory, in lower case."""

CACHE_BYTES = {ENCODE: 5217, DECODE: 8187}
"""The bytes of the convolutions' cache for each pixel of a frame of the video.

The cache has this size after a chunk of any length, even of a single frame.
"""
FRAME_BYTES = {ENCODE: 840, DECODE: 5230}
"""The bytes of temporaries for each of the video's pixels, of each frame to encode or latent frame to decode.

The first of an odd number of frames is computed alone, and needs no further memory.
"""
IMAGE_BYTES = {ENCODE: 1083, DECODE: 739}
"""The bytes of temporaries for each pixel of a chunk of a single frame.

All three tables come from the first chunks in benchmarks/results/plan-v6e-1-*-torchax.json. At 480 x 720 a
steady chunk needs less than a first chunk. At 720 x 1280 it needs a twentieth more than estimated.
"""
PLANNED_CHANNELS, PLANNED_ITEMSIZE = 128, 2
"""The planned model's channels at the highest resolution, and the bytes of its numbers."""
FACTOR_WITHOUT_KERNEL = 2.1
"""The factor for dtypes other than bfloat16, in which the convolutions do not use their Pallas kernel.

Without this kernel, the plan has 13513 bytes for each pixel of a latent frame to decode.
"""
MARGIN = 0.9
"""The fraction of the free memory that the estimate may take."""

MEMINFO = Path("/proc/meminfo")

Item = TypeVar("Item")


def parse_tiles(text: str, scale: int) -> tuple[int, int]:
    """Return the height and width in pixels that a text such as "240x360" gives a tile.

    Raises:
        SizeError: the text has another form, or a side is not a multiple of `scale` or is below 2 * `scale`.
    """
    height, width = parse_size(text, "tiles", multiple=scale, least=SMALLEST_TILE)
    return height, width


def check_tiling(tiling: str | None, scale: int) -> None:
    """Raise `SizeError` unless `set_tiles` takes this `tiling`."""
    if tiling not in (None, "auto"):
        parse_tiles(tiling, scale)


def set_tiles(vae: Any, tiling: str | None) -> None:
    """Enable a model's tiling by an option: "HEIGHTxWIDTH" in pixels, or "auto"; None does nothing.

    Raises:
        SizeError: the model does not take tiles of this size.
    """
    if tiling is not None:
        vae.enable_tiling(
            *(["auto"] if tiling == "auto" else parse_tiles(tiling, vae.spatial_compression_ratio))
        )


def estimated_bytes(vae: Any, direction: Direction, height: int, width: int, frames: int) -> int:
    """Return the estimated bytes of a video's largest chunk, without the weights, on each of the devices."""
    longest_chunk = max(map(len, direction.chunks(vae, frames)))  # its number of frames
    channels = vae.config["block_out_channels"][0]  # at the highest resolution, which takes the most memory
    # The tables are for a planned model, which has 128 channels there and computes in bfloat16.
    relative_size = channels / PLANNED_CHANNELS * vae.dtype.itemsize / PLANNED_ITEMSIZE
    mesh = getattr(vae, "mesh", None)
    devices = 1 if mesh is None else mesh.size  # they share the frame's columns
    # The Pallas kernel of the convolutions takes only bfloat16.
    kernel_factor = 1.0 if runtime.dtype_name(vae.dtype) == "bfloat16" else FACTOR_WITHOUT_KERNEL
    # If the number of frames is odd, the first frame is computed before the others, in memory that they use
    # after it. So the others alone count: `FRAME_BYTES` for each. A chunk of a single frame has no others: it
    # takes `IMAGE_BYTES`. The tables are for one pixel of the video's frame.
    other_frames = longest_chunk - longest_chunk % 2
    temporaries = other_frames * FRAME_BYTES[direction] if other_frames else IMAGE_BYTES[direction]
    bytes_a_pixel = CACHE_BYTES[direction] + temporaries
    return math.ceil(bytes_a_pixel * relative_size * kernel_factor * height * width / devices)


def fitting_tile(
    vae: Any, direction: Direction, height: int, width: int, frames: int, free: int
) -> tuple[int, int] | None:
    """Return the (height, width) in pixels of the largest tile that is estimated to fit into `free` bytes.

    The tile has about the shape of the frame. The result is None if whole frames fit.
    """
    whole_bytes = estimated_bytes(vae, direction, height, width, frames)
    if whole_bytes <= MARGIN * free:  # `MARGIN` is the fraction of the free memory that an estimate may take
        return None
    shrink = math.sqrt(MARGIN * free / whole_bytes)  # the root, because memory grows with the area
    scale = vae.spatial_compression_ratio
    # A tile has a whole number of latent pixels along each side, at least `SMALLEST_TILE`.
    tile_height, tile_width = (
        max(int(side * shrink) // scale, SMALLEST_TILE) * scale for side in (height, width)
    )
    return tile_height, tile_width


def own_tile(vae: Any) -> tuple[int, int]:
    """Return the height and width, in pixels, of the tiles that a model's attributes ask for."""
    scale = vae.spatial_compression_ratio
    return vae.tile_latent_min_height * scale, vae.tile_latent_min_width * scale


def tile_of(vae: Any, direction: Direction, height: int, width: int, frames: int) -> tuple[int, int] | None:
    """Return the height and width, in pixels, of a model's tiles; None if its tiling is off.

    After `enable_tiling("auto")` they are chosen at the first call for a video of this size and number of
    frames: None if whole frames fit into the free memory. With several processes, every process must call
    this.
    """
    if not vae.use_tiling:
        return None
    if vae.tile_choices is None:
        return own_tile(vae)
    key = direction, height, width, frames
    if key not in vae.tile_choices:
        vae.tile_choices[key] = fitting_tile(vae, *key, free_memory(vae.mesh))
    return vae.tile_choices[key]


@contextlib.contextmanager
def restoring_tiles(vae: Any) -> Iterator[None]:
    """Restore a model's tile settings after the `with` block, which may change them."""
    attributes = vars(vae).copy()  # a loop over `vars` fails if another thread adds an attribute meanwhile
    saved = {name: attributes[name] for name in attributes if name.startswith(("use_tiling", "tile_"))}
    saved["tile_choices"] = vae.tile_choices  # of the class, if `enable_tiling` was never called
    try:
        yield
    finally:
        for name, value in saved.items():
            setattr(vae, name, value)


def retry_tiled_on_oom(
    vae: Any, sides: Sequence[int], start: Callable[[], Iterator[Item]], say: Callable[[str], None]
) -> Iterator[Item]:
    """Yield the results of a video's chunks; if memory runs out, continue once in smaller tiles.

    A failed chunk may have lost the convolutions' cache, which was donated to its program. So the video
    starts again, in tiles of half the height and width. The results that were yielded before are computed
    again, but not yielded again. The model's tiling stays on. With several processes the error is raised,
    because the other processes do not know of it and would wait.

    `sides` are the height and width in pixels of what the network takes at once, a frame or a tile. `start`
    starts the video with the model's tiling, and returns an iterator over the chunks' results. `say` gets a
    message if memory runs out.
    """
    yielded = 0
    try:
        for item in start():
            yield item
            yielded += 1
        return
    except Exception as error:
        if of_several_processes(getattr(vae, "mesh", None)) or not out_of_memory(error):
            raise
    scale = vae.spatial_compression_ratio
    tile = [max(side // 2 // scale, SMALLEST_TILE) * scale for side in sides]
    say(f"out of memory after {yielded} chunks: going on in tiles of {tile[0]} x {tile[1]} pixels")
    vae.enable_tiling(*tile)
    yield from itertools.islice(start(), yielded, None)  # without the results that were yielded before


def out_of_memory(error: BaseException) -> bool:
    """Return whether an error reports exhausted memory, of the device or of the host."""
    text = f"{type(error).__name__}: {error}".lower()
    return any(words in text for words in EXHAUSTED)


def free_memory(mesh: Mesh | None = None) -> int:
    """Return the free bytes of one device: of this process's first device, for a mesh too.

    One device stands for all. CPU devices share the host's free memory equally. For a mesh of several
    processes the result is the least that a process finds, and every process must call this.
    """
    local_bytes = _free_memory(1 if mesh is None else mesh.local_mesh.size)
    if not of_several_processes(mesh):
        return local_bytes
    # In MiB, which fit into 32 bits: JAX has no 64-bit integers by default.
    mebibytes = multihost_utils.process_allgather(np.asarray(local_bytes // 2**20, np.int32))
    return int(np.min(mebibytes)) * 2**20


def _free_memory(devices: int) -> int:
    """Return the free bytes of this process's first device.

    For a CPU device this is the host's free memory over `devices`, the number of CPU devices that share it.
    """
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:  # an accelerator; JAX has no statistics of a CPU
        return int(stats["bytes_limit"] - stats.get("bytes_in_use", 0))
    if not MEMINFO.is_file():  # off Linux: all memory of the machine
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // devices
    lines = MEMINFO.read_text().splitlines()  # such as "MemAvailable:   12345678 kB"
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")) // devices
