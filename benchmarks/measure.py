"""The requests to a process: describe devices, compute a reference, measure a case, estimate its times."""

import functools
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import jax
import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import ops
from benchmarks.jobs import Budget, Size, spread
from benchmarks.loading import Case, Run, load, mesh
from benchmarks.plan import chips, networks, programs, videos
from benchmarks.plan.programs import Work
from benchmarks.report import host_peak_bytes
from cogvideox_torchax import runtime
from cogvideox_torchax.terminal import CompileClock, covered_seconds
from cogvideox_torchax.upstream import COMPILING_EVENTS, TRACING_EVENTS
from cogvideox_torchax.vae import tolerances

ALLOWED = {
    ("train", "float32"): 1e-4,  # gradients sum what many pixels contribute
    ("kernels", "bfloat16"): tolerances.BFLOAT16_LAYER_RMS_RATIO,
}
"""By job and dtype, bounds of the error in place of the contract's."""
WHOLE = "whole"
"""The name under which all parts of a run are timed together."""


def probe(dp: int | None, tp: int | None) -> dict[str, Any]:
    """Return a description of the devices in a mesh; `ValueError` if it does not fit the devices.

    "count" is the number of all devices, "used" the number of devices in the mesh. "torch" is PyTorch's name
    for the hardware, "cuda" or "cpu"; None on a TPU.
    """
    used = mesh(dp, tp).devices.reshape(-1).tolist()
    platform = used[0].platform
    torch_devices = {"gpu": "cuda" if torch.cuda.is_available() else None, "cpu": "cpu"}
    return {
        "platform": platform,
        "kind": used[0].device_kind,
        "count": len(jax.devices()),
        "used": len(used),
        # (x, y, z) of each chip in the grid of TPUs; other devices have no coordinates.
        "coordinates": [list(getattr(device, "coords", None) or (0, 0, 0)) for device in used],
        "torch": torch_devices.get(platform),
    }


@torch.no_grad()
def reference(case: Case, data: str) -> dict[str, Any]:
    """Compute a case, whose way is "", in float32 on the host, and write the results to the .npy file `data`.

    A network's reference is diffusers' network in PyTorch; an op's is its plain form. Return "rms", the error
    of the same computation in the case's dtype (0 for float32), and "flops", which PyTorch counts in the
    float32 run.
    """
    exact = replace(case, dtype="float32")
    with FlopCounterMode(display=False) as counter:
        want = got = _flat(_once(load(exact))[1])
    np.save(data, want.numpy())
    if case != exact:
        got = _flat(_once(load(case))[1])
    return {"rms": tolerances.rms_error(got, want), "flops": counter.get_total_flops()}


@torch.no_grad()
def measure(
    case: Case,
    checked: Sequence[Any],
    data: str,
    rms: float,
    lenient: bool,
    budget: Sequence[Any],
) -> dict[str, Any]:
    """Compare a case's results with the reference; where they are right, time its runs.

    Args:
        case: the job, the way and the size to time.
        checked: the `Size` at which results are compared.
        data: path of the .npy file of the reference's results.
        rms: RMS error of PyTorch's own run in the dtype, which `reference` gives.
        lenient: whether any finite error will do, even one beyond the contract.
        budget: how often to run it, a `Budget`.

    Returns:
        "check", the comparison. If it fails, "status" is "wrong", and nothing is timed. A timed case also has
        the peak memory, and times: a dictionary for the "whole" run, and a list of them for its "parts". Each
        has the times of the first run, which compiles, and the `spread` of the runs after the warm-ups.
    """
    run = load(replace(case, size=Size(*checked)))
    first_run, results = _once(run)  # times of each part and of the whole, by name; each part's result
    # An op's job is "kernels OP". None stands for the bound of `tolerances.contract`.
    allowed_error = ALLOWED.get((case.job.partition(" ")[0], case.dtype))
    verdict = check(_flat(results), torch.from_numpy(np.load(data)), case.dtype, rms, allowed_error)
    del results  # frees the device's memory for the runs below
    is_finite = isinstance(verdict.get("rms_error"), float)  # `check` gives text for any other number
    if not (verdict["passed"] or (lenient and is_finite)):
        return {"status": "wrong", "check": verdict}
    if case.size != Size(*checked):
        run = load(case)
        first_run = _once(run)[0]  # only the seconds: keeping the results would add to the peak memory
    limits = Budget(*budget)
    for _ in range(limits.warmups):
        _once(run)
    timed: list[dict[str, Any]] = []
    end = time.perf_counter() + limits.seconds
    while len(timed) < limits.fewest or (len(timed) < limits.runs and time.perf_counter() < end):
        timed.append(_once(run)[0])
    # "start_s" is the wall time of a part. The first run's parts also have JAX's compile times.
    parts = {
        name: part | spread([each[name]["start_s"] for each in timed]) for name, part in first_run.items()
    }
    if case.torch_device:
        for part in parts.values():
            # JAX compiled nothing here. `torch.compile` compiles within the first run and does not time it:
            # the whole first run counts as compilation.
            part.update(lower_s=None, compile_s=part["start_s"] if case.way == "torch-compile" else None)
    peak = _peak_bytes()
    return {
        "check": verdict,
        "whole": parts.pop(WHOLE),
        "parts": [{"part": name, **part, "peak_bytes": peak} for name, part in parts.items()],
        "host_peak_bytes": host_peak_bytes(),
    }


