"""The host's work for a denoising step: how long Python takes to queue one, by the number of layers.

    python -m benchmarks.host       # writes results/host.json; then python -m benchmarks draw

A small pipeline with random weights has as many layers as a published one, so that Python sees as many
modules and weights, while its widths are small. `call` is `transformer(...)` until it returns, before the
device has computed anything. `step` is a whole step of the pipeline, with guidance, scheduler and progress
bar. Each is the median of `REPETITIONS` times. They are CPU times of the calling thread, on which other work
of the machine has little effect.
"""

import itertools
import os
import platform
import statistics
import time
from typing import Any

if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

from benchmarks.jobs import Size
from benchmarks.loading import Case, network
from benchmarks.pages import RESULTS
from cogvideox_torchax import port, runtime
from cogvideox_torchax.files import reports
from cogvideox_torchax.versions import versions
from examples import small_pipeline

FORMAT = "cogvideox-torchax-host/1"
RESULT = RESULTS / "host.json"
LAYERS = {"2 layers": 2, "2b": 30, "5b and 1.5-5b": 42}
"""Numbers of layers by what has them."""
REPETITIONS = 20
CALL = {"prompt": "a cat", "height": 16, "width": 16, "num_frames": 9, "output_type": "latent"}


def measure(layers: int) -> dict[str, float]:
    """Return the milliseconds of the host for a call of the transformer and for a step."""
    pipe = small_pipeline.pipeline(num_layers=layers)
    port(pipe)
    run: Any = pipe  # diffusers types no callback that is a function
    run(num_inference_steps=2, **CALL)  # compiles
    calls: list[float] = []
    steps: list[float] = []
    transformer: Any = pipe.transformer
    forward = type(transformer).forward

    def timed(self: Any, *args: Any, **kwargs: Any) -> Any:
        begin = time.thread_time()
        result = forward(self, *args, **kwargs)
        calls.append(time.thread_time() - begin)
        return result

    def step_end(_pipe: Any, _step: int, _timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        steps.append(time.thread_time())
        return kwargs

    type(transformer).forward = timed
    try:
        run(num_inference_steps=REPETITIONS + 1, callback_on_step_end=step_end, **CALL)
    finally:
        type(transformer).forward = forward
    between = [after - before for before, after in itertools.pairwise(steps)]
    return {"call_ms": 1e3 * statistics.median(calls[1:]), "step_ms": 1e3 * statistics.median(between)}


def beside_stock() -> dict[str, float]:
    """Return the milliseconds of a compiled step of the small transformer, by backend."""
    runtime.enable()
    size = Size("small", 9, 64, 96)
    runs = {way: network(Case("step", way, size)) for way in ("torchax", "torchax-stock")}
    seconds: dict[str, list[float]] = {way: [] for way in runs}
    for _ in range(2 * REPETITIONS):
        for way, run in runs.items():
            begin = time.perf_counter()
            jax.block_until_ready([result for _name, result in run()])
            seconds[way].append(time.perf_counter() - begin)
    # The first two compile and warm up.
    return {way: 1e3 * statistics.median(measured[2:]) for way, measured in seconds.items()}


def step_seconds(video: str) -> float:
    """Return the seconds of the host for a step; `video` begins with the model's name, as in `LAYERS`."""
    rows = reports.load(RESULT, FORMAT)["layers"]
    return next(row["step_ms"] for name, row in rows.items() if video.split(",")[0] in name) / 1e3


def drawn() -> str:
    """Return the table of the kept times."""
    report = reports.load(RESULT, FORMAT)
    rows = [
        (name, f"{row['call_ms']:.1f}", f"{row['step_ms']:.1f}") for name, row in report["layers"].items()
    ]
    port, stock = (report["beside_stock"][way] for way in ("torchax", "torchax-stock"))
    return (
        reports.table(("transformer of", "call, ms of the host", "step, ms of the host"), rows)
        + f"\n\nWhere the CPU itself is the device, a compiled step of a small transformer takes {port:.1f} "
        f"ms with this\nproject's modules, and {stock:.1f} ms with diffusers' own modules through torchax."
    )


TABLES = {("docs/performance.md", "host"): drawn}

if __name__ == "__main__":
    kept = {
        "format": FORMAT,
        "versions": versions("jax", "torch", "torchax"),
        "cpu": platform.processor() or platform.machine(),
        "layers": {name: measure(layers) for name, layers in LAYERS.items()},
        "beside_stock": beside_stock(),
    }
    reports.write_json(RESULT, kept)
