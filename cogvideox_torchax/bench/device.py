"""`bench device`: the jobs that `plan` estimates, measured on JAX's devices, by the port and by its peers.

A job may fail, hang or run out of memory, so it runs in another process. On an accelerator each result has a
new process, since the device's counter of peak memory never falls. A kernel that raises, or whose results are
wrong, is switched off for all later jobs. The report is kept after each result: a run that was ended is
resumed from it.
"""

import contextlib
import os
import re
import tempfile
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cogvideox_torchax.bench import ladder
from cogvideox_torchax.bench.report import about
from cogvideox_torchax.bench.worker import Worker
from cogvideox_torchax.plan import chips
from jax_kernels.common.tiles import SWITCH

FORMAT = "cogvideox-torchax-bench-device/1"
PLATFORMS = ("tpu", "cuda", "cpu")
SAME = ("version", "commit", "versions", "device", "dtype", "mesh")
"""Fields of a kept report that must be equal for a run to resume it."""


@dataclass(frozen=True)
class DeviceOptions:
    """Settings of a run.

    Attributes:
        small: directory of the VAE that stands for the model "small" of `ladder`.
        jobs: names of jobs, of `ladder.JOBS`.
        platform: of `PLATFORMS`; JAX's choice where None.
        dtype: bfloat16 on an accelerator and float32 on a CPU where None.
        dp, tp: the mesh; one device where both are None.
        limit: seconds for one result.
    """

    small: str
    jobs: tuple[str, ...] = tuple(ladder.JOBS)
    platform: str | None = None
    dtype: str | None = None
    dp: int | None = None
    tp: int | None = None
    limit: float = 1800.0


