"""Clips a second of `encode DIRECTORY` against the model's own: the cost of reading and writing.

    python -m benchmarks.dataset_throughput     # then python -m benchmarks draw

The model's own speed is that of `encode_stream` for frames that are in memory. Both run in one process, in
turn, with programs that are compiled. The model is the small one in the package, in float32 on a CPU, which
reads, computes and writes with the same cores. A TPU leaves its host's cores to reading and writing.
"""

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from benchmarks.pages import DEMO_MODEL, keep
from cogvideox_torchax.dataset import Clip, ClipConfig, EncodeClip, sources
from cogvideox_torchax.dataset.directory import LatentDirectory
from tests.dataset.conftest import write_clip

CLIPS, ROUNDS, VIDEO = 16, 5, (17, 64, 96)
"""Number of clips, how often all of them are encoded each way, and a clip's frames, height and width."""


def seconds_alone(unit: EncodeClip, clips: list[Clip]) -> float:
    """Return the seconds that the model takes to encode the clips' frames, which are in memory."""
    readings = [unit.read(clip) for clip in clips]
    start = time.perf_counter()
    for reading in readings:
        assert reading.frames is not None
        for posterior in unit.vae.encode_stream(reading.frames):
            posterior.mode()
    return time.perf_counter() - start


def seconds_of_directory(unit: EncodeClip, clips: list[Clip], out: Path) -> float:
    """Return the seconds that encoding the clips' directory takes, from its listing to its last file."""
    start = time.perf_counter()
    assert all(step.error is None for step in LatentDirectory(out, unit, clips).work())
    return time.perf_counter() - start


def measured() -> dict[str, Any]:
    """Encode the same clips both ways in turn; return the report."""
    torch.set_grad_enabled(False)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for number in range(CLIPS):
            write_clip(root / "in" / f"{number:03}.mp4", 3 * number, *VIDEO)
        clips = sources.clips(root / "in")
        unit = EncodeClip(ClipConfig(str(DEMO_MODEL)))
        unit(clips[0])  # compiles
        rounds = []
        for number in range(ROUNDS):
            own, directory = seconds_alone(unit, clips), seconds_of_directory(unit, clips, root / f"{number}")
            rounds.append({"own_s": own, "batch_s": directory, "ratio": own / directory})
            print(rounds[-1], flush=True)
    own, directory, ratio = (statistics.median(r[name] for r in rounds) for name in rounds[0])
    return {
        "clips": CLIPS,
        "video": VIDEO,
        "rounds": rounds,
        "own_clips_a_second": CLIPS / own,
        "batch_clips_a_second": CLIPS / directory,
        "ratio": ratio,
        "load_of_the_machine": os.getloadavg()[1],
        "cores_of_the_machine": os.cpu_count(),
    }


if __name__ == "__main__":
    keep("dataset_throughput", measured(), "torch", "torchax", "jax", "diffusers")
