"""diffusers' step caches on JAX, which skip layers of a denoising step and use results of earlier steps.

`enable_cache` has diffusers put hooks on the transformer's modules. Here the hooks are taken off again, and a
copy of them for each run decides on the host what a step skips; for FirstBlockCache the device decides. The
arrays that a step keeps for later steps are its program's cache: donated, and zeros before the first step.

Terms:
    run: the denoising steps of one call of a pipeline.
    context: a group of a run's calls of the transformer, such as those with the prompt, where a pipeline does
        not batch the two passes of guidance. diffusers' `cache_context` names it; each has its own state.
    form of a step: the layers that it skips, and the results that it keeps; each form is a program.
    numbers of a step: its scalars and vectors, which are inputs of its program (`cached_layers.NUMBERS`).
    prompted videos: with guidance a batch has each video twice, without the prompt in its first half, with it
        in the second half. The second half are the prompted videos.
    host scalar: a scalar that a step's program returns for the host, beside the prediction; most caches have
        none (None). It stays on the device until somebody reads its value.

`computes_module` asks a hook whether its module runs in a step: it calls the hook with a stand-in for the
module. The hook takes this call for the module's step, and updates its state, such as its count of steps.
"""

import contextlib
import copy
import functools
import math
import re
import threading
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from cogvideox_torchax import runtime, upstream


class Form(NamedTuple):
    """The form of a step.

    Attributes:
        kind: key of the class that runs the step, in `cached_layers.STEP_CLASSES`.
        kept_modules: names of the modules whose results are kept for later steps.
        skipped_modules: names of the modules that do not run, as their kept results are used.
        arrays_per_tensor: number of arrays that are kept for each tensor of a module's result.
        dtype: dtype of kept arrays; None for the results' own.
        prompted_only: whether the step runs on the prompted videos alone, and estimates the prediction
            without the prompt; None if the batch has no videos without the prompt.
        reuses: whether a "first_block" step skips the blocks after the first; None lets the device decide.
    """

    kind: str
    kept_modules: tuple[str, ...] = ()
    skipped_modules: tuple[str, ...] = ()
    arrays_per_tensor: int = 1
    dtype: torch.dtype | None = None
    prompted_only: bool | None = None
    reuses: bool | None = None


form = functools.cache(Form)
"""Make a `Form`; the same arguments give the same object, as a model finds its program by identity."""

StepPlan = tuple[Form, dict[str, torch.Tensor]]
"""(form, numbers) of a step. The numbers are tensors on the host, by a name of `cached_layers.NUMBERS`."""


@dataclass
class RunState:
    """The state of a run, in one context.

    Attributes:
        hooks: diffusers' hooks, copied for this run, by the module's name.
        kept_arrays: the arrays that the last step has kept; None before the first step.
        computed: for each step, whether it skipped nothing: a bool, or a scalar that is still on the device.
    """

    hooks: dict[str, Any]
    kept_arrays: Any = None
    computed: list[Any] = field(default_factory=list)


class _ThreadStates(threading.local):
    """The states of a thread's runs, and the name of its context; each thread gets its own object."""

    def __init__(self) -> None:
        # States by cache, then by the context's name, which is None outside of any context.
        self.states: MutableMapping[StepCache, dict[str | None, RunState]] = WeakKeyDictionary()
        self.context: str | None = None


_THREAD = _ThreadStates()


@contextlib.contextmanager
def context(name: str) -> Iterator[None]:
    """Put the steps of a `with` block into the context called `name`, as diffusers' `cache_context` does."""
    outer_context = _THREAD.context
    _THREAD.context = name
    try:
        yield
    finally:
        _THREAD.context = outer_context


