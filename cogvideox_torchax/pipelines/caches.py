"""diffusers' step caches on JAX: what its hooks would skip of a step is not computed.

`enable_cache` has diffusers hook the transformer's modules. The hooks are removed from the modules, and kept:
a copy of them for each run decides on the host what a step skips; for FirstBlockCache the device decides.
Each set of skipped modules, a form, is a program of its own. The arrays that a step keeps for later ones are
the program's cache: donated, and zeros before the first step.
"""

import contextlib
import copy
import functools
import math
import re
import threading
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from cogvideox_torchax import runtime, upstream

Form = tuple[Any, ...]
"""A step's computation: its kind, the names of modules whose results are kept, and of skipped modules.

Further items depend on the kind; a form may end early. Another form is another program.
"""


StepPlan = tuple[Form, dict[str, torch.Tensor]]
"""The form of a step, and the tensors of `cached_layers.NUMBERS` that its program takes, by name."""


@functools.cache
def form(*parts: Any) -> Form:
    """Return the form of these items, the same object for the same items: programs are cached by it."""
    return parts


@dataclass
class RunState:
    """The state of a run of denoising steps, in one context of the pipeline.

    A context (diffusers' `cache_context`) separates calls of a step that are not batched, such as those with
    and without the prompt.

    Attributes:
        hooks: diffusers' hooks, copied for this run, by the module's name.
        kept: arrays of the last step; None before the first.
        computed: for each step, whether nothing was skipped: a bool, or a scalar on the device that is not
            waited for.
    """

    hooks: dict[str, Any]
    kept: Any = None
    computed: list[Any] = field(default_factory=list)


class _ThreadStates(threading.local):
    """The states of this thread's runs, by cache and name of a context, and the current context."""

    def __init__(self) -> None:
        self.states: MutableMapping[StepCache, dict[str | None, RunState]] = WeakKeyDictionary()
        self.context: str | None = None


_THREAD = _ThreadStates()


@contextlib.contextmanager
def context(name: str) -> Iterator[None]:
    """Have the steps of a `with` block share a state by this name, as diffusers' `cache_context` does."""
    before, _THREAD.context = _THREAD.context, name
    try:
        yield
    finally:
        _THREAD.context = before


class StepCache:
    """A cache of a transformer's steps, as diffusers' hooks describe it.

    Args:
        hooks: diffusers' hooks, taken off the modules (`upstream.take_hooks`).
    """

    def __init__(self, hooks: list[upstream.Hooked]):
        self.hooks = hooks
        self._computed: list[Any] = []

    @property
    def computed(self) -> list[bool]:
        """True for each step of the last run that skipped nothing; waits for the run."""
        return [bool(step) for step in self._computed]

    def __str__(self) -> str:
        """Return how many steps of the last run were skipped, in words."""
        skipped, steps = self.computed.count(False), len(self.computed)
        return f"{skipped} of {steps} steps skipped" + ", in whole or in part" * (skipped > 0)

    def reset(self) -> None:
        """Drop the states of this thread's runs: the next step begins a run."""
        _THREAD.states.pop(self, None)

    def step(self, model: Any, network: Callable[[Form], nn.Module], tensors: dict[str, Any]) -> torch.Tensor:
        """Run a step, by the program of its form, and return its prediction.

        Args:
            model: the transformer.
            network: returns the network of a step of a form.
            tensors: inputs of the step, by name.
        """
        name = _THREAD.context if any(hasattr(each.hook, "state_manager") for each in self.hooks) else None
        states = _THREAD.states.setdefault(self, {})
        state = states.pop(name, None) or self._new_state(name)  # a step that fails leaves nothing
        form, numbers = runtime.without_torchax(self._plan_step, state, model, tensors)
        network_of_form = network(form)
        program = model.program_of(network_of_form)
        weights, inputs = program.weights(network_of_form), program.put({**tensors, **numbers})
        if state.kept is None:
            state.kept = program.empty_cache(weights, inputs)
        (sample, seen), state.kept = program.run(weights, inputs, state.kept)
        self._record(state, seen)
        states[name] = state
        return runtime.tensor_of(sample)

    def plan_run(self, model: Any, batch: int, steps: Iterable[Any]) -> list[StepPlan]:
        """Return the plan of each of a run's steps on `batch` videos, without running them.

        `steps` is iterated meanwhile, so it may set the timestep that callbacks return.
        """
        state, tensors = self._new_state("a plan"), {"hidden_states": torch.empty(batch, 0)}
        return [self._plan_step(state, model, tensors) for _ in steps]

    def _new_state(self, name: str | None) -> RunState:
        """Return the state of a new run, with copies of the hooks, reset and in the context `name`."""
        state = RunState(
            runtime.without_torchax(copy.deepcopy, {each.module: each.hook for each in self.hooks})
        )
        for hook in state.hooks.values():
            hook.reset_state(None)
            upstream.set_context(hook, name)
        self._computed = state.computed
        return state

    def _plan_step(self, state: RunState, model: Any, tensors: dict[str, Any]) -> StepPlan:
        """Return the next step's form and the tensors of its `NUMBERS`, and count the step.

        The hooks of `state` decide what the step skips; `tensors` are its inputs, by name.
        """
        raise NotImplementedError

    def _record(self, state: RunState, seen: Any) -> None:
        """Record `seen`, the scalar that a step's program returned for the host, or None."""


