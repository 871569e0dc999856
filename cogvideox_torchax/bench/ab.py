"""`bench`: the backends against each other on the same input and weights, one process each, interleaved.

Every case (frames and size) is measured in rounds; in a round each backend has its turn, in a process of its
own, so that what drifts on the machine hits all of them, and a TPU, which belongs to one process at a time,
is free for the next. The first round starts with an empty compile cache, the later ones with what it filled.
"""

import datetime
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from cogvideox_torchax import __version__, backends
from cogvideox_torchax.bench.worker import Task
from cogvideox_torchax.plan.chips import CHIPS, DEVICE_KINDS
from cogvideox_torchax.vae.directions import DECODE, ENCODE, Direction
from cogvideox_torchax.vae.sizes import check_sides, parse_size
from cogvideox_torchax.versions import versions

FORMAT = "cogvideox-torchax-bench-ab/1"
DEFAULT_BACKENDS = ("torch", "torchax-stock", "torchax")
TIMEOUT = 3600.0
"""Seconds that one process may take."""
WORKER = (sys.executable, "-m", "cogvideox_torchax.bench.worker")
PACKAGES = ("torch", "torchax", "jax", "jaxlib", "diffusers", "flax", "numpy")


def peak_flops(device: str, dtype: str) -> float | None:
    """FLOP/s that the maker states for one device; None where none is stated for the dtype."""
    generation = DEVICE_KINDS.get(device)
    return CHIPS[generation].flops if generation and dtype == "bfloat16" else None


@dataclass(frozen=True)
class Case:
    """The size of one video."""

    frames: int
    height: int
    width: int

    @property
    def name(self) -> str:
        return f"{self.frames} x {self.height} x {self.width}"


@dataclass(frozen=True)
class Options:
    """Options that all processes share."""

    model: str
    backends: tuple[str, ...] = DEFAULT_BACKENDS
    dtype: str = "float32"
    repetitions: int = 5
    warmups: int = 2
    rounds: int = 2

    @property
    def model_name(self) -> str:
        return Path(self.model).expanduser().resolve().name


def sweep(base: Case, axes: list[str]) -> list[Case]:
    """Return the cases of `frames=9,17` or `size=64x96,128x192`, each varied from the base, or the base.

    Raises:
        ValueError: another axis, or a value that is no number and no size.
    """
    check_sides("a video", base.height, base.width, multiple=8)
    if base.frames < 1:
        raise ValueError(f"got a video of {base.name}: at least one frame is needed")
    cases = [base] if not axes else []
    for axis in axes:
        name, _, values = axis.partition("=")
        for value in values.split(","):
            case = _varied(base, name, value)
            if case not in cases:
                cases.append(case)
    return cases


def _varied(base: Case, name: str, value: str) -> Case:
    if name == "frames" and value.isdigit() and int(value):
        return replace(base, frames=int(value))
    if name == "size":
        height, width = parse_size(value, "a video", multiple=8)
        return replace(base, height=height, width=width)
    raise ValueError(f"got --sweep {name}={value}: it takes frames=9,17 or size=64x96,128x192")


def run(
    options: Options,
    cases: list[Case],
    say: Callable[[str], None],
    keep: Callable[[dict[str, Any]], None] = lambda report: None,
) -> dict[str, Any]:
    """Measure every backend at every case; failures and misfits are reported, and the rest continues.

    Args:
        options: what is the same in every process.
        cases: sizes.
        say: gets a line for each process that starts.
        keep: gets the report after each case, so that a long run that is stopped leaves what it found.
    """
    for name in options.backends:
        backends.backend(name)  # before the work, not after it
    # A result is read on other machines: the model by name, no path of this one.
    settings = asdict(options) | {"model": options.model_name}
    report = {"format": FORMAT, **about(), "model_name": options.model_name, "options": settings, "cases": []}
    for case in cases:
        with tempfile.TemporaryDirectory() as scratch:
            report["cases"].append(_run_case(options, case, Path(scratch), say))
        keep(report)
    return report


def about() -> dict[str, Any]:
    """When, where and with what a run was made."""
    return {
        "version": __version__,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "versions": {"python": platform.python_version(), **versions(*PACKAGES)},
        "host": {
            "machine": platform.machine(),
            "system": platform.system(),
            "cpus": os.cpu_count(),
            "load": os.getloadavg()[0],
        },
    }


