"""`bench device`: what `plan` estimates, measured on the devices that there are, beside the port's peers.

Each job runs each way in a process of its own, which may fail, hang or run out of memory. A kernel that
raises, or that computes something wrong, is switched off for the jobs after it. The report is kept after each
process: a run that was ended goes on from there.
"""

import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cogvideox_torchax.bench import ab, ladder
from cogvideox_torchax.plan import chips
from jax_kernels.common.tiles import SWITCH

FORMAT = "cogvideox-torchax-bench-device/1"
PLATFORMS = ("tpu", "cuda", "cpu")
LIMIT = 1800.0
"""Seconds that one process may take."""
SAME = ("version", "commit", "versions", "device", "dtype", "mesh")
"""Fields of a kept report that must be equal for a run to resume it."""


@dataclass(frozen=True)
class DeviceOptions:
    """Settings of a run.

    Attributes:
        small: the directory of the small VAE.
        jobs: of `ladder.JOBS`.
        platform: of `PLATFORMS`; JAX's choice where None.
        dtype: bfloat16 on an accelerator and float32 on a CPU where None.
        dp, tp: the mesh; one device where both are None.
        limit: seconds for one process.
    """

    small: str
    jobs: tuple[str, ...] = ladder.JOBS
    platform: str | None = None
    dtype: str | None = None
    dp: int | None = None
    tp: int | None = None
    limit: float = LIMIT