class StepCache:
    """A cache of a transformer's steps; each subclass is for one of diffusers' caches.

    Args:
        hooks: the hooks that diffusers' cache had on the modules, each with its module's name.
    """

    def __init__(self, hooks: list[upstream.Hooked]):
        self.hooks = hooks
        self._computed: list[Any] = []  # `RunState.computed` of the last run

    @property
    def computed(self) -> list[bool]:
        """True for each step of the last run that skipped nothing; reading it waits for the run."""
        return [bool(step) for step in self._computed]

    def __str__(self) -> str:
        skipped, steps = self.computed.count(False), len(self.computed)
        return f"{skipped} of {steps} steps skipped" + (", in whole or in part" if skipped else "")

    def reset(self) -> None:
        """Drop the states of this thread's runs: the next step begins a run."""
        _THREAD.states.pop(self, None)

    def step(
        self, model: Any, make_network: Callable[[Form], nn.Module], tensors: dict[str, Any]
    ) -> torch.Tensor:
        """Run a denoising step and return its prediction; keep its arrays for the context's next step.

        `model` is the ported transformer. `make_network` makes the module that the program of a form is
        compiled from.
        """
        # Each context has its own state. But the hooks of some caches of diffusers have no state manager, and
        # one state for all contexts: this state gets the name None.
        has_contexts = any(hasattr(each.hook, "state_manager") for each in self.hooks)
        name = _THREAD.context if has_contexts else None
        states = _THREAD.states.setdefault(self, {})
        # The state is put back after the step. If the step fails, it is gone, and the next step begins a run.
        state = states.pop(name, None) or self.new_state(name)
        # Without torchax, as the hooks compute with plain tensors on the host.
        step_form, numbers = self.plan_step(state, model, tensors)
        network = make_network(step_form)
        program = model.program_of(network)  # all steps of this form have one program
        # Both are moved to the program's devices, unless they are there already.
        weights, inputs = program.weights(network), program.put({**tensors, **numbers})
        if state.kept_arrays is None:  # the first step takes zeros, of the shapes that its program returns
            state.kept_arrays = program.empty_cache(weights, inputs)
        # The program is donated the kept arrays, and returns those that replace them.
        (prediction, host_scalar), state.kept_arrays = program.run(weights, inputs, state.kept_arrays)
        self._record(state, host_scalar)
        states[name] = state
        return runtime.tensor_of(prediction)

    def new_state(self, name: str | None) -> RunState:
        """Begin a run in the context `name`, and return its state; `self.computed` now reports this run."""
        state = RunState(copy.deepcopy({each.module: each.hook for each in self.hooks}))
        for hook in state.hooks.values():
            hook.reset_state(None)  # the argument is the hooked module, which no cache's hook reads
            upstream.set_context(hook, name)
        self._computed = state.computed
        return state

    def plan_step(self, state: RunState, model: Any, tensors: dict[str, Any]) -> StepPlan:
        """Plan the next step, which the hooks count; append to `state.computed` here or in `_record`."""
        raise NotImplementedError

    def _record(self, state: RunState, host_scalar: Any) -> None:
        """Update `state` after a step, whose program returned `host_scalar`."""


class FirstBlockSteps(StepCache):
    """FirstBlockCache: the blocks after the first run only if the first block's residual has changed enough.

    The residual (a result minus its input) is compared with that of the last step whose blocks all ran. One
    program runs all steps, and the device decides in each.
    """

    def plan_step(self, state: RunState, model: Any, tensors: dict[str, Any]) -> StepPlan:
        first_block_hook = next(iter(state.hooks.values()))
        # Called only for diffusers' error: it raises one if the step runs outside of any context.
        first_block_hook.state_manager.get_state()
        return form("first_block"), {"threshold": torch.tensor(first_block_hook.threshold)}

    def _record(self, state: RunState, host_scalar: Any) -> None:
        state.computed.append(host_scalar)  # whether the device ran all blocks


class MagSteps(StepCache):
    """MagCache: a step runs all blocks or none, by ratios that a calibration has measured.

    A calibration is a run that skips nothing. The residual of a step is what its blocks add to their input.
    The ratio of a step is the norm of its residual over the norm of the residual of the step before.
    """

    def plan_step(self, state: RunState, model: Any, tensors: dict[str, Any]) -> StepPlan:
        """Ask the first block's hook, which decides by the ratios, whether all blocks run or none."""
        first_hook, *_, last_hook = state.hooks.values()  # in the order of the blocks
        # The hooks read a block's arguments and its result, (patches, text), but decide without their values.
        zeros = torch.zeros(1, 1, 1)
        arguments, result = {"hidden_states": zeros, "encoder_hidden_states": zeros}, (zeros, zeros)
        computes = computes_module(first_hook, result, **arguments)
        # The last block's hook counts the step, so it is called too. In a calibration this is left to
        # `_record`, where the hook also records the step's ratio.
        if not first_hook.config.calibrate:
            computes_module(last_hook, result, **arguments)
        state.computed.append(computes)
        return form("all_blocks" if computes else "no_block"), {}

    def _record(self, state: RunState, host_scalar: Any) -> None:
        """In a calibration, have the last block's hook record `host_scalar`, the step's ratio."""
        *_, last_hook = state.hooks.values()
        if last_hook.config.calibrate:
            upstream.record_ratio(last_hook, host_scalar)


