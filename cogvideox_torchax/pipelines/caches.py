"""diffusers' step caches on JAX: what its hooks would skip of a step is not computed.

`enable_cache` has diffusers hook the transformer's modules. The hooks are taken off again; copies of them,
some for each run, decide on the host what a step skips; for FirstBlockCache the device decides. A step is a
program of its own for each set of skipped modules. What later steps reuse is the program's cache: donated
arrays, zeros before the first step.
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
"""The kind of a step's computation, the modules whose results are kept, and the skipped modules.

Further items depend on the kind, and some kinds have none. Another form is another program.
"""


StepPlan = tuple[Form, dict[str, torch.Tensor]]
"""The form of a step, and tensors that its program takes besides, named as in `cached_layers.NUMBERS`."""


@functools.cache
def form(*parts: Any) -> Form:
    """Return the form, one object for the same parts: programs are kept for objects that stay the same."""
    return parts


@dataclass
class State:
    """The state that a run carries from step to step, in one of the pipeline's contexts.

    Attributes:
        hooks: diffusers' hooks, copied for this run, by the module's name.
        kept: arrays of the last step; None before the first.
        computed: for each step, whether nothing was skipped; a bool, or one on the device, not awaited yet.
    """

    hooks: dict[str, Any]
    kept: Any = None
    computed: list[Any] = field(default_factory=list)


class _OfThisThread(threading.local):
    """The states of this thread's runs, by cache and context, and the context that is open."""

    def __init__(self) -> None:
        self.states: MutableMapping[StepCache, dict[str | None, State]] = WeakKeyDictionary()
        self.context: str | None = None


_HERE = _OfThisThread()


@contextlib.contextmanager
def context(name: str) -> Iterator[None]:
    """Run a block whose steps, in this thread, share a state under `name`, as diffusers' `cache_context`."""
    before, _HERE.context = _HERE.context, name
    try:
        yield
    finally:
        _HERE.context = before


class StepCache:
    """A cache of a transformer's steps, as diffusers' hooks describe it.

    Args:
        hooks: as `upstream.take_hooks` gives them.
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
        """Drop what this thread's steps keep."""
        _HERE.states.pop(self, None)

    def step(self, model: Any, network: Callable[[Form], nn.Module], tensors: dict[str, Any]) -> torch.Tensor:
        """Return a step's prediction.

        Args:
            model: the transformer.
            network: from a form to the network of such a step.
            tensors: inputs of the step, by name.
        """
        name = _HERE.context if any(hasattr(each.hook, "state_manager") for each in self.hooks) else None
        states = _HERE.states.setdefault(self, {})
        state = states.pop(name, None) or self._begin(name)  # a step that fails leaves nothing
        form, numbers = runtime.without_torchax(self._plan, state, model, tensors)
        network_of_form = network(form)
        program = model.program_of(network_of_form)
        weights, inputs = program.weights(network_of_form), program.put({**tensors, **numbers})
        if state.kept is None:
            state.kept = program.empty_cache(weights, inputs)
        (sample, seen), state.kept = program.run(weights, inputs, state.kept)
        self._ran(state, seen)
        states[name] = state
        return runtime.tensor_of(sample)

    def ahead(self, model: Any, batch: int, steps: Iterable[Any]) -> list[StepPlan]:
        """Return the plan of each of a run's steps on `batch` videos, without running them.

        `steps` is iterated meanwhile, so it may set the timestep that callbacks return.
        """
        state, tensors = self._begin("a plan"), {"hidden_states": torch.empty(batch, 0)}
        return [self._plan(state, model, tensors) for _ in steps]

    def _begin(self, name: str | None) -> State:
        """Return the state of a new run, with copies of the hooks, reset and in the context `name`."""
        state = State(runtime.without_torchax(copy.deepcopy, {each.module: each.hook for each in self.hooks}))
        for hook in state.hooks.values():
            hook.reset_state(None)
            upstream.set_context(hook, name)
        self._computed = state.computed
        return state

    def _plan(self, state: State, model: Any, tensors: dict[str, Any]) -> StepPlan:
        """Return the next step's form and the tensors of its `NUMBERS`, and count the step.

        The hooks of `state` decide what the step skips; `tensors` are its inputs, by name.
        """
        raise NotImplementedError

    def _ran(self, state: State, seen: Any) -> None:
        """Record `seen`, the scalar that a step's program returned besides its prediction, or None."""