class FirstBlockSteps(StepCache):
    """FirstBlockCache: the other blocks run if the first one's residual has changed enough."""

    def plan_run(self, model: Any, batch: int, steps: Iterable[Any]) -> list[StepPlan]:
        """Return two plans: of a step that runs all blocks, and of one that reuses the others' residual."""
        ((_, numbers),) = super().plan_run(model, batch, range(1))
        return [(form("first_block", (), (), reuses), numbers) for reuses in (False, True)]

    def _plan_step(self, state: RunState, model: Any, tensors: dict[str, Any]) -> StepPlan:
        """Return the form that is the same for all steps, and the threshold: the device decides."""
        head = next(iter(state.hooks.values()))
        head.state_manager.get_state()  # raises an error outside of a context
        return form("first_block"), {"threshold": torch.tensor(head.threshold)}

    def _record(self, state: RunState, seen: Any) -> None:
        """Record whether the step ran all blocks."""
        state.computed.append(seen)


class MagSteps(StepCache):
    """MagCache: all blocks or none, by ratios that are known before the run."""

    def _plan_step(self, state: RunState, model: Any, tensors: dict[str, Any]) -> StepPlan:
        """Return the form that runs all blocks or none, as the hooks decide by their ratios."""
        if self.hooks[0].hook.config.calibrate:
            return form("all_blocks"), {}
        state.computed.append(self._count_step(state))
        return form("all_blocks" if state.computed[-1] else "no_block"), {}

    def _record(self, state: RunState, seen: Any) -> None:
        """Give the measured ratio to the hooks, if they calibrate."""
        if self.hooks[0].hook.config.calibrate:
            state.computed.append(runtime.without_torchax(self._count_step, state, seen))

    def _count_step(self, state: RunState, ratio: Any = None) -> bool:
        """Make the hooks of the first and the last block count a step; return whether it runs the blocks.

        `ratio` is the ratio that a calibration has measured at this step, or None.
        """
        nothing = torch.zeros(1, 1, 1)
        head, *_, tail = state.hooks.values()

        def calibrate(counted: Any, _residual: Any) -> None:
            """Append the measured ratio to diffusers' state, in place of its own measurement."""
            counted.calibration_ratios.append(float(ratio) if counted.calibration_ratios else 1.0)

        computes, _ = (
            computes_module(hook, (nothing, nothing), hidden_states=nothing, encoder_hidden_states=nothing)
            for hook in (head, upstream.calibrated(tail, calibrate))
        )
        return computes


class BroadcastSteps(StepCache):
    """PyramidAttentionBroadcast: later steps reuse attention's results."""

    def _plan_step(self, state: RunState, model: Any, tensors: dict[str, Any]) -> StepPlan:
        """Return the form whose skipped modules are those whose hooks would reuse a result."""
        skipped = tuple(
            name for name, hook in state.hooks.items() if not computes_module(hook, torch.zeros(1))
        )
        state.computed.append(not skipped)
        return form("broadcast", tuple(state.hooks), skipped), {}


class TaylorSteps(StepCache):
    """TaylorSeer: results are extrapolated from earlier steps."""

    def _plan_step(self, state: RunState, model: Any, tensors: dict[str, Any]) -> StepPlan:
        """Return the form, the steps `since` the last computed one, and how many differences are `known`.

        All hooks compute or skip the same steps.
        """
        counts = {name: hook.state_manager.get_state() for name, hook in state.hooks.items()}
        kept = tuple(name for name in results_that_skips_read(counts) if not counts[name].is_inactive)
        first = counts[kept[0]] if kept else next(iter(counts.values()))
        last, known = first.last_update_step, len(first.taylor_factors.get(0, ()))
        (computes,) = {computes_module(hook, torch.zeros(1)) for hook in state.hooks.values()}
        state.computed.append(computes)
        since = 1.0 if last is None else float(first.current_step - last)
        static = kept, () if computes else tuple(counts), first.max_order + 1, first.taylor_factors_dtype
        return form("taylor", *static), {"since": torch.tensor(since), "known": torch.tensor(known)}


