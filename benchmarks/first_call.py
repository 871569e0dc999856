"""How long the first call of CogVideoX-5b's pipeline compiles on this machine, for one v6e, without a cache.

    python -m benchmarks.first_call         # writes results/first-call.json; ten minutes on two idle cores
    python -m benchmarks.first_call --warm  # writes results/ready.json; two minutes
    python -m benchmarks draw performance.md

The programs are the prompt, a denoising step, and the VAE's first and steady chunk. They are compiled one
after the other, and as a pipeline's call compiles them: the VAE's in two threads beside the others
(`compile_ahead`). Each way is a process of its own. The seconds contain tracing and lowering.

`--warm` measures what a process spends before its first call beside compiling: seconds of one core for its
imports, and for tracing and lowering. A first process keeps what it has lowered, and a later one reads it. A
machine without a TPU cannot load executables, so that loading is not in it.
"""

import argparse
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks import worker
from benchmarks.pages import keep
from benchmarks.plan.command import CASES, parsed
from benchmarks.plan.requests import requested

CASE = "pipeline-5b-v6e-1"
WAYS = {"one after the other": False, "side by side": True}
"""By the name of a way to compile, whether it compiles the VAE's programs in threads."""


def seconds(beside: bool) -> dict[str, float]:
    """Return the seconds until all programs are compiled; `beside` compiles the VAE's in threads."""
    request = requested(parsed(CASES[CASE].split()))
    in_threads = request.works[2:] if beside else []  # the VAE's chunks, behind the prompt and the step
    start = time.perf_counter()
    with ThreadPoolExecutor() as threads:
        compiling = [threads.submit(work.lowered(request.mesh).compile) for work in in_threads]
        for work in request.works[: len(request.works) - len(in_threads)]:
            work.lowered(request.mesh).compile()
        for each in compiling:
            each.result()  # raises what compiling has raised
    return {"figure": time.perf_counter() - start}


def cpu_seconds() -> dict[str, dict[str, float]]:
    """Return the seconds of one core by what this process does: imports, and then each program."""
    spent = {"imports": time.process_time()}
    request = requested(parsed(CASES[CASE].split()))
    for work in request.works:
        start = time.process_time()
        work.lowered(request.mesh)
        spent[f"{work.name}: traced and lowered"] = time.process_time() - start
    return {"figure": spent}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_call")
    parser.add_argument("--warm", action="store_true", help="measure what a full compile cache leaves to do")
    if parser.parse_args().warm:
        spent: dict[str, dict[str, float]] = {}
        with tempfile.TemporaryDirectory() as cache:
            for process in ("first", "later"):
                environment = {"JAX_COMPILATION_CACHE_DIR": cache}
                spent[process] = worker.figure("first_call.cpu_seconds", {}, environment)
                for name, seconds_spent in spent[process].items():
                    print(f"{process} process, {name}: {seconds_spent:.2f} s of one core")
        keep("ready", {"cores": os.cpu_count(), "cpu_seconds": spent}, "jax", "libtpu")
        return
    result: dict[str, Any] = {"cores": os.cpu_count()}
    for name, beside in WAYS.items():
        result[name] = worker.figure(
            "first_call.seconds", {"beside": beside}, {"JAX_ENABLE_COMPILATION_CACHE": "false"}
        )
        print(f"{name}: {result[name]:.1f} s")
    keep("first-call", result, "jax", "libtpu")


if __name__ == "__main__":
    main()
