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
from cogvideox_torchax.runtime import torch_view

Form = tuple[Any, ...]
"""The computation of a step, its kind first; another form is another program."""


StepPlan = tuple[Form, dict[str, torch.Tensor]]
"""The form of a step, and numbers that its program takes, of `NUMBERS`."""


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
        """True for each step of the last run that skipped nothing; waits for the run."""
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

    def ahead(self, model: Any, batch: int, steps: Iterable[Any]) -> list[StepPlan]:
        """Return the plans of a run's steps on so many videos, found while `steps` is gone through."""
        state, tensors = self._begin("a plan"), {"hidden_states": torch.empty(batch, 0)}
        return [self._plan(state, model, tensors) for _ in steps]

    def _begin(self, name: str | None) -> State:
        state = State(runtime.without_torchax(copy.deepcopy, {each.module: each.hook for each in self.hooks}))
        for hook in state.hooks.values():
            hook.reset_state(None)
            upstream.set_context(hook, name)
        self._computed = state.computed
        return state

    def _plan(self, state: State, model: Any, tensors: dict[str, Any]) -> StepPlan:
        """Return the form of the step that comes, and its numbers; count the step."""
        raise NotImplementedError

    def _ran(self, state: State, seen: Any) -> None:
        """Take note of what a step's program told besides: a scalar on the device, or None."""


class FirstBlock(StepCache):
    """FirstBlockCache: the other blocks run where the first one's residual has changed enough."""

    def ahead(self, model: Any, batch: int, steps: Iterable[Any]) -> list[StepPlan]:
        """Return the plans of a step whose decision is to compute, and of one whose is to reuse."""
        ((_, numbers),) = super().ahead(model, batch, range(1))
        return [(form("first_block", (), (), reuses), numbers) for reuses in (False, True)]

    def _plan(self, state: State, model: Any, tensors: dict[str, Any]) -> StepPlan:
        head = next(iter(state.hooks.values()))
        head.state_manager.get_state()  # refuses a step outside of a context
        return form("first_block"), {"threshold": torch.tensor(head.threshold)}

    def _ran(self, state: State, seen: Any) -> None:
        state.computed.append(seen)


class Mag(StepCache):
    """MagCache: all blocks or none, by ratios that are known before the run."""

    def _plan(self, state: State, model: Any, tensors: dict[str, Any]) -> StepPlan:
        if self.hooks[0].hook.config.calibrate:
            return form("compared_blocks"), {}
        state.computed.append(self._count(state))
        return form("all_blocks" if state.computed[-1] else "no_block"), {}

    def _ran(self, state: State, seen: Any) -> None:
        if self.hooks[0].hook.config.calibrate:
            state.computed.append(runtime.without_torchax(self._count, state, seen))

    def _count(self, state: State, ratio: Any = None) -> bool:
        """Have the hooks of the first and of the last block count a step; return whether they compute it."""
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
        skipped = tuple(name for name, hook in state.hooks.items() if not asked(hook, torch.zeros(1)))
        state.computed.append(not skipped)
        return form("broadcast", tuple(state.hooks), skipped), {}


class Taylor(StepCache):
    """TaylorSeer: results are extrapolated from earlier steps."""

    def _plan(self, state: State, model: Any, tensors: dict[str, Any]) -> StepPlan:
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
    """Return the modules whose results a step reads that skips all of these.

    Modules before the last block, or the last layer, that is skipped whole are left out.
    """

    def place(name: str) -> tuple[float, bool]:
        block = re.match(r"transformer_blocks\.(\d+)(\.?)", name)
        return (float(block[1]), not block[2]) if block else (math.inf, name == "proj_out")

    last = max((place(name) for name in names if place(name)[1]), default=(-1.0, False))
    return [name for name in names if place(name) >= last]


