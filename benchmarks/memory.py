"""Memory over the frames and over the size of a video: streamed, whole, in tiles, and diffusers in PyTorch.

    PYTHONPATH=. python benchmarks/memory.py          # writes results/memory.json, draws the plot

Each point is a process of its own. What counts is its largest resident set less that of the same process
with one frame, which has the packages, the weights and the programs: of the curve's own size where the frames
vary, of `PLACE` where the size does. `reconstruct` goes from file to file; the others decode latents that are
there to frames that stay there. Random weights of a small model, float32, one CPU; XLA without LLVM's passes,
so that compiling takes no memory of note; the C library gives back at once what is freed.
"""

import argparse
import contextlib
import ctypes
import functools
import io
import json
import os
import resource
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false")

import torch
import torchax  # noqa: F401 (imported once, before the first fork)

import cogvideox_torchax.backends.torchax
import cogvideox_torchax.sharding  # noqa: F401
from benchmarks.pages import fill
from cogvideox_torchax import cli
from cogvideox_torchax.files import reports, video
from cogvideox_torchax.versions import versions
from tests import reference

FORMAT = "cogvideox-torchax-memory/1"
RESULTS = Path("benchmarks/results/memory.json")
PAGE, PLOT = Path("docs/performance.md"), Path("docs/images/memory.png")
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
    """Mebibytes of the largest resident set of a process of its own, forked before JAX has a device."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        code = 1
        try:
            os.write(write, str(one(way, frames, height, width)).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(write)
    with os.fdopen(read, "rb") as said:
        found = said.read()
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        raise RuntimeError(f"{way} of {frames} x {height} x {width} failed")
    return float(found)


def one(way: str, frames: int, height: int, width: int) -> float:
    """Measure one point; return mebibytes of this process's largest resident set."""
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    if way == "reconstruct":
        _reconstruct(frames, height, width)
    else:
        stock = reference.small_vae(**reference.THREE_LEVELS)
        z = torch.zeros(1, 16, -(-frames // 4), height // 4, width // 4)
        if way == "diffusers in PyTorch":
            stock.decode(z)
        else:
            vae = reference.on_jax(stock)
            if way == "torchax, in tiles":
                rows = TILE[0] if height > TILE[0] else height // 2
                vae.enable_tiling(tile_sample_min_height=rows, tile_sample_min_width=min(width, TILE[1]))
            if way == "torchax, streamed":
                for _ in vae.decode_stream(z, output_dtype=torch.uint8):
                    pass
            else:
                vae.decode(z.to("jax")).sample.to("cpu")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MIB


def _reconstruct(frames: int, height: int, width: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        reference.small_vae(**reference.THREE_LEVELS).save_pretrained(directory / "vae")
        with video.writing(directory / "in.mp4", 25) as sink:
            for number in range(frames):
                sink.write(torch.full((1, 3, 1, height, width), number % 256, dtype=torch.uint8))
        given = ["reconstruct", directory / "in.mp4", "-o", directory / "out.mp4", "--crop"]
        with contextlib.redirect_stdout(io.StringIO()):
            code = cli.main([*map(str, given), "--model", str(directory / "vae"), "--quiet"])
        assert code == 0
        assert video.probe(directory / "out.mp4").num_frames == frames


def curve(way: str, points: list[tuple[int, int, int]], before: tuple[int, int, int]) -> dict[str, Any]:
    base = measured(way, *before)
    found = [round(measured(way, *point) - base, 1) for point in points]
    print(way, points, found, flush=True)
    return {"way": way, "points": [list(point) for point in points], "base_MiB": round(base, 1), "MiB": found}


def measure(only: list[str] | None) -> dict[str, Any]:
    """Measure the curves, saving each at once; with `only`, other kinds are kept from the last run."""
    found = json.loads(RESULTS.read_text()) if only else {}
    found |= {"format": FORMAT, "versions": versions("torch", "torchax", "jax", "diffusers")}
    points = {
        "long": ([(frames, *SMALL) for frames in LONG], (1, *SMALL)),
        "over_frames": ([(frames, *PLACE) for frames in FRAMES], (1, *PLACE)),
        "over_size": ([(4 * LATENT_FRAMES - 3, *size) for size in SIZES], (1, *PLACE)),
    }
    for kind in only or points:
        ways = ("reconstruct",) if kind == "long" else WAYS
        found[kind] = []
        for way in ways:
            found[kind].append(curve(way, *points[kind]))
            reports.write_json(RESULTS, found)
    return found


PANELS = {
    "over_frames": ("frames of 64 x 96", "frames", lambda point: point[0]),
    "over_size": ("pixels of each of 17 frames", "size", lambda point: point[1] * point[2]),
    "long": ("frames of 16 x 24, file to file", "long", lambda point: point[0]),
}
"""For each kind of curve: the axis, its part of the page, and a point's place on it."""


def draw(found: dict[str, Any]) -> None:
    """Draw the plot of the curves that exist, and their tables in the page."""
    pyplot = reports.pyplot()
    kinds = [kind for kind in PANELS if kind in found]
    figure, axes = pyplot.subplots(1, len(kinds), figsize=(4.5 * len(kinds), 4), squeeze=False)
    for axis, kind in zip(axes[0], kinds, strict=True):
        label, part, place = PANELS[kind]
        for curve in found[kind]:
            axis.plot([place(point) for point in curve["points"]], curve["MiB"], "o-", label=curve["way"])
        axis.set_xlabel(label)
        axis.set_ylabel("MiB over a video of one frame")
        axis.set_ylim(bottom=0)
        axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2, frameon=False)  # above the curves
        name = (lambda point: f"{point[1]} x {point[2]}") if kind == "over_size" else (lambda p: str(p[0]))
        fill(PAGE, part, _table("pixels" if kind == "over_size" else "frames", found[kind], name))
    figure.tight_layout()
    figure.savefig(PLOT, dpi=110)


def _table(head: str, curves: list[dict[str, Any]], name: Any) -> str:
    rows = [(curve["way"], *(f"{value:.0f}" for value in curve["MiB"])) for curve in curves]
    return reports.table((f"MiB, by {head}", *map(name, curves[0]["points"])), rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draw", action="store_true", help="from the results that there are")
    parser.add_argument("--only", nargs="+", choices=("long", "over_frames", "over_size"))
    args = parser.parse_args()
    if not args.draw:
        settle_malloc()
        measure(args.only)
    draw(json.loads(RESULTS.read_text()))


if __name__ == "__main__":
    main()
