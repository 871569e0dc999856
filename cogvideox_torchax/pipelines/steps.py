"""The steps of a pipeline's call, watched by the callback that it takes: a NaN or Inf names its step."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from diffusers.callbacks import MultiPipelineCallbacks, PipelineCallback

from cogvideox_torchax import runtime

CALLBACK, INPUTS, LATENTS = "callback_on_step_end", "callback_on_step_end_tensor_inputs", "latents"
"""Arguments of a pipeline's call: the callback, and the names of what it gets; the latents' name."""


class NonFiniteError(ArithmeticError):
    """A NaN or Inf in a denoising step; the message names the step."""


class _Steps:
    """A callback at the end of each step that checks the step before, and then calls the user's callback."""

    def __init__(self, callback: Any, names: list[str]):
        self._callback = callback
        self._names = names
        self._last: tuple[Any, str, torch.dtype] | None = None

    def __call__(self, pipe: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        latents = values[LATENTS]
        # The test is in the device's queue before the next step's network, and is read when that is there
        # too: the device does not wait.
        self.check()
        place = f"step {step + 1} of {pipe.num_timesteps} (timestep {int(timestep)})"
        self._last = runtime.all_finite(latents), place, latents.dtype
        if self._callback is None:
            return {}
        return self._callback(pipe, step, timestep, {name: values[name] for name in self._names})

    def check(self) -> None:
        """Raise `NonFiniteError` if the last step's latents hold a NaN or an Inf; this waits for them."""
        if self._last is None or self._last[0]:
            return
        _, place, dtype = self._last
        raise NonFiniteError(
            f"{place} gave NaN or Inf in {dtype}: "
            f"{'float16 overflows in this model, ' if dtype == torch.float16 else ''}load the pipeline with "
            "dtype=torch.bfloat16 or torch.float32, and check the weights"
        )


def run_checked(call: Callable[..., Any], pipe: Any, args: Any, kwargs: Any) -> Any:
    """Run a pipeline's call; raise `NonFiniteError` after the first step whose latents are not finite.

    A call that takes no callback of diffusers' runs as it is.
    """
    signature = inspect.signature(call)
    if not {CALLBACK, INPUTS} <= signature.parameters.keys():
        return call(pipe, *args, **kwargs)
    arguments = signature.bind(pipe, *args, **kwargs).arguments
    callback = arguments.get(CALLBACK)
    names: list[str] = list(arguments.get(INPUTS, signature.parameters[INPUTS].default) or ())
    if isinstance(callback, PipelineCallback | MultiPipelineCallbacks):
        names = callback.tensor_inputs
    steps = _Steps(callback, names)
    bound = signature.bind(pipe, *args, **kwargs)
    bound.arguments |= {CALLBACK: steps, INPUTS: [*dict.fromkeys([*names, LATENTS])]}
    result = call(*bound.args, **bound.kwargs)
    steps.check()
    return result