def run(
    options: DeviceOptions,
    say: Callable[[str], None],
    keep: Callable[[dict[str, Any]], None] = lambda report: None,
    before: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Measure all jobs in all ways, then have `plan` estimate the jobs; return the report.

    A job is what runs, such as "decode"; a way is what runs it: the port or another backend (`ladder.WAYS`).

    Args:
        options: settings of the run.
        say: gets a line for each measurement that begins, and each estimate that is there.
        keep: gets the report after each result.
        before: the report of an unfinished run, to resume: its results are not measured again.

    Raises:
        ValueError: an unknown job, no such device or mesh, or `before` is of other settings.
    """
    if options.platform not in (None, *PLATFORMS):
        raise ValueError(f"got device {options.platform!r}: one of {', '.join(PLATFORMS)}")
    several = bool(options.dp or options.tp)  # whether devices form a mesh
    jobs = ladder.all_jobs(options.jobs, several)
    with (
        tempfile.TemporaryDirectory() as scratch,
        contextlib.closing(Worker(Path(scratch), options.limit)) as worker,
    ):
        bench = _Bench(options, Path(scratch), say, worker)
        report = bench.begin(before)
        done = {(result["job"], result["way"]) for result in report["results"]}
        for job in jobs:
            for way in ladder.ways(job, report["device"], several):
                if (job, way) not in done:
                    report["results"].append(bench.measured(job, way))
                    keep(report)
        for result in bench.estimated():  # each is a result of the report, which now has its estimate
            say(f"planned: {result['job']}")
            keep(report)
    return report


class _Bench:
    """A run: its worker, and the report so far.

    Args:
        options: settings of the run.
        scratch: a directory for the references' results.
        say: gets a line for each measurement that begins, and each estimate that is there.
        worker: answers the requests.
    """

    def __init__(self, options: DeviceOptions, scratch: Path, say: Callable[[str], None], worker: Worker):
        """Keep the settings, the directory for references' results, the printer of lines and the worker."""
        self._options, self._scratch, self._say, self._worker = options, scratch, say, worker
        # By job, the worker's answer for the job's reference; only the latest job's answer is kept.
        self._references: dict[str, dict[str, Any]] = {}
        self._report: dict[str, Any] = {}
        self._on_cpu = False  # until `begin` knows the device

    def begin(self, before: dict[str, Any] | None) -> dict[str, Any]:
        """Ask the worker for the devices; return the report to which results are then added.

        Args:
            before: the report of an unfinished run, to resume; None for a new report.

        Raises:
            ValueError: no such device or mesh, or `before` is of other settings.
        """
        device = self._ask("probe", {})
        if device.pop("status") != "ok":
            # The worker's reason begins with the type of its error.
            raise ValueError(device["reason"].removeprefix("ValueError: "))
        self._on_cpu = device["platform"] == "cpu"
        self._report = {
            "format": FORMAT,
            **about(),
            "device": device,
            "dtype": self._options.dtype or ("float32" if self._on_cpu else "bfloat16"),
            "mesh": {"dp": self._options.dp, "tp": self._options.tp},
            "switched_off": {},  # by a kernel's name, the reason
            "results": [],
        }
        if before is not None:  # results of two settings do not go into one report
            changed = [name for name in SAME if before.get(name) != self._report[name]]
            if changed:
                raise ValueError(
                    f"the output holds results of another {' and '.join(changed)}: give another directory, "
                    "or delete its device.json"
                )
            self._report = before
        return self._report

    def measured(self, job: str, way: str) -> dict[str, Any]:
        """Measure a job at the largest size that fits; return the result.

        `way` is the way to run the job, such as a backend (`ladder.WAYS`). If no size fits, the result is the
        failure at the smallest size.
        """
        result: dict[str, Any] = {}
        for size in ladder.sizes(job, self._on_cpu):  # the largest first
            self._say(f"{job}, {way}: {size.name}")
            result = {"job": job, "way": way, "size": size._asdict(), **self._attempt(job, way, size)}
            if result["status"] != "ok":  # a wrong result has its comparison, "check", in place of a reason
                self._say(f"{job}, {way}: {result['status']}: {result.get('reason', result.get('check'))}")
            if result["status"] != "does not fit":
                break
        return result

    def _attempt(self, job: str, way: str, size: ladder.Size) -> dict[str, Any]:
        """Measure a job at one size by a way (a backend, perhaps with an option); return the result.

        If the port itself ("torchax") fails or is wrong, find the kernel to blame and switch it off for later
        jobs too; the report's "switched_off" has the reason. If the job runs one kernel alone, that kernel is
        to blame. Any other job that did not hang is run again without one of its kernels, each in turn. If it
        then passes, the kernel left out is to blame, and the result of that run is returned.
        """
        off = self._report["switched_off"]  # by a kernel's name, the reason
        request = {
            "job": job,
            "size": size,
            "checked": ladder.checked(job, self._on_cpu),  # the size at which results are compared
            "data": str(self._scratch / "wanted.npy"),
            "platform": self._report["device"]["platform"],
        }
        # The file `data` holds one job's reference, so only the latest is kept: all ways of a job run before
        # the next job.
        if job not in self._references:
            self._references = {job: self._ask("reference", request)}
        if self._references[job]["status"] != "ok":
            return self._references[job]
        # A peer, a backend with diffusers' own modules, is timed even if its error is too large. "rms" is the
        # RMS error of the reference itself when it runs in the dtype.
        request |= {"way": way, "peer": way in ladder.STOCK_WAYS, "rms": self._references[job]["rms"]}
        result = self._ask("measure", request, off)
        if way != "torchax" or result["status"] not in ("failed", "wrong"):
            return result
        reason = result.get("reason") or f"wrong: {result['check']}"
        if job.startswith("kernels "):
            off[job.removeprefix("kernels ")] = reason
        elif "not done after" not in reason:  # `Worker` gives this reason for a hang; each try could hang too
            for name in ladder.kernels_used(job, request["platform"]):
                if name in off:
                    continue
                self._say(f"{job}, {way}: without the kernel of {name}")
                retried = self._ask("measure", request, [*off, name])
                if retried["status"] == "ok":
                    off[name] = reason
                    return retried
        return result

    def estimated(self) -> Iterator[dict[str, Any]]:
        """Add an "estimate" by `plan`, or a reason why there is none, to each result of the port ("torchax").

        A result is yielded once it has its estimate. If `plan` does not know the device, nothing is yielded,
        and the report's "not_planned" has the reason.
        """
        device, switched_off = self._report["device"], self._report["switched_off"]  # kernels that are off
        try:
            topology = chips.topology_of(device["kind"], device["coordinates"])
            chips.check_compiler()
        except chips.PlanError as error:
            self._report["not_planned"] = str(error)
            return
        for result in self._report["results"]:
            if result["way"] == "torchax" and result["status"] == "ok" and "estimate" not in result:
                request = {"job": result["job"], "size": [*result["size"].values()], "topology": topology}
                answer = self._ask("estimate", request, switched_off)
                # Seconds by the names of the job's parts, or the reason.
                result["estimate"] = answer.get("seconds") or {"reason": answer["reason"]}
                yield result

    def _ask(self, do: str, request: dict[str, Any], off: Collection[str] = ()) -> dict[str, Any]:
        """Have the worker call a function of `measure`; return its answer, which holds a "status".

        Args:
            do: the function's name.
            request: fields of `measure.Task`. A copy gets the mesh and the dtype, and the VAE's directory for
                the model "small".
            off: names of kernels to run without.
        """
        # JAX has no compile cache, as compiling is measured too; PyTorch's cache is this run's own.
        environment = {"JAX_ENABLE_COMPILATION_CACHE": "false", "TORCHINDUCTOR_CACHE_DIR": str(self._scratch)}
        on_host = self._on_cpu or do in ("reference", "estimate")
        platform = "cpu" if on_host else self._options.platform or os.environ.get("JAX_PLATFORMS")
        if platform:
            environment["JAX_PLATFORMS"] = platform
        if request.get("way") == ladder.KERNELS_OFF:
            environment[SWITCH] = "off"  # leaves the work of all kernels to XLA
        elif off:
            environment[SWITCH] = f"off:{','.join(off)}"
        request = request | {"dp": self._options.dp, "tp": self._options.tp}
        request["dtype"] = self._report.get("dtype", "float32")  # there is no report before `probe`
        for name in request.keys() & {"size", "checked"}:  # each a `ladder.Size`
            model, *frames_height_width = request[name]
            request[name] = [self._options.small if model == "small" else model, *frames_height_width]
        answer = self._worker.ask(do, request, environment)
        if do == "measure" and not self._on_cpu:  # a new process has a new counter of peak memory
            self._worker.close()
        if "reason" in answer:  # paths lose their directories: a result is read on other machines
            answer["reason"] = re.sub(r"(?:/[\w.+-]+)+/", "", answer["reason"])
        return answer
