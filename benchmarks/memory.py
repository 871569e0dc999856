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
import ctypes
import functools
import io
import multiprocessing
import os
import resource
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault(
        "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
    )

import torch
import torchax  # noqa: F401 (imported once, before the first fork)

import cogvideox_torchax.backends.torchax
import cogvideox_torchax.sharding  # noqa: F401
from benchmarks.pages import RESULTS, ROOT
from cogvideox_torchax import cli
from cogvideox_torchax.files import reports, video
from cogvideox_torchax.versions import versions
from tests import reference

FORMAT = "cogvideox-torchax-memory/1"
RESULT, PLOT = RESULTS / "memory.json", ROOT / "docs" / "images" / "memory.png"
MIB = 2**20
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


def settle_malloc() -> None:
    """Make the C library return freed memory at once, so that the resident set is the memory in use."""
    mmap_threshold, arena_max = -3, -8
    library = ctypes.CDLL(None)
    assert library.mallopt(mmap_threshold, 2**16)
    assert library.mallopt(arena_max, 1)


@functools.cache
def measured(way: str, frames: int, height: int, width: int) -> float:
    """Return `largest_resident_set` of a process of its own, forked before JAX has a device."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as processes:
        return processes.submit(largest_resident_set, way, frames, height, width).result()


def largest_resident_set(way: str, frames: int, height: int, width: int) -> float:
    """Decode or reconstruct a video one way, and return this process's largest resident set in MiB."""
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    if way == "reconstruct":
        _reconstruct(frames, height, width)
    else:
        _decode(way, frames, height, width)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MIB


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
    """Encode and decode a video by the command line, from file to file."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        reference.small_vae().save_pretrained(directory / "vae")
        with video.writing(directory / "in.mp4", 25) as sink:
            for number in range(frames):
                sink.write(torch.full((1, 3, 1, height, width), number % 256, dtype=torch.uint8))
        given = ["reconstruct", directory / "in.mp4", "-o", directory / "out.mp4", "--crop"]
        with contextlib.redirect_stdout(io.StringIO()):
            code = cli.main([*map(str, given), "--model", str(directory / "vae"), "--quiet"])
        assert code == 0
        assert video.probe(directory / "out.mp4").num_frames == frames


def curve(way: str, points: list[tuple[int, int, int]], before: tuple[int, int, int]) -> dict[str, Any]:
    """Return the memory of one way at each point (frames, height, width) over that at the point `before`."""
    base = measured(way, *before)
    found = [round(measured(way, *point) - base, 1) for point in points]
    print(way, points, found, flush=True)
    return {"way": way, "points": [list(point) for point in points], "base_MiB": round(base, 1), "MiB": found}


def measure() -> None:
    """Measure all curves, and keep the results after each."""
    found: dict[str, Any] = {"format": FORMAT, "versions": versions("torch", "torchax", "jax", "diffusers")}
    kinds = {  # by kind of curves: the ways, the points and the point that is subtracted
        "long": (("reconstruct",), [(frames, *SMALL) for frames in LONG], (1, *SMALL)),
        "over_frames": (WAYS, [(frames, *PLACE) for frames in FRAMES], (1, *PLACE)),
        "over_size": (WAYS, [(4 * LATENT_FRAMES - 3, *size) for size in SIZES], (1, *PLACE)),
    }
    for kind, (ways, points, before) in kinds.items():
        found[kind] = []
        for way in ways:
            found[kind].append(curve(way, points, before))
            reports.write_json(RESULT, found)


PANELS = {
    # kind of curves: (label of its axis, name of its table in the page, head of that table)
    "over_frames": ("frames of 64 x 96", "frames", "frames"),
    "over_size": ("pixels of each of 17 frames", "size", "pixels"),
    "long": ("frames of 16 x 24, file to file", "long", "frames"),
}


def _places(points: list[list[int]], head: str) -> tuple[list[int], list[str]]:
    """Return where points lie on the axis of frames or pixels, and their names in a table."""
    if head == "frames":
        return [frames for frames, _, _ in points], [str(frames) for frames, _, _ in points]
    return [height * width for _, height, width in points], [
        f"{height} x {width}" for _, height, width in points
    ]


def drawn(kind: str) -> str:
    """Return the table of a kind of curves."""
    (_label, _part, head), curves = PANELS[kind], reports.load(RESULT, FORMAT)[kind]
    _, names = _places(curves[0]["points"], head)
    rows = [(curve["way"], *(f"{value:.0f}" for value in curve["MiB"])) for curve in curves]
    return reports.table((f"MiB, by {head}", *names), rows)


def plot() -> None:
    found = reports.load(RESULT, FORMAT)
    figure, axes = reports.pyplot().subplots(1, len(PANELS), figsize=(4.5 * len(PANELS), 4))
    for axis, (kind, (label, _part, head)) in zip(axes, PANELS.items(), strict=True):
        for curve in found[kind]:
            axis.plot(_places(curve["points"], head)[0], curve["MiB"], "o-", label=curve["way"])
        axis.set(xlabel=label, ylabel="MiB over a video of one frame", ylim=(0, None))
        axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2, frameon=False)  # above the curves
    figure.tight_layout()
    reports.save_figure(figure, PLOT)


TABLES = {
    ("docs/performance.md", part): functools.partial(drawn, kind) for kind, (_, part, _) in PANELS.items()
}

if __name__ == "__main__":
    settle_malloc()
    measure()