class FirstBlock(StepCache):
    """FirstBlockCache: the other blocks run where the first one's residual has changed enough."""

    def ahead(self, model: Any, batch: int, steps: Iterable[Any]) -> list[StepPlan]:
        """Return the plans of a step whose decision is to compute, and of one whose is to reuse."""
        ((_, numbers),) = super().ahead(model, batch, range(1))
        return [(form("first_block", (), (), reuses), numbers) for reuses in (False, True)]

    def _plan(self, state: State, model: Any, tensors: dict[str, Any]) -> StepPlan:
        """Return the form that is the same for all steps, and the threshold: the device decides."""
        head = next(iter(state.hooks.values()))
        head.state_manager.get_state()  # raises an error outside of a context
        return form("first_block"), {"threshold": torch.tensor(head.threshold)}

    def _ran(self, state: State, seen: Any) -> None:
        """Record whether the step ran all blocks."""
        state.computed.append(seen)


class Mag(StepCache):
    """MagCache: all blocks or none, by ratios that are known before the run."""

    def _plan(self, state: State, model: Any, tensors: dict[str, Any]) -> StepPlan:
        """Return the form that runs all blocks or none, as the hooks decide by their ratios."""
        if self.hooks[0].hook.config.calibrate:
            return form("all_blocks"), {}
        state.computed.append(self._count(state))
        return form("all_blocks" if state.computed[-1] else "no_block"), {}

    def _ran(self, state: State, seen: Any) -> None:
        """Give the measured ratio to the hooks, if they calibrate."""
        if self.hooks[0].hook.config.calibrate:
            state.computed.append(runtime.without_torchax(self._count, state, seen))

    def _count(self, state: State, ratio: Any = None) -> bool:
        """Make the first and the last block's hooks count a step; return whether they compute it.

        `ratio` is what a calibration has measured.
        """
        nothing = torch.zeros(1, 1, 1)
        head, *_, tail = state.hooks.values()

        def calibrate(counted: Any, _residual: Any) -> None:
            counted.calibration_ratios.append(float(ratio) if counted.calibration_ratios else 1.0)

        computes, _ = (
            asked(hook, (nothing, nothing), hidden_states=nothing, encoder_hidden_states=nothing)
            for hook in (head, upstream.calibrated(tail, calibrate))
        )
        return computes


class Broadcast(StepCache):
    """PyramidAttentionBroadcast: later steps reuse attention's results."""

    def _plan(self, state: State, model: Any, tensors: dict[str, Any]) -> StepPlan:
        """Return the form whose skipped modules are those whose hooks would reuse a result."""
        skipped = tuple(name for name, hook in state.hooks.items() if not asked(hook, torch.zeros(1)))
        state.computed.append(not skipped)
        return form("broadcast", tuple(state.hooks), skipped), {}


class Taylor(StepCache):
    """TaylorSeer: results are extrapolated from earlier steps."""

    def _plan(self, state: State, model: Any, tensors: dict[str, Any]) -> StepPlan:
        """Return the form, the steps `since` the last computed one, and how many differences are `known`.

        All hooks compute or skip the same steps.
        """
        counts = {name: hook.state_manager.get_state() for name, hook in state.hooks.items()}
        kept = tuple(name for name in read_by_skips(counts) if not counts[name].is_inactive)
        first = counts[kept[0]] if kept else next(iter(counts.values()))
        last, known = first.last_update_step, len(first.taylor_factors.get(0, ()))
        (computes,) = {asked(hook, torch.zeros(1)) for hook in state.hooks.values()}
        state.computed.append(computes)
        since = 1.0 if last is None else float(first.current_step - last)
        static = kept, () if computes else tuple(counts), first.max_order + 1, first.taylor_factors_dtype
        return form("taylor", *static), {"since": torch.tensor(since), "known": torch.tensor(known)}


def read_by_skips(names: Iterable[str]) -> list[str]:
    """Return those of these modules whose results a step reads that skips them all.

    Modules before the last block, or the last layer, that is skipped whole are left out.
    """

    def position(name: str) -> tuple[float, bool]:
        """Return a module's position among the layers, and whether it is a whole layer."""
        block = re.match(r"transformer_blocks\.(\d+)(\.?)", name)
        return (float(block[1]), not block[2]) if block else (math.inf, name == "proj_out")

    last = max((position(name) for name in names if position(name)[1]), default=(-1.0, False))
    return [name for name in names if position(name) >= last]


