"""One backend in one process: loads, runs, checks its answers, then measures.

python -m cogvideox_torchax.bench.worker TASK.json RESULT.json
"""

import ctypes
import dataclasses
import json
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from cogvideox_torchax import backends, runtime
from cogvideox_torchax.backends.base import Backend
from cogvideox_torchax.backends.native import Torch
from cogvideox_torchax.plan.models import CONFIGS, weightless_vae
from cogvideox_torchax.runtime.clock import CompileClock
from cogvideox_torchax.vae import tolerances
from cogvideox_torchax.vae.directions import DECODE, ENCODE, Direction

PR_SET_PDEATHSIG = 1
"""Linux's `prctl`: the signal that a process gets when its parent ends."""


@dataclasses.dataclass(frozen=True)
class Task:
    """The work of one process.

    `data` holds the inputs and the reference's answers; backend "reference" makes it.
    """

    backend: str
    model: str
    dtype: str
    frames: int
    height: int
    width: int
    repetitions: int
    warmups: int
    data: str


def run_chunks(backend: Backend, kind: Direction, x: torch.Tensor) -> list[Any]:
    """Compute all chunks of a video and leave them on the device."""
    results = list(backend.chunks(kind, x))
    for result in results:
        backend.wait(result)
    return results


# The reference


def native(model: str, dtype: torch.dtype) -> Any:
    """Return a model in PyTorch on the host; of a published config, with random weights, always the same."""
    if model not in CONFIGS:
        return Torch.load(model, dtype).vae
    torch.manual_seed(0)
    return nn.Module.to(weightless_vae(model, torch.float32, "cpu"), dtype)


def make_reference(task: Task) -> dict[str, Any]:
    """Write inputs and float32 answers; return the FLOPs and, in bfloat16, PyTorch's own error."""
    from torch.utils.flop_counter import FlopCounterMode

    generator = torch.Generator().manual_seed(0)
    x = torch.rand((1, 3, task.frames, task.height, task.width), generator=generator) * 2 - 1
    inputs, answers, flops, torchs = {ENCODE: x}, {}, {}, {}
    exact = Torch.from_native(native(task.model, torch.float32))
    for kind in Direction:
        with FlopCounterMode(display=False) as counter:
            answers[kind] = torch.cat(run_chunks(exact, kind, inputs[kind]), dim=2)
        flops[kind] = counter.get_total_flops()
        inputs.setdefault(DECODE, answers[kind].chunk(2, dim=1)[0])
    if task.dtype == "bfloat16":
        rounded = Torch.from_native(native(task.model, torch.bfloat16))
        for kind in Direction:
            got = torch.cat(run_chunks(rounded, kind, inputs[kind].bfloat16()), dim=2)
            torchs[kind] = tolerances.rms_error(got, answers[kind])
    arrays = {f"input_{kind}": inputs[kind].numpy() for kind in Direction}
    np.savez(task.data, **arrays, **{f"answer_{kind}": answers[kind].numpy() for kind in Direction})
    return {"status": "ok", "flops": flops, "torch_rms": torchs, "output_frames": answers[DECODE].shape[2]}


def check(
    got: torch.Tensor, want: torch.Tensor, dtype: str, torchs: float | None, allowed: float | None = None
) -> dict[str, Any]:
    """Compare an answer with the reference's, under the contract for its dtype, or what else is allowed."""
    if got.shape != want.shape:
        return {"passed": False, "reason": f"shape {tuple(got.shape)} for {tuple(want.shape)}"}
    error, rms = tolerances.relative_error(got, want), tolerances.rms_error(got, want)
    _, measured, most = tolerances.contract(getattr(torch, dtype), error, rms, torchs or 0.0)
    passed = measured <= (allowed or most)
    return {"passed": passed, "relative_error": _json_number(error), "rms_error": _json_number(rms)}


def _json_number(value: float) -> float | str:
    return value if np.isfinite(value) else str(value)


# Measuring


