"""One backend in one process: loads, runs, checks its answers, then measures.

python -m cogvideox_torchax.bench.worker TASK.json RESULT.json
"""

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from cogvideox_torchax import chunks, runtime, tolerances
from cogvideox_torchax.autoencoder import AutoencoderKLCogVideoX, DecoderChunk, EncoderChunk

BACKENDS = ("torch", "torch-compile", "torchax-stock", "torchax", "flax")
KINDS = ("encode", "decode")
OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "out of memory", "Out of memory", "not enough memory", "MemoryError")


@dataclasses.dataclass(frozen=True)
class Task:
    """What one process does. `data` holds the inputs and the reference's answers; backend "reference" makes
    it."""

    backend: str
    model: str
    dtype: str
    frames: int
    height: int
    width: int
    repetitions: int
    warmups: int
    data: str


class Backend:
    """encode and decode of one backend as a stream of chunks that are left where they were computed."""

    device = "cpu"

    def chunks(self, kind: str, x: torch.Tensor) -> Iterator[Any]:
        raise NotImplementedError

    def wait(self, chunk: Any) -> None:
        """Returns when a chunk has been computed."""

    def to_torch(self, chunk: Any) -> torch.Tensor:
        return chunk

    def run(self, kind: str, x: torch.Tensor) -> list[Any]:
        """All chunks, computed."""
        results = list(self.chunks(kind, x))
        for result in results:
            self.wait(result)
        return results


class Native(Backend):
    """Stock diffusers in PyTorch on the CPU, eager or through `torch.compile`."""

    def __init__(self, stock: Any, compiled: bool = False):
        self.frames_a_chunk = _frames_a_chunk(stock)
        self.networks: dict[str, Any] = _networks(stock)
        if compiled:
            self.networks = {kind: torch.compile(network) for kind, network in self.networks.items()}

    def chunks(self, kind: str, x: torch.Tensor) -> Iterator[Any]:
        return _through(runtime.NativeRun(self.networks[kind]), x, self.frames_a_chunk[kind])


class OnJax(Backend):
    """Torch modules compiled by JAX, a program for the first chunk and one for every later one."""

    def __init__(self, vae: Any):
        import jax

        self.device = jax.devices()[0].device_kind
        self.frames_a_chunk = _frames_a_chunk(vae)
        self.programs = {kind: runtime.ChunkProgram(network) for kind, network in _networks(vae).items()}

    def chunks(self, kind: str, x: torch.Tensor) -> Iterator[Any]:
        return _through(runtime.JaxRun(self.programs[kind]), x, self.frames_a_chunk[kind])

    def wait(self, chunk: torch.Tensor) -> None:
        runtime.wait(chunk)

    def to_torch(self, chunk: torch.Tensor) -> torch.Tensor:
        return runtime.to_torch(chunk)


class Flax(Backend):
    """The Flax build behind torch tensors, which come to the host: its times include that copy."""

    def __init__(self, wrapper: Any):
        import jax

        self.device = jax.devices()[0].device_kind
        self.wrapper = wrapper

    def chunks(self, kind: str, x: torch.Tensor) -> Iterator[Any]:
        if kind == "encode":
            return (posterior.parameters for posterior in self.wrapper.encode_stream(x))
        return self.wrapper.decode_stream(x)


def _networks(vae: Any) -> dict[str, nn.Module]:
    return {"encode": EncoderChunk(vae), "decode": DecoderChunk(vae)}


def _frames_a_chunk(vae: Any) -> dict[str, int]:
    return {"encode": vae.num_sample_frames_batch_size, "decode": vae.num_latent_frames_batch_size}


def _through(run: Callable[[torch.Tensor], Any], x: torch.Tensor, frames_a_chunk: int) -> Iterator[Any]:
    for chunk in chunks.plan(x.shape[2], frames_a_chunk):
        yield run(runtime.take_frames(x, chunk.start, chunk.length))