def run(
    options: DeviceOptions,
    say: Callable[[str], None],
    keep: Callable[[dict[str, Any]], None] = lambda report: None,
    before: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Measure all jobs, then have `plan` estimate them.

    Args:
        options: what is measured.
        say: gets a line for each process that starts.
        keep: gets the report after each process.
        before: the report of a run that was ended; what it has is not measured again.

    Raises:
        ValueError: a job, a device or a mesh that there is not, or a report of something else.
    """
    if options.platform not in (None, *PLATFORMS):
        raise ValueError(f"got device {options.platform!r}: one of {', '.join(PLATFORMS)}")
    several = bool(options.dp or options.tp)
    names = ladder.all_jobs(list(options.jobs), several)
    with tempfile.TemporaryDirectory() as scratch:
        process = _Processes(options, Path(scratch), say)
        device = process.probed()
        report = _begun(options, device, before)
        process.follow(report, on_cpu=device["platform"] == "cpu")
        done = {(result["job"], result["way"]) for result in report["results"]}
        for job in names:
            for way in ladder.ways(job, device, several):
                if (job, way) not in done:
                    report["results"].append(process.measured(job, way))
                    keep(report)
        _estimate(process, report, keep)
    return report


def _begun(options: DeviceOptions, device: dict[str, Any], before: dict[str, Any] | None) -> dict[str, Any]:
    """Return the report so far."""
    dtype = options.dtype or ("float32" if device["platform"] == "cpu" else "bfloat16")
    mesh = {"dp": options.dp, "tp": options.tp}
    now = {
        "format": FORMAT,
        **ab.about(),
        "device": device,
        "dtype": dtype,
        "mesh": mesh,
        "switched_off": {},
        "results": [],
    }
    if before is None:
        return now
    changed = [name for name in SAME if before.get(name) != now[name]]
    if changed:
        raise ValueError(
            f"the output holds results of another {' and '.join(changed)}: give another directory, or delete "
            "its device.json"
        )
    return before


class _Processes:
    """The processes of a run, one after the other.

    Args:
        options, say: as `run` takes them.
        scratch: a directory for what they exchange.
    """

    def __init__(self, options: DeviceOptions, scratch: Path, say: Callable[[str], None]):
        self._options, self._scratch, self._say = options, scratch, say
        self._references: dict[str, dict[str, Any]] = {}
        self._dtype, self._on_cpu, self._off = "float32", True, {}

    def follow(self, report: dict[str, Any], *, on_cpu: bool) -> None:
        """Take a report's dtype and the kernels that it has switched off; new ones are noted there."""
        self._dtype, self._off, self._on_cpu = report["dtype"], report["switched_off"], on_cpu

    def probed(self) -> dict[str, Any]:
        """Return the devices as `measure.probe` describes them; `ValueError` where it cannot."""
        found = self._ask("probe", {})
        if found.pop("status") != "ok":
            raise ValueError(found["reason"].removeprefix("ValueError: "))
        return found

    def measured(self, job: str, way: str) -> dict[str, Any]:
        """Return the result of a job, at the largest size that fits."""
        result: dict[str, Any] = {}
        for size in ladder.sizes(job, self._on_cpu):
            self._say(f"{job}, {way}: {size.name}")
            result = {"job": job, "way": way, "size": asdict(size), **self._attempt(job, way, asdict(size))}
            if result["status"] != "ok":
                self._say(f"{job}, {way}: {result['status']}: {result.get('reason', result.get('check'))}")
            if result["status"] != "does not fit":
                break
        return result

    def _attempt(self, job: str, way: str, size: dict[str, Any]) -> dict[str, Any]:
        """Return a job's result; where a kernel is to blame, without it, as all later ones then are."""
        request = {"job": job, "way": way, "size": size, "checked": asdict(ladder.checked(job, self._on_cpu))}
        if ladder.family(job) == "vae":
            reference = self._reference(request["checked"])
            if reference["status"] != "ok":
                return reference
            request |= {"torch_rms": reference["torch_rms"], "data": str(self._scratch / "reference.npz")}
        result = self._ask("measure", request, self._kernels_off(way))
        if way != "torchax" or result["status"] not in ("failed", "wrong"):
            return result
        reason = result.get("reason") or f"wrong: {result['check']}"
        kernels = [name for name in ladder.used_kernels(job) if name not in self._off]
        if job.startswith("kernels "):
            self._off.update(dict.fromkeys(kernels, reason))
        elif "not done after" not in reason:  # each try could hang as long
            for name in kernels:
                self._say(f"{job}, {way}: without the kernel of {name}")
                again = self._ask("measure", request, f"off:{','.join([*self._off, name])}")
                if again["status"] == "ok":
                    self._off[name] = reason
                    return again
        return result

    def _kernels_off(self, way: str) -> str | None:
        """Return what `SWITCH` says in a process."""
        if way == ladder.OFF:
            return "off"
        return f"off:{','.join(self._off)}" if self._off else None

    def _reference(self, checked: dict[str, Any]) -> dict[str, Any]:
        """Return the VAE's answers in PyTorch, which are made once."""
        if "vae" not in self._references:
            size = ladder.Size(**checked)
            self._say(f"reference: {size.name}")
            task = ab.Task(
                backend="reference",
                model=self._options.small if size.model == "small" else size.model,
                dtype=self._dtype,
                frames=size.frames,
                height=size.height,
                width=size.width,
                repetitions=1,
                warmups=0,
                data=str(self._scratch / "reference.npz"),
            )
            self._references["vae"] = self._start({"task": asdict(task), "torch_rms": {}})
        return self._references["vae"]

    def estimated(self, result: dict[str, Any], topology: str) -> dict[str, Any]:
        """Return the seconds of a result's parts by `plan`, or the reason why there are none."""
        self._say(f"plan for {topology}: {result['job']}")
        request = {name: result[name] for name in ("job", "way", "size")} | {"topology": topology}
        found = self._ask("estimate", request, self._kernels_off(result["way"]), JAX_PLATFORMS="cpu")
        return found.get("seconds") or {"reason": found["reason"]}

    def _ask(
        self, do: str, request: dict[str, Any], kernels: str | None = None, **environment: str
    ) -> dict[str, Any]:
        """Return what a function of `measure` gives in a process of its own."""
        common = {"dtype": self._dtype, "dp": self._options.dp, "tp": self._options.tp}
        common |= {"small": self._options.small}
        switch = {} if kernels is None else {SWITCH: kernels}
        return self._start({"do": do, "request": common | request}, **switch, **environment)

    def _start(self, request: dict[str, Any], **environment: str) -> dict[str, Any]:
        platforms = self._options.platform or os.environ.get("JAX_PLATFORMS")
        if platforms and "cpu" not in platforms:
            platforms += ",cpu"  # where the kernels' references are computed
        common = {"JAX_PLATFORMS": platforms} if platforms else {}
        common |= {"JAX_ENABLE_COMPILATION_CACHE": "false", "TORCHINDUCTOR_CACHE_DIR": str(self._scratch)}
        result = ab.in_process(request, self._scratch, self._options.limit, common | environment)
        if "reason" in result:  # a result is read on other machines
            result["reason"] = re.sub(r"(?:/[\w.+-]+)+/", "", result["reason"])
        return result


def _estimate(process: _Processes, report: dict[str, Any], keep: Callable[[dict[str, Any]], None]) -> None:
    """Add estimates to the results of the port."""
    device = report["device"]
    try:
        topology = chips.topology_of(device["kind"], device["coordinates"])
        chips.check_compiler()
    except chips.PlanError as error:
        report["not_planned"] = str(error)
        return
    for result in report["results"]:
        if result["way"] == "torchax" and result["status"] == "ok" and "estimate" not in result:
            result["estimate"] = process.estimated(result, topology)
            keep(report)