class Faster(StepCache):
    """FasterCache: attention of the second half is extrapolated, the first half made of its frequencies."""

    def _plan(self, state: State, model: Any, tensors: dict[str, Any]) -> StepPlan:
        weights: dict[str, float] = {}
        for each in self.hooks:  # the user's callbacks are asked with the user's modules
            self._note(state.hooks[each.module], each, model.get_submodule(each.module), weights)
        denoiser, parts = state.hooks[""], {name: hook for name, hook in state.hooks.items() if name}
        batch, halves, skipped = len(tensors["hidden_states"]), [], []

        def denoise(hidden_states: torch.Tensor) -> tuple[torch.Tensor]:
            halves.append(len(hidden_states) < batch)
            skipped.extend(name for name, hook in parts.items() if not asked(hook, *2 * [hidden_states]))
            return (hidden_states,)

        numbers = {"first": torch.tensor(denoiser.state.iteration == 0)}
        upstream.call_hook(denoiser, denoise, hidden_states=torch.zeros(batch, 1, 1, 1, 1))
        for name in ("low", "high"):
            numbers[name] = torch.tensor(weights.get(f".{name}_frequency_weight_callback", 1.0))
        numbers["weights"] = torch.tensor([weights.get(f"{name}.weight_callback", 0.0) for name in parts])
        state.computed.append(not (halves[0] or skipped))
        videos = "all" if denoiser.is_guidance_distilled else "second half" if halves[0] else "both halves"
        return form("faster", tuple(parts), tuple(skipped), videos), numbers

    def _note(
        self, hook: Any, original: upstream.Hooked, module: nn.Module, weights: dict[str, float]
    ) -> None:
        """Have what a hook's callbacks answer kept by name."""
        for name in [name for name in vars(original.hook) if name.endswith("weight_callback")]:

            def ask(_: Any, name: str = name) -> float:
                key = f"{original.module}.{name}"
                weights[key] = float(getattr(original.hook, name)(module))
                return weights[key]

            setattr(hook, name, ask)


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
    "PyramidAttentionBroadcastHook": Broadcast,
    "TaylorSeerCacheHook": Taylor,
    "FasterCacheDenoiserHook": Faster,
    "FasterCacheBlockHook": Faster,
}
"""The cache of each class of hooks."""


WITHOUT_EFFECT = (
    "{} skips nothing on CogVideoX, in diffusers either: take FirstBlockCacheConfig, MagCacheConfig, "
    "PyramidAttentionBroadcastConfig or FasterCacheConfig, or TaylorSeerCacheConfig with use_lite_mode=True "
    r"or cache_identifiers=[r'transformer_blocks\.\d+\.attn1']"
)


def cache_of(hooks: list[upstream.Hooked]) -> StepCache | None:
    """Return the cache that hooks taken off a transformer describe; None for those without effect."""
    kinds = {KINDS[kind] for each in hooks if (kind := type(each.hook).__name__) in KINDS}
    if len(kinds) > 1:
        raise ValueError(f"got hooks of {len(kinds)} caches: disable one before another is enabled")
    return kinds.pop()(hooks) if kinds else None


# Inside of a program


RunStep = Callable[[dict[str, Any]], torch.Tensor]
"""Function of a step's tensors, by name, to its sample."""

NUMBERS = ("threshold", "since", "known", "first", "low", "high", "weights")
"""Inputs of a step besides its tensors."""


