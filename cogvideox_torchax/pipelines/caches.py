"""diffusers' step caches on JAX: what its hooks would skip of a step is not computed.

`enable_cache` has diffusers hook the transformer's modules. Here a copy of these hooks for each run decides
on the host what a step skips; for FirstBlockCache the device decides. The arrays that a step keeps for later
steps are the program's cache: donated, and zeros before the first step. The docstring of `pipelines` explains
the terms.
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
        kind: a key of `cached_layers.REUSES`, the class that runs the step.
        kept: names of the modules whose results are kept.
        skipped: names of the modules whose kept results are used.
        arrays: number of arrays that are kept for each tensor of a result.
        dtype: dtype of kept arrays; None for the results' own.
        prompted_only: whether the step runs on the prompted videos alone, and estimates the prediction
            without the prompt; None if no video has a twin without the prompt.
        reuses: whether a "first_block" step reuses; None lets the device decide.
    """

    kind: str
    kept: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    arrays: int = 1
    dtype: torch.dtype | None = None
    prompted_only: bool | None = None
    reuses: bool | None = None


form = functools.cache(Form)
"""Make a `Form`; the same arguments give the same object, by which a program is found again."""

StepPlan = tuple[Form, dict[str, torch.Tensor]]
"""(form, numbers) of a step: `numbers` are tensors of `cached_layers.NUMBERS`, by name, for its program."""


@dataclass
class RunState:
    """The state of a run of denoising steps, in one context.

    Attributes:
        hooks: diffusers' hooks, copied for this run, by the module's name.
        kept: arrays that the last step has kept; None before the first step.
        computed: for each step, whether it skipped nothing: a bool, or a scalar that is still on the device.
    """

    hooks: dict[str, Any]
    kept: Any = None
    computed: list[Any] = field(default_factory=list)


class _ThreadStates(threading.local):
    """The states of this thread's runs, by cache and name of a context, and the current context's name."""

    def __init__(self) -> None:
        # A context is a group of a pipeline's calls, such as those with the prompt. States are by cache, then
        # by the context's name, None outside of any.
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
    """A cache of a transformer's steps, as the hooks that `upstream.take_hooks` took off describe it."""

    def __init__(self, hooks: list[upstream.Hooked]):
        self.hooks = hooks
        self._computed: list[Any] = []  # for each step of the last run, whether it skipped nothing

    @property
    def computed(self) -> list[bool]:
        """True for each step of the last run that skipped nothing; reading it waits for the run."""
        return [bool(step) for step in self._computed]

    def __str__(self) -> str:
        # `computed` has for each step whether all of it was computed.
        skipped, steps = self.computed.count(False), len(self.computed)
        return f"{skipped} of {steps} steps skipped" + ", in whole or in part" * (skipped > 0)

    def reset(self) -> None:
        """Drop the states of this thread's runs: the next step begins a run."""
        _THREAD.states.pop(self, None)

    def step(
        self, model: Any, make_network: Callable[[Form], nn.Module], tensors: dict[str, Any]
    ) -> torch.Tensor:
        """Run a step and return its prediction; keep its arrays for the context's next step."""
        # Hooks without a state manager do not tell contexts apart, in diffusers either.
        name = _THREAD.context if any(hasattr(each.hook, "state_manager") for each in self.hooks) else None
        states = _THREAD.states.setdefault(self, {})
        state = states.pop(name, None) or self._new_state(name)  # a step that fails leaves no state behind
        # `numbers` are scalars that the step's program takes besides the tensors.
        form, numbers = runtime.without_torchax(self._plan_step, state, model, tensors)
        network = make_network(form)
        program = model.program_of(network)
        weights, inputs = program.weights(network), program.put({**tensors, **numbers})
        if state.kept is None:
            state.kept = program.empty_cache(weights, inputs)
        # The kept arrays are donated, and replaced by the step's; `seen` is a scalar for the host, or None.
        (prediction, seen), state.kept = program.run(weights, inputs, state.kept)
        self._record(state, seen)
        states[name] = state
        return runtime.tensor_of(prediction)

    def plan_run(self, model: Any, batch: int, steps: Iterable[Any]) -> list[StepPlan]:
        """Return the `StepPlan` of each step of a run, without running a step.

        `steps` has an item for each step, which is ignored. A generator may set the step's timestep, which
        the hooks' callbacks return, before it yields.
        """
        state = self._new_state("a plan")  # hooks need a context; its name does not matter
        tensors = {"hidden_states": torch.empty(batch, 0)}  # hooks read nothing of them but the batch size
        return [self._plan_step(state, model, tensors) for _ in steps]

    def _new_state(self, name: str | None) -> RunState:
        """Return the state of a new run in the context `name`, which `self.computed` reports from now on."""
        hooks = {each.module: each.hook for each in self.hooks}  # by the module's name
        state = RunState(runtime.without_torchax(copy.deepcopy, hooks))
        for hook in state.hooks.values():
            hook.reset_state(None)  # its argument is the hooked module, which no cache's hook reads
            upstream.set_context(hook, name)
        self._computed = state.computed
        return state

    def _plan_step(self, state: RunState, model: Any, tensors: dict[str, Any]) -> StepPlan:
        """Return the form and the numbers of the next step, and have the hooks count the step."""
        raise NotImplementedError

    def _record(self, state: RunState, seen: Any) -> None:
        """Update `state` after a step by `seen`, a scalar that the program returned for the host, or None."""


