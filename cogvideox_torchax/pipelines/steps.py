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


def run_checked(call: Callable[..., Any], pipe: Any, args: Any, kwargs: Any) -> Any:
    """Run a pipeline's call; raise `NonFiniteError` after the first step whose latents are not finite.

    A call that takes no callback of diffusers' runs as it is.
    """
    signature = inspect.signature(call)
    if not {CALLBACK, INPUTS} <= signature.parameters.keys():
        return call(pipe, *args, **kwargs)
    bound = signature.bind(pipe, *args, **kwargs)
    callback = bound.arguments.get(CALLBACK)
    names: list[str] = list(bound.arguments.get(INPUTS, signature.parameters[INPUTS].default) or ())
    if isinstance(callback, PipelineCallback | MultiPipelineCallbacks):
        names = callback.tensor_inputs
    last_step: Any = (True, "", None)  # whether its latents are finite, its name, and their dtype

    def check_last_step() -> None:  # this waits for the step
        is_finite, place, dtype = last_step
        if not is_finite:
            raise NonFiniteError(
                f"{place} gave NaN or Inf in {dtype}: "
                f"{'float16 overflows in this model, ' if dtype == torch.float16 else ''}load the pipeline "
                "with dtype=torch.bfloat16 or torch.float32, and check the weights"
            )

    def end_step(pipe: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        nonlocal last_step
        # The test is in the device's queue before the next step's network, and is read when that is there
        # too: the device does not wait.
        check_last_step()
        last_step = (
            runtime.all_finite(values[LATENTS]),
            f"step {step + 1} of {pipe.num_timesteps} (timestep {int(timestep)})",
            values[LATENTS].dtype,
        )
        return callback(pipe, step, timestep, {name: values[name] for name in names}) if callback else {}

    bound.arguments |= {CALLBACK: end_step, INPUTS: [*dict.fromkeys([*names, LATENTS])]}
    result = call(*bound.args, **bound.kwargs)
    check_last_step()
    return result
