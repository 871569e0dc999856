"""Schedulers around a pipeline on JAX: their tables stay on the host, and a NaN or Inf names its step.

A scheduler's work in a step is a few numbers from tables in float64, which JAX does not have by default, and
a multiply-add of the latents. The numbers are computed on the host; the latents stay on the device.
"""

import functools
import inspect
from dataclasses import dataclass, replace
from typing import Any

import torch

from cogvideox_torchax import runtime
from cogvideox_torchax.runtime.models import PicklesAsStock


class NonFiniteError(ArithmeticError):
    """A NaN or Inf in a denoising step; the message names the step."""


@dataclass
class StepLog:
    """The last step of a run.

    Attributes:
        total, done: number of steps of the run, and of steps that were taken.
        timestep, dtype: the last step's timestep, and its latents' dtype.
        finite: whether the last step's latents are finite; a bool on their device, not waited for.
    """

    total: int = 0
    done: int = 0
    timestep: Any = None
    dtype: torch.dtype | None = None
    finite: Any = True

    def check(self) -> None:
        """Raise `NonFiniteError` if the last step's latents hold a NaN or an Inf; this waits for them."""
        if not self.finite:
            raise NonFiniteError(
                f"step {self.done} of {self.total} (timestep {self.timestep}) gave NaN or Inf in "
                f"{self.dtype}: {'float16 overflows in this model, ' if self.dtype == torch.float16 else ''}"
                "load the pipeline with dtype=torch.bfloat16 or torch.float32, and check the weights"
            )


class HostScheduler(PicklesAsStock):
    """Mixin of `port_scheduler`: tables on the host, and a log of the last step, which is not pickled."""

    log: StepLog

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "log"}


def port_scheduler(scheduler: Any) -> Any:
    """Give a scheduler, in place, the class that keeps its tables on the host and checks steps; return it."""
    if not isinstance(scheduler, HostScheduler):
        scheduler.__class__ = _host_class(type(scheduler))
    if "log" not in vars(scheduler):  # the first call, or a scheduler that was made by its ported class
        tables = {name: value for name, value in vars(scheduler).items() if isinstance(value, torch.Tensor)}
        vars(scheduler).update({name: runtime.to_torch(table) for name, table in tables.items()})
        scheduler.log = StepLog()
    return scheduler


@functools.cache
def _host_class(kind: Any) -> type:
    """Return the ported subclass of a scheduler's class, with that class's name and signatures."""

    @functools.wraps(kind.set_timesteps)
    def set_timesteps(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = inspect.signature(kind.set_timesteps).bind(self, *args, **kwargs)
        if "device" in bound.arguments:
            bound.arguments["device"] = "cpu"
        kind.set_timesteps(*bound.args, **bound.kwargs)
        self.log = StepLog(total=len(self.timesteps))

    # A subclass may pass its arguments on without their names: the first class that names them tells.
    signatures = (inspect.signature(each.step) for each in kind.__mro__)
    signature = next(each for each in signatures if "sample" in each.parameters)

    @functools.wraps(kind.step)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Take a step on float32 latents; raise `NonFiniteError` if the step before gave NaN or Inf."""
        # This waits for the previous step's result while the device runs this step's network, queued already.
        self.log.check()
        bound = signature.bind(self, *args, **kwargs)
        given = bound.arguments
        # A step draws noise in CogVideoX's DPM scheduler (it has this argument), and in DDIM with `eta`.
        draws_noise = "old_pred_original_sample" in given or bool(given.get("eta"))
        if not draws_noise:  # noise is drawn in the latents' dtype, which then has to stay
            # JAX rounds a Python number to the array's dtype before it multiplies, PyTorch does not.
            given["sample"] = given["sample"].float()
        result = kind.step(*bound.args, **bound.kwargs)
        latents = result[0] if isinstance(result, tuple) else result.prev_sample
        self.log = replace(
            self.log,
            done=self.log.done + 1,
            timestep=given["timestep"],
            dtype=latents.dtype,
            # A bool on the device, queued before the next step's network: a device runs in order.
            finite=runtime.all_finite(latents),
        )
        return result

    def add_noise(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        tables = {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        try:
            return kind.add_noise(self, *args, **kwargs)
        finally:
            vars(self).update(tables)  # diffusers moves one of the tables to the latents' device

    members = {"set_timesteps": set_timesteps, "step": step, "add_noise": add_noise}
    return type(kind.__name__, (HostScheduler, kind), {"__module__": kind.__module__, **members})
