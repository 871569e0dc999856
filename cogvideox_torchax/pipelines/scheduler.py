"""Schedulers around a pipeline on JAX: their tables stay on the host, and a NaN or Inf names its step.

In a step a scheduler computes a few numbers from its tables, then multiplies and adds latents by them. The
tables are float64, which JAX does not have by default, so the numbers are computed on the host. The latents
stay on the device.
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
    """The state of the denoising steps of a pipeline's call after the last step that was taken.

    Attributes:
        total: number of steps of the call.
        done: number of steps that were taken.
        timestep: the last step's timestep.
        dtype: dtype of the latents that the last step returned.
        finite: whether these latents are finite: a bool on their device. Reading it waits for the step.
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
    """Mixin for the class of a ported scheduler: its tables are on the host, and a log has the last step.

    The log is not pickled, as it may hold an array of a device.
    """

    log: StepLog

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "log"}


def port_scheduler(scheduler: Any) -> Any:
    """Give a scheduler its ported class, in place; return it. A ported one stays as it is."""
    if not isinstance(scheduler, HostScheduler):
        scheduler.__class__ = _host_class(type(scheduler))
    # A scheduler without a log is newly ported, or it was unpickled, or its ported class has made it, such as
    # by `from_config`: its tables may be on a device.
    if "log" not in vars(scheduler):
        tables = {name: value for name, value in vars(scheduler).items() if isinstance(value, torch.Tensor)}
        vars(scheduler).update({name: runtime.to_torch(table) for name, table in tables.items()})
        scheduler.log = StepLog()
    return scheduler


@functools.cache
def _host_class(kind: Any) -> type:
    """Return the ported subclass of a scheduler's class `kind`, with that class's name.

    Its methods have the signatures of that class, as pipelines inspect them.
    """

    @functools.wraps(kind.set_timesteps)
    def set_timesteps(self: Any, *args: Any, **kwargs: Any) -> None:
        """Make the tables of timesteps on the host, whatever the argument `device` is; begin a new log."""
        bound = inspect.signature(kind.set_timesteps).bind(self, *args, **kwargs)
        if "device" in bound.arguments:
            bound.arguments["device"] = "cpu"
        kind.set_timesteps(*bound.args, **bound.kwargs)
        self.log = StepLog(total=len(self.timesteps))

    # The signature names the arguments of `step`. In a user's subclass it may be only `*args, **kwargs`: then
    # it is taken from the first base whose `step` names an argument "sample".
    signatures = (inspect.signature(base.step) for base in kind.__mro__)
    step_signature = next(signature for signature in signatures if "sample" in signature.parameters)

    @functools.wraps(kind.step)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Take a step, and log it; raise `NonFiniteError` if the step before gave NaN or Inf."""
        # The check waits for the previous step's latents. The device does not wait: it has this step's
        # network, whose prediction is an argument here, in its queue already.
        self.log.check()
        bound = step_signature.bind(self, *args, **kwargs)
        arguments = bound.arguments
        # CogVideoX's DPM scheduler draws noise; it alone has the argument `old_pred_original_sample`. DDIM
        # draws noise if it is given an `eta` other than 0.
        draws_noise = "old_pred_original_sample" in arguments or bool(arguments.get("eta"))
        # JAX rounds the scheduler's numbers to the latents' dtype before it multiplies, PyTorch does not. So
        # the latents are given in float32; CogVideoX's pipelines round the result. Where noise is drawn, they
        # keep their dtype: the noise has the dtype of the latents, and in another it would be other noise.
        if not draws_noise:
            arguments["sample"] = arguments["sample"].float()
        result = kind.step(*bound.args, **bound.kwargs)
        latents = result[0] if isinstance(result, tuple) else result.prev_sample
        self.log = replace(
            self.log,
            done=self.log.done + 1,
            timestep=arguments["timestep"],
            dtype=latents.dtype,
            # The test for NaN and Inf is in the device's queue before the next step's network. So `check`
            # does not wait for that network.
            finite=runtime.all_finite(latents),
        )
        return result

    def add_noise(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        # diffusers' method moves one of the tables to the latents' device, and keeps it there. So the tables
        # are put back afterwards.
        tables = {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        try:
            return kind.add_noise(self, *args, **kwargs)
        finally:
            vars(self).update(tables)

    members = {"set_timesteps": set_timesteps, "step": step, "add_noise": add_noise}
    return type(kind.__name__, (HostScheduler, kind), {"__module__": kind.__module__, **members})
