"""One VAE under eight threads for half an hour: every result right, memory flat, nobody stuck.

    PYTHONPATH=. python benchmarks/soak.py --minutes 30

Each thread draws a size and a call at random, encode or decode, whole or streamed, and compares the result
with diffusers' of the same input. Memory is sampled all the while; what counts as growth is the median of the
last tenth of the samples over that of the first tenth, of those taken after every call has been made with
every size. Float32, random weights of a small model, one CPU device.
"""

import argparse
import os
import platform
import random
import sys
import threading
import time
from collections import Counter
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false")
os.environ.setdefault("COGVIDEOX_TORCHAX_COMPILE_CACHE", "off")

import copy
import statistics
from dataclasses import dataclass, field
from typing import Any

import jax
import torch

from cogvideox_torchax import enable, port, runtime
from cogvideox_torchax.files.reports import write_json
from cogvideox_torchax.vae.tolerances import FLOAT32_RELATIVE, relative_error
from tests import reference

FORMAT = "cogvideox-torchax soak 1"
SIZES = [(n, *size) for n in range(1, 6) for size in ((2, 2), (2, 3), (3, 4), (2, 6), (4, 4))]
"""Latent frames, rows and columns."""
CALLS = ("decode", "decode_stream", "encode", "encode_stream")
FLAT = 0.05
"""The growth of memory that still counts as none."""
STUCK = 300.0
"""Seconds that a thread has for its last call before it counts as stuck; a compilation takes a few."""


@dataclass
class Seen:
    """What the threads have done so far.

    Attributes:
        done: how often each call was made with each size.
        worst: the largest error of each call.
        errors: what a thread ended with.
    """

    done: Counter[tuple[str, tuple[int, int, int]]] = field(default_factory=Counter)
    worst: dict[str, float] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, call: str, size: tuple[int, int, int], error: float) -> None:
        with self.lock:
            self.done[call, size] += 1
            self.worst[call] = max(self.worst.get(call, 0.0), error)


def given(call: str, size: tuple[int, int, int]) -> torch.Tensor:
    """The input of a call: latents, or a video of as many latent frames."""
    frames, height, width = size
    if call.startswith("decode"):
        return reference.latents(frames, height=height, width=width)
    return reference.video(4 * frames - 3, height=4 * height, width=4 * width)


def answer(vae: Any, call: str, x: torch.Tensor) -> torch.Tensor:
    """What a ported VAE gives for plain tensors, plain again."""
    if call == "decode_stream":
        return torch.cat(list(vae.decode_stream(x)), dim=2)
    if call == "encode_stream":
        return torch.cat([part.parameters for part in vae.encode_stream(x)], dim=2)
    return wanted(vae, call, runtime.to_jax(x))


def wanted(vae: Any, call: str, x: torch.Tensor) -> torch.Tensor:
    """What diffusers' own calls give."""
    if call.startswith("decode"):
        return runtime.to_torch(vae.decode(x).sample)
    return runtime.to_torch(vae.encode(x).latent_dist.parameters)


def work(vae: Any, answers: dict[Any, torch.Tensor], seen: Seen, thread: int, stop: threading.Event) -> None:
    """One thread: random calls of random sizes until it is told to stop."""
    chance = random.Random(thread)
    try:
        with torch.no_grad():
            while not stop.is_set():
                call, size = chance.choice(CALLS), chance.choice(SIZES)
                got = answer(vae, call, given(call, size))
                seen.add(call, size, relative_error(got, answers[call.partition("_")[0], size]))
    except BaseException as error:
        seen.errors.append(f"{type(error).__name__}: {error}")
        raise


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def growth(samples: list[int]) -> float:
    """How much larger the last tenth of the samples is than the first, as a share of it."""
    tenth = max(1, len(samples) // 10)
    return statistics.median(samples[-tenth:]) / statistics.median(samples[:tenth]) - 1


def soak(minutes: float, *, threads: int = 8, every: float = 10.0) -> dict[str, Any]:
    """Runs for so many minutes and says what came of it.

    Args:
        minutes: how long.
        threads: how many call the model at once.
        every: seconds between two samples of the process's memory.

    Returns:
        The report; its "complaints" are empty where all is well.
    """
    stock = reference.small_vae(**reference.THREE_LEVELS)
    with torch.no_grad():
        kinds = ("decode", "encode")
        answers = {(kind, size): wanted(stock, kind, given(kind, size)) for kind in kinds for size in SIZES}
    vae = port(copy.deepcopy(stock))
    enable()
    vae.to("jax")

    seen, stop, start = Seen(), threading.Event(), time.monotonic()
    running = [
        threading.Thread(target=work, args=(vae, answers, seen, number, stop), daemon=True)
        for number in range(threads)
    ]
    for thread in running:
        thread.start()
    samples: list[tuple[float, int]] = []
    all_seen: float | None = None
    while (now := time.monotonic() - start) < 60 * minutes and not seen.errors:
        if all_seen is None and len(seen.done) == len(CALLS) * len(SIZES):
            all_seen = now
        samples.append((round(now, 1), resident_bytes()))
        time.sleep(every)
    stop.set()
    for thread in running:
        thread.join(timeout=STUCK)
    stuck = sum(thread.is_alive() for thread in running)
    steady = [size for at, size in samples if all_seen is not None and at >= all_seen]
    report = {
        "format": FORMAT,
        "minutes": round((time.monotonic() - start) / 60, 2),
        "threads": threads,
        "platform": jax.devices()[0].platform,
        "versions": {
            "jax": jax.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "calls": {call: sum(n for (c, _), n in seen.done.items() if c == call) for call in CALLS},
        "sizes": len(SIZES),
        "relative_error": seen.worst,
        "tolerance": FLOAT32_RELATIVE,
        "all_sizes_seen_after_s": all_seen,
        "memory_growth": growth(steady) if steady else None,
        "memory_samples": samples,
    }
    return report | {"complaints": complaints(report, seen.errors, stuck)}


def complaints(report: dict[str, Any], errors: list[str], stuck: int) -> list[str]:
    """A line for each thing that is not as it should be."""
    lines = list(errors)
    if stuck:
        lines.append(f"{stuck} threads are stuck")
    for call, error in report["relative_error"].items():
        if not error < report["tolerance"]:
            lines.append(f"{call} is off by {error:.1e}")
    if report["memory_growth"] is None:
        lines.append("not every call was made with every size: run for longer")
    elif report["memory_growth"] > FLAT:
        lines.append(f"memory grew by {report['memory_growth']:.1%}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("-o", "--output", type=Path, default=Path("benchmarks/results/soak.json"))
    args = parser.parse_args()
    report = soak(args.minutes, threads=args.threads)
    write_json(args.output, report)
    print({name: value for name, value in report.items() if name != "memory_samples"})
    if report["complaints"]:
        sys.exit("; ".join(report["complaints"]))


if __name__ == "__main__":
    main()
