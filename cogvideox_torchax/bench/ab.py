"""`bench`: the backends against each other on the same input and weights, one process each, interleaved.

Every size is measured in rounds. In a round each backend has its turn, in a process of its own. So a drift of
the machine's speed hits all backends, and a TPU, which belongs to one process at a time, is free for the next
one. The first round starts with an empty compile cache, later rounds with the one that the first has filled.
"""

import contextlib
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cogvideox_torchax import backends
from cogvideox_torchax.bench.ladder import Size
from cogvideox_torchax.bench.measure import spread
from cogvideox_torchax.bench.report import about
from cogvideox_torchax.bench.worker import Worker
from cogvideox_torchax.plan.chips import CHIPS, DEVICE_KINDS
from cogvideox_torchax.vae.directions import Direction
from cogvideox_torchax.vae.sizes import check_sides, parse_size

FORMAT = "cogvideox-torchax-bench-ab/2"
LIMIT = 3600.0
"""Seconds that a worker may take for one request: one backend, encoding or decoding."""


@dataclass(frozen=True)
class Options:
    """Options that all processes share.

    Attributes:
        model: directory or hub id of the VAE.
        backends: names of the backends to measure.
        dtype: of weights and activations.
        repetitions: measured runs in each process.
        warmups: runs before the measured ones.
        rounds: processes for each backend.
    """

    model: str
    backends: tuple[str, ...] = ("torch", "torchax-stock", "torchax")
    dtype: str = "float32"
    repetitions: int = 5
    warmups: int = 2
    rounds: int = 2


def sweep(base: Size, axes: list[str]) -> list[Size]:
    """Return the sizes to measure: the base alone, or the base with each value of each axis.

    Args:
        base: the model and a video; an axis replaces the frames, or the height and width.
        axes: texts such as `frames=9,17` and `size=64x96,128x192`; none for the base alone.

    Raises:
        ValueError: an axis other than these two, a value that does not fit its axis, or a base of a size that
            no VAE takes.
    """
    check_sides("a video", base.height, base.width, multiple=8)
    if base.frames < 1:
        raise ValueError(f"got a video of {base.video}: at least one frame is needed")
    sizes = [] if axes else [base]
    for axis in axes:
        name, _, values = axis.partition("=")
        for value in values.split(","):
            if name == "frames" and value.isdigit() and int(value):
                sizes.append(base._replace(frames=int(value)))
            elif name == "size":
                height, width = parse_size(value, "a video", multiple=8)
                sizes.append(base._replace(height=height, width=width))
            else:
                raise ValueError(f"got --sweep {name}={value}: it takes frames=9,17 or size=64x96,128x192")
    return list(dict.fromkeys(sizes))  # without duplicates, in order


def run(
    options: Options,
    sizes: list[Size],
    say: Callable[[str], None],
    keep: Callable[[dict[str, Any]], None] = lambda report: None,
) -> dict[str, Any]:
    """Measure every backend at every size; one that fails or is wrong is reported, and the run continues.

    Args:
        options: settings of every process.
        sizes: the sizes of videos, each with the model's directory or hub id.
        say: gets a line for each request to a process.
        keep: gets the report after each size, so that a long run that is stopped leaves its results.

    Returns:
        The report: settings, versions, and "results", a list with the result of `merge` for each size,
        direction (its field "job") and backend (its field "way").
    """
    for name in options.backends:
        backends.backend(name)  # raises before the work, not after it
    # A report is read on other machines: it has the model's name, and no path of this machine.
    model = Path(options.model).expanduser().resolve().name
    report: dict[str, Any] = {
        "format": FORMAT,
        **about(),
        "model_name": model,
        "options": asdict(options) | {"model": model},
        "results": [],
    }
    for size in sizes:
        with tempfile.TemporaryDirectory() as scratch:
            report["results"] += [
                {"job": job, "way": way, "size": size._replace(model=model)._asdict(), **result}
                for (job, way), result in _measured(options, size, Path(scratch), say).items()
            ]
        keep(report)
    return report