def _once(run: Run) -> tuple[dict[str, dict[str, Any]], list[Any]]:
    """Run a job once, part by part; each part is finished before the next begins.

    `run()` yields each part's name and result; a device may still be computing the result.

    Returns:
        (seconds, results). The seconds are a dictionary for each part's name, and one for the whole run under
        `WHOLE`: "start_s" is the wall time, "lower_s" and "compile_s" the time within it in JAX's compiler.
        Parts of one name are summed. The results are a list, one for each part.
    """
    clock, seconds, results = _clock(), dict[str, Counter[str]](), []
    start = time.perf_counter()
    for name, result in run():
        for leaf in jax.tree.leaves(result):
            on_jax = isinstance(leaf, torch.Tensor) and runtime.on_jax(leaf)
            jax.block_until_ready(runtime.array_of(leaf) if on_jax else leaf)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # PyTorch returns before a GPU is done
        spans, clock.spans = clock.spans, []  # the clock's next spans are those of the next part
        taken: Any = {
            "start_s": time.perf_counter() - start,
            "lower_s": covered_seconds(spans, TRACING_EVENTS),
            "compile_s": covered_seconds(spans, COMPILING_EVENTS),
        }
        for key in (name, WHOLE):
            seconds.setdefault(key, Counter()).update(taken)  # a Counter adds, where a dict replaces
        results.append(result)
        start = time.perf_counter()
    return {name: dict(part) for name, part in seconds.items()}, results


_clock = functools.cache(CompileClock)  # one for the process, as a clock listens to JAX for good


def _peak_bytes() -> int | None:
    """Return the device's peak memory as PyTorch or JAX counts it; None if neither does, as on a CPU."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


# Compared


def check(
    got: torch.Tensor, want: torch.Tensor, dtype: str, torch_rms: float, allowed: float | None = None
) -> dict[str, Any]:
    """Compare a job's numbers with the reference's.

    Args:
        got, want: all numbers of the results and of the reference, each flattened into one vector.
        dtype: the job's dtype, for which `tolerances.contract` has a bound: of the relative error in
            float32, of the RMS error over `torch_rms` in bfloat16.
        torch_rms: the RMS error of the reference itself when it runs in that dtype.
        allowed: a bound in place of the contract's.

    Returns:
        "passed", "relative_error" and "rms_error", or "passed" and a "reason" where the shapes differ. An
        error that is not finite is text, as JSON has no such number.
    """
    if got.shape != want.shape:
        return {"passed": False, "reason": f"shape {tuple(got.shape)} for {tuple(want.shape)}"}
    error, rms = tolerances.relative_error(got, want), tolerances.rms_error(got, want)
    _name, measured, bound = tolerances.contract(getattr(torch, dtype), error, rms, torch_rms)
    errors = {"relative_error": error, "rms_error": rms}
    shown = {name: value if np.isfinite(value) else str(value) for name, value in errors.items()}
    return {"passed": measured <= (bound if allowed is None else allowed), **shown}


def _flat(results: list[Any]) -> torch.Tensor:
    """Return all numbers of nested results, tensors or arrays, in one float32 row on the host."""
    hosts = [
        runtime.to_torch(leaf).cpu() if isinstance(leaf, torch.Tensor) else np.array(leaf, np.float32)
        for leaf in jax.tree.leaves(results)
    ]
    return torch.cat([torch.as_tensor(host).float().ravel() for host in hosts])


# Estimated


def estimate(case: Case, topology: str) -> dict[str, Any]:
    """Estimate a case on a topology of absent TPUs; return "seconds" by the names of its parts.

    `PlanError` for a network whose shape is not a published one.
    """
    if case.job.startswith("kernels "):
        name = case.job.removeprefix("kernels ")
        op, operands = ops.bound(name, case.size, runtime.jax_dtype(case.torch_dtype))  # shape structs
        plan = programs.estimate_function(jax.jit(op), topology, operands, name, case.size.frames)
        return {"seconds": {name: plan.seconds_with_collectives}}
    chip, devices = chips.chip_of(topology), case.mesh(chips.topology_devices(topology, schedules=True))
    plans = [programs.compile_program(work, devices, chip) for work in works(case, devices, chip)]
    return {"seconds": {plan.name: plan.seconds_with_collectives for plan in plans}}


def works(case: Case, devices: Any, chip: chips.Chip) -> Iterable[Work]:
    """Return the programs of a model's case, to be compiled for the mesh `devices`, which are `chip`s."""
    size, dtype = case.size, case.torch_dtype
    if case.job in ("step", "prompt"):
        if size.model not in ops.TRANSFORMERS:
            raise chips.PlanError("there are estimates of the published shapes alone")
        if case.job == "step":
            of_video: Any = ops.latents(size)
            with mock.patch.dict(networks.TRANSFORMERS, ops.TRANSFORMERS):
                return [networks.step_work(size.model, dtype, devices, chip, **of_video)]
        return [networks.prompt_work(size.model, dtype, devices, tokens=ops.TOKENS)]
    vae = videos.weightless_vae(size.model, dtype)
    # One video to encode or decode; training does both, and does not read the direction.
    video = videos.Job(case.direction, size.frames, size.height, size.width)
    return (videos.gradient_works if case.job == "train" else videos.chunk_works)(vae, video, devices)
