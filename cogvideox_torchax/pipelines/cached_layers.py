"""Layers of the program of a step with a cache, and the stand-ins for those that are skipped.

Axis letters: N videos, S positions of a sequence (text first, then patches), C channels.
"""

import math
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from cogvideox_torchax.pipelines.caches import Form
from cogvideox_torchax.runtime import torch_view

RunStep = Callable[[dict[str, Any]], torch.Tensor]
"""Function of a step's tensors, by name, to its prediction."""

NUMBERS = ("threshold", "since", "known", "low", "high", "weights")
"""Inputs of a step besides its tensors."""


class Stack(nn.Module):
    """All blocks of a program's transformer in one; some of them may not run.

    Args:
        form: the computation; its first part names the method.
        kept: arrays of the last step, by name; None to find their shapes.
        numbers: values of `NUMBERS`.

    Attributes:
        kept: arrays for the next step.
        seen: a scalar for the host, or None.
    """

    def __init__(self, form: Form, kept: Any, numbers: dict[str, torch.Tensor]):
        """Choose the method by the form's kind, and the names of the arrays that it keeps."""
        super().__init__()
        self.blocks: tuple[nn.Module, ...] = ()
        self.kept: Any = kept
        self.numbers = numbers
        self.seen: Any = None
        kind = form[0]
        self.names = ("head", "tail") if kind == "first_block" else ("tail",)
        self._run = getattr(self, f"_{kind}")
        self.decided = form[3] if len(form) > 3 else None  # a plan compiles each branch by itself

    def step(self, model: Any, run: RunStep, tensors: dict[str, Any], joined: bool) -> torch.Tensor:
        """Return the result of `run(tensors)` with this module in place of the blocks of `model`.

        `model` is a program's own copy.
        """
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
            self.kept = dict.fromkeys(self.names, hidden_states)
            return x[0] if joined else x
        y = self._run(x, options)
        return y[0] if joined else y

    def _through(self, blocks: Any, x: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
        """Run blocks one after the other on (patches, text), or on (sequence,)."""
        for block in blocks:
            y = block(*x, **options)
            x = y if isinstance(y, tuple) else (y,)
        return x

    def _first_block(self, x: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
        """Run the first block, and the others only if its residual has changed by more than the threshold.

        Else the others' residual of the last full step is added. Both residuals are kept, as "head" and
        "tail"; `seen` is whether the others ran.
        """
        import jax

        kept = self.kept
        head = self._through(self.blocks[:1], x, options)
        residual = head[0] - x[0]
        change, size = (
            _mean(each.abs(), options).to(residual.dtype)  # diffusers rounds its means too
            for each in (residual - kept["head"], kept["head"])
        )
        reuses = change / size <= self.numbers["threshold"]  # the first step's NaN, from zeros, is no reuse

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
        return y, *head[1:]  # the text's result is not used after the blocks

    def _all_blocks(self, x: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
        """Run all blocks and keep their residual; `seen` is its norm over the last step's."""
        before = self.kept["tail"]
        y = self._through(self.blocks, x, options)
        self.kept = {"tail": y[0] - x[0]}
        now, before = (torch.linalg.norm(each.float(), dim=-1) for each in (self.kept["tail"], before))
        self.seen = _mean(now / (before + 1e-8), options)
        return y

    def _no_block(self, x: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
        """Add the residual of the last full step instead of running any block."""
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
        kept: of each module, by name, for each of its tensors, a tuple of arrays; None to find their shapes.
        numbers: of `NUMBERS`.

    Attributes:
        kept: for the next step.
        seen: None; the host gets no scalar.
    """

    seen = None
    arrays = 1
    """Number of arrays that are kept of each tensor."""

    def __init__(self, form: Form, kept: Any, numbers: dict[str, torch.Tensor]):
        """Read the form; without kept arrays nothing is skipped."""
        _, self.names, skipped, *self.static = form
        self.kept: Any = kept
        self.numbers = numbers
        self.skipped = () if kept is None else skipped

    def step(self, model: Any, run: RunStep, tensors: dict[str, Any], joined: bool) -> torch.Tensor:
        """Return the result of `run(tensors)` with the skipped modules of `model` replaced by kept results.

        `model` is a program's own copy.
        """
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
        return sample

    def _reused(self, name: str, kept: Any, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """Return the tensors that replace a module's result, from what is kept of it."""
        return tuple(arrays[0] for arrays in kept)

    def _renewed(self, name: str, y: torch.Tensor, kept: Any) -> tuple[torch.Tensor, ...]:
        """Return what is kept of a tensor `y` from now on, computed or reused; `kept` is from before."""
        return (y,)


class TaylorParts(Parts):
    """Results and their divided differences; what stands for one is extrapolated from them."""

    def __init__(self, form: Form, kept: Any, numbers: dict[str, torch.Tensor]):
        """Read from the form how many arrays of a tensor are kept, and their dtype."""
        super().__init__(form, kept, numbers)
        self.arrays, self.dtype = self.static

    def _reused(self, name: str, kept: Any, dtype: torch.dtype) -> tuple[Any, ...]:
        """Return the Taylor series of a module's tensors after so many steps."""
        since = self.numbers["since"]
        powers = [(since**order / math.factorial(order)).to(dtype) for order in range(self.arrays)]
        return tuple(
            sum(each.to(dtype) * power for each, power in zip(factors, powers, strict=True))
            for factors in kept
        )

    def _renewed(self, name: str, y: torch.Tensor, kept: Any) -> tuple[torch.Tensor, ...]:
        """Return a computed tensor and its divided differences of rising order; `kept` if it was reused."""
        if name in self.skipped:
            return kept
        factors = [y]
        for order, before in enumerate(kept[:-1]):
            change = (factors[order] - before.to(y.dtype)) / self.numbers["since"].to(y.dtype)
            factors.append(torch.where(self.numbers["known"] > order, change, torch.zeros_like(change)))
        return tuple(factor.to(self.dtype) for factor in factors)


class FasterParts(Parts):
    """The last two results of attention, of the second half; how the halves of a prediction differ.

    It takes the older first, and gives the newer first: that is the order of the donated memory.
    """

    arrays = 2

    def step(self, model: Any, run: RunStep, tensors: dict[str, Any], joined: bool) -> torch.Tensor:
        """Run a step on both halves of guidance, or on the second alone.

        A step on both keeps the low and high frequencies of the halves' difference. A later step on the
        second half adds them to its result to get the first.
        """
        videos, before = self.static[0], self.kept
        if videos == "all":
            return super().step(model, run, tensors, joined)
        half = before is None or videos == "second half"
        low, high = before.pop("frequencies") if before else (torch.zeros(0), torch.zeros(0))
        if half:
            tensors = {name: each.chunk(2)[1] if name in HALVED else each for name, each in tensors.items()}
        sample = super().step(model, run, tensors, joined)
        if before is None:
            low = high = sample.float()
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
        """Return a module's tensors extrapolated from their last two results."""
        weight = self.numbers["weights"][self.names.index(name)].to(dtype)
        return tuple(now + (now - before) * weight for before, now in kept)

    def _renewed(self, name: str, y: torch.Tensor, kept: Any) -> tuple[torch.Tensor, ...]:
        """Return the second half of a new result, and the result before it."""
        if len(y) > len(kept[1]):  # a mesh may pad the sequences of half the videos to another length
            y, length = y.chunk(2)[1], kept[1].shape[1]
            y = torch.nn.functional.pad(y[:, :length], (0, 0, 0, max(length - y.shape[1], 0)))
        return y, kept[1]


HALVED = ("hidden_states", "encoder_hidden_states", "timestep")
"""Inputs that hold both halves of guidance."""


def low_frequencies(x: Any) -> Any:
    """Return pictures (..., H, W) without the frequencies above a fifth of the shorter side."""
    import jax.numpy as jnp

    height, width = x.shape[-2:]
    rows, columns = jnp.arange(height)[:, None] - height // 2, jnp.arange(width) - width // 2
    inside = rows**2 + columns**2 <= (min(height, width) // 5) ** 2
    return jnp.fft.ifft2(jnp.fft.fft2(x) * jnp.fft.ifftshift(inside)).real


def _stand_in(module: nn.Module, given: dict[str, Any], results: dict[str, Any], name: str) -> None:
    """Replace the forward of a module of a program's own model.

    If `name` is in `given`, it returns that result, or zeros for None. Else it also adds its tensors to
    `results[name]`.
    """
    forward = module.forward

    def call(*args: Any, **kwargs: Any) -> Any:
        """Return the given result or the module's own, a tuple only if it has several tensors."""
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
    """Return the object that runs a step of this form, a `Stack` or `Parts`."""
    return REUSES.get(form[0], Stack)(form, kept, numbers)


def takes_sequences(form: Form) -> bool:
    """Return whether all modules that a form names still run if layers run on one sequence."""
    inside = re.compile(r"transformer_blocks\.\d+(\.(attn1|ff))?|(?!transformer_blocks\.).*")
    return all(inside.fullmatch(name) for names in form[1:3] for name in names)