def make_backend(name: str, vae: AutoencoderKLCogVideoX) -> Backend:
    """A backend around a loaded model, whose weights it takes."""
    from cogvideox_torchax import verify

    if name == "torchax":
        runtime.enable()
        return OnJax(nn.Module.to(vae, "jax"))
    stock: Any = nn.Module.to(verify.load_reference(vae), vae.dtype)
    if name == "flax":
        return Flax(verify.load_flax(stock))
    if name == "torchax-stock":
        runtime.enable()
        return OnJax(nn.Module.to(stock, "jax"))
    return Native(stock, compiled=name == "torch-compile")


# The reference


def make_reference(task: Task) -> dict[str, Any]:
    """Writes inputs and float32 answers; returns the FLOPs and, in bfloat16, PyTorch's own error."""
    from torch.utils.flop_counter import FlopCounterMode

    generator = torch.Generator().manual_seed(0)
    x = torch.rand((1, 3, task.frames, task.height, task.width), generator=generator) * 2 - 1
    inputs, answers, flops, torchs = {"encode": x}, {}, {}, {}
    exact = Native(_load(task.model, "float32"))
    for kind in KINDS:
        with FlopCounterMode(display=False) as counter:
            answers[kind] = torch.cat(exact.run(kind, inputs[kind]), dim=2)
        flops[kind] = counter.get_total_flops()
        inputs.setdefault("decode", answers[kind].chunk(2, dim=1)[0])
    if task.dtype == "bfloat16":
        rounded = Native(_load(task.model, "bfloat16"))
        for kind in KINDS:
            got = torch.cat(rounded.run(kind, inputs[kind].bfloat16()), dim=2)
            torchs[kind] = tolerances.rms_error(got, answers[kind])
    arrays = {f"input_{kind}": inputs[kind].numpy() for kind in KINDS}
    np.savez(task.data, **arrays, **{f"answer_{kind}": answers[kind].numpy() for kind in KINDS})
    return {"status": "ok", "flops": flops, "torch_rms": torchs, "output_frames": answers["decode"].shape[2]}


def _load(model: str, dtype: str) -> AutoencoderKLCogVideoX:
    from cogvideox_torchax.cli.common import load_vae

    return load_vae(model, "torch", dtype)


def check(got: torch.Tensor, want: torch.Tensor, dtype: str, torchs: float | None) -> dict[str, Any]:
    """An answer against the reference's, under the contract for its dtype."""
    if got.shape != want.shape:
        return {"passed": False, "reason": f"shape {tuple(got.shape)} for {tuple(want.shape)}"}
    error, rms = tolerances.relative_error(got, want), tolerances.rms_error(got, want)
    if dtype == "float32":
        passed = error <= tolerances.FLOAT32_RELATIVE
    else:
        passed = torchs is not None and rms <= tolerances.BFLOAT16_RMS_RATIO * torchs
    return {"passed": passed, "relative_error": _plain(error), "rms_error": _plain(rms)}


def _plain(value: float) -> float | str:
    return value if np.isfinite(value) else str(value)


# Measuring


class CompileClock:
    """Seconds that JAX spent lowering (tracing included) and compiling; nested spans count once."""

    LOWER = ("/jax/core/compile/jaxpr_trace_duration", "/jax/core/compile/jaxpr_to_mlir_module_duration")
    COMPILE = ("/jax/core/compile/backend_compile_duration",)

    def __init__(self) -> None:
        import jax.monitoring

        self.spans: list[tuple[str, float, float]] = []
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        now = time.perf_counter()
        self.spans.append((event, now - duration_secs, now))

    def take(self) -> dict[str, float]:
        """Seconds since the last call."""
        spans, self.spans = self.spans, []
        return {"lower_s": _union(spans, self.LOWER), "compile_s": _union(spans, self.COMPILE)}


