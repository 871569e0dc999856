"""Memory over the frames and over the size of a video: streamed, whole, in tiles, and diffusers in PyTorch.

    python -m benchmarks.memory       # writes results/memory.json; then python -m benchmarks draw

Each point is a process of its own. Its figure is its largest resident set less that of the same process with
one frame, which has the packages, the weights and the programs. That frame has the curve's own size if the
frames vary, and the size `PLACE` if the size does. `reconstruct` goes from file to file; the others decode
latents in memory to frames in memory. A small model has random weights, in float32 on one CPU. XLA runs
without LLVM's passes, so that compiling takes little memory, and the C library returns freed memory at once.
"""

import collections
import contextlib
import functools
import io
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks import worker
from benchmarks.pages import keep
from benchmarks.report import host_peak_bytes
from cogvideox_torchax.files import video
from tests import reference

MIB = 2**20
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "OMP_NUM_THREADS": "1",
    "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false",
    # The C library returns freed memory at once, so that the resident set is the memory in use.
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_ARENA_MAX": "1",
}
"""The variables with which each process starts."""
LONG, SMALL = (17, 497, 1001, 2001), (16, 24)
FRAMES = (17, 49, 97, 129)
SIZES = ((64, 96), (96, 144), (128, 192), (192, 288))
WAYS = ("diffusers in PyTorch", "torchax, streamed", "torchax, whole", "torchax, in tiles")
PLACE = (64, 96)
"""Height and width where the frames vary."""
TILE = (64, 96)
"""Tile of larger pictures; a picture that is no larger is cut in two."""
LATENT_FRAMES = 5
"""Latent frames where the size varies: 17 frames."""


@functools.cache
def measured(way: str, frames: int, height: int, width: int) -> float:
    """Return the `peak` of a process of its own."""
    point = {"way": way, "frames": frames, "height": height, "width": width}
    return worker.figure("memory.peak", point, ENVIRONMENT)


def peak(way: str, frames: int, height: int, width: int) -> dict[str, float]:
    """Decode or reconstruct a video one way, and return this process's largest resident set in MiB."""
    torch.set_grad_enabled(False)
    if way == "reconstruct":
        _reconstruct(frames, height, width)
    else:
        _decode(way, frames, height, width)
    return {"figure": (host_peak_bytes() or 0) / MIB}


def _decode(way: str, frames: int, height: int, width: int) -> None:
    """Decode latents of a video one of `WAYS`; the small model has four pixels to a latent pixel."""
    stock = reference.small_vae()
    z = torch.zeros(1, 16, -(-frames // 4), height // 4, width // 4)
    if way == "diffusers in PyTorch":
        stock.decode(z)
        return
    vae: Any = reference.on_jax(stock)
    if way == "torchax, streamed":
        collections.deque(vae.decode_stream(z, output_dtype=torch.uint8), maxlen=0)  # drops the frames
        return
    if way == "torchax, in tiles":
        rows = TILE[0] if height > TILE[0] else height // 2
        vae.enable_tiling(tile_sample_min_height=rows, tile_sample_min_width=min(width, TILE[1]))
    vae.decode(z.to("jax")).sample.to("cpu")


def _reconstruct(frames: int, height: int, width: int) -> None:
    """Encode and decode a video by the command `reconstruct`, from file to file."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        reference.small_vae().save_pretrained(directory / "vae")
        with video.writing(directory / "in.mp4", 25) as write:
            for number in range(frames):
                write(torch.full((1, 3, 1, height, width), number % 256, dtype=torch.uint8))
        files = [directory / "in.mp4", "-o", directory / "out.mp4", "--model", directory / "vae"]
        given = ["", "reconstruct", *map(str, files), "--crop", "--quiet"]
        # In this process, whose memory is measured.
        with (
            mock.patch.object(sys, "argv", given),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.suppress(SystemExit),
        ):
            runpy.run_module("cogvideox_torchax", run_name="__main__")
        assert video.probe(directory / "out.mp4").num_frames == frames


def curve(way: str, points: list[tuple[int, int, int]], before: tuple[int, int, int]) -> dict[str, Any]:
    """Return the memory of one way at each point (frames, height, width) over that at the point `before`."""
    base = measured(way, *before)
    found = [round(measured(way, *point) - base, 1) for point in points]
    print(way, points, found, flush=True)
    return {"way": way, "points": [list(point) for point in points], "base_MiB": round(base, 1), "MiB": found}


def measure() -> None:
    """Measure all curves, and keep the results after each."""
    found: dict[str, list[Any]] = {}
    kinds = {  # by kind of curves: the ways, the points and the point that is subtracted
        "long": (("reconstruct",), [(frames, *SMALL) for frames in LONG], (1, *SMALL)),
        "over_frames": (WAYS, [(frames, *PLACE) for frames in FRAMES], (1, *PLACE)),
        "over_size": (WAYS, [(4 * LATENT_FRAMES - 3, *size) for size in SIZES], (1, *PLACE)),
    }
    for kind, (ways, points, before) in kinds.items():
        found[kind] = []
        for way in ways:
            found[kind].append(curve(way, points, before))
            keep("memory", found, "torch", "torchax", "jax", "diffusers")


if __name__ == "__main__":
    measure()
