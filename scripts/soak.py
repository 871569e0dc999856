"""Calls of one VAE by many threads for minutes: every result is right, memory stays flat, no thread hangs.

    PYTHONPATH=. python scripts/soak.py --minutes 30 --threads 8

Each thread draws a size and a call at random, encode or decode, whole or streamed, and compares the result
with diffusers' for the same input. Memory is sampled once every call was made with every size; growth is the
median of the last tenth of the samples over the median of the first. Float32, random weights of a small
model, one CPU device.
"""

import argparse
import copy
import itertools
import os
import random
import statistics
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false")
os.environ.setdefault("COGVIDEOX_TORCHAX_COMPILE_CACHE", "off")

import torch

from cogvideox_torchax import runtime
from cogvideox_torchax.vae.tolerances import FLOAT32_RELATIVE, relative_error
from tests import reference

SIZES = [(n, *size) for n in range(1, 6) for size in ((2, 2), (2, 3), (3, 4), (2, 6), (4, 4))]
"""Latent frames, rows and columns."""
CALLS = ("decode", "decode_stream", "encode", "encode_stream")
FLAT = 0.05
"""The growth of memory that still counts as none."""
STUCK = 300.0
"""Seconds that a thread has for its last call."""


def given(call: str, size: tuple[int, int, int]) -> torch.Tensor:
    """Return the input of a call: latents of a size of `SIZES`, or a video that is encoded to these."""
    frames, height, width = size
    if call.startswith("decode"):
        return reference.latents(frames, height=height, width=width)
    return reference.video(4 * frames - 3, height=4 * height, width=4 * width)


def answer(vae: Any, call: str, x: torch.Tensor) -> torch.Tensor:
    """Return the result of a call of a VAE, ported or diffusers' own: frames, or a posterior's parameters."""
    if call == "decode_stream":
        return torch.cat(list(vae.decode_stream(x)), dim=2)
    if call == "encode_stream":
        return torch.cat([part.parameters for part in vae.encode_stream(x)], dim=2)
    result = vae.decode(x).sample if call == "decode" else vae.encode(x).latent_dist.parameters
    return runtime.to_torch(result)


class Soak:
    """One ported VAE, called by several threads.

    Attributes:
        wanted: diffusers' results, by (call, size).
        done: number of calls, by (call, size).
        wrong: a message for each wrong result and each error.
        stop: set to end the threads.
        lock: held to count in `done`.
    """

    def __init__(self) -> None:
        stock = reference.small_vae()
        with torch.no_grad():
            self.wanted = {
                (call, size): answer(stock, call, given(call, size))
                for call, size in itertools.product(("decode", "encode"), SIZES)
            }
        self.vae = reference.on_jax(copy.deepcopy(stock))
        self.done: Counter[tuple[str, tuple[int, int, int]]] = Counter()
        self.wrong: list[str] = []
        self.stop, self.lock = threading.Event(), threading.Lock()

    def work(self, thread: int) -> None:
        """Make random calls until `stop` is set, or a result is wrong; `thread` is the seed."""
        chance = random.Random(thread)
        while not self.stop.is_set() and not self.wrong:
            call, size = chance.choice(CALLS), chance.choice(SIZES)
            try:
                with torch.no_grad():
                    x = given(call, size)
                    # Streams take tensors on the host, whole calls tensors on the device.
                    got = answer(self.vae, call, x if "stream" in call else runtime.to_jax(x))
                error = relative_error(got, self.wanted[call.partition("_")[0], size])
                if not error < FLOAT32_RELATIVE:
                    self.wrong.append(f"{call} of {size} is off by {error:.1e}")
            except BaseException as error:
                self.wrong.append(f"{call} of {size}: {type(error).__name__}: {error}")
                raise
            with self.lock:
                self.done[call, size] += 1


def resident_bytes() -> int:
    """Return the memory of this process that is in RAM."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--threads", type=int, default=8)
    args = parser.parse_args()
    soak, samples = Soak(), []
    threads = [threading.Thread(target=soak.work, args=(n,), daemon=True) for n in range(args.threads)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + 60 * args.minutes
    while time.monotonic() < end and not soak.wrong:
        if len(soak.done) == len(CALLS) * len(SIZES):
            samples.append(resident_bytes())
        time.sleep(1)
    soak.stop.set()
    for thread in threads:
        thread.join(timeout=STUCK)
    soak.wrong += ["a thread is stuck" for thread in threads if thread.is_alive()]
    tenth = max(1, len(samples) // 10)
    if not samples:
        soak.wrong.append("not every call was made with every size: run for longer")
    elif (growth := statistics.median(samples[-tenth:]) / statistics.median(samples[:tenth]) - 1) > FLAT:
        soak.wrong.append(f"memory grew by {growth:.1%}")
    print(f"{soak.done.total()} calls of {len(soak.done)} kinds")
    sys.exit("; ".join(soak.wrong) or 0)


if __name__ == "__main__":
    main()
