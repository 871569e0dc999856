"""diffusers' step caches on JAX: what its hooks would skip of a step is not computed.

`enable_cache` has diffusers hook the transformer's modules. The hooks are taken off again; copies of them,
some for each run, decide on the host what a step skips; for FirstBlockCache the device decides. A step is a
program of its own for each set of skipped modules. What later steps reuse is the program's cache: donated
arrays, zeros before the first step.

Axis letters: N videos, S positions of a sequence (text first, then patches), C channels.
"""

import contextlib
import copy
import functools
import threading
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from cogvideox_torchax import runtime, upstream
from cogvideox_torchax.runtime import torch_view

Form = tuple[Any, ...]
"""What a step computes, its kind first; another form is another program."""


Plan = tuple[Form, dict[str, torch.Tensor]]
"""The form of a step, and numbers that its program takes, of `NUMBERS`."""


@functools.cache
def form(*parts: Any) -> Form:
    """Return the form, one object for the same parts: programs are kept for objects that stay the same."""
    return parts


@dataclass
class State:
    """What a run carries from step to step, in one of the pipeline's contexts.

    Attributes:
        hooks: diffusers' hooks, copies of this run's own.
        kept: arrays that the last step gave; None before the first.
        computed: of each step, whether nothing was skipped; a bool, or one on the device, not waited for yet.
    """

    hooks: list[Any]
    kept: Any = None
    computed: list[Any] = field(default_factory=list)


class _OfThisThread(threading.local):
    def __init__(self) -> None:
        self.states: MutableMapping[StepCache, dict[str | None, State]] = WeakKeyDictionary()
        self.context: str | None = None


_HERE = _OfThisThread()


@contextlib.contextmanager
def context(name: str) -> Iterator[None]:
    """While it is open, this thread's steps have a state of this name, as in diffusers' `cache_context`."""
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
        """Whether each step of the last run skipped nothing; waits for the run."""
        return [bool(step) for step in self._computed]

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
        kept = state.kept
        if kept is None:
            kept = program.run(weights, inputs)[1]
        (sample, seen), state.kept = program.run(weights, inputs, kept)
        self._ran(state, seen)
        states[name] = state
        return runtime.tensor_of(sample)

    def _begin(self, name: str | None) -> State:
        state = State(runtime.without_torchax(copy.deepcopy, [each.hook for each in self.hooks]))
        for hook in state.hooks:
            hook.reset_state(None)
            upstream.set_context(hook, name)
        self._computed = state.computed
        return state

    def _plan(self, state: State, model: Any, tensors: dict[str, Any]) -> Plan:
        """Return the form of the step that comes, and its numbers; count the step."""
        raise NotImplementedError

    def _ran(self, state: State, seen: Any) -> None:
        """Take note of what a step's program told besides: a scalar on the device, or None."""


class FirstBlock(StepCache):
    """FirstBlockCache: the other blocks run where the first one's residual has changed enough."""

    def _plan(self, state: State, model: Any, tensors: dict[str, Any]) -> Plan:
        head = state.hooks[0]
        head.state_manager.get_state()  # refuses a step outside of a context
        return form("first_block"), {"threshold": torch.tensor(head.threshold)}

    def _ran(self, state: State, seen: Any) -> None:
        state.computed.append(seen)


class Mag(StepCache):
    """MagCache: all blocks or none, by ratios that are known before the run."""

    def _plan(self, state: State, model: Any, tensors: dict[str, Any]) -> Plan:
        if state.hooks[0].config.calibrate:
            return form("compared_blocks"), {}
        state.computed.append(self._count(state))
        return form("all_blocks" if state.computed[-1] else "no_block"), {}

    def _ran(self, state: State, seen: Any) -> None:
        if state.hooks[0].config.calibrate:
            state.computed.append(runtime.without_torchax(self._count, state, seen))

    def _count(self, state: State, ratio: Any = None) -> bool:
        """Have the hooks of the first and of the last block count a step; return whether they compute it."""
        nothing = torch.zeros(1, 1, 1)

        def calibrate(counted: Any, _residual: Any) -> None:
            counted.calibration_ratios.append(float(ratio) if counted.calibration_ratios else 1.0)

        computes, _ = (
            asked(hook, (nothing, nothing), hidden_states=nothing, encoder_hidden_states=nothing)
            for hook in (state.hooks[0], upstream.calibrated(state.hooks[-1], calibrate))
        )
        return computes


def asked(hook: Any, result: Any, *args: Any, **kwargs: Any) -> bool:
    """Return whether a hook that is on no module has it computed; it takes `result` for the module's."""
    ran: list[bool] = []

    def module(*_: Any, **__: Any) -> Any:
        ran.append(True)
        return result

    upstream.call_hook(hook, module, *args, **kwargs)
    return bool(ran)