class BroadcastSteps(StepCache):
    """PyramidAttentionBroadcast: attention runs in some steps, and the steps between reuse its results."""

    def plan_step(self, state: RunState, model: Any, tensors: dict[str, Any]) -> StepPlan:
        # A zero stands for any module's result, which the hooks only pass on.
        skipped_modules = tuple(
            name for name, hook in state.hooks.items() if not computes_module(hook, torch.zeros(1))
        )
        state.computed.append(not skipped_modules)
        # Every module that may be skipped has its result kept.
        return form("broadcast", tuple(state.hooks), skipped_modules), {}


class TaylorSteps(StepCache):
    """TaylorSeer: a skipped step's results are extrapolated, by a Taylor series, from the computed steps."""

    def plan_step(self, state: RunState, model: Any, tensors: dict[str, Any]) -> StepPlan:
        hook_states = {name: hook.state_manager.get_state() for name, hook in state.hooks.items()}
        # A step that skips all modules reads only some of the modules' results: only these are kept. Of them
        # the results of inactive modules are not kept either, as zeros replace these.
        kept_modules = tuple(
            name for name in results_read_by_skips(hook_states) if not hook_states[name].is_inactive
        )
        # One hook's state tells for all, as all hooks have counted the same steps. It is that of a kept
        # module, if there is one: only such a state has the factors of a series.
        first_module, *_ = (*kept_modules, *hook_states)
        hook_state = hook_states[first_module]
        # These two are read before `computes_module`, which has the hooks update their states. All tensors of
        # a result have as many factors as tensor 0.
        known_factors = len(hook_state.taylor_factors.get(0, ()))
        last_computed_step = hook_state.last_update_step
        # A zero stands for each module's result. All hooks give the same answer, as the step computes all
        # modules or none: so the set has one item.
        (computes,) = {computes_module(hook, torch.zeros(1)) for hook in state.hooks.values()}
        state.computed.append(computes)
        # In the first step no earlier one was computed, and no difference is kept: any number but 0, by which
        # the program would divide, will do.
        since = 1.0 if last_computed_step is None else float(hook_state.current_step - last_computed_step)
        taylor_form = form(
            "taylor",
            kept_modules,
            skipped_modules=() if computes else tuple(hook_states),
            arrays_per_tensor=hook_state.max_order + 1,  # the value, and `max_order` derivatives
            dtype=hook_state.taylor_factors_dtype,
        )
        return taylor_form, {"since": torch.tensor(since), "known": torch.tensor(known_factors)}


def results_read_by_skips(names: Iterable[str]) -> list[str]:
    """Return the names of the modules whose kept results a step reads if it skips all modules `names`.

    The result of a whole block, or of the last layer "proj_out", replaces all that is computed before it. So
    the step reads only the result of the last such module, and those of the modules after it.
    """

    def position(name: str) -> tuple[float, bool]:
        """Return (index of the module's block, whether it is the whole block), by which to order modules."""
        # A module outside of the blocks comes after them. "proj_out" counts as a whole block: its result
        # replaces all that is computed before it.
        block = re.match(r"transformer_blocks\.(?P<index>\d+)(?P<inside>\.?)", name)
        return (float(block["index"]), not block["inside"]) if block else (math.inf, name == "proj_out")

    positions = {name: position(name) for name in names}
    # The position of the last whole block, or of "proj_out". Without one, -1 is before the first block: all
    # names are returned. Modules inside that block are before it, as False is less than True.
    last_whole = max(
        ((block, is_whole) for block, is_whole in positions.values() if is_whole), default=(-1.0, False)
    )
    return [name for name in names if positions[name] >= last_whole]