class Stack(nn.Module):
    """All blocks of a program's transformer in one; some of them may not run.

    Args:
        form: the computation; its first part names the method.
        kept: arrays of the last step, by name; None to find zeros for them.
        numbers: values of `NUMBERS`.

    Attributes:
        kept: arrays for the next step.
        seen: a scalar for the host, or None.
    """

    def __init__(self, form: Form, kept: Any, numbers: dict[str, torch.Tensor]):
        super().__init__()
        self.blocks: tuple[nn.Module, ...] = ()
        self.kept, self.numbers = kept, numbers
        self.seen: Any = None
        kind = form[0]
        self.names = ("head", "tail") if kind == "first_block" else ("tail",)
        self._run = getattr(self, f"_{kind}")
        self.decided = form[3] if len(form) > 3 else None  # by a plan, which wants each branch by itself

    def step(self, model: Any, run: RunStep, tensors: dict[str, Any], joined: bool) -> torch.Tensor:
        """Return what `run(tensors)` gives, this in the place of the blocks of a program's own model."""
        blocks = model.transformer_blocks
        self.blocks, model.transformer_blocks = tuple(blocks), nn.ModuleList([self])
        try:
            return run(tensors)
        finally:
            model.transformer_blocks = blocks

    def forward(self, hidden_states: Any, encoder_hidden_states: Any = None, **options: Any) -> Any:
        """Run the blocks on patches and text, or on one sequence."""
        joined = encoder_hidden_states is None
        x = (hidden_states,) if joined else (hidden_states, encoder_hidden_states)
        if self.kept is None:
            self.kept = {name: torch.zeros_like(hidden_states) for name in self.names}
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

        if self.decided is None:
            y, *new = torch_view(jax.lax.cond)(reuses, reuse, compute)
        else:
            y, *new = reuse() if self.decided else compute()
        self.kept = dict(zip(("head", "tail"), new, strict=True))
        self.seen = ~reuses
        return y, *head[1:]  # nothing is made of the text after the blocks

    def _all_blocks(self, x: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
        y = self._through(self.blocks, x, options)
        self.kept = {"tail": y[0] - x[0]}
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


class Parts:
    """Modules of a program's transformer; later steps reuse the results of some.

    Args:
        form: its kind, the names of the modules whose results are kept, and of the skipped modules.
        kept: of each module, by name, for each tensor that it gives, a tuple of arrays; None to find zeros.
        numbers: of `NUMBERS`.

    Attributes:
        kept: for the next step.
        seen: None; the host gets no scalar.
    """

    seen = None
    arrays = 1
    """Kept of each tensor."""

    def __init__(self, form: Form, kept: Any, numbers: dict[str, torch.Tensor]):
        _, self.names, skipped, *self.static = form
        self.kept: Any = kept
        self.numbers = numbers
        self.skipped = () if kept is None else skipped

    def step(self, model: Any, run: RunStep, tensors: dict[str, Any], joined: bool) -> torch.Tensor:
        """Return what `run(tensors)` gives, of a program's own model whose skipped parts are not computed."""
        dtype, before = tensors["hidden_states"].dtype, self.kept or {}
        given = {
            name: self._reused(name, before[name], dtype) if name in before else None for name in self.skipped
        }
        results: dict[str, list[torch.Tensor]] = {name: [] for name in self.names if name not in given}
        for name in (*given, *results):
            owner, _, part = name.rpartition(".")
            if joined and re.fullmatch(r"transformer_blocks\.\d+", owner):
                model.get_submodule(owner).stand_in(part, given, results, name)
            else:
                _stand_in(model.get_submodule(name), given, results, name)
        sample = run(tensors)
        self.kept = {}
        for name in self.names:
            y = given.get(name) or results.get(name, ())
            kept = before.get(name) or [self.arrays * (each,) for each in y]
            self.kept[name] = tuple(self._renewed(name, *pair) for pair in zip(y, kept, strict=True))
        if not before:
            self.kept = {
                name: tuple(tuple(map(torch.zeros_like, arrays)) for arrays in kept)
                for name, kept in self.kept.items()
            }
        return sample

    def _reused(self, name: str, kept: Any, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """Return what stands for a module's result."""
        return tuple(arrays[0] for arrays in kept)

    def _renewed(self, name: str, y: torch.Tensor, kept: Any) -> tuple[torch.Tensor, ...]:
        """Return what is kept of a tensor, computed or reused."""
        return (y,)


class TaylorParts(Parts):
    """Results and their divided differences; what stands for one is extrapolated from them."""

    def __init__(self, form: Form, kept: Any, numbers: dict[str, torch.Tensor]):
        super().__init__(form, kept, numbers)
        self.arrays, self.dtype = self.static

    def _reused(self, name: str, kept: Any, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        since = self.numbers["since"]
        powers = [(since**order / math.factorial(order)).to(dtype) for order in range(self.arrays)]
        return tuple(
            functools.reduce(
                torch.add, [each.to(dtype) * power for each, power in zip(factors, powers, strict=True)]
            )
            for factors in kept
        )

    def _renewed(self, name: str, y: torch.Tensor, kept: Any) -> tuple[torch.Tensor, ...]:
        if name in self.skipped:
            return kept
        factors = [y]
        for order, before in enumerate(kept[:-1]):
            change = (factors[order] - before.to(y.dtype)) / self.numbers["since"].to(y.dtype)
            factors.append(torch.where(self.numbers["known"] > order, change, torch.zeros_like(change)))
        return tuple(factor.to(self.dtype) for factor in factors)


class FasterParts(Parts):
    """The last two results of attention, of the second half; how the halves of a prediction differ."""

    arrays = 2

    def step(self, model: Any, run: RunStep, tensors: dict[str, Any], joined: bool) -> torch.Tensor:
        videos, before = self.static[0], self.kept
        if videos == "all":
            return super().step(model, run, tensors, joined)
        half = before is None or videos == "second half"
        low, high = before.pop("frequencies") if before else (torch.zeros(0), torch.zeros(0))
        if half:
            tensors = {name: each.chunk(2)[1] if name in HALVED else each for name, each in tensors.items()}
        sample = super().step(model, run, tensors, joined)
        if before is None:
            low = high = torch.zeros_like(sample, dtype=torch.float32)
        elif half:
            low, high = low * self.numbers["low"], high * self.numbers["high"]
            sample = torch.cat([(sample.float() + low + high).to(sample.dtype), sample])
        else:
            first, second = sample.float().chunk(2)
            low = torch_view(low_frequencies)(first - second)
            high = first - second - low
        self.kept["frequencies"] = low, high
        return sample

    def _reused(self, name: str, kept: Any, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        weight = self.numbers["weights"][self.names.index(name)].to(dtype)
        return tuple(now + (now - before) * weight for before, now in kept)

    def _renewed(self, name: str, y: torch.Tensor, kept: Any) -> tuple[torch.Tensor, ...]:
        if len(y) > len(kept[1]):  # a mesh may pad the sequences of half the videos to another length
            y, length = y.chunk(2)[1], kept[1].shape[1]
            y = torch.nn.functional.pad(y[:, :length], (0, 0, 0, max(length - y.shape[1], 0)))
        return torch.where(self.numbers["first"], y, kept[1]), y


HALVED = ("hidden_states", "encoder_hidden_states", "timestep")
"""Inputs that hold both halves of guidance."""


def low_frequencies(x: Any) -> Any:
    """Return what pictures (..., H, W) are of frequencies up to a fifth of the shorter side."""
    import jax.numpy as jnp

    height, width = x.shape[-2:]
    rows, columns = jnp.arange(height)[:, None] - height // 2, jnp.arange(width) - width // 2
    inside = rows**2 + columns**2 <= (min(height, width) // 5) ** 2
    return jnp.fft.ifft2(jnp.fft.fft2(x) * jnp.fft.ifftshift(inside)).real


def _stand_in(module: nn.Module, given: dict[str, Any], results: dict[str, Any], name: str) -> None:
    """Have a program's own module give what is given for it, zeros for None; or note its result."""
    forward = module.forward

    def call(*args: Any, **kwargs: Any) -> Any:
        y: Any = given.get(name)
        if y is None:
            y = forward(*args, **kwargs)
            y = y if isinstance(y, tuple) else (y,)
            if name in given:
                y = tuple(map(torch.zeros_like, y))
            else:
                results[name].extend(y)
        return y if len(y) > 1 else y[0]

    vars(module)["forward"] = call


REUSES: dict[str, type[Any]] = {"broadcast": Parts, "taylor": TaylorParts, "faster": FasterParts}
"""Class that runs each kind of form; any other form is a `Stack`."""


def reuse(form: Form, kept: Any, numbers: dict[str, torch.Tensor]) -> Any:
    """Return what runs a step of this form."""
    return REUSES.get(form[0], Stack)(form, kept, numbers)


def takes_sequences(form: Form) -> bool:
    """Return whether all parts that a form names are there where layers run on one sequence."""
    inside = re.compile(r"transformer_blocks\.\d+(\.(attn1|ff))?|(?!transformer_blocks\.).*")
    return all(inside.fullmatch(name) for names in form[1:3] for name in names)