def _measured(
    options: Options, size: Size, scratch: Path, say: Callable[[str], None]
) -> dict[tuple[str, str], dict[str, Any]]:
    """Measure all backends at one size, and merge each backend's results of all rounds.

    For each direction PyTorch computes the float32 reference once. Then, in each round, each backend gets a
    new process, which runs both directions. A backend that failed in a direction is not run in it again.

    Args:
        options: settings of every process.
        size: the size to measure.
        scratch: a directory for references and compile caches.
        say: gets a line for each request to a process.

    Returns:
        Results by (direction, name of the backend).
    """
    requests: dict[Direction, dict[str, Any]] = {}  # the fields of `measure.Task` that all backends share
    # By (direction, backend), the worker's answers, one for each round.
    rounds_of: dict[tuple[str, str], list[dict[str, Any]]] = {}
    flops = {}  # by direction, floating-point operations of a run
    with contextlib.closing(Worker(scratch, LIMIT)) as worker:
        for direction in Direction:
            say(f"{size.video}: {direction}: reference")
            request = {
                "job": direction,
                "size": size,
                "checked": size,
                "dtype": options.dtype,
                "data": str(scratch / f"{direction}.npy"),  # the reference's result, to compare with
                "warmups": options.warmups,
                "runs": options.repetitions,
                "fewest": options.repetitions,  # as many as "runs", so a slow backend has no fewer
            }
            answer = worker.ask("reference", request, {})  # no environment variables
            requests[direction] = request | {"rms": answer.get("rms")}  # PyTorch's own error in this dtype
            flops[direction] = answer.get("flops")
            # If the reference failed, its failure is each backend's result, and no backend is run.
            failures = [] if answer["status"] == "ok" else [answer]
            rounds_of |= {(direction, backend): list(failures) for backend in options.backends}
        for number in range(options.rounds):
            for backend in options.backends:
                worker.close()  # the next request starts a new process
                environment = {  # by default JAX would not cache quick or small programs
                    "JAX_COMPILATION_CACHE_DIR": str(scratch / "compiled" / backend),
                    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
                    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
                    "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor"),
                }
                for direction in Direction:
                    rounds = rounds_of[direction, backend]
                    if rounds and rounds[-1]["status"] != "ok":  # failed in an earlier round
                        continue
                    say(f"{size.video}: round {number + 1} of {options.rounds}: {direction}, {backend}")
                    # A `Task` calls a backend a "way".
                    answer = worker.ask("measure", requests[direction] | {"way": backend}, environment)
                    rounds.append(answer)
                    if answer["status"] != "ok":
                        reason = answer.get("reason", "an answer misses its tolerance")
                        say(f"{size.video}: {direction}, {backend}: {answer['status']}: {reason}")
    return {
        (direction, backend): merge(rounds, size.frames, flops[direction], options.dtype)
        for (direction, backend), rounds in rounds_of.items()
    }


def merge(rounds: list[dict[str, Any]], frames: int, flops: int, dtype: str) -> dict[str, Any]:
    """Merge one backend's rounds into one result.

    The first round starts cold, with an empty compile cache. Later rounds start warm: the first round has
    filled the cache.

    Args:
        rounds: answers of `measure.measure`, in order; if any failed, the first failure is the result.
        frames: number of frames of the video.
        flops: floating-point operations of a run.
        dtype: of the run; only in bfloat16, for which the device's peak is published, has the result a
            "share_of_peak".
    """
    failure = next((result for result in rounds if result["status"] != "ok"), None)
    if failure is not None:
        return failure
    first_round = rounds[0]
    # Of each round: the times of its start, and of its whole runs after that ("all_s").
    cold, *warm = [result["whole"] for result in rounds]
    steady = spread([seconds for times in (cold, *warm) for seconds in times["all_s"]])
    # The first part of a run is the first chunk; the second part, if any, is all later chunks.
    first_chunks = [seconds for result in rounds for seconds in result["parts"][0]["all_s"]]
    warm_starts = [times["start_s"] for times in warm]
    generation = DEVICE_KINDS.get(first_round["device"])  # of the TPU; None for another device
    rate = flops / steady["median_s"]
    share = rate / CHIPS[generation].flops if generation and dtype == "bfloat16" else None
    return {
        **{name: first_round[name] for name in ("status", "check", "device", "load_s")},
        **{name: cold[name] for name in ("lower_s", "compile_s")},
        "start_cold_s": cold["start_s"],
        "start_warm_s": statistics.median(warm_starts) if warm_starts else None,
        "first_chunk_s": statistics.median(first_chunks),
        "steady": steady,
        "frames_per_s": frames / steady["median_s"],
        "flops_per_s": rate,
        "share_of_peak": share,
        # Each process gives its peak, or None if it cannot read one; None if no process can.
        "host_peak_bytes": max(result["host_peak_bytes"] or 0 for result in rounds) or None,
        # A process has one device peak, which each of its parts holds.
        "device_peak_bytes": max(result["parts"][0]["peak_bytes"] or 0 for result in rounds) or None,
    }