def results_that_skips_read(names: Iterable[str]) -> list[str]:
    """Return the modules, of those named, whose results are read by a step that skips all of them.

    A block that is skipped as a whole, or the last layer, needs no results of the modules before it: those
    are left out.
    """

    def position(name: str) -> tuple[float, bool]:
        """Return a module's place among the blocks, and whether it is a whole block or the last layer."""
        block = re.match(r"transformer_blocks\.(\d+)(\.?)", name)
        return (float(block[1]), not block[2]) if block else (math.inf, name == "proj_out")

    last = max((position(name) for name in names if position(name)[1]), default=(-1.0, False))
    return [name for name in names if position(name) >= last]


class FasterSteps(StepCache):
    """FasterCache: attention is extrapolated, the prediction without the prompt made from the other one."""

    def _plan_step(self, state: RunState, model: Any, tensors: dict[str, Any]) -> StepPlan:
        """Return the form, with the videos that the step runs on, and the weights of its extrapolations.

        The transformer's hook decides whether to skip the videos without a prompt, attention's hooks whether
        to skip a module.
        """
        weights: dict[str, float] = {}
        for each in self.hooks:  # the user's callbacks are asked with the user's modules
            self._record_weights(state.hooks[each.module], each, model.get_submodule(each.module), weights)
        denoiser, parts = state.hooks[""], {name: hook for name, hook in state.hooks.items() if name}
        batch, prompted_only, skipped = len(tensors["hidden_states"]), [], []

        def denoise(hidden_states: torch.Tensor) -> tuple[torch.Tensor]:
            """Stand for the transformer: record if it runs with the prompt alone, and the skipped modules."""
            prompted_only.append(len(hidden_states) < batch)
            skipped.extend(
                name for name, hook in parts.items() if not computes_module(hook, *2 * [hidden_states])
            )
            return (hidden_states,)

        known = denoiser.state.iteration > 1  # results of two steps
        upstream.call_hook(denoiser, denoise, hidden_states=torch.zeros(batch, 1, 1, 1, 1))
        numbers = {
            name: torch.tensor(weights.get(f".{name}_frequency_weight_callback", 1.0))
            for name in ("low", "high")
        }
        part_weights = [known * weights.get(f"{name}.weight_callback", 0.0) for name in parts]
        numbers["weights"] = torch.tensor(part_weights)
        state.computed.append(not (prompted_only[0] or skipped))
        videos = "with the prompt" if prompted_only[0] else "with and without"
        videos = "all" if denoiser.is_guidance_distilled else videos
        return form("faster", tuple(parts), tuple(skipped), videos), numbers

    def _record(self, state: RunState, seen: Any) -> None:
        """Put the two kept results of each tensor in order again, the older one first."""
        # The program returns the newer result first, written to the memory of the older one.
        swapped = {name: tuple(pair[::-1] for pair in state.kept[name]) for name in state.hooks if name}
        state.kept = {**state.kept, **swapped}

    def _record_weights(
        self, hook: Any, original: upstream.Hooked, module: nn.Module, weights: dict[str, float]
    ) -> None:
        """Make a copied hook call the user's weight callbacks with the user's module; record their results.

        `original` is the hook that was copied, `weights` gets a result by "MODULE.CALLBACK".
        """
        for name in [name for name in vars(original.hook) if name.endswith("weight_callback")]:

            def ask(_: Any, name: str = name) -> float:
                key = f"{original.module}.{name}"
                weights[key] = float(getattr(original.hook, name)(module))
                return weights[key]

            setattr(hook, name, ask)


def computes_module(hook: Any, result: Any, *args: Any, **kwargs: Any) -> bool:
    """Call a hook, and return whether it calls its module, in place of which a function returns `result`."""
    ran: list[bool] = []

    def module(*_: Any, **__: Any) -> Any:
        """Record the call."""
        ran.append(True)
        return result

    upstream.call_hook(hook, module, *args, **kwargs)
    return bool(ran)


KINDS: dict[str, type[StepCache]] = {
    "FBC": FirstBlockSteps,
    "Mag": MagSteps,
    "PyramidAttention": BroadcastSteps,
    "TaylorSeer": TaylorSteps,
    "FasterCache": FasterSteps,
}
"""The class of each cache, by the prefix of its hooks' classes in diffusers."""


WITHOUT_EFFECT = (
    "{} skips nothing on CogVideoX, in diffusers either: take FirstBlockCacheConfig, MagCacheConfig, "
    "PyramidAttentionBroadcastConfig or FasterCacheConfig, or TaylorSeerCacheConfig with use_lite_mode=True "
    r"or cache_identifiers=[r'transformer_blocks\.\d+\.attn1']"
)


def cache_of(hooks: list[upstream.Hooked]) -> StepCache | None:
    """Return the cache that diffusers' hooks, taken off a transformer, ask for; None if they skip nothing."""
    names = {type(each.hook).__name__ for each in hooks}
    kinds = {kind for prefix, kind in KINDS.items() for name in names if name.startswith(prefix)}
    if len(kinds) > 1:
        raise ValueError(f"got hooks of {len(kinds)} caches: disable one before another is enabled")
    return kinds.pop()(hooks) if kinds else None
