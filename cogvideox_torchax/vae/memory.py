"""Tiles chosen by the free memory, and a video continued in tiles where memory runs out.

The memory of a chunk is estimated from the TPU compiler's plan of CogVideoX-5b at 480 x 720 in bfloat16
(`cogvideox-torchax plan`): bytes for each pixel of a frame, for the cache and for each frame of the chunk, in
proportion to the channels and to the bytes of a number.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from cogvideox_torchax import runtime
from cogvideox_torchax.vae.directions import DECODE, ENCODE, Direction
from cogvideox_torchax.vae.sizes import SMALLEST_TILE, parse_size

CACHE_BYTES = {ENCODE: 5217, DECODE: 8187}
"""Bytes of the convolutions' cache for each pixel of a frame (of the video, to decode too).

The cache has this size after a chunk of any length, even a single frame.
"""
FRAME_BYTES = {ENCODE: 840, DECODE: 5230}
"""Bytes of temporaries beside the cache, for each pixel of each frame to encode or latent frame to decode.

The first of an odd number of frames is computed alone, and needs no further memory.
"""
IMAGE_BYTES = {ENCODE: 1083, DECODE: 739}
"""Bytes of temporaries beside the cache, for each pixel of a chunk of a single frame.

All three tables come from benchmarks/results/plan-v6e-1-*-torchax.json and compile-times.json, for first
chunks. A later chunk takes a cache too: it needs less than a first chunk at 480 x 720, and a twentieth more
than estimated at 720 x 1280.
"""
PLANNED_CHANNELS, PLANNED_ITEMSIZE = 128, 2
"""Channels at the highest resolution, and bytes of a number, of the planned model: CogVideoX-5b, bfloat16."""
WITHOUT_KERNEL = 2.1
"""Factor for dtypes other than bfloat16, which do not use the convolution's kernel.

