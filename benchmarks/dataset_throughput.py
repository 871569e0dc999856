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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from benchmarks.pages import fill
from cogvideox_torchax import runtime
from cogvideox_torchax.cli.common import DEMO_MODEL
from cogvideox_torchax.dataset import Clip, ClipConfig, EncodeClip, manifest, sources
from cogvideox_torchax.files import reports
from cogvideox_torchax.plan import jobs
from cogvideox_torchax.versions import versions
from tests.dataset.conftest import write_clip

FORMAT = "cogvideox-torchax-dataset-throughput/1"
PAGE = Path("docs/datasets.md")
RESULTS = Path("benchmarks/results/dataset_throughput.json")
PLAN = Path("benchmarks/results/plan-v6e-1-encode-torchax.json")
MILLION = 1_000_000


@dataclass(frozen=True)
class Took:
    """Seconds of the clock, of this process's cores together, and of the clock while a clip was computed."""

    wall: float
    cores: float
    computing: float


def alone(unit: EncodeClip, clips: list[Clip]) -> Took:
    """Time the model alone."""
    readings = [unit.read(clip) for clip in clips]
    start, cores = time.perf_counter(), time.process_time()
    for reading in readings:
        assert reading.frames is not None
        for posterior in unit.vae.encode_stream(reading.frames):
            posterior.mode()
    wall = time.perf_counter() - start
    return Took(wall, time.process_time() - cores, wall)


def through(unit: EncodeClip, clips: list[Clip], out: Path) -> Took:
    """Time the directory, from its listing to its last shard."""
    start, cores = time.perf_counter(), time.process_time()
    made_by = unit.config.fixed_settings(unit.model_sha256)
    with manifest.DatasetDirectory(out, made_by, clips, kind="parquet", shard_size=8) as directory:
        done = list(directory.work(unit))
        assert all(step.error is None for step in done)
    took = Took(time.perf_counter() - start, time.process_time() - cores, sum(step.computed for step in done))
    shutil.rmtree(out)
    return took


def drawn(document: dict[str, Any], plan: dict[str, Any]) -> str:
    """Return the page's text."""
    frames, height, width = document["video"]
    job, seconds = plan["job"], plan["summary"]["with_collectives_s"]
    hours = MILLION * seconds / document["ratio"] / 3600
    rows = (
        (
            f"a directory, {document['clips']} clips of {frames} x {height} x {width}, bundled model, CPU",
            f"{document['batch_clips_a_second']:.2f} clips a second",
        ),
        (
            "the model alone, the same frames in memory",
            f"{document['own_clips_a_second']:.2f} clips a second",
        ),
        ("ratio, median of the rounds", f"{document['ratio']:.2f}"),
        (
            f"estimate for a clip of {job['frames']} x {job['height']} x {job['width']}, one v6e",
            f"{seconds:.2f} s",
        ),
        ("the same for a million clips, at that ratio", f"{hours:.0f} chip hours"),
    )
    return reports.table(("encoding", "rate"), rows)


def draw(results: Path) -> None:
    """Fill the table of the page."""
    document, plan = (reports.load(path, kind) for path, kind in ((results, FORMAT), (PLAN, jobs.FORMAT)))
    fill(PAGE, "throughput", drawn(document, plan))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--output", type=Path, default=RESULTS)
    parser.add_argument("--model", default=str(DEMO_MODEL))
    parser.add_argument("--clips", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--frames", type=int, default=17)
    parser.add_argument("--height", type=int, default=64)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--draw", action="store_true", help="from the results that there are")
    args = parser.parse_args()
    if args.draw:
        draw(args.output)
        return
    torch.set_grad_enabled(False)
    runtime.enable()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for number in range(args.clips):
            path = root / "in" / f"{number:03}.mp4"
            write_clip(path, 3 * number, args.frames, args.height, args.width)
        clips = sources.clips(root / "in")
        unit = EncodeClip(ClipConfig(args.model))
        unit(clips[0])
        rounds: list[dict[str, Any]] = []
        for _ in range(args.rounds):
            own, batch = alone(unit, clips), through(unit, clips, root / "out")
            rounds.append(
                {
                    "own_s": own.wall,
                    "batch_s": batch.wall,
                    "ratio": own.wall / batch.wall,
                    "ratio_of_core_seconds": own.cores / batch.cores,
                    "computing_share": batch.computing / batch.wall,
                }
            )
            print(rounds[-1], flush=True)
    document = {
        "format": FORMAT,
        "clips": args.clips,
        "video": [args.frames, args.height, args.width],
        "rounds": rounds,
        "own_clips_a_second": args.clips / statistics.median(r["own_s"] for r in rounds),
        "batch_clips_a_second": args.clips / statistics.median(r["batch_s"] for r in rounds),
        **{
            name: statistics.median(r[name] for r in rounds)
            for name in ("ratio", "ratio_of_core_seconds", "computing_share")
        },
        "load_of_the_machine": os.getloadavg()[1],
        "cores_of_the_machine": os.cpu_count(),
        "versions": versions("torch", "torchax", "jax", "diffusers"),
    }
    reports.write_json(args.output, document)
    draw(args.output)


if __name__ == "__main__":
    main()