def _commit() -> str | None:
    """Return the git commit of the running code, "+" if it has changed since; None outside a checkout."""
    root = Path(__file__).parents[2]

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")).resolve() != root.resolve():
            return None  # installed into somebody else's repository
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _run_case(options: Options, case: Case, scratch: Path, say: Callable[[str], None]) -> dict[str, Any]:
    say(f"{case.name}: reference")
    task = Task(
        backend="reference",
        model=options.model,
        dtype=options.dtype,
        **asdict(case),
        repetitions=options.repetitions,
        warmups=options.warmups,
        data=str(scratch / "reference.npz"),
    )
    reference = run_task(task, {}, scratch)
    if reference["status"] != "ok":
        say(f"{case.name}: no reference: {reference['reason']}")
        return {**asdict(case), "reference": reference, "results": []}
    found: dict[str, list[dict[str, Any]]] = {backend: [] for backend in options.backends}
    for number in range(options.rounds):
        for backend, results in found.items():
            if results and results[-1]["status"] != "ok":
                continue
            say(f"{case.name}: round {number + 1} of {options.rounds}: {backend}")
            results.append(run_task(replace(task, backend=backend), reference["torch_rms"], scratch))
            if results[-1]["status"] != "ok":
                reason = results[-1].get("reason", "an answer misses its tolerance")
                say(f"{case.name}: {backend}: {results[-1]['status']}: {reason}")
    merged = [merge(backend, rounds, reference, case, options.dtype) for backend, rounds in found.items()]
    return {**asdict(case), "reference": reference, "results": merged}


def run_task(task: Task, torchs: dict[str, float], scratch: Path, timeout: float = TIMEOUT) -> dict[str, Any]:
    """Run a task in a process of its own."""
    environment = {
        "JAX_COMPILATION_CACHE_DIR": str(scratch / "compiled" / task.backend),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor"),
    }
    return in_process({"task": asdict(task), "torch_rms": torchs}, scratch, timeout, environment)


def in_process(
    request: dict[str, Any], scratch: Path, timeout: float, environment: dict[str, str]
) -> dict[str, Any]:
    """Run one worker from start to end; a crash, a kill for memory and a timeout are results too."""
    asked, answer = scratch / "task.json", scratch / "result.json"
    asked.write_text(json.dumps(request))
    answer.unlink(missing_ok=True)
    command = [*WORKER, str(asked), str(answer)]
    try:
        done = subprocess.run(
            command, env=os.environ | environment, capture_output=True, text=True, timeout=timeout
        )
    except subprocess.TimeoutExpired:
        return {"status": "failed", "reason": f"not done after {timeout:.0f} s"}
    if answer.is_file():
        return json.loads(answer.read_text())
    if done.returncode == -signal.SIGKILL:
        return {"status": "does not fit", "reason": "killed, as the system does when host memory runs out"}
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return {"status": "failed", "reason": f"exit code {done.returncode}: {last[:300]}"}


def merge(
    backend: str, rounds: list[dict[str, Any]], reference: dict[str, Any], case: Case, dtype: str
) -> dict[str, Any]:
    """Merge one backend's rounds into one result: the first is the cold start, the later ones warm starts."""
    bad = next((result for result in rounds if result["status"] != "ok"), None)
    if bad is not None:
        return {"backend": backend, **bad}
    merged: dict[str, Any] = {
        "backend": backend,
        "status": "ok",
        "device": rounds[0]["device"],
        "load_s": rounds[0]["load_s"],
        "host_peak_bytes": _largest([result["host_peak_bytes"] for result in rounds]),
        "device_peak_bytes": _largest([result["device_peak_bytes"] for result in rounds]),
    }
    frames = {ENCODE: case.frames, DECODE: reference["output_frames"]}
    for kind in Direction:
        halves = [result[kind] for result in rounds]
        merged[kind] = _merge_half(halves, frames[kind], reference["flops"][kind])
        peak = peak_flops(merged["device"], dtype)
        merged[kind]["share_of_peak"] = merged[kind]["flops_per_s"] / peak if peak else None
    return merged


def _merge_half(halves: list[dict[str, Any]], frames: int, flops: int) -> dict[str, Any]:
    steady = [seconds for half in halves for seconds in half["steady_s"]]
    warm = [half["start_s"] for half in halves[1:]]
    median = statistics.median(steady)
    return {
        "check": halves[0]["check"],
        "lower_s": halves[0]["lower_s"],
        "compile_cold_s": halves[0]["compile_s"],
        "start_cold_s": halves[0]["start_s"],
        "start_warm_s": statistics.median(warm) if warm else None,
        "first_frame_s": statistics.median(seconds for half in halves for seconds in half["first_chunk_s"]),
        "steady": {"median_s": median, "min_s": min(steady), "max_s": max(steady), "all_s": steady},
        "frames_per_s": frames / median,
        "flops_per_s": flops / median,
    }


def _largest(values: list[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)