class Faster(StepCache):
    """FasterCache: attention of the second half is extrapolated, the first half made of its frequencies."""

    def _plan(self, state: State, model: Any, tensors: dict[str, Any]) -> StepPlan:
        """Return the form, with the videos that the step runs on, and the weights of its extrapolations.

        The denoiser's hook decides on the half without a prompt, attention's hooks on each module.
        """
        weights: dict[str, float] = {}
        for each in self.hooks:  # the user's callbacks are asked with the user's modules
            self._note(state.hooks[each.module], each, model.get_submodule(each.module), weights)
        denoiser, parts = state.hooks[""], {name: hook for name, hook in state.hooks.items() if name}
        batch, halves, skipped = len(tensors["hidden_states"]), [], []

        def denoise(hidden_states: torch.Tensor) -> tuple[torch.Tensor]:
            """Stand for the transformer: note the videos that it runs on and the skipped modules."""
            halves.append(len(hidden_states) < batch)
            skipped.extend(name for name, hook in parts.items() if not asked(hook, *2 * [hidden_states]))
            return (hidden_states,)

        known = denoiser.state.iteration > 1  # results of two steps
        upstream.call_hook(denoiser, denoise, hidden_states=torch.zeros(batch, 1, 1, 1, 1))
        numbers = {
            name: torch.tensor(weights.get(f".{name}_frequency_weight_callback", 1.0))
            for name in ("low", "high")
        }
        part_weights = [known * weights.get(f"{name}.weight_callback", 0.0) for name in parts]
        numbers["weights"] = torch.tensor(part_weights)
        state.computed.append(not (halves[0] or skipped))
        videos = "all" if denoiser.is_guidance_distilled else "second half" if halves[0] else "both halves"
        return form("faster", tuple(parts), tuple(skipped), videos), numbers

    def _ran(self, state: State, seen: Any) -> None:
        """Put the two results that are kept of each tensor in the order of age."""
        # The newest result was written to the oldest one's memory, and is first: older ones go first again.
        swapped = {name: tuple(pair[::-1] for pair in state.kept[name]) for name in state.hooks if name}
        state.kept = {**state.kept, **swapped}

    def _note(
        self, hook: Any, original: upstream.Hooked, module: nn.Module, weights: dict[str, float]
    ) -> None:
        """Make a copied hook's callbacks call the user's own, and keep their answers in `weights` by name."""
        for name in [name for name in vars(original.hook) if name.endswith("weight_callback")]:

            def ask(_: Any, name: str = name) -> float:
                key = f"{original.module}.{name}"
                weights[key] = float(getattr(original.hook, name)(module))
                return weights[key]

            setattr(hook, name, ask)


def asked(hook: Any, result: Any, *args: Any, **kwargs: Any) -> bool:
    """Return whether a hook calls its module, which a function that returns `result` stands for."""
    ran: list[bool] = []

    def module(*_: Any, **__: Any) -> Any:
        ran.append(True)
        return result

    upstream.call_hook(hook, module, *args, **kwargs)
    return bool(ran)


KINDS: dict[str, type[StepCache]] = {
    "FBC": FirstBlock,
    "Mag": Mag,
    "PyramidAttention": Broadcast,
    "TaylorSeer": Taylor,
    "FasterCache": Faster,
}
"""The cache of each kind of hooks, by their classes' prefix."""


WITHOUT_EFFECT = (
    "{} skips nothing on CogVideoX, in diffusers either: take FirstBlockCacheConfig, MagCacheConfig, "
    "PyramidAttentionBroadcastConfig or FasterCacheConfig, or TaylorSeerCacheConfig with use_lite_mode=True "
    r"or cache_identifiers=[r'transformer_blocks\.\d+\.attn1']"
)


def cache_of(hooks: list[upstream.Hooked]) -> StepCache | None:
    """Return the cache that hooks taken off a transformer describe; None for those without effect."""
    names = {type(each.hook).__name__ for each in hooks}
    kinds = {kind for prefix, kind in KINDS.items() for name in names if name.startswith(prefix)}
    if len(kinds) > 1:
        raise ValueError(f"got hooks of {len(kinds)} caches: disable one before another is enabled")
    return kinds.pop()(hooks) if kinds else None
