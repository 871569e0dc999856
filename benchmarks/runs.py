"""A run of measurements: jobs, each in several ways, against a reference that PyTorch computes in float32.

A measurement may fail, hang or run out of memory, so each runs in a process of its own, whose counter of peak
memory starts anew. In a run of several rounds each way has its turn in each round, so that a drift of the
machine's speed affects all ways. The first round starts with an empty compile cache, and later rounds with
the one that it has filled. A kernel that raises, or whose results are wrong, is switched off for all later
measurements. The report is kept after each result, so that an ended run can be resumed from it.
"""

import math
import os
import re
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import calibration, jobs, worker
from benchmarks.jobs import Budget, Size, spread
from benchmarks.plan import chips
from benchmarks.report import about
from jax_kernels.common.tiles import SWITCH

FORMAT = "cogvideox-torchax-measurements/1"
QUICK = 420.0
"""Seconds after which a quick run begins no further measurement."""
ESTIMATING = 90.0
"""Seconds after the end of a run's time in which it still begins estimates."""
_NO_TIME = {"status": "failed", "reason": "no time was left"}
SAME = ("version", "commit", "versions", "device", "dtype", "mesh", "settings")
"""Fields of a kept report that must be equal for a run to resume it."""


@dataclass(frozen=True)
class Settings:
    """Settings of a run.

    Attributes:
        jobs: names of jobs, of `jobs.JOBS`.
        models: directories or hub ids, by the names that sizes give models.
        ways: of `jobs.WAYS`; None for all that the device can run.
        size: the size to measure each job at; None for the largest one of the job's own that fits.
        platform: "tpu", "cuda" or "cpu"; JAX's choice where None.
        dtype: bfloat16 on an accelerator and float32 on a CPU where None.
        dp, tp: the mesh; one device where both are None.
        limit: seconds for one measurement.
        rounds: processes for each way.
        budget: runs in each process.
        quick: whether jobs have the size that is theirs in a quick run; what is not timed runs side by side.
        seconds: time after which no further measurement or estimate begins.
    """

    jobs: tuple[str, ...]
    models: dict[str, str]
    ways: tuple[str, ...] | None = None
    size: Size | None = None
    platform: str | None = None
    dtype: str | None = None
    dp: int | None = None
    tp: int | None = None
    limit: float = 1800.0
    rounds: int = 1
    budget: Budget = field(default_factory=Budget)
    quick: bool = False
    seconds: float = math.inf