class FirstBlockSteps(StepCache):
    """FirstBlockCache: the blocks after the first run if the first one's residual has changed enough."""

    def plan_run(self, model: Any, batch: int, steps: Iterable[Any]) -> list[StepPlan]:
        """Return (form, numbers) of a step that runs all blocks, and of one that reuses.

        In a run the device decides between the two; in a plan each is a program.
        """
        # `numbers` has only the threshold, the same for all steps: `range(1)` plans one step to get it.
        ((_form, numbers),) = super().plan_run(model, batch, range(1))
        return [(form("first_block", reuses=reuses), numbers) for reuses in (False, True)]

    def _plan_step(self, state: RunState, model: Any, tensors: dict[str, Any]) -> StepPlan:
        first_hook = next(iter(state.hooks.values()))  # the first block's
        first_hook.state_manager.get_state()  # raises an error outside of a context
        return form("first_block"), {"threshold": torch.tensor(first_hook.threshold)}

    def _record(self, state: RunState, seen: Any) -> None:
        state.computed.append(seen)


class MagSteps(StepCache):
    """MagCache: all blocks or none, by ratios that a calibration run, which skips nothing, has measured.

    A ratio is the norm of a step's residual of all blocks over that of the step before.
    """

    def _plan_step(self, state: RunState, model: Any, tensors: dict[str, Any]) -> StepPlan:
        """Ask the first block's hook, which decides by its ratios, whether all blocks run or none."""
        first_hook, *_, last_hook = state.hooks.values()  # in the order of the blocks
        # The hooks need arguments and a result of a block, (patches, text), but decide without the values.
        zeros = torch.zeros(1, 1, 1)
        arguments, result = {"hidden_states": zeros, "encoder_hidden_states": zeros}, (zeros, zeros)
        computes = computes_module(first_hook, result, **arguments)
        if not first_hook.config.calibrate:  # else `_record` counts the step, once its ratio is measured
            computes_module(last_hook, result, **arguments)  # called because this hook counts the step
        state.computed.append(computes)
        return form("all_blocks" if computes else "no_block"), {}

    def _record(self, state: RunState, seen: Any) -> None:
        """In a calibration, have the last block's hook record `seen`, the step's ratio."""
        *_, last_hook = state.hooks.values()
        if last_hook.config.calibrate:
            runtime.without_torchax(upstream.record_ratio, last_hook, seen)


class BroadcastSteps(StepCache):
    """PyramidAttentionBroadcast: later steps reuse attention's results."""

    def _plan_step(self, state: RunState, model: Any, tensors: dict[str, Any]) -> StepPlan:
        # The hooks only pass a module's result on: any tensor can stand for it.
        skipped = tuple(
            name for name, hook in state.hooks.items() if not computes_module(hook, torch.zeros(1))
        )
        state.computed.append(not skipped)  # whether the step skips nothing
        return form("broadcast", tuple(state.hooks), skipped), {}


class TaylorSteps(StepCache):
    """TaylorSeer: results are extrapolated from earlier steps."""

    def _plan_step(self, state: RunState, model: Any, tensors: dict[str, Any]) -> StepPlan:
        hook_states = {name: hook.state_manager.get_state() for name, hook in state.hooks.items()}
        # diffusers keeps no result of an inactive module: zeros replace it.
        kept = tuple(name for name in results_read_by_skips(hook_states) if not hook_states[name].is_inactive)
        # Any state tells "since", as all count the same steps. "known" is a kept module's: an inactive
        # module's state has no factors, the arrays that diffusers keeps.
        hook_state = hook_states[kept[0] if kept else next(iter(hook_states))]
        # Both are read before `computes_module`, which has the hooks count this step.
        known = len(hook_state.taylor_factors.get(0, ()))  # factors of a result's tensor 0, as of each tensor
        last_step = hook_state.last_update_step  # the last computed one
        # Each hook is called, to count the step; all give one answer, whatever the module's result (a zero).
        (computes,) = {computes_module(hook, torch.zeros(1)) for hook in state.hooks.values()}
        state.computed.append(computes)
        # Without a computed step before, no difference is kept: 1 only avoids a division by 0.
        since = 1.0 if last_step is None else float(hook_state.current_step - last_step)
        taylor_form = form(
            "taylor",
            kept,
            skipped=() if computes else tuple(hook_states),
            arrays=hook_state.max_order + 1,
            dtype=hook_state.taylor_factors_dtype,
        )
        return taylor_form, {"since": torch.tensor(since), "known": torch.tensor(known)}


