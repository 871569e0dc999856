"""A denoising step with a cache: which layers of the program run, and what replaces the skipped ones.

Two classes run such a step: `BlockStack` skips all blocks after one, `ReusedModules` skips single modules.
The docstring of `pipelines` explains the terms.

Axis letters: N videos, S positions of a sequence (text first, then patches), C channels.
"""

import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import nn

from cogvideox_torchax.pipelines.caches import Form
from cogvideox_torchax.runtime import torch_view

Predict = Callable[[dict[str, Any]], torch.Tensor]
"""Function of a step's tensors, by name, to its prediction."""

NUMBERS = ("threshold", "since", "known", "low", "high", "weights")
"""Names of scalars and vectors that a step's program takes besides its tensors; each cache uses some.

threshold: FirstBlockCache reuses if the first block's residual has changed by no more than this share.
since, known: TaylorSeer's steps since the last computed one, and arrays of each tensor that are known then.
low, high, weights: FasterCache's weights of low and high frequencies, and of each module's extrapolation.
"""


class BlockStack(nn.Module):
    """Module in place of all transformer blocks, which runs all of them, some or none.

    Args:
        form: form of the step; its kind names the method that runs.
        kept: the residuals that the last step kept, by name: "head" of the first block, "tail" of the blocks
            after it, or of all; None in a trace for shapes. The attribute has those for the next step.
        numbers: values of `NUMBERS`, by name.

    Attributes:
        seen: a scalar for the host, or None.
    """

    def __init__(self, form: Form, kept: Any, numbers: dict[str, torch.Tensor]):
        super().__init__()
        self.form = form
        self.blocks: tuple[nn.Module, ...] = ()  # the transformer's own; `step` sets them
        self.kept: Any = kept
        self.numbers = numbers
        self.seen: Any = None  # a scalar for the host, which `forward` may set

    def step(self, model: Any, predict: Predict, tensors: dict[str, Any], joined: bool) -> torch.Tensor:
        """Return `predict(tensors)`, with this module in place of all blocks of `model`, a program's copy."""
        self.blocks = tuple(model.transformer_blocks)
        model.transformer_blocks = nn.ModuleList([self])
        return predict(tensors)

    def forward(self, hidden_states: Any, encoder_hidden_states: Any = None, **options: Any) -> Any:
        """Run the blocks that the form asks for, on (patches, text) or on one sequence."""
        joined = encoder_hidden_states is None
        x = (hidden_states,) if joined else (hidden_states, encoder_hidden_states)
        if self.kept is None:  # a trace for the shapes of arrays to keep alone: no block needs to run
            # A kept residual, of the first block ("head") or of later or all blocks ("tail"), has the shape
            # of `hidden_states`, which stand for it.
            names = ("head", "tail") if self.form.kind == "first_block" else ("tail",)
            self.kept = dict.fromkeys(names, hidden_states)
        else:
            # The kind of the step's form names a method: `_first_block`, `_all_blocks` or `_no_block`.
            x = getattr(self, f"_{self.form.kind}")(x, options)
        return x[0] if joined else x

    def _run_blocks(self, blocks: Any, x: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
        for block in blocks:
            y = block(*x, **options)
            x = y if isinstance(y, tuple) else (y,)
        return x

    def _first_block(self, x: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
        """Run the first block; run the later ones if its residual has changed beyond the threshold."""
        last_head, last_tail = self.kept["head"], self.kept["tail"]
        first_result = self._run_blocks(self.blocks[:1], x, options)
        head = first_result[0] - x[0]
        # Means of absolute values, in the residual's dtype, as diffusers rounds its means too.
        change = _mean_of_patches((head - last_head).abs(), options).to(head.dtype)
        size = _mean_of_patches(last_head.abs(), options).to(head.dtype)
        is_similar = change / size <= self.numbers["threshold"]  # false in the first step, where `size` is 0

        def reuse() -> Any:
            return first_result[0] + last_tail, last_head, last_tail

        def compute() -> Any:
            y = self._run_blocks(self.blocks[1:], first_result, options)[0]
            return y, head, y - first_result[0]

        reuses = self.form.reuses
        if reuses is None:  # in a run the device decides
            y, next_head, next_tail = torch_view(jax.lax.cond)(is_similar, reuse, compute)
        else:  # in a plan, which compiles each branch alone
            y, next_head, next_tail = reuse() if reuses else compute()
        self.kept = {"head": next_head, "tail": next_tail}
        self.seen = ~is_similar
        return y, *first_result[1:]  # the text is only passed on: after the blocks nothing reads it

    def _all_blocks(self, x: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
        """Run all blocks and keep their residual; `seen` is its norm relative to that of the last step.

        It is the mean over all patches, which a calibration of MagCache reads.
        """
        last_tail = self.kept["tail"]
        y = self._run_blocks(self.blocks, x, options)
        self.kept = {"tail": y[0] - x[0]}
        norm = torch.linalg.norm(self.kept["tail"].float(), dim=-1)
        last_norm = torch.linalg.norm(last_tail.float(), dim=-1)
        self.seen = _mean_of_patches(norm / (last_norm + 1e-8), options)  # no division by 0, as in diffusers
        return y

    def _no_block(self, x: tuple[Any, ...], _options: dict[str, Any]) -> tuple[Any, ...]:
        """Run no block: add the residual that the last full step kept."""
        return x[0] + self.kept["tail"], *x[1:]


def _mean_of_patches(values: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """Return the float32 mean of the values (N, S, ...) of patches, without those of text and padding."""
    values = values.float()
    sequence = options.get("sequence")
    if sequence is None:
        return values.mean()
    position = torch.arange(values.shape[1], device=values.device)
    is_patch = (position >= sequence.text) & (position < sequence.tokens)
    is_patch = is_patch.reshape(1, -1, *(1,) * (values.ndim - 2))  # broadcasts over N and the last axes
    values_per_position = values.numel() // values.shape[1]
    count = values_per_position * (sequence.tokens - sequence.text)
    return torch.where(is_patch, values, torch.zeros_like(values)).sum() / count


class ReusedModules:
    """A step in which some modules are skipped, and their kept results are used.

    This class uses a kept result unchanged; subclasses estimate the result from several kept arrays.

    Args:
        form: form of the step.
        kept: by module's name, for each tensor of its result, a tuple of arrays of earlier steps; None in a
            trace for shapes. The attribute has the arrays for the next step.
        numbers: values of `NUMBERS`, by name.
    """

    seen = None

    def __init__(self, form: Form, kept: Any, numbers: dict[str, torch.Tensor]):
        self.form = form
        self.kept: Any = kept
        self.numbers = numbers
        self.skipped = () if kept is None else form.skipped

    def step(self, model: Any, predict: Predict, tensors: dict[str, Any], joined: bool) -> torch.Tensor:
        """Return `predict(tensors)`, with estimates in place of the skipped modules' results.

        `model` is a program's own copy of the transformer; with `joined` its blocks take text and patches as
        one sequence.
        """
        dtype = tensors["hidden_states"].dtype
        last_kept = self.kept or {}  # by a module's name; empty in a trace for the shapes of arrays to keep
        # By skipped module, the tuple of tensors that replace its result; None, if none is kept, means zeros.
        replaced: dict[str, Any] = {
            name: self._estimate(name, last_kept[name], dtype) if name in last_kept else None
            for name in self.skipped
        }
        # By module that runs and whose result is kept, a list that `predict` fills with the result's tensors.
        collected: dict[str, list[torch.Tensor]] = {
            name: [] for name in self.form.kept if name not in replaced
        }
        _replace_and_collect(model, replaced, collected, joined)
        prediction = predict(tensors)
        self.kept = {}
        for name in self.form.kept:
            # The tensors of the module's result; none if zeros replace it.
            result = replaced.get(name) or collected.get(name, ())
            # For each tensor, the arrays that the last step kept. A trace for shapes has none: copies of the
            # tensor, as many as are kept, stand for them.
            last_arrays = last_kept.get(name) or [self.form.arrays * (y,) for y in result]
            self.kept[name] = tuple(
                self._to_keep(name, y, arrays) for y, arrays in zip(result, last_arrays, strict=True)
            )
        return prediction

    def _estimate(self, name: str, kept: Any, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """Return the tensors, of `dtype`, that replace the result of module `name`."""
        return tuple(arrays[0] for arrays in kept)

    def _to_keep(self, name: str, y: torch.Tensor, arrays: Any) -> tuple[torch.Tensor, ...]:
        """Return the arrays to keep for a result's tensor `y`, for which the last step kept `arrays`."""
        return (y,)


class TaylorModules(ReusedModules):
    """TaylorSeer: skipped results are extrapolated by a Taylor series.

    For each tensor as many arrays are kept as its series has terms: the value of the last computed step, and
    estimates of the first and higher derivatives, from differences between the computed steps.
    """

    def _estimate(self, name: str, kept: Any, dtype: torch.dtype) -> tuple[Any, ...]:
        """Return each tensor's Taylor polynomial at the present step."""
        since = self.numbers["since"]  # steps since the last computed step
        powers = [(since**order / math.factorial(order)).to(dtype) for order in range(self.form.arrays)]
        return tuple(
            sum(derivative.to(dtype) * power for derivative, power in zip(derivatives, powers, strict=True))
            for derivatives in kept
        )

    def _to_keep(self, name: str, y: torch.Tensor, arrays: Any) -> tuple[torch.Tensor, ...]:
        """Return the factors of the series: factor n + 1 is the change of factor n, divided by "since"."""
        if name in self.skipped:
            return arrays
        factors = [y]
        for order, last_factor in enumerate(arrays[:-1]):  # the highest order has no next one
            difference = (factors[order] - last_factor.to(y.dtype)) / self.numbers["since"].to(y.dtype)
            # If `last_factor` is not valid, the difference is not known either: it is zeros.
            is_valid = self.numbers["known"] > order
            factors.append(torch.where(is_valid, difference, torch.zeros_like(difference)))
        return tuple(factor.to(self.form.dtype) for factor in factors)


class FasterCacheModules(ReusedModules):
    """FasterCache: attention is extrapolated, and the prediction without the prompt is estimated.

    A step keeps the low and high frequencies of the difference of the two predictions, and the last two
    results of attention for prompted videos. It takes (older, newer) results and returns (newer, older): so
    its new result is written to the donated memory of the oldest one.
    """

    def step(self, model: Any, predict: Predict, tensors: dict[str, Any], joined: bool) -> torch.Tensor:
        """Run a step for all videos, or only for the prompted ones; return the predictions for all.

        A step for all keeps the low and high frequencies of the difference, without minus with the prompt. A
        step for the prompted videos adds them, weighted, to its prediction, to estimate the prediction
        without the prompt.
        """
        if self.form.prompted_only is None:  # distilled guidance: no video has a twin without the prompt
            return super().step(model, predict, tensors, joined)
        last_kept = self.kept  # None in a trace that finds the shapes of the arrays that a step keeps
        # A module's arrays are kept for the videos with the prompt: the trace for shapes runs on them alone.
        prompted_only = last_kept is None or self.form.prompted_only
        if prompted_only:  # the second half of the batch
            tensors = {
                name: each.chunk(2)[1] if name in GUIDED_INPUTS else each for name, each in tensors.items()
            }
        # The base class does not read "frequencies" of what was kept: that is no module's name.
        prediction = super().step(model, predict, tensors, joined)
        if last_kept is None:  # in the trace for shapes: the frequencies have the prediction's shape
            low = high = prediction.float()
        elif prompted_only:
            low, high = last_kept["frequencies"]
            low, high = low * self.numbers["low"], high * self.numbers["high"]
            estimate = (prediction.float() + low + high).to(prediction.dtype)
            prediction = torch.cat([estimate, prediction])
        else:
            unprompted, prompted = prediction.float().chunk(2)
            low = torch_view(low_frequencies)(unprompted - prompted)
            high = unprompted - prompted - low
        self.kept["frequencies"] = low, high
        return prediction

    def _estimate(self, name: str, kept: Any, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        # "weights" has a number for each name in `form.kept`, the modules whose results are kept.
        weight = self.numbers["weights"][self.form.kept.index(name)].to(dtype)
        return tuple(newer + (newer - older) * weight for older, newer in kept)

    def _to_keep(self, name: str, y: torch.Tensor, arrays: Any) -> tuple[torch.Tensor, ...]:
        """Return (new result for the prompted videos, result before it)."""
        _older, newer = arrays
        if len(y) > len(newer):  # both ran: the videos with the prompt are the second half of the batch
            y = y.chunk(2)[1]
            # A mesh may pad the sequences of two videos to another length than that of one: cut or pad to the
            # length of `newer`.
            length = newer.shape[1]
            y = torch.nn.functional.pad(y[:, :length], (0, 0, 0, max(length - y.shape[1], 0)))
        return y, newer


GUIDED_INPUTS = ("hidden_states", "encoder_hidden_states", "timestep")
"""Inputs of a step that have a video without the prompt and one with it."""


def low_frequencies(x: Any) -> Any:
    """Return pictures (..., H, W) with only the lowest frequencies, as diffusers' FasterCache cuts them.

    These are a disk in the centered spectrum; its radius is a fifth of the shorter side.
    """
    height, width = x.shape[-2:]
    rows = jnp.arange(height)[:, None] - height // 2  # distances from the center
    columns = jnp.arange(width) - width // 2
    is_low = rows**2 + columns**2 <= (min(height, width) // 5) ** 2
    return jnp.fft.ifft2(jnp.fft.fft2(x) * jnp.fft.ifftshift(is_low)).real


def _replace_and_collect(
    model: Any, replaced: dict[str, Any], collected: dict[str, list[torch.Tensor]], joined: bool
) -> None:
    """Have skipped modules return their tensors of `replaced` (None: zeros), and others fill `collected`."""
    for name in (*replaced, *collected):
        owner, _, part = name.rpartition(".")  # such as "transformer_blocks.0" and "attn1"
        if joined and re.fullmatch(r"transformer_blocks\.\d+", owner):
            # A block on one sequence does not call its parts "attn1" and "ff": it reads these attributes,
            # set anew because their empty defaults are the class's.
            block: Any = model.get_submodule(owner)
            if name in replaced:  # a tuple of one tensor, for the whole sequence, or None for zeros
                block.replaced = {**block.replaced, part: replaced[name] and replaced[name][0]}
            else:
                block.collected = {**block.collected, part: collected[name]}
        elif name in replaced:
            _replace_result(model.get_submodule(name), replaced[name])
        else:
            _collect_results(model.get_submodule(name), collected[name])


def _replace_result(module: nn.Module, tensors: tuple[torch.Tensor, ...] | None) -> None:
    """Replace a module's forward by one that returns `tensors`, or for None zeros of the result's shapes."""
    forward = module.forward

    def call(*args: Any, **kwargs: Any) -> Any:
        y: Any = tensors
        if y is None:
            y = forward(*args, **kwargs)
            y = tuple(map(torch.zeros_like, y if isinstance(y, tuple) else (y,)))
        return y if len(y) > 1 else y[0]

    module.forward = call


def _collect_results(module: nn.Module, collected: list[torch.Tensor]) -> None:

    def collect(_module: nn.Module, _args: Any, result: Any) -> None:
        collected.extend(result if isinstance(result, tuple) else (result,))

    module.register_forward_hook(collect, prepend=True)  # a user's hooks, which may change it, come after


REUSES: dict[str, Any] = {
    **dict.fromkeys(("first_block", "all_blocks", "no_block"), BlockStack),
    "broadcast": ReusedModules,
    "taylor": TaylorModules,
    "faster": FasterCacheModules,
}
"""The class that runs a step, by the kind of its form."""


def takes_sequences(form: Form) -> bool:
    """Return whether a cache of this form works with text and patches as one sequence.

    The form may name only blocks, their parts "attn1" and "ff", and modules outside of the blocks: kernels
    take the weights of the modules inside a part, without a call.
    """
    allowed = re.compile(r"transformer_blocks\.\d+(\.(attn1|ff))?|(?!transformer_blocks\.).*")
    return all(allowed.fullmatch(name) for name in (*form.kept, *form.skipped))
