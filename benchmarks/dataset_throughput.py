"""Clips a second of `encode DIRECTORY` against the model's own: what reading and writing cost.

    PYTHONPATH=. python benchmarks/dataset_throughput.py          # writes results/dataset_throughput.json

The model's own is `encode_stream` of frames that are in memory. Both run in one process, in turn, with
programs that are compiled. Random weights of the small model that the package carries, float32, on a CPU,
which reads, computes and writes with the same cores: on a TPU reading and writing have theirs to themselves.
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from cogvideox_torchax import runtime
from cogvideox_torchax.cli.common import DEMO_MODEL
from cogvideox_torchax.dataset import Clip, EncodeClip, Recipe, loop, manifest, sources
from cogvideox_torchax.files import reports
from cogvideox_torchax.versions import versions
from tests.dataset.conftest import write_clip

FORMAT = "cogvideox-torchax-dataset-throughput/1"
PAGE = Path("docs/datasets.md")
RESULTS = Path("benchmarks/results/dataset_throughput.json")


def alone(unit: EncodeClip, clips: list[Clip]) -> float:
    """Seconds for the model alone."""
    readings = [unit.read(clip) for clip in clips]
    start = time.perf_counter()
    for reading in readings:
        assert reading.frames is not None
        for posterior in unit.vae.encode_stream(reading.frames):
            posterior.mode()
    return time.perf_counter() - start


def through(unit: EncodeClip, clips: list[Clip], out: Path) -> float:
    """Seconds for the directory, from its listing to its last shard."""
    by_id = {clip.id: clip for clip in clips}
    start = time.perf_counter()
    made_by = unit.recipe.lasting(unit.model_sha256)
    with manifest.Shelf(out, made_by, list(by_id), kind="parquet", shard_size=8) as shelf:
        steps = loop.work(
            shelf.pending(),
            lambda index: unit.read(by_id[shelf.ids[index] or ""]),
            unit.encode,
            shelf.keep,
            shelf.refuse,
        )
        assert all(step.error is None for step in steps)
    seconds = time.perf_counter() - start
    shutil.rmtree(out)
    return seconds


def drawn(document: dict[str, Any]) -> str:
    """What the page says of it."""
    frames, height, width = document["video"]
    return (
        f"On a CPU, {document['clips']} clips of {frames} x {height} x {width} and the small model that the "
        f"package carries: {document['batch_clips_a_second']:.2f} clips a second through the directory, "
        f"{document['own_clips_a_second']:.2f} by the model alone on frames in memory, a share of "
        f"**{document['ratio']:.2f}** (median of {len(document['rounds'])} rounds; "
        "`python benchmarks/dataset_throughput.py`)."
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("benchmarks/results/dataset_throughput.json")
    )
    parser.add_argument("--model", default=str(DEMO_MODEL))
    parser.add_argument("--clips", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--frames", type=int, default=17)
    parser.add_argument("--height", type=int, default=64)
    parser.add_argument("--width", type=int, default=96)
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    runtime.enable()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for number in range(args.clips):
            path = root / "in" / f"{number:03}.mp4"
            write_clip(path, 3 * number, args.frames, args.height, args.width)
        clips = sources.clips(root / "in")
        unit = EncodeClip(Recipe(args.model))
        unit(clips[0])
        rounds: list[dict[str, Any]] = []
        for _ in range(args.rounds):
            own, batch = alone(unit, clips), through(unit, clips, root / "out")
            rounds.append({"own_s": own, "batch_s": batch, "ratio": own / batch})
            print(rounds[-1], flush=True)
    document = {
        "format": FORMAT,
        "clips": args.clips,
        "video": [args.frames, args.height, args.width],
        "rounds": rounds,
        "own_clips_a_second": args.clips / statistics.median(r["own_s"] for r in rounds),
        "batch_clips_a_second": args.clips / statistics.median(r["batch_s"] for r in rounds),
        "ratio": statistics.median(r["ratio"] for r in rounds),
        "versions": versions("torch", "torchax", "jax", "diffusers"),
    }
    reports.write_json(args.output, document)
    reports.fill(PAGE, "throughput", drawn(document))


if __name__ == "__main__":
    main()