Before the kernel existed, a chunk to decode was planned at 13513 bytes for each pixel of a latent frame.
"""
MARGIN = 0.9
"""Fraction of the free memory that the estimate may take."""

Item = TypeVar("Item")


def parse_tiles(text: str, scale: int) -> tuple[int, int]:
    """Return a tile's height and width in pixels, of text like "240x360".

    `scale` is the number of pixels for each latent pixel, along one axis.

    Raises:
        SizeError: another text, or sides that are no multiples of `scale`, or smaller than 2 * `scale`.
    """
    height, width = parse_size(text, "tiles", multiple=scale, least=SMALLEST_TILE)
    return height, width


def check_tiling(tiling: str | None, scale: int) -> None:
    """Raise `SizeError` unless `set_tiles` takes this `tiling`.

    Args:
        tiling: tiles as "HEIGHTxWIDTH", or "auto" or None, which are always valid.
        scale: pixels for each latent pixel, along one axis; a tile's sides must be multiples of it.
    """
    if tiling not in (None, "auto"):
        parse_tiles(tiling, scale)


def estimated_bytes(vae: Any, direction: Direction, height: int, width: int, frames: int) -> int:
    """Return the estimated bytes of a video's largest chunk, without weights, on one device.

    Args:
        vae: the model.
        direction: `ENCODE` or `DECODE`.
        height, width: size of the frames, in pixels.
        frames: number of frames of the whole input, a video or latents.
    """
    longest = max(map(len, direction.chunks(vae, frames)))  # frames of the largest chunk
    # The constants are bytes per pixel of the published model in bfloat16. Other models are in proportion to
    # the channels at full resolution (the first of `block_out_channels`) and to the bytes of a number.
    relative_size = (
        vae.config["block_out_channels"][0] / PLANNED_CHANNELS * vae.dtype.itemsize / PLANNED_ITEMSIZE
    )
    mesh = getattr(vae, "mesh", None)
    devices = 1 if mesh is None else mesh.size
    # Only bfloat16 uses the convolution's kernel.
    kernel_factor = 1.0 if runtime.dtype_name(vae.dtype) == "bfloat16" else WITHOUT_KERNEL
    # The first of an odd number of frames runs alone, and needs less than the frames after it, run together.
    together = longest - longest % 2
    temporaries = together * FRAME_BYTES[direction] if together else IMAGE_BYTES[direction]
    bytes_a_pixel = CACHE_BYTES[direction] + temporaries
    return math.ceil(bytes_a_pixel * relative_size * kernel_factor * height * width / devices)


def fitting_tile(
    vae: Any, direction: Direction, height: int, width: int, frames: int, free: int
) -> tuple[int, ...] | None:
    """Return the largest tile, of the frame's shape, that fits into memory by the estimate.

    Args:
        vae, direction: the model, and `ENCODE` or `DECODE`.
        height, width: size of the frames, in pixels.
        frames: number of frames of the whole input, a video or latents.
        free: free bytes of a device.

    Returns:
        Height and width in pixels; None if whole frames fit.
    """
    whole_bytes = estimated_bytes(vae, direction, height, width, frames)
    if whole_bytes <= MARGIN * free:
        return None
    # `MARGIN` is the fraction of the free memory that the estimate may take. Memory grows with the area, so a
    # side shrinks by the root. Tiles have whole latent pixels, which are `scale` pixels wide and high.
    shrink, scale = math.sqrt(MARGIN * free / whole_bytes), vae.spatial_compression_ratio
    return tuple(max(int(side * shrink) // scale, SMALLEST_TILE) * scale for side in (height, width))


def set_tiles(
    vae: Any, tiling: str | None, direction: Direction, height: int, width: int, frames: int
) -> str | None:
    """Enable or disable a model's tiling for a video.

    Args:
        vae: the model.
        tiling: "HEIGHTxWIDTH" in pixels, "auto" for tiles if whole frames do not fit into memory, or None,
            which leaves the model's tiling as it is.
        direction: `ENCODE` or `DECODE`. The direction and the sizes below are used only for "auto".
        height, width: size of the frames, in pixels.
        frames: number of frames of the whole input, a video or latents.

    Returns:
        A message about tiles that "auto" has chosen, or None.

    Raises:
        SizeError: a size that cannot be taken.
    """
    if tiling is None:
        return None
    if tiling != "auto":
        vae.enable_tiling(*parse_tiles(tiling, vae.spatial_compression_ratio))
        return None
    free = runtime.free_memory(getattr(vae, "mesh", None))
    tile = fitting_tile(vae, direction, height, width, frames, free)
    if tile is None:  # whole frames fit
        vae.disable_tiling()
        return None
    vae.enable_tiling(*tile)
    return f"tiles of {' x '.join(map(str, tile))} pixels, as {free / 2**30:.1f} GiB are free"


def tile_of(vae: Any) -> tuple[int, int] | None:
    """Return the height and width of a model's tiles, in pixels; None if tiling is off."""
    if not vae.use_tiling:
        return None
    return (
        vae.tile_latent_min_height * vae.spatial_compression_ratio,
        vae.tile_latent_min_width * vae.spatial_compression_ratio,
    )


@contextlib.contextmanager
def restoring_tiles(vae: Any) -> Iterator[None]:
    """Restore a model's tile settings after the `with` block, which may change them."""
    attributes = vars(vae).copy()  # at once: another thread may add an attribute
    saved = {name: attributes[name] for name in attributes if name.startswith(("use_tiling", "tile_"))}
    try:
        yield
    finally:
        for name, value in saved.items():
            setattr(vae, name, value)


def retry_tiled_on_oom(
    vae: Any, size: tuple[int, int], start: Callable[[], Iterator[Item]], say: Callable[[str], None]
) -> Iterator[Item]:
    """Yield the results of a video's chunks; if memory runs out, continue once in smaller tiles.

    The video then starts again, in tiles of half the height and width, as a failed chunk may have lost the
    convolutions' cache; results that were yielded before are computed, but not yielded, again. With several
    processes the error is raised: the other processes do not know of it, and would wait.

    Args:
        vae: the model; its tiling stays on afterwards.
        size: height and width of the frames, in pixels.
        start: starts the video with the model's tiling, and returns an iterator over its chunks' results.
        say: called with a message if memory runs out.
    """
    yielded = 0
    try:
        for item in start():
            yield item
            yielded += 1
        return
    except Exception as error:
        if runtime.of_several_processes(getattr(vae, "mesh", None)) or not runtime.out_of_memory(error):
            raise
    scale = vae.spatial_compression_ratio
    last_sides = map(min, tile_of(vae) or size, size)  # a tile may be larger than the frame
    tile = [max(side // 2 // scale, SMALLEST_TILE) * scale for side in last_sides]
    say(f"out of memory after {yielded} chunks: going on in tiles of {tile[0]} x {tile[1]} pixels")
    vae.enable_tiling(*tile)
    yield from itertools.islice(start(), yielded, None)
