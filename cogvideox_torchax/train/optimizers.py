"""The optimizers, their learning rates, and the average of the weights that is kept."""

import functools
import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from cogvideox_torchax import runtime

WARM_UP = 100
"""Steps over which the learning rate rises."""

LOWEST = 0.02
"""Learning rate at the end of the cosine, as a share of the largest."""

KERNELS_RATE, OTHERS_RATE = 5e-3, 1e-3
AVERAGE = 0.9995


class Muon(torch.optim.Optimizer):
    """Momentum made orthogonal, for the kernels of convolutions.

    `torch.optim.Muon` takes matrices alone: here a kernel (O, I, ...) is one of O rows. Kernels of one shape
    go through the iteration together. The iteration and its coefficients: Jordan et al., "Muon: An optimizer
    for hidden layers in neural networks", 2024.

    Args:
        kernels: parameters of two or more axes.
        lr: the learning rate.
        momentum: Nesterov's.
        weight_decay: of a step, times the learning rate.
    """

    def __init__(
        self,
        kernels: Iterable[nn.Parameter],
        *,
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.01,
    ):
        """Keep the settings, and begin with a momentum of 0 for each kernel."""
        super().__init__(kernels, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        for kernel in self.param_groups[0]["params"]:
            self.state[kernel] = {"momentum": torch.zeros_like(kernel, requires_grad=False)}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update the kernels that have a gradient, those of one shape together."""
        for group in self.param_groups:
            alike = defaultdict(list)
            for kernel in group["params"]:
                if kernel.grad is not None:
                    alike[tuple(kernel.shape)].append(kernel)
            for kernels in alike.values():
                self._step_alike(kernels, group)

    def _step_alike(self, kernels: list[nn.Parameter], group: dict[str, Any]) -> None:
        """Update kernels of one shape by their orthogonal momentum, with the options of their group."""
        directions = []
        for kernel in kernels:
            momentum = self.state[kernel]["momentum"].mul_(group["momentum"]).add_(kernel.grad)
            directions.append((kernel.grad + momentum * group["momentum"]).flatten(1))
        rows, columns = directions[0].shape
        scale = -group["lr"] * math.sqrt(max(1.0, rows / columns))
        for kernel, update in zip(kernels, orthogonal(torch.stack(directions)), strict=True):
            kernel.mul_(1 - group["lr"] * group["weight_decay"]).add_(update.view(kernel.shape) * scale)


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """Return matrices (N, R, C) with their singular values drawn towards 1, by five Newton-Schulz iterations.

    Each iteration multiplies x by a polynomial of x x^T, and all of these commute: they are gathered on the
    short side, so that products over the long one are two in all, not two an iteration.
    """
    wide = matrices if matrices.shape[1] <= matrices.shape[2] else matrices.transpose(1, 2)
    x = wide / (wide.square().sum((1, 2), keepdim=True).sqrt() + 1e-7)
    square = x @ x.transpose(1, 2)
    gathered = identity = torch.eye(square.shape[1], device=square.device).expand_as(square)
    for _ in range(5):
        factor = 3.4445 * identity - 4.7750 * square + 2.0315 * square @ square
        gathered = factor @ gathered
        square = factor @ square @ factor
    x = gathered @ x
    return x if wide is matrices else x.transpose(1, 2)


Moments = dict[str, torch.Tensor]
"""State of the optimizers, as `muon/3/momentum`: an optimizer, the index of its parameter, its name there."""


class Optimizers:
    """Muon for the inner convolutions, AdamW for the rest, along one schedule; gradients clipped to 1.

    Args:
        weights: parameters by their names.
        steps: of the whole training.
        rate: factor of the learning rates.
    """

    def __init__(self, weights: dict[str, nn.Parameter], *, steps: int, rate: float = 1.0):
        self._weights = weights
        self._steps = steps
        self._rate_factor = rate
        self._by_name = _optimizers(weights, traced=False)

    def step(self, number: int, average: dict[str, torch.Tensor]) -> float:
        """Update the weights and their average in step `number`; return the gradient's norm before clipping.

        Raises:
            FloatingPointError: a gradient that was not finite; everything stays as it was.
        """
        norm = self._advance(
            average, self._rate_factor * schedule(number, self._steps), average_decay(number)
        )
        if not math.isfinite(norm):
            raise FloatingPointError(f"the gradient of step {number} is {norm}")
        return norm

    def _advance(self, average: dict[str, torch.Tensor], rate: float, decay: float) -> float:
        """Update weights and average, with a learning rate factor `rate`; return the gradient's norm."""
        return _advance(self._by_name, self._weights, average, rate, decay).item()

    @property
    def moments(self) -> Moments:
        """The optimizers' state."""
        return _moments(self._by_name)


class CompiledOptimizers(Optimizers):
    """`Optimizers` on JAX: both optimizers and the average are traced into one program."""

    @functools.cached_property
    def _program(self) -> Any:
        return runtime.jit_torch(_traced)

    def _advance(self, average: dict[str, torch.Tensor], rate: float, decay: float) -> float:
        """Make the step as one program, and assign its results to weights, average and moments."""
        moments = self.moments
        static = tuple(self._weights), tuple(moments)
        gradients = [weight.grad for weight in self._weights.values()]
        tensors = [*self._weights.values(), *(average[name] for name in self._weights), *moments.values()]
        scalars = runtime.to_jax(torch.tensor([rate, decay]))
        norm, *advanced = self._program(static, scalars, *gradients, *tensors)
        for tensor, value in zip(tensors, advanced, strict=True):
            runtime.assign(tensor, value)
        return runtime.to_torch(norm).item()


def _traced(static: tuple[tuple[str, ...], tuple[str, ...]], scalars: Any, *tensors: Any) -> tuple[Any, ...]:
    """Return the gradients' norm, then weights, average and moments after the step; traced as one program.

    With a norm that is not finite these are as before the step.

    Args:
        static: the names of the weights, and of the moments in `Moments`.
        scalars: the learning rate's factor, and the average's decay.
        tensors: gradients, weights and average, each in the order of the names, then the moments.
    """
    names, keys = static
    count = len(names)
    gradients, weights, average = (
        dict(zip(names, tensors[i * count : (i + 1) * count], strict=True)) for i in range(3)
    )
    for name, weight in weights.items():
        weight.grad = gradients[name]
    optimizers = _optimizers(weights, traced=True)
    for key, tensor in zip(keys, tensors[3 * count :], strict=True):
        kind, index, moment = key.split("/")
        optimizers[kind].state[optimizers[kind].param_groups[0]["params"][int(index)]][moment] = tensor
    before = [tensor.clone() for tensor in tensors[count:]]
    norm = _advance(optimizers, weights, average, scalars[0], scalars[1], traced=True)
    after = [*weights.values(), *average.values(), *_moments(optimizers).values()]
    is_finite = torch.isfinite(norm)
    return norm, *(torch.where(is_finite, new, old) for new, old in zip(after, before, strict=True))


def _optimizers(weights: dict[str, Any], *, traced: bool) -> dict[str, torch.optim.Optimizer]:
    """Return Muon and AdamW by their names, their moments 0.

    With `traced`, AdamW takes numbers that change from step to step as tensors, so that they are traced.
    """
    kernels = [
        weight for name, weight in weights.items() if weight.ndim > 1 and not _is_outer_convolution(name)
    ]
    others = [weight for name, weight in weights.items() if weight.ndim == 1 or _is_outer_convolution(name)]
    adamw = torch.optim.AdamW(
        others, lr=OTHERS_RATE, betas=(0.9, 0.98), weight_decay=1e-3, differentiable=traced
    )
    for weight in others:
        adamw.state[weight] = {
            "step": torch.zeros((), device=weight.device),
            "exp_avg": torch.zeros_like(weight, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(weight, requires_grad=False),
        }
    return {"muon": Muon(kernels, lr=KERNELS_RATE), "adamw": adamw}


def _moments(optimizers: dict[str, torch.optim.Optimizer]) -> Moments:
    """Return the optimizers' tensors by the names of `Moments`."""
    return {
        f"{kind}/{index}/{name}": moment
        for kind, optimizer in optimizers.items()
        for index, weight in enumerate(optimizer.param_groups[0]["params"])
        for name, moment in optimizer.state[weight].items()
    }


def _advance(
    optimizers: dict[str, torch.optim.Optimizer],
    weights: dict[str, Any],
    average: dict[str, torch.Tensor],
    rate: Any,
    decay: Any,
    *,
    traced: bool = False,
) -> torch.Tensor:
    """Step the optimizers, then the average; return the gradient's norm.

    With a norm that is not finite nothing changes, except in a traced step, whose caller chooses.
    """
    norm = torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
    if not traced and not math.isfinite(norm):
        return norm
    for optimizer, largest in zip(optimizers.values(), (KERNELS_RATE, OTHERS_RATE), strict=True):
        optimizer.param_groups[0]["lr"] = largest * rate
        optimizer.step()
    with torch.no_grad():
        for name, weight in weights.items():
            average[name].lerp_(weight, 1 - decay)
    return norm


def _is_outer_convolution(name: str) -> bool:
    """Return whether a parameter belongs to the first or the last convolution of the encoder or decoder."""
    return "conv_in" in name or "conv_out" in name


def schedule(step: int, steps: int) -> float:
    """Return a step's learning rate over the largest: a rise, then a cosine down to `LOWEST`."""
    cosine = 0.5 * (1 + math.cos(math.pi * min(step / steps, 1.0)))
    return min(1.0, (step + 1) / WARM_UP) * (LOWEST + (1 - LOWEST) * cosine)


def average_decay(step: int) -> float:
    """Return the fraction of the weights' average that step `step` keeps: it rises to `AVERAGE`."""
    return min(AVERAGE, (1 + step) / (10 + step))
