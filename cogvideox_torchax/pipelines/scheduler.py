"""Schedulers around a pipeline on JAX: their tables stay on the host, and they watch every step.

A scheduler's work is a few numbers a step from tables in float64, which JAX does not have by default, and a
multiply-add of the latents. The numbers are found where they are exact; the latents never leave the device.
Where the numbers are all that a scheduler's class knows of a step (`LINEAR`), they are found before the first
one, and a step with the guidance before it is one program.
"""

import functools
import inspect
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from diffusers.schedulers.scheduling_ddim_cogvideox import CogVideoXDDIMScheduler, DDIMSchedulerOutput
from diffusers.schedulers.scheduling_dpm_cogvideox import CogVideoXDPMScheduler
from diffusers.utils.torch_utils import randn_tensor

from cogvideox_torchax import runtime
from cogvideox_torchax.pipelines.later import Later, Written, computed, nobody_looks, written
from cogvideox_torchax.runtime import array_of, tensor_of
from cogvideox_torchax.runtime.models import PickledAsStock


class NonFiniteError(ArithmeticError):
    """A NaN or Inf in a denoising step; the message names the step."""


@dataclass
class StepState:
    """What a denoising loop carries from one step to the next.

    Attributes:
        done: steps that have been taken.
        latents: (N, T, C, H, W), after the last of them.
        previous: the model's prediction of the clean latents at that step, which multistep solvers look back
            to; None for the others.
        generator: the state of the caller's random generator after it; None where there is none.
    """

    done: int
    latents: torch.Tensor
    previous: torch.Tensor | None = None
    generator: torch.Tensor | None = None


@dataclass
class Watch:
    """The steps of one run: what the last one left, and what the first one takes up from.

    Attributes:
        linear: the step of each timestep, or of each with the one that it looks back to, of a scheduler whose
            steps are sums.
        finite: whether the last step's latents are, where its program has looked.
    """

    total: int = 0
    last: StepState | None = None
    timestep: Any = None
    resume: StepState | None = None
    timesteps: list[Any] = field(default_factory=list)
    linear: "dict[tuple[int, int | None], Linear]" = field(default_factory=dict)
    finite: Any = None

    def check(self) -> None:
        """Raises `NonFiniteError` if the last step's latents hold a NaN or an Inf; waits for them."""
        if self.last is None or self._is_finite(self.last.latents):
            return
        dtype = self.last.latents.dtype
        raise NonFiniteError(
            f"step {self.last.done} of {self.total} (timestep {self.timestep}) gave NaN or Inf in {dtype}: "
            f"{'float16 overflows in this model, ' if dtype == torch.float16 else ''}"
            "load the pipeline with torch_dtype=torch.bfloat16 or torch.float32, and check the weights"
        )

    def _is_finite(self, latents: torch.Tensor) -> bool:
        return runtime.first_nonfinite(latents) is None if self.finite is None else bool(self.finite)


class HostScheduler(PickledAsStock):
    """Mixed into a scheduler's class by `port_scheduler`; the steps that it has watched are not pickled."""

    watch: Watch

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "watch"}


def port_scheduler(scheduler: Any) -> Any:
    """Gives a scheduler the class that keeps its tables on the host and watches its steps; once."""
    if not isinstance(scheduler, HostScheduler):
        scheduler.__class__ = _host_class(type(scheduler))
    if "watch" not in vars(scheduler):  # one that was made of a ported one's class has none yet either
        for name, value in vars(scheduler).items():
            if isinstance(value, torch.Tensor):
                setattr(scheduler, name, runtime.to_torch(value))
        scheduler.watch = Watch()
    return scheduler


RESUMED = (
    "CogVideoXDDIMScheduler",
    "CogVideoXDPMScheduler",
    "DDIMScheduler",
    "DDIMParallelScheduler",
    "DDPMScheduler",
)
"""Schedulers that find a step by its timestep, and need no more of those before it than `StepState` holds."""


def check_resumed(*class_names: str) -> None:
    """Raises ValueError unless a run may begin at a later step of a scheduler of one of these classes."""
    if not set(class_names) & set(RESUMED):
        raise ValueError(
            f"a run of {class_names[0]} cannot be taken up at a step, as it may count its steps or look back "
            f"at several: generate it as a whole, or set one of {', '.join(RESUMED)}"
        )


def resume_from(scheduler: Any, state: StepState) -> None:
    """Has the next run of a ported scheduler leave out the steps that were taken.

    Args:
        scheduler: of `port_scheduler`.
        state: after the last of them; its latents go to the pipeline's call as `latents`.

    Raises:
        ValueError: a scheduler that cannot begin at a later step.
    """
    check_resumed(*(kind.__name__ for kind in type(scheduler).__mro__))
    moved = None if state.previous is None else runtime.to_jax(state.previous)
    scheduler.watch = Watch(resume=replace(state, previous=moved))