class FasterSteps(StepCache):
    """FasterCache: attention's results are extrapolated, and predictions without the prompt estimated."""

    def plan_step(self, state: RunState, model: Any, tensors: dict[str, Any]) -> StepPlan:
        attention_modules = tuple(name for name in state.hooks if name)  # the transformer's hook is ""
        transformer_hook = state.hooks[""]
        # True after two steps. It is read before `_ask_hooks`, which has the hooks count the present step.
        has_two_results = transformer_hook.state.iteration > 1
        prompted_only, skipped_modules = self._ask_hooks(state, len(tensors["hidden_states"]))
        # In the copied hooks `_ask_hooks` has replaced the user's callbacks: the original hooks have them.
        original_hooks = {each.module: each.hook for each in self.hooks}
        # By attention module, the weight of its extrapolation: 0 for a module that runs, and 0, by the factor
        # `has_two_results`, before there are two results to extrapolate.
        weights = [
            has_two_results * float(original_hooks[name].weight_callback(model.get_submodule(name)))
            if name in skipped_modules
            else 0.0
            for name in attention_modules
        ]
        low, high = 1.0, 1.0  # weights of low and high frequencies; only a `prompted_only` step reads them
        if prompted_only:
            low = float(original_hooks[""].low_frequency_weight_callback(model))
            high = float(original_hooks[""].high_frequency_weight_callback(model))
        state.computed.append(not (prompted_only or skipped_modules))
        faster_form = form(
            "faster",
            attention_modules,
            skipped_modules,
            arrays_per_tensor=2,  # the last two results
            # A model with distilled guidance runs no videos without the prompt.
            prompted_only=None if transformer_hook.is_guidance_distilled else prompted_only,
        )
        return faster_form, {
            "low": torch.tensor(low),
            "high": torch.tensor(high),
            "weights": torch.tensor(weights),
        }

    def _ask_hooks(self, state: RunState, batch: int) -> tuple[bool, tuple[str, ...]]:
        """Return (whether a step runs only the prompted videos, names of the modules that it skips)."""
        # The user's callbacks for weights need modules and do not change what is skipped: in these copies of
        # the hooks they are replaced by one that returns 0.
        for hook in state.hooks.values():
            vars(hook).update(
                {name: lambda _module: 0.0 for name in vars(hook) if name.endswith("weight_callback")}
            )
        answers: list[tuple[bool, tuple[str, ...]]] = []

        # The transformer's hook always calls this in place of the transformer, with all videos or with the
        # prompted ones.
        def stand_in_transformer(hidden_states: torch.Tensor) -> tuple[torch.Tensor]:
            # The transformer would call its attention modules: their hooks are asked here. The videos stand
            # for a module's result, too, of which hooks read only the number of videos.
            skipped_modules = tuple(
                name
                for name, hook in state.hooks.items()
                if name and not computes_module(hook, hidden_states, hidden_states)
            )
            answers.append((len(hidden_states) < batch, skipped_modules))
            return (hidden_states,)

        # The hook reads nothing of the latents (N, T, C, H, W) but their number.
        upstream.call_hook(
            state.hooks[""], stand_in_transformer, hidden_states=torch.zeros(batch, 1, 1, 1, 1)
        )
        return answers[0]

    def _record(self, state: RunState, host_scalar: Any) -> None:
        """Put the two kept results of each tensor in the order (older, newer), which the next step takes.

        A step's program returns (newer, older), so that its new result takes the oldest one's donated memory.
        """
        state.kept_arrays |= {
            name: tuple((older, newer) for newer, older in state.kept_arrays[name])
            for name in state.hooks
            if name  # not the transformer, for which no such pairs are kept
        }


def computes_module(hook: Any, result: Any, *args: Any, **kwargs: Any) -> bool:
    """Return whether a hook would run its module in this step; the hook counts the step.

    The hook is called with `args` and `kwargs`; a stand-in for its module returns `result`.
    """
    calls: list[Any] = []

    def stand_in_module(*_args: Any, **_kwargs: Any) -> Any:
        calls.append(result)
        return result

    upstream.call_hook(hook, stand_in_module, *args, **kwargs)
    return bool(calls)


CACHE_CLASSES: dict[str, type[StepCache]] = {
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
"""Warning of an enabled cache that skips nothing, to format with the name of its config's class."""


def cache_of(hooks: list[upstream.Hooked]) -> StepCache | None:
    """Return the step cache that replaces diffusers' hooks; None for a cache that `CACHE_CLASSES` lacks.

    Caches that are not in `CACHE_CLASSES` skip nothing on CogVideoX.

    Raises:
        ValueError: hooks of several caches.
    """
    hook_classes = {type(each.hook).__name__ for each in hooks}
    # diffusers' classes of one cache's hooks begin with one prefix.
    cache_classes = {
        cache_class
        for prefix, cache_class in CACHE_CLASSES.items()
        if any(name.startswith(prefix) for name in hook_classes)
    }
    if len(cache_classes) > 1:
        raise ValueError(f"got hooks of {len(cache_classes)} caches: disable one before another is enabled")
    return cache_classes.pop()(hooks) if cache_classes else None
