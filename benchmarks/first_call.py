"""How long the first call of CogVideoX-5b's pipeline compiles on this machine, for one v6e, without a cache.

    python -m benchmarks.first_call      # writes results/first-call.json; about ten minutes on two idle cores
    python -m benchmarks draw planning.md

The programs are the prompt, a denoising step, and the VAE's first and steady chunk. They are compiled one
after the other, and as a pipeline's call compiles them: the VAE's in two threads beside the others
(`compile_ahead`). Each way is a process of its own. The seconds contain tracing and lowering.
"""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks import worker
from benchmarks.estimate.command import CASES, parsed
from benchmarks.pages import keep
from cogvideox_torchax.cli import planning

CASE = "pipeline-5b-v6e-1"
WAYS = {"one after the other": False, "side by side": True}
"""By the name of a way to compile, whether it compiles the VAE's programs in threads."""


def seconds(beside: bool) -> dict[str, float]:
    """Return the seconds until all programs are compiled; `beside` compiles the VAE's in threads."""
    request = planning.requested(parsed(CASES[CASE].split()))
    in_threads = request.works[2:] if beside else []  # the VAE's chunks, behind the prompt and the step
    start = time.perf_counter()
    with ThreadPoolExecutor() as threads:
        compiling = [threads.submit(work.lowered(request.mesh).compile) for work in in_threads]
        for work in request.works[: len(request.works) - len(in_threads)]:
            work.lowered(request.mesh).compile()
        for each in compiling:
            each.result()  # raises what compiling has raised
    return {"figure": time.perf_counter() - start}


def main() -> None:
    result: dict[str, Any] = {"cores": os.cpu_count()}
    for name, beside in WAYS.items():
        result[name] = worker.figure(
            "first_call.seconds", {"beside": beside}, {"JAX_ENABLE_COMPILATION_CACHE": "false"}
        )
        print(f"{name}: {result[name]:.1f} s")
    keep("first-call", result, "jax", "libtpu")


if __name__ == "__main__":
    main()