def measure(
    backend: Backend, kind: Direction, x: torch.Tensor, task: Task, judge: Callable
) -> dict[str, Any]:
    """Time one half; a wrong answer gets no times."""
    clock = CompileClock()
    start = time.perf_counter()
    first = run_chunks(backend, kind, x)
    found: dict[str, Any] = {"start_s": time.perf_counter() - start, **clock.take()}
    verdict = judge(_joined(backend, first))
    del first
    if not verdict["passed"]:
        return {"check": verdict}
    for _ in range(task.warmups):
        run_chunks(backend, kind, x)
    steady, first_chunk = [], []
    last = None
    for _ in range(task.repetitions):
        start = time.perf_counter()
        last = run_chunks(backend, kind, x)
        steady.append(time.perf_counter() - start)
        first_chunk.append(_time_of_first_chunk(backend, kind, x))
    if last is not None:
        verdict = judge(_joined(backend, last))  # once more: what was timed is what is right
    if not verdict["passed"]:
        return {"check": verdict}
    return {"check": verdict, **found, "steady_s": steady, "first_chunk_s": first_chunk}


def _joined(backend: Backend, results: list[Any]) -> torch.Tensor:
    return torch.cat([backend.to_torch(result) for result in results], dim=2)


def _time_of_first_chunk(backend: Backend, kind: Direction, x: torch.Tensor) -> float:
    """Until the first frames of a new video are on the host."""
    start = time.perf_counter()
    backend.to_torch(next(iter(backend.chunks(kind, x))))
    return time.perf_counter() - start


def device_peak_bytes() -> int | None:
    """Return JAX's peak memory on its first device; None if the device does not report it, as a CPU."""
    import jax

    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


@torch.no_grad()
def run_task(task: Task, torchs: dict[str, float]) -> dict[str, Any]:
    """Run the whole work of a process.

    Returns:
        `status` "ok" or "wrong" (an answer misses its tolerance), and the result of `measure` for each half.
    """
    if task.backend == "reference":
        return make_reference(task)
    start = time.perf_counter()
    vae = native(task.model, getattr(torch, task.dtype))
    with np.load(task.data) as file:
        arrays = {name: torch.from_numpy(file[name]) for name in file.files}
    backend = backends.backend(task.backend).from_native(vae)
    result: dict[str, Any] = {"load_s": time.perf_counter() - start, "device": backend.device()}
    for kind in Direction:
        x = backend.put(arrays[f"input_{kind}"].to(getattr(torch, task.dtype)))

        def judge(got: torch.Tensor, kind: Direction = kind) -> dict[str, Any]:
            return check(got, arrays[f"answer_{kind}"], task.dtype, torchs.get(kind))

        result[kind] = measure(backend, kind, x, task, judge)
        if not backend.compiled_by_jax and "lower_s" in result[kind]:
            result[kind] |= {"lower_s": None, "compile_s": None}  # JAX compiled nothing here
    passed = all(result[kind]["check"]["passed"] for kind in Direction)
    return {
        "status": "ok" if passed else "wrong",
        **result,
        "host_peak_bytes": runtime.host_peak_bytes(),
        "device_peak_bytes": device_peak_bytes() if backend.compiled_by_jax else None,
    }


def failure(error: BaseException) -> dict[str, Any]:
    """Return a result with the reason for a failure."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return {"status": "does not fit" if runtime.out_of_memory(error) else "failed", "reason": text}


def main(argv: list[str]) -> int:
    from cogvideox_torchax.runtime.quiet import quiet_libraries

    quiet_libraries()
    if sys.platform == "linux":  # one that is killed leaves no process that holds the device
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    request = json.loads(Path(argv[0]).read_text())
    Path(argv[1]).write_text(json.dumps(answer(request)))
    return 0


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a request, which names a task, or what `bench device` asks a process to do."""
    try:
        if "task" in request:
            return run_task(Task(**request["task"]), request["torch_rms"])
        from cogvideox_torchax.bench import measure

        return getattr(measure, request["do"])(measure.DeviceTask(**request["request"]))
    except Exception as error:
        return failure(error)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