def run(
    settings: Settings,
    say: Callable[[str], None],
    keep: Callable[[dict[str, Any]], None] = lambda report: None,
    before: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Measure all jobs in all ways; where sizes are the jobs' own, estimate the times too. Return the report.

    Args:
        settings: settings of the run.
        say: gets a line for each measurement that begins, and each estimate that is there.
        keep: gets the report after each result.
        before: the report of an unfinished run, to resume: its results are not measured again.

    Raises:
        ValueError: no such device or mesh, or `before` is of other settings.
    """
    with tempfile.TemporaryDirectory() as scratch:
        laboratory = _Laboratory(settings, Path(scratch), say, before)
        report = laboratory.report
        if settings.quick:
            laboratory.prepare()
        for job in laboratory.ways:
            for result in laboratory.compared(job):
                report["results"].append(result)
                keep(report)
        # Published programs, with which the estimates are compared; there is no time for them in a quick run.
        for name in () if settings.quick else calibration.cases_of(report["device"]["kind"]):
            report.setdefault("published", {})[name] = laboratory._ask("calibration.measured", {"name": name})
            keep(report)
        if settings.size is None:
            for result in laboratory.estimated():  # of the report, which now has its estimate
                say(f"estimated: {result['job']}")
                keep(report)
    return report


class _Laboratory:
    """A run: its requests, and the report so far.

    Args:
        settings: settings of the run.
        scratch: a directory for references and compile caches.
        say: gets a line for each measurement that begins.
        before: the report of an unfinished run, to resume; None for a new report.

    Attributes:
        report: the report, to which results are added.
        ways: by job, the ways in which it is measured.

    Raises:
        ValueError: no such device or mesh, or `before` is of other settings.
    """

    def __init__(
        self,
        settings: Settings,
        scratch: Path,
        say: Callable[[str], None],
        before: dict[str, Any] | None,
    ):
        self._settings, self._scratch, self._say = settings, scratch, say
        self._begun = time.monotonic()
        self._end = self._begun + settings.seconds
        # The number of processes on the host while nothing is timed. One takes several cores, and for
        # published sizes up to 13 GB.
        self._processes = max(1, (os.cpu_count() or 1) // 4) if settings.quick else 1
        self._references: dict[str, tuple[Size, str, dict[str, Any]]] = {}  # results of `_reference` by job
        self._on_cpu = False  # until the device is known
        device = self._ask("probe", {"dp": settings.dp, "tp": settings.tp})
        if device.pop("status") != "ok":
            # The reason begins with the type of its error.
            raise ValueError(device["reason"].removeprefix("ValueError: "))
        self._on_cpu = device["platform"] == "cpu"
        several = bool(settings.dp or settings.tp)  # whether devices form a mesh
        names = jobs.all_jobs(settings.jobs, several)
        self.ways = {job: settings.ways or jobs.ways(job, device, several) for job in names}
        self._turns = settings.rounds * sum(map(len, self.ways.values()))  # number of measurements
        self._turn = 0  # number of those that have begun, or that `before` has
        self.report: dict[str, Any] = {
            "format": FORMAT,
            **about(),
            "device": device,
            "dtype": settings.dtype or ("float32" if self._on_cpu else "bfloat16"),
            "mesh": {"dp": settings.dp, "tp": settings.tp},
            "settings": {"rounds": settings.rounds, **settings.budget._asdict()},
            "switched_off": {},  # by a kernel's name, the reason
            "results": [],
        }
        if before is not None:  # results of two settings do not go into one report
            changed = [name for name in SAME if before.get(name) != self.report[name]]
            if changed:
                raise ValueError(
                    f"the output holds results of another {' and '.join(changed)}: give another directory, "
                    "or delete its report"
                )
            self.report = before

    def compared(self, job: str) -> Iterator[dict[str, Any]]:
        """Measure a job in each way in rounds; yield the results that the report does not have.

        A way that failed in a round is not run in the next. Of the job's own sizes the largest one that fits
        is measured.
        """
        own_sizes = jobs.sizes(job, self._on_cpu, self._settings.quick)
        sizes = (self._settings.size,) if self._settings.size else own_sizes
        done = {
            result["way"]
            for result in self.report["results"]
            if result["job"] == job and Size(**result["size"]) in sizes
        }
        results: dict[str, dict[str, Any]] = {}
        for number in range(self._settings.rounds):
            for way in self.ways[job]:
                self._turn += 1
                if way in done:
                    continue
                before = results.get(way)
                if before is None:
                    results[way] = self._measured(job, way, sizes)
                elif before["status"] == "ok":
                    results[way] = merged(before, self._measured(job, way, (Size(**before["size"]),)))
                if number == self._settings.rounds - 1:
                    yield results[way]

    def _measured(self, job: str, way: str, sizes: tuple[Size, ...]) -> dict[str, Any]:
        """Measure a job once, at the largest size that fits; return the result.

        If no size fits, the result is the failure at the smallest size.
        """
        result: dict[str, Any] = {}
        for size in sizes:  # the largest first
            now = time.monotonic()
            so_far = f"{now - self._begun:.0f} s so far"
            if self._turn == 1:
                self._say("each measurement is a process of its own: seconds for a small size, else minutes")
            self._say(f"{self._turn} of {self._turns}: {job} of {size.name}, by {way}; {so_far}")
            found = _NO_TIME if now > self._end else self._attempt(job, way, size)
            result = {"job": job, "way": way, "size": size._asdict(), **found}
            if result["status"] != "ok":  # a wrong result has its comparison, "check", in place of a reason
                self._say(f"{job}, {way}: {result['status']}: {result.get('reason', result.get('check'))}")
            if result["status"] != "does not fit":
                break
        return result

    def _attempt(self, job: str, way: str, size: Size) -> dict[str, Any]:
        """Measure a job at one size in one way; return the result.

        If the port itself ("torchax") fails or is wrong, find the kernel to blame and switch it off for later
        jobs too; the report's "switched_off" has the reason. If the job runs one kernel alone, that kernel is
        to blame. Any other job that did not hang is run again without one of its kernels, each in turn. If it
        then passes, the kernel left out is to blame, and the result of that run is returned.
        """
        off = self.report["switched_off"]  # by a kernel's name, the reason
        checked, data, reference = self._reference(job)
        if reference["status"] != "ok":
            return reference
        request = {
            "case": self._case(job, way, size),
            "checked": self._at_home(checked),
            "data": data,
            "rms": reference["rms"],
            # A peer with diffusers' own modules is timed even if its error is too large.
            "lenient": way in jobs.STOCK_WAYS,
            "budget": self._settings.budget,
        }
        flops = {"flops": reference["flops"]} if size == checked else {}
        result = self._ask("measure", request, off) | flops
        if way != "torchax" or result["status"] not in ("failed", "wrong"):
            return result
        reason = result.get("reason") or f"wrong: {result['check']}"
        if job.startswith("kernels "):
            off[job.removeprefix("kernels ")] = reason
        elif "not done after" not in reason:  # `ask` gives this reason for a hang; each try could hang too
            for name in jobs.kernels_used(job, self.report["device"]["platform"]):
                if name in off:
                    continue
                self._say(f"{job}, {way}: without the kernel of {name}")
                retried = self._ask("measure", request, [*off, name]) | flops
                if retried["status"] == "ok":
                    off[name] = reason
                    return retried
        return result

    def prepare(self) -> None:
        """Have PyTorch compute the references of all jobs, side by side, before anything is timed."""
        self._say(f"references, by PyTorch on the host: {len(self.ways)}")
        with ThreadPoolExecutor(self._processes) as pool:
            list(pool.map(self._reference, self.ways))

    def _reference(self, job: str) -> tuple[Size, str, dict[str, Any]]:
        """Have PyTorch compute the reference of a job, unless it has; return (size, file, answer).

        The size is that of the run, or one that PyTorch is quick at on the host.
        """
        if job not in self._references:
            size = self._settings.size or jobs.checked(job, self._on_cpu)
            request = {"case": self._case(job, "", size), "data": str(self._scratch / f"{job}.npy")}
            self._references[job] = size, request["data"], self._ask("reference", request)
        return self._references[job]

    def estimated(self) -> Iterator[dict[str, Any]]:
        """Add an "estimate", or a reason why there is none, to each result of the port ("torchax").

        A result is yielded once it has its estimate. If the device is of an unknown kind, nothing is yielded,
        and the report's "not_estimated" has the reason.
        """
        device, switched_off = self.report["device"], self.report["switched_off"]  # kernels that are off
        try:
            topology = chips.topology_of(device["kind"], device["coordinates"])
            chips.check_compiler(topology)
        except chips.PlanError as error:
            self.report["not_estimated"] = str(error)
            return

        def ask(result: dict[str, Any]) -> dict[str, Any]:
            case = self._case(result["job"], "torchax", Size(**result["size"]))
            if time.monotonic() > self._end + ESTIMATING:
                return _NO_TIME
            return self._ask("estimate", {"case": case, "topology": topology}, switched_off)

        wanted = [
            result
            for result in reversed(self.report["results"])  # whole jobs first: they take longer than kernels
            if result["way"] == "torchax" and result["status"] == "ok" and "estimate" not in result
        ]
        with ThreadPoolExecutor(self._processes) as pool:
            for result, answer in zip(wanted, pool.map(ask, wanted), strict=True):
                # Seconds by the names of the job's parts, or the reason.
                result["estimate"] = answer.get("seconds") or {"reason": answer["reason"]}
                yield result

    def _at_home(self, size: Size) -> Size:
        return size._replace(model=self._settings.models.get(size.model, size.model))

    def _case(self, job: str, way: str, size: Size) -> dict[str, Any]:
        about = {"dtype": self.report["dtype"], "platform": self.report["device"]["platform"]}
        return {"job": job, "way": way, "size": self._at_home(size), **about, **self.report["mesh"]}

    def _ask(self, do: str, request: dict[str, Any], off: Collection[str] = ()) -> dict[str, Any]:
        """Have a process call a function of `measure`, without the kernels `off`; return its answer."""
        way = request.get("case", {}).get("way", "")
        environment = {"TORCHINDUCTOR_CACHE_DIR": str(self._scratch / "inductor")}
        if self._settings.rounds == 1:  # compiling is measured: nothing comes from a cache
            environment["JAX_ENABLE_COMPILATION_CACHE"] = "false"
        else:
            environment |= {  # by default JAX would not cache quick or small programs
                "JAX_COMPILATION_CACHE_DIR": str(self._scratch / "compiled" / way),
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
                "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            }
        on_host = self._on_cpu or do in ("reference", "estimate")
        platform = "cpu" if on_host else self._settings.platform or os.environ.get("JAX_PLATFORMS")
        if platform:
            environment["JAX_PLATFORMS"] = platform
        if way == jobs.KERNELS_OFF:
            environment[SWITCH] = "off"  # leaves the work of all kernels to XLA
        elif off:
            environment[SWITCH] = f"off:{','.join(off)}"
        answer = worker.ask(do, request, environment, self._settings.limit)
        if "reason" in answer:  # paths lose their directories: a result is read on other machines
            answer["reason"] = re.sub(r"(?:/[\w.+-]+)+/", "", answer["reason"])
        return answer


def merged(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Merge another round into a result; if the round failed, it is the result.

    The first round starts cold, with an empty compile cache: its times of compiling stay. Later rounds start
    warm: "warm_starts_s" has the seconds of their first runs.
    """
    if after["status"] != "ok":
        return after

    def joined(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
        starts = [*one.get("warm_starts_s", []), other["start_s"]]
        return {**one, **spread([*one["all_s"], *other["all_s"]]), "warm_starts_s": starts}

    return before | {
        "whole": joined(before["whole"], after["whole"]),
        "parts": [
            joined(one, other) | {"peak_bytes": _larger(one["peak_bytes"], other["peak_bytes"])}
            for one, other in zip(before["parts"], after["parts"], strict=True)
        ],
        "host_peak_bytes": _larger(before["host_peak_bytes"], after["host_peak_bytes"]),
    }


def _larger(*sizes: int | None) -> int | None:
    return max((size for size in sizes if size is not None), default=None)
