"""How long the first call of CogVideoX-5b's pipeline compiles on this machine, for one v6e, without a cache.

    python -m benchmarks.first_call      # writes results/first-call.json; about ten minutes on two idle cores
    python -m benchmarks draw planning.md

The programs are the prompt, a denoising step, and the VAE's first and steady chunk. They are compiled one
after the other, and as a pipeline's call compiles them: the VAE's in two threads beside the others
(`compile_ahead`). Each way is a process of its own. The seconds contain tracing and lowering.
"""

import multiprocessing
import os
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from benchmarks.estimate.command import CASES, parsed
from benchmarks.pages import RESULTS
from cogvideox_torchax.cli import planning
from cogvideox_torchax.files.reports import load, table, write_json
from cogvideox_torchax.versions import versions

FORMAT = "cogvideox-torchax-first-call/1"
RESULT = RESULTS / "first-call.json"
CASE = "pipeline-5b-v6e-1"
WAYS = {"one after the other": False, "side by side": True}
"""By the name of a way to compile, whether it compiles the VAE's programs in threads."""


def seconds(*, beside: bool) -> float:
    """Return the time until all programs are compiled; `beside` compiles the VAE's in threads."""
    import jax

    jax.config.update("jax_enable_compilation_cache", False)
    request = planning.requested(parsed(CASES[CASE].split()))
    prompt_and_step, chunks = request.works[:2], request.works[2:]
    start = time.perf_counter()
    threads = []
    if beside:
        threads = [threading.Thread(target=work.lowered(request.mesh).compile) for work in chunks]
        for thread in threads:
            thread.start()
    for work in prompt_and_step if beside else request.works:
        work.lowered(request.mesh).compile()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start


def main() -> None:
    result: dict[str, Any] = {
        "format": FORMAT,
        "versions": versions("jax", "libtpu"),
        "cores": os.cpu_count(),
    }
    for name, beside in WAYS.items():
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as processes:
            result[name] = round(processes.submit(seconds, beside=beside).result(), 1)
        print(f"{name}: {result[name]} s")
    write_json(RESULT, result)


def drawn() -> str:
    """Return a line for each way to compile, and the cores and versions that it was measured with."""
    report = load(RESULT, FORMAT)
    rows = [(name, f"{report[name]:.0f}") for name in WAYS]
    packages = " and ".join(f"{name} {version}" for name, version in report["versions"].items())
    head = (f"programs of 5b for one v6e, on {report['cores']} CPU cores, {packages}", "s")
    return table(head, rows)


TABLES = {("docs/planning.md", "first call"): drawn}

if __name__ == "__main__":
    main()