def results_read_by_skips(names: Iterable[str]) -> list[str]:
    """Return the names of the modules whose kept results a step reads if it skips all modules `names`.

    The result of a whole block, or of the last layer "proj_out", replaces all that is computed before it. So
    the step reads only the result of the last such module, and those of the modules after it.
    """

    def position(name: str) -> tuple[float, bool]:
        """Return (index of a module's block, whether it is the whole block), in the order of running."""
        block = re.match(r"transformer_blocks\.(?P<index>\d+)(?P<inside>\.?)", name)
        return (float(block["index"]), not block["inside"]) if block else (math.inf, name == "proj_out")

    positions = {name: position(name) for name in names}
    # The default is before the first block: without a whole module all names are returned.
    last_whole = max((each for each in positions.values() if each[1]), default=(-1.0, False))
    return [name for name in names if positions[name] >= last_whole]


class FasterSteps(StepCache):
    """FasterCache: attention is extrapolated, the prediction without the prompt made from the one with it."""

    def _plan_step(self, state: RunState, model: Any, tensors: dict[str, Any]) -> StepPlan:
        """Return the form, with the weights that the user's callbacks give."""
        # The hook of the transformer has the name "", hooks of attention modules have the modules' names.
        attention = tuple(name for name in state.hooks if name)
        denoiser = state.hooks[""]
        has_two_results = denoiser.state.iteration > 1  # else there is nothing to extrapolate: weight 0
        prompted_only, skipped = self._ask_hooks(state, len(tensors["hidden_states"]))
        callbacks = {each.module: each.hook for each in self.hooks}  # the original hooks have the user's
        weights = [
            has_two_results * float(callbacks[name].weight_callback(model.get_submodule(name)))
            if name in skipped
            else 0.0
            for name in attention
        ]
        low, high = 1.0, 1.0
        if prompted_only:
            low = float(callbacks[""].low_frequency_weight_callback(model))
            high = float(callbacks[""].high_frequency_weight_callback(model))
        state.computed.append(not (prompted_only or skipped))  # whether the step skips nothing
        faster_form = form(
            "faster",
            attention,
            skipped,
            arrays=2,  # the last two results are kept
            # None: in a distilled model no video has a twin without the prompt.
            prompted_only=None if denoiser.is_guidance_distilled else prompted_only,
        )
        return faster_form, {
            "low": torch.tensor(low),
            "high": torch.tensor(high),
            "weights": torch.tensor(weights),
        }

    def _ask_hooks(self, state: RunState, batch: int) -> tuple[bool, tuple[str, ...]]:
        """Return (whether a step runs only the prompted videos, names of the modules that it skips).

        The transformer's hook, named "", decides the first, the attention modules' hooks the second. They
        also count the step. `batch` is the number of videos, without and with the prompt.
        """
        # These hooks are copies, and weights do not change what they skip: their callbacks return 0.
        for hook in state.hooks.values():
            vars(hook).update(
                {name: lambda _module: 0.0 for name in vars(hook) if name.endswith("weight_callback")}
            )
        prompted_only: bool = False
        skipped: tuple[str, ...] = ()

        def denoise(hidden_states: torch.Tensor) -> tuple[torch.Tensor]:
            """Stand for the transformer: ask the hooks of attention, which it would call."""
            nonlocal prompted_only, skipped
            prompted_only = len(hidden_states) < batch
            result = hidden_states  # in place of a module's result: hooks read only its number of videos
            skipped = tuple(
                name
                for name, hook in state.hooks.items()
                if name and not computes_module(hook, result, hidden_states)
            )
            return (result,)

        # The hook calls `denoise` once, with all videos or with those that it does not skip.
        upstream.call_hook(state.hooks[""], denoise, hidden_states=torch.zeros(batch, 1, 1, 1, 1))
        return prompted_only, skipped

    def _record(self, state: RunState, seen: Any) -> None:
        """Put the two kept results of each tensor in order again, the older one first."""
        # The program returns (newer, older): the newer result is written to the donated memory of the oldest.
        # The hook named "" is the transformer's: it keeps no such pairs.
        in_order = {
            name: tuple((older, newer) for newer, older in state.kept[name]) for name in state.hooks if name
        }
        state.kept = {**state.kept, **in_order}


def computes_module(hook: Any, result: Any, *args: Any, **kwargs: Any) -> bool:
    """Run a hook with a stand-in for its module; return whether the hook called the stand-in.

    If so, this step has to compute the module. The hook counts the step. `result` is what the stand-in
    returns to it.
    """
    ran: list[bool] = []

    def module(*_: Any, **__: Any) -> Any:
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
"""Warning for the name of a config whose cache skips nothing."""


def cache_of(hooks: list[upstream.Hooked]) -> StepCache | None:
    """Return the step cache that replaces diffusers' hooks; None if these hooks skip nothing.

    Raises:
        ValueError: hooks of several caches.
    """
    class_names = {type(each.hook).__name__ for each in hooks}
    # `KINDS` has the class of each cache, by the prefix of its hooks' classes.
    kinds = {kind for prefix, kind in KINDS.items() for name in class_names if name.startswith(prefix)}
    if len(kinds) > 1:
        raise ValueError(f"got hooks of {len(kinds)} caches: disable one before another is enabled")
    return kinds.pop()(hooks) if kinds else None