KINDS: dict[str, type[StepCache]] = {
    "FBCHeadBlockHook": FirstBlock,
    "FBCBlockHook": FirstBlock,
    "MagCacheHeadHook": Mag,
    "MagCacheBlockHook": Mag,
}
"""The cache of each class of hooks."""


def cache_of(hooks: list[upstream.Hooked]) -> StepCache | None:
    """Return the cache that hooks taken off a transformer describe; None for those without effect."""
    kinds = {KINDS[kind] for each in hooks if (kind := type(each.hook).__name__) in KINDS}
    if len(kinds) > 1:
        raise ValueError(f"got hooks of {len(kinds)} caches: disable one before another is enabled")
    return kinds.pop()(hooks) if kinds else None


# Inside of a program


NUMBERS = ("threshold",)
"""What a step takes besides its tensors."""


class Stack(nn.Module):
    """All blocks of a program's own transformer in one, some of which may not run.

    Args:
        form: what runs; its first part names the method.
        kept: arrays of the last step, by name; None to find zeros for them.
        numbers: of `NUMBERS`.

    Attributes:
        kept: for the next step.
        seen: a scalar that the host is told; or None.
    """

    def __init__(self, form: Form, kept: Any, numbers: dict[str, torch.Tensor]):
        super().__init__()
        self.blocks: tuple[nn.Module, ...] = ()
        self.kept, self.numbers = kept, numbers
        self.seen: Any = None
        self._run = getattr(self, f"_{form[0]}")

    def step(self, model: Any, run: Callable[..., torch.Tensor], tensors: dict[str, Any]) -> torch.Tensor:
        """Return what `run(tensors)` gives, this in the place of the blocks of a program's own model."""
        blocks = model.transformer_blocks
        self.blocks, model.transformer_blocks = tuple(blocks), nn.ModuleList([self])
        try:
            return run(tensors)
        finally:
            model.transformer_blocks = blocks

    def forward(self, hidden_states: Any, encoder_hidden_states: Any = None, **options: Any) -> Any:
        """As a block's: of patches and text, or of one sequence."""
        joined = encoder_hidden_states is None
        x = (hidden_states,) if joined else (hidden_states, encoder_hidden_states)
        if self.kept is None:
            self.kept = {name: torch.zeros_like(hidden_states) for name in ("head", "tail")}
            return x[0] if joined else x
        y = self._run(x, options)
        return y[0] if joined else y

    def _through(self, blocks: Any, x: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
        for block in blocks:
            y = block(*x, **options)
            x = y if isinstance(y, tuple) else (y,)
        return x

    def _first_block(self, x: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
        import jax

        kept = self.kept
        head = self._through(self.blocks[:1], x, options)
        residual = head[0] - x[0]
        change, size = (
            _mean(each.abs(), options).to(residual.dtype)  # diffusers rounds its means too
            for each in (residual - kept["head"], kept["head"])
        )
        reuses = change / size <= self.numbers["threshold"]  # zeros, before the first step, give no number

        def reuse() -> Any:
            return head[0] + kept["tail"], kept["head"], kept["tail"]

        def compute() -> Any:
            y = self._through(self.blocks[1:], head, options)[0]
            return y, residual, y - head[0]

        y, *new = torch_view(jax.lax.cond)(reuses, reuse, compute)
        self.kept = dict(zip(("head", "tail"), new, strict=True))
        self.seen = ~reuses
        return y, *head[1:]  # nothing is made of the text after the blocks

    def _all_blocks(self, x: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
        y = self._through(self.blocks, x, options)
        self.kept = {**self.kept, "tail": y[0] - x[0]}
        return y

    def _compared_blocks(self, x: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
        before = self.kept["tail"]
        y = self._all_blocks(x, options)
        now, before = (torch.linalg.norm(each.float(), dim=-1) for each in (self.kept["tail"], before))
        self.seen = _mean(now / (before + 1e-8), options)
        return y

    def _no_block(self, x: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
        return x[0] + self.kept["tail"], *x[1:]


def _mean(values: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """Return the float32 mean of values (N, S, ...) of patches: text and padding do not count."""
    sequence, values = options.get("sequence"), values.float()
    if sequence is None:
        return values.mean()
    position = torch.arange(values.shape[1], device=values.device)
    patches = (position >= sequence.text) & (position < sequence.tokens)
    patches = patches.reshape(1, -1, *(1,) * (values.ndim - 2))
    count = values.numel() // values.shape[1] * (sequence.tokens - sequence.text)
    return torch.where(patches, values, torch.zeros_like(values)).sum() / count
