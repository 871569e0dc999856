"""A denoising step with a cache: which layers of the program run, and what replaces the skipped ones.

`BlockStack` skips all blocks, or all after the first; `ReusedModules` skips single modules.

Terms:
    form of a step (`caches.Form`): the layers that it skips, and the results that it keeps.
    numbers of a step: the scalars and vectors that its program takes besides its tensors (`NUMBERS`).
    prompted videos: with guidance a batch has each video twice, without the prompt in its first half, with it
        in the second half. The second half are the prompted videos.
    kept arrays: the arrays that a step hands on to the next step with the same cache.
    trace for shapes: a trace of a step without kept arrays. Only the shapes of the arrays that it would keep
        are used, so any values of these shapes will do.
    residual of blocks: their result minus their input.
    joined: the blocks take text and patches as one sequence; otherwise they take (patches, text).

A parameter `model` is a program's own copy of the transformer, which may be changed. `predict` is a function
that runs this copy on a step's tensors, by name, and returns its prediction. `torch_view` turns a function of
JAX arrays into one of tensors.

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
"""The type of `predict`."""

NUMBERS = ("threshold", "since", "known", "low", "high", "weights")
"""The names of the numbers of a step: the scalars and vectors that its program takes besides its tensors.

threshold: FirstBlockCache skips blocks if the first block's residual has changed by no more than this share.
since: TaylorSeer's number of steps since the last computed step.
known: TaylorSeer's number of valid factors in each series; the arrays of the other factors hold zeros.
low, high: FasterCache's weights of low and high frequencies.
weights: FasterCache's weights of the modules' extrapolations, in the order of `Form.kept_modules`.
"""


class BlockStack(nn.Module):
    """Module in place of all transformer blocks, which runs all of them, the first one, or none.

    Args:
        form: form of the step; its kind names the method that runs.
        last_arrays: the residuals that the last step kept, by name: "head" is that of the first block, "tail"
            that of the blocks after it or, without a "head", of all blocks. None in a trace for shapes.
        numbers: values of `NUMBERS`, by name.

    Attributes:
        next_arrays: the residuals that this step keeps, by the same names.
        host_scalar: a scalar of this step that the host reads; None if there is none.
    """

    def __init__(self, form: Form, last_arrays: Any, numbers: dict[str, torch.Tensor]):
        super().__init__()
        self.form = form
        self.blocks: tuple[nn.Module, ...] = ()  # the transformer's blocks; `step` sets them
        self.last_arrays = last_arrays
        self.next_arrays: Any = last_arrays  # they stay if the step runs no block
        self.numbers = numbers
        self.host_scalar: Any = None

    def step(self, model: Any, predict: Predict, tensors: dict[str, Any], joined: bool) -> torch.Tensor:
        """Return `predict(tensors)`, with this module in place of all blocks of `model`."""
        # `joined` is for other classes of `STEP_CLASSES`. Here `forward` can tell by its own arguments.
        self.blocks = tuple(model.transformer_blocks)
        model.transformer_blocks = nn.ModuleList([self])
        return predict(tensors)

    def forward(self, hidden_states: Any, encoder_hidden_states: Any = None, **options: Any) -> Any:
        """Run the blocks that the form asks for, on (patches, text) or, without text, on one sequence.

        `options` are a block's other arguments, which every block gets.
        """
        joined = encoder_hidden_states is None
        x = (hidden_states,) if joined else (hidden_states, encoder_hidden_states)
        if self.last_arrays is None:  # a trace for shapes: no block needs to run
            # A residual has the shape of `hidden_states`, which stand for it.
            names = ("head", "tail") if self.form.kind == "first_block" else ("tail",)
            self.next_arrays = dict.fromkeys(names, hidden_states)
        else:  # the form's kind names a method: `_first_block`, `_all_blocks` or `_no_block`
            x = getattr(self, f"_{self.form.kind}")(x, options)
        return x[0] if joined else x

    def _run_blocks(self, blocks: Any, x: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
        """Run `blocks` on the tuple of one sequence, or of patches and text, and return such a tuple."""
        for block in blocks:
            y = block(*x, **options)
            x = y if isinstance(y, tuple) else (y,)
        return x

    def _first_block(self, x: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
        """Run the first block; run the later ones if the first one's residual has changed enough."""
        last_head, last_tail = self.last_arrays["head"], self.last_arrays["tail"]
        first_result = self._run_blocks(self.blocks[:1], x, options)
        head = first_result[0] - x[0]
        # Both are means of absolute values, rounded to the residual's dtype, as diffusers rounds its means.
        change = _mean_of_patches((head - last_head).abs(), options).to(head.dtype)
        size = _mean_of_patches(last_head.abs(), options).to(head.dtype)
        # Before the first step the kept arrays are zeros: then `size` is 0, and the comparison false.
        is_similar = change / size <= self.numbers["threshold"]

        # Both functions return (patches or sequence after all blocks, "head" to keep, "tail" to keep).
        def reuse() -> Any:
            # The old head is kept: the next step is compared with the last step that ran all blocks.
            return first_result[0] + last_tail, last_head, last_tail

        def compute() -> Any:
            y = self._run_blocks(self.blocks[1:], first_result, options)[0]
            return y, head, y - first_result[0]

        reuses = self.form.reuses
        if reuses is None:  # the device decides, in each step, and one program has both functions
            y, next_head, next_tail = torch_view(jax.lax.cond)(is_similar, reuse, compute)
        else:  # a plan compiles a program for each of the two functions
            y, next_head, next_tail = reuse() if reuses else compute()
        self.next_arrays = {"head": next_head, "tail": next_tail}
        self.host_scalar = ~is_similar  # whether the step ran all blocks
        return y, *first_result[1:]  # the text is only passed on: after the blocks nothing reads it

    def _all_blocks(self, x: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
        """Run all blocks and keep their residual; `host_scalar` is the ratio for MagCache's calibration."""
        y = self._run_blocks(self.blocks, x, options)
        tail = y[0] - x[0]
        # A patch has the norm of its residual over the channels, and the ratio of this norm to that of the
        # last step. The step's ratio is the mean of the patches' ratios.
        norm = torch.linalg.norm(tail.float(), dim=-1)
        last_norm = torch.linalg.norm(self.last_arrays["tail"].float(), dim=-1)
        # Before the first step the kept arrays are zeros: 1e-8, as in diffusers, avoids a division by 0.
        self.host_scalar = _mean_of_patches(norm / (last_norm + 1e-8), options)
        self.next_arrays = {"tail": tail}
        return y

    def _no_block(self, x: tuple[Any, ...], _options: dict[str, Any]) -> tuple[Any, ...]:
        return x[0] + self.last_arrays["tail"], *x[1:]


def _mean_of_patches(values: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """Return the mean, in float32, of the `values` (N, S, ...) at the patches' positions.

    The `options`, a block's arguments by name, tell whether S has other positions than those of patches.
    """
    values = values.float()
    sequence = options.get("sequence")
    if sequence is None:  # blocks take the text apart from the patches
        return values.mean()
    # The sequence also has text and padding, which do not count.
    position = torch.arange(values.shape[1], device=values.device)
    is_patch = (position >= sequence.text) & (position < sequence.tokens)
    is_patch = is_patch.reshape(1, -1, *(1,) * (values.ndim - 2))  # broadcasts over N and the last axes
    count = values.numel() // values.shape[1] * (sequence.tokens - sequence.text)
    return torch.where(is_patch, values, torch.zeros_like(values)).sum() / count


class ReusedModules:
    """A step in which some modules are skipped, and results from kept arrays are used in place of theirs.

    This class keeps a result, and uses it unchanged. Subclasses estimate a result from several kept arrays.

    Args:
        form, numbers: as in `BlockStack`.
        last_arrays: what the last step kept, by module's name: for each tensor of the module's result, a
            tuple of arrays. None in a trace for shapes.

    Attributes:
        next_arrays: what this step keeps, in the layout of `last_arrays`.
        skipped_modules: names of the modules that do not run; none in a trace for shapes.
    """

    host_scalar = None  # the host reads no scalar of this step

    def __init__(self, form: Form, last_arrays: Any, numbers: dict[str, torch.Tensor]):
        self.form = form
        self.last_arrays = last_arrays
        self.next_arrays: dict[str, Any] = {}
        self.numbers = numbers
        self.skipped_modules = () if last_arrays is None else form.skipped_modules

    def step(self, model: Any, predict: Predict, tensors: dict[str, Any], joined: bool) -> torch.Tensor:
        """Return `predict(tensors)`, with estimates in place of the results of `model`'s skipped modules."""
        dtype = tensors["hidden_states"].dtype
        last_arrays = self.last_arrays or {}  # by module's name; empty in a trace for shapes
        # By skipped module, the tensors that replace its result; None for zeros, if no result of it is kept.
        # diffusers' TaylorSeer names such modules: only results that do not reach the prediction.
        replaced: dict[str, Any] = {
            name: self._estimate(name, last_arrays[name], dtype) if name in last_arrays else None
            for name in self.skipped_modules
        }
        # By module that runs and whose result is kept, a list that `predict` fills with the result's tensors.
        collected: dict[str, list[torch.Tensor]] = {
            name: [] for name in self.form.kept_modules if name not in replaced
        }
        _replace_and_collect(model, replaced, collected, joined)
        prediction = predict(tensors)
        for name in self.form.kept_modules:
            # The tensors of the module's result: the estimates, which `_to_keep` may keep too, or the
            # computed ones; none if zeros replace the result.
            result = replaced.get(name) or collected.get(name, ())
            # For each tensor, the arrays that the last step kept. In a trace for shapes there are none yet:
            # copies of the tensor stand for them.
            arrays_by_tensor = last_arrays.get(name) or [
                (tensor,) * self.form.arrays_per_tensor for tensor in result
            ]
            self.next_arrays[name] = tuple(
                self._to_keep(name, tensor, arrays)
                for tensor, arrays in zip(result, arrays_by_tensor, strict=True)
            )
        return prediction

    def _estimate(self, name: str, kept_result: Any, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """Return the tensors, of `dtype`, that replace a result, from the tuple of arrays kept for each."""
        return tuple(arrays[0] for arrays in kept_result)

    def _to_keep(self, name: str, y: torch.Tensor, last_arrays: Any) -> tuple[torch.Tensor, ...]:
        """Return the arrays to keep for `y`, a tensor of a result, from those that the last step kept."""
        return (y,)


class TaylorModules(ReusedModules):
    """TaylorSeer: the results of skipped modules are extrapolated by a Taylor series in the number of steps.

    The arrays that are kept for a tensor are the factors of its series: factor 0 is the tensor of the last
    computed step, factor n the estimate of its n-th derivative, from differences between computed steps.
    """

    def _estimate(self, name: str, kept_result: Any, dtype: torch.dtype) -> tuple[Any, ...]:
        # The value of a Taylor series, for each tensor of the module's result. The n-th derivative, factor n,
        # is multiplied by since ** n / n!.
        since = self.numbers["since"]  # steps since the last computed step
        weights = [
            (since**order / math.factorial(order)).to(dtype) for order in range(self.form.arrays_per_tensor)
        ]
        return tuple(
            sum(factor.to(dtype) * weight for factor, weight in zip(factors, weights, strict=True))
            for factors in kept_result  # `kept_result` has a tuple of factors for each tensor
        )

    def _to_keep(self, name: str, y: torch.Tensor, last_arrays: Any) -> tuple[torch.Tensor, ...]:
        """Return the factors of the tensor's series; a skipped module keeps those that it has."""
        if name in self.skipped_modules:
            return last_arrays
        factors = [y]
        # Factor n + 1 is the change of factor n since the last computed step, divided by the steps since it.
        for order, last_factor in enumerate(last_arrays[:-1]):  # the highest factor's change is not kept
            difference = (factors[order] - last_factor.to(y.dtype)) / self.numbers["since"].to(y.dtype)
            # If the last factor is not valid yet, its change is not known either: the new factor is zeros.
            is_valid = self.numbers["known"] > order
            factors.append(torch.where(is_valid, difference, torch.zeros_like(difference)))
        return tuple(factor.to(self.form.dtype) for factor in factors)


class FasterCacheModules(ReusedModules):
    """FasterCache: results of attention are extrapolated, and predictions without the prompt are estimated.

    A step keeps the last two results of attention for the prompted videos. The difference of the prediction
    without the prompt minus that with it is kept under the name "frequencies", as (low, high) frequencies.

    A step takes (older, newer) results of attention and returns (newer, older). So its new result is written
    to the donated memory of the oldest one; `caches.FasterSteps` puts the two in order again.
    """

    def step(self, model: Any, predict: Predict, tensors: dict[str, Any], joined: bool) -> torch.Tensor:
        """Run a step for all videos, or only for the prompted ones; return the predictions for all."""
        if self.form.prompted_only is None:  # no video of the batch is without the prompt
            return super().step(model, predict, tensors, joined)
        is_trace_for_shapes = self.last_arrays is None
        # Results of attention are kept for the prompted videos, so the trace for shapes runs on these alone.
        prompted_only = is_trace_for_shapes or self.form.prompted_only
        if prompted_only:  # the prompted videos are the second half of the batch
            tensors = {name: x.chunk(2)[1] if name in GUIDED_INPUTS else x for name, x in tensors.items()}
        # The base class reads the arrays of modules alone: "frequencies" is no module's name.
        prediction = super().step(model, predict, tensors, joined)
        if is_trace_for_shapes:
            low = high = prediction.float()  # it has the frequencies' shape, which alone matters
        elif prompted_only:
            # The estimate without the prompt is the prediction with it plus their last difference, whose low
            # and high frequencies are weighted. As in diffusers, the weighted ones are kept.
            last_low, last_high = self.last_arrays["frequencies"]
            low, high = last_low * self.numbers["low"], last_high * self.numbers["high"]
            estimate = (prediction.float() + low + high).to(prediction.dtype)
            prediction = torch.cat([estimate, prediction])
        else:
            unprompted, prompted = prediction.float().chunk(2)
            low = torch_view(low_frequencies)(unprompted - prompted)
            high = unprompted - prompted - low
        self.next_arrays["frequencies"] = low, high
        return prediction

    def _estimate(self, name: str, kept_result: Any, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        # The weight of this module's extrapolation. `kept_result` has a pair for each tensor of its result.
        weight = self.numbers["weights"][self.form.kept_modules.index(name)].to(dtype)
        return tuple(newer + (newer - older) * weight for older, newer in kept_result)

    def _to_keep(self, name: str, y: torch.Tensor, last_arrays: Any) -> tuple[torch.Tensor, ...]:
        """Return (`y` for the prompted videos, computed or estimated, and the result before it)."""
        _older, newer = last_arrays
        if len(y) > len(newer):  # the step ran all videos: the prompted ones are the second half of the batch
            y = y.chunk(2)[1]
            # On a mesh, a batch of all videos may have another padding than one of the prompted videos, whose
            # shape is kept: so the axis S of `y` is cut or padded to that of `newer`.
            length = newer.shape[1]
            y = torch.nn.functional.pad(y[:, :length], (0, 0, 0, max(length - y.shape[1], 0)))
        return y, newer


GUIDED_INPUTS = ("hidden_states", "encoder_hidden_states", "timestep")
"""The inputs of a step that have an entry for each video of the batch, without the prompt and with it."""


def low_frequencies(x: Any) -> Any:
    """Return pictures (..., H, W) with only the lowest frequencies, as diffusers' FasterCache cuts them."""
    height, width = x.shape[-2:]
    # With frequency 0 in the spectrum's center, the lowest frequencies are a disk around it. Its radius is a
    # fifth of the shorter side.
    row_distance = jnp.arange(height)[:, None] - height // 2  # from the center
    column_distance = jnp.arange(width) - width // 2
    is_low = row_distance**2 + column_distance**2 <= (min(height, width) // 5) ** 2
    # `fft2` has frequency 0 at the corner, so the disk is shifted there.
    return jnp.fft.ifft2(jnp.fft.fft2(x) * jnp.fft.ifftshift(is_low)).real


def _replace_and_collect(
    model: Any, replaced: dict[str, Any], collected: dict[str, list[torch.Tensor]], joined: bool
) -> None:
    """Have modules of `model` return other results or report their results.

    By module's name, `replaced` has the tensors to return instead of a result, or None for zeros; `collected`
    has an empty list, which gets the tensors of the result when the module runs.
    """
    for name in (*replaced, *collected):
        owner, _, part = name.rpartition(".")  # such as "transformer_blocks.0" and "attn1"
        if joined and re.fullmatch(r"transformer_blocks\.\d+", owner):
            # On one sequence a block does not call its parts, so they cannot be hooked. Instead it reads its
            # attributes `replaced` and `collected`. New dictionaries are set: the empty ones are the class's.
            block: Any = model.get_submodule(owner)
            if name in replaced:
                tensors = replaced[name]
                # The result for a joined sequence is one tensor.
                block.replaced = {**block.replaced, part: None if tensors is None else tensors[0]}
            else:
                block.collected = {**block.collected, part: collected[name]}
        elif name in replaced:
            _replace_result(model.get_submodule(name), replaced[name])
        else:
            _collect_results(model.get_submodule(name), collected[name])


def _replace_result(module: nn.Module, tensors: tuple[torch.Tensor, ...] | None) -> None:
    """Replace a module's forward by one that returns `tensors`; None stands for zeros."""
    own_forward = module.forward

    def replacing_forward(*args: Any, **kwargs: Any) -> Any:
        y: Any = tensors
        if y is None:
            y = own_forward(*args, **kwargs)  # only for its shapes: the compiler drops the computation
            y = tuple(map(torch.zeros_like, y if isinstance(y, tuple) else (y,)))
        return y if len(y) > 1 else y[0]  # a module returns a single tensor without a tuple

    module.forward = replacing_forward


def _collect_results(module: nn.Module, collected: list[torch.Tensor]) -> None:
    def collect(_module: nn.Module, _args: Any, result: Any) -> None:
        collected.extend(result if isinstance(result, tuple) else (result,))

    # `prepend`: what is kept is the module's own result, before a user's hooks, which may change it.
    module.register_forward_hook(collect, prepend=True)


STEP_CLASSES: dict[str, Any] = {
    **dict.fromkeys(("first_block", "all_blocks", "no_block"), BlockStack),
    "broadcast": ReusedModules,
    "taylor": TaylorModules,
    "faster": FasterCacheModules,
}
"""The class that runs a step, by the kind of its form."""


def takes_sequences(form: Form) -> bool:
    """Return whether a step of this form can run on text and patches as one sequence."""
    # Such a step can replace or collect the results of whole blocks, of their parts "attn1" and "ff", and of
    # modules outside of the blocks. It cannot do so for modules inside a part: kernels read their weights,
    # and do not call them.
    allowed = re.compile(r"transformer_blocks\.\d+(\.(attn1|ff))?|(?!transformer_blocks\.).*")
    return all(allowed.fullmatch(name) for name in (*form.kept_modules, *form.skipped_modules))
