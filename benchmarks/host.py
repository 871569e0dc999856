"""The host's work for a denoising step: how long Python takes to queue one, by the number of layers.

    python -m benchmarks.host       # writes results/host.json; then python -m benchmarks draw

A small pipeline with random weights has as many layers as a published one, so that Python sees as many
modules and weights, while its widths are small. `call` is `transformer(...)` until it returns, before the
device has computed anything. `step` is a whole step of the pipeline, with guidance, scheduler and progress
bar. Each is the median of `REPETITIONS` times. They are CPU times of the calling thread, on which other work
of the machine has little effect.
"""

import contextlib
import itertools
import os
import platform
import statistics
import time
from typing import Any
from unittest import mock

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import torch

from benchmarks import runs
from benchmarks.jobs import Budget, Size
from benchmarks.pages import keep
from cogvideox_torchax import port
from examples import small_pipeline

LAYERS = {"2 layers": 2, "2b": 30, "5b and 1.5-5b": 42}
"""Numbers of layers by what has them."""
REPETITIONS = 20
CALL = {"prompt": "a cat", "height": 16, "width": 16, "num_frames": 9, "output_type": "latent"}


def measure(layers: int) -> dict[str, float]:
    """Return the milliseconds of the host for a call of the transformer and for a step."""
    pipe: Any = port(small_pipeline.pipeline(num_layers=layers))  # diffusers types no function as a callback
    transformer = pipe.transformer
    steps: list[float] = []

    def step_end(_pipe: Any, _step: int, _timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        steps.append(time.thread_time())
        return kwargs

    pipe(num_inference_steps=2, **CALL)  # compiles
    pipe(num_inference_steps=REPETITIONS + 1, callback_on_step_end=step_end, **CALL)
    # A transformer with another `forward` is not stock, so it gets one only to see the arguments of a call.
    seen = mock.patch.object(type(transformer), "forward", side_effect=NotImplementedError)
    with seen as forward, contextlib.suppress(NotImplementedError):
        pipe(num_inference_steps=2, **CALL)
    calls: list[float] = []
    for _ in range(REPETITIONS + 1):
        begin = time.thread_time()
        with torch.no_grad():
            (result,) = transformer(*forward.call_args.args, **forward.call_args.kwargs)
        calls.append(time.thread_time() - begin)
        jax.block_until_ready(result.jax())
    between = [after - before for before, after in itertools.pairwise(steps)]
    return {"call_ms": 1e3 * statistics.median(calls[1:]), "step_ms": 1e3 * statistics.median(between)}


def beside_stock() -> dict[str, float]:
    """Return the milliseconds of a compiled step of the small transformer, by backend."""
    settings = runs.Settings(
        jobs=("step",),
        models={},
        ways=("torchax", "torchax-stock"),
        size=Size("small", 9, 64, 96),
        rounds=2,
        budget=Budget(runs=REPETITIONS, fewest=REPETITIONS),
    )
    results = runs.run(settings, print)["results"]
    return {result["way"]: 1e3 * result["whole"]["median_s"] for result in results}


if __name__ == "__main__":
    keep(
        "host",
        {
            "cpu": platform.processor() or platform.machine(),
            "layers": {name: measure(layers) for name, layers in LAYERS.items()},
            "beside_stock": beside_stock(),
        },
        *("jax", "torch", "torchax"),
    )