def disarm(scheduler: Any) -> None:
    """Takes a `resume_from` back that no run has taken up: one that was refused before its first step."""
    if scheduler.watch.total == 0:
        scheduler.watch = Watch()


@functools.cache
def _host_class(kind: Any) -> type:
    """A subclass of a scheduler's class, of the same name and signatures."""

    @functools.wraps(kind.set_timesteps)
    def set_timesteps(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = inspect.signature(kind.set_timesteps).bind(self, *args, **kwargs)
        if "device" in bound.arguments:
            bound.arguments["device"] = "cpu"
        kind.set_timesteps(*bound.args, **bound.kwargs)
        _start(self, LINEAR.get(kind))

    @functools.wraps(kind.step)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _step(self.watch, kind.step, inspect.signature(kind.step).bind(self, *args, **kwargs))

    def add_noise(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        tables = {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        try:
            return kind.add_noise(self, *args, **kwargs)
        finally:
            vars(self).update(tables)  # it moves one of them to the latents' device, for good

    members = {
        "__module__": kind.__module__,
        "set_timesteps": set_timesteps,
        "step": step,
        "add_noise": add_noise,
    }
    return type(kind.__name__, (HostScheduler, kind), members)


def _start(scheduler: Any, linear: Any) -> None:
    """A new run; one that resumes leaves out as many timesteps as were done.

    Those that a video-to-video run's strength leaves out are cut off after this, in front as well.
    """
    watch = scheduler.watch
    scheduler.watch = Watch(total=len(scheduler.timesteps), timesteps=scheduler.timesteps.tolist())
    if linear is not None:
        scheduler.watch.linear = runtime.without_torchax(linear, scheduler)
    if watch.resume is not None and watch.total == 0:  # set by `resume_from`, for this run alone
        scheduler.watch.resume = watch.resume
        scheduler.timesteps = scheduler.timesteps[watch.resume.done :]


def _step(watch: Watch, inherited: Any, bound: inspect.BoundArguments) -> Any:
    given = bound.arguments
    watch.check()  # of the step before, while this one's network is running
    done = watch.last.done if watch.last is not None else 0
    generator = given.get("generator")
    if watch.resume is not None and watch.last is None:
        done = watch.resume.done
        if isinstance(generator, torch.Generator) and watch.resume.generator is not None:
            generator.set_state(watch.resume.generator)
        if "old_pred_original_sample" in bound.signature.parameters:
            given["old_pred_original_sample"] = watch.resume.previous
            given["timestep_back"] = watch.timesteps[watch.timesteps.index(int(given["timestep"])) - 1]
    watch.finite = None
    linear = watch.linear.get(_times(given)) if runtime.on_jax(given["sample"]) else None
    if linear is not None:
        result = _linear_step(linear, watch, **_named(bound))
    else:
        given["sample"] = _exact(given["sample"], given)
        if isinstance(given["model_output"], Later):
            given["model_output"] = given["model_output"].value
        result = inherited(*bound.args, **bound.kwargs)
    latents = result[0] if isinstance(result, tuple) else result.prev_sample
    looks_back = "old_pred_original_sample" in bound.signature.parameters
    previous = result[1] if looks_back else None
    state = generator.get_state() if isinstance(generator, torch.Generator) else None
    watch.last = StepState(done + 1, latents, previous, state)
    watch.timestep = given["timestep"]
    return result


@dataclass(frozen=True)
class Linear:
    """A step that is a sum, of whatever options.

    Attributes:
        factors: in float32, (2, 4): what the prediction, the latents, the clean ones predicted a step
            before and the noise are multiplied by, for the next latents and for the clean ones.
        draws: how often noise is drawn, of which the last counts.
    """

    factors: np.ndarray
    draws: int = 0


def _times(given: dict[str, Any]) -> tuple[int, int | None]:
    """The timestep of a step, and the one that it looks back to."""
    back = given.get("timestep_back") if given.get("old_pred_original_sample") is not None else None
    return int(given["timestep"]), None if back is None else int(back)


def _named(bound: inspect.BoundArguments) -> dict[str, Any]:
    bound.apply_defaults()
    taken = ("model_output", "sample", "old_pred_original_sample", "generator", "return_dict")
    return {name: bound.arguments[name] for name in taken if name in bound.arguments}


ONE, ZERO = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)


def _of_ddim(scheduler: Any) -> dict[tuple[int, int | None], Linear]:
    """Found by having the scheduler step with ones and zeros."""
    found = {}
    for timestep in scheduler.timesteps:
        results = [
            CogVideoXDDIMScheduler.step(scheduler, output, timestep, sample, return_dict=False)
            for output, sample in ((ONE, ZERO), (ZERO, ONE))
        ]
        columns = [[float(part) for part in result] for result in results]
        found[int(timestep), None] = Linear(np.array([*columns, (0, 0), (0, 0)], np.float32).T)
    return found


def _of_dpm(scheduler: Any) -> dict[tuple[int, int | None], Linear]:
    """As `_of_ddim`, of noise that is known; a step whose factors are not finite, or that draws more than two
    times, is left to the scheduler."""
    timesteps, found = scheduler.timesteps, {}
    step: Any = CogVideoXDPMScheduler.step
    pairs = [(timestep, None) for timestep in timesteps]
    for timestep, back in [*pairs, *zip(timesteps[1:], timesteps[:-1], strict=True)]:

        def stepped(output: Any, sample: Any, old: Any, timestep: Any = timestep, back: Any = back) -> Any:
            generator = torch.Generator().manual_seed(0)
            old = None if back is None else old
            result = step(scheduler, output, old, timestep, back, sample, generator=generator)
            return np.array([float(part) for part in result]), generator

        noisy, generator = stepped(ZERO, ZERO, ZERO)
        columns = [
            stepped(*ones)[0] - noisy for ones in ((ONE, ZERO, ZERO), (ZERO, ONE, ZERO), (ZERO, ZERO, ONE))
        ]
        draw, states = torch.Generator().manual_seed(0), []
        for _ in range(2):
            noise = randn_tensor(ZERO.shape, generator=draw, dtype=ZERO.dtype)
            states.append(torch.equal(draw.get_state(), generator.get_state()))
            if states[-1]:
                break
        factors = np.array([*columns, noisy / float(noise)], np.float32).T
        if states[-1] and np.isfinite(factors).all():
            found[int(timestep), None if back is None else int(back)] = Linear(factors, len(states))
    return found


LINEAR = {CogVideoXDDIMScheduler: _of_ddim, CogVideoXDPMScheduler: _of_dpm}
"""The schedulers whose steps are sums, and what finds their factors."""


def _linear_step(
    linear: Linear,
    watch: Watch,
    *,
    model_output: Any,
    sample: torch.Tensor,
    old_pred_original_sample: torch.Tensor | None = None,
    generator: Any = None,
    return_dict: bool = True,
) -> Any:
    """A step, and the guidance that waited for it, as one program; arguments as the schedulers' own."""
    leaves: list[Any] = []
    expression = written(model_output, leaves)
    noise = None
    device = sample.device if generator is None else torch.device("cpu")  # where diffusers draws them
    for _ in range(linear.draws):
        noise = randn_tensor(sample.shape, generator=generator, device=device, dtype=sample.dtype)
    others = [None if tensor is None else _array(tensor) for tensor in (old_pred_original_sample, noise)]
    own = watch.last is not None and array_of(sample) is array_of(watch.last.latents)
    program = _linear_program(own and nobody_looks())
    latents, original, watch.finite = program(expression, leaves, array_of(sample), others, linear.factors)
    previous, original = tensor_of(latents), tensor_of(original)
    if return_dict:
        return DDIMSchedulerOutput(prev_sample=previous, pred_original_sample=original)  # pyright: ignore
    return previous, original


def _array(tensor: torch.Tensor) -> Any:
    return array_of(tensor) if runtime.on_jax(tensor) else runtime.host_array(tensor)


@functools.cache
def _linear_program(donated: bool) -> Any:
    """From a prediction, as it is written, latents, and the clean ones before and noise or None, to the next
    and the clean latents, and whether all is finite."""
    import jax
    import jax.numpy as jnp

    def step(expression: Written, leaves: list[Any], latents: Any, others: list[Any], factors: Any) -> Any:
        terms = [computed(expression, leaves), latents, *others]
        there = [(place, term.astype(jnp.float32)) for place, term in enumerate(terms) if term is not None]
        after, clean = (
            functools.reduce(jnp.add, (row[place] * term for place, term in there)) for row in factors
        )
        return after.astype(latents.dtype), clean, jnp.isfinite(after).all()

    return jax.jit(step, static_argnums=0, donate_argnums=2 if donated else ())


def _exact(sample: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
    """16-bit latents in float32 for the step's multiply-adds, unless the step draws noise in their dtype.

    JAX rounds a Python number to the array's dtype before it multiplies, PyTorch does not.
    """
    draws = "old_pred_original_sample" in given or bool(given.get("eta"))
    return sample if draws or sample.dtype == torch.float32 else sample.float()