def _union(spans: list[tuple[str, float, float]], events: tuple[str, ...]) -> float:
    total, end = 0.0, float("-inf")
    for _, start, stop in sorted((span for span in spans if span[0] in events), key=lambda span: span[1]):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def measure(backend: Backend, kind: str, x: torch.Tensor, task: Task, judge: Callable) -> dict[str, Any]:
    """Times of one half; without any where its answer is wrong."""
    clock = CompileClock()
    start = time.perf_counter()
    first = backend.run(kind, x)
    found: dict[str, Any] = {"start_s": time.perf_counter() - start, **clock.take()}
    verdict = judge(_joined(backend, first))
    del first
    if not verdict["passed"]:
        return {"check": verdict}
    for _ in range(task.warmups):
        backend.run(kind, x)
    steady, first_chunk = [], []
    last = None
    for _ in range(task.repetitions):
        start = time.perf_counter()
        last = backend.run(kind, x)
        steady.append(time.perf_counter() - start)
        first_chunk.append(_time_of_first_chunk(backend, kind, x))
    if last is not None:
        verdict = judge(_joined(backend, last))  # once more: what was timed is what is right
    if not verdict["passed"]:
        return {"check": verdict}
    return {"check": verdict, **found, "steady_s": steady, "first_chunk_s": first_chunk}


def _joined(backend: Backend, results: list[Any]) -> torch.Tensor:
    return torch.cat([backend.to_torch(result) for result in results], dim=2)


def _time_of_first_chunk(backend: Backend, kind: str, x: torch.Tensor) -> float:
    """Until the first frames of a new video are on the host."""
    start = time.perf_counter()
    backend.to_torch(next(iter(backend.chunks(kind, x))))
    return time.perf_counter() - start


def host_peak_bytes() -> int | None:
    """The most memory this process has held; None off Linux. (`getrusage` counts the parent's too.)"""
    status = Path("/proc/self/status")
    if not status.is_file():
        return None
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def device_peak_bytes() -> int | None:
    """The most memory JAX has held on its first device; None where the device does not say, as a CPU."""
    import jax

    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


@torch.no_grad()
def run_task(task: Task, torchs: dict[str, float]) -> dict[str, Any]:
    """The whole work of a process.

    Returns:
        `status` "ok", "wrong" (an answer misses its tolerance), and for each half what `measure` gives.
    """
    if task.backend == "reference":
        return make_reference(task)
    start = time.perf_counter()
    vae = _load(task.model, task.dtype)
    with np.load(task.data) as file:
        arrays = {name: torch.from_numpy(file[name]) for name in file.files}
    backend = make_backend(task.backend, vae)
    result: dict[str, Any] = {"load_s": time.perf_counter() - start, "device": backend.device}
    for kind in KINDS:
        x = arrays[f"input_{kind}"].to(getattr(torch, task.dtype))
        if isinstance(backend, OnJax):
            x = runtime.to_jax(x)

        def judge(got: torch.Tensor, kind: str = kind) -> dict[str, Any]:
            return check(got, arrays[f"answer_{kind}"], task.dtype, torchs.get(kind))

        result[kind] = measure(backend, kind, x, task, judge)
        if isinstance(backend, Native) and "lower_s" in result[kind]:
            result[kind] |= {"lower_s": None, "compile_s": None}  # JAX compiled nothing here
    passed = all(result[kind]["check"]["passed"] for kind in KINDS)
    on_device = not isinstance(backend, Native)
    return {
        "status": "ok" if passed else "wrong",
        **result,
        "host_peak_bytes": host_peak_bytes(),
        "device_peak_bytes": device_peak_bytes() if on_device else None,
    }


def failure(error: BaseException) -> dict[str, Any]:
    """A result that says why there is none."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    fits = not any(mark in text for mark in OUT_OF_MEMORY)
    return {"status": "failed" if fits else "does not fit", "reason": text}


def main(argv: list[str]) -> int:
    from cogvideox_torchax.cli.common import quiet_libraries

    quiet_libraries()
    request = json.loads(Path(argv[0]).read_text())
    try:
        result = run_task(Task(**request["task"]), request["torch_rms"])
    except Exception as error:
        result = failure(error)
    Path(argv[1]).write_text(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
