"""The optimizers, their learning rates, and the average of the weights that is kept."""

import functools
import itertools
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
"""Largest learning rates: Muon's, for kernels of convolutions, and AdamW's, for all other weights."""
AVERAGE = 0.9995
"""Fraction of the weights' average that a late step keeps; see `average_decay`."""


class Muon(torch.optim.Optimizer):
    """An optimizer whose updates are momenta made orthogonal, for the kernels of convolutions.

    `torch.optim.Muon` takes matrices alone: here a kernel (O, I, ...) is taken as a matrix of O rows. Kernels
    of one shape go through the iteration of `orthogonal` together. The iteration and its coefficients: Jordan
    et al., "Muon: An optimizer for hidden layers in neural networks", 2024.

    Args:
        kernels: parameters of two or more axes.
        lr: the learning rate.
        momentum: factor of Nesterov's momentum.
        weight_decay: a step multiplies kernels by 1 - lr * weight_decay.
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
        for kernel in self.param_groups[0]["params"]:  # all kernels are in one group
            self.state[kernel] = {"momentum": torch.zeros_like(kernel, requires_grad=False)}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update the kernels that have a gradient, kernels of one shape together; a closure is not called."""
        (group,) = self.param_groups  # the kernels and the settings of the constructor
        alike = defaultdict(list)  # kernels by their shape
        for kernel in group["params"]:
            if kernel.grad is not None:
                alike[tuple(kernel.shape)].append(kernel)
        for kernels in alike.values():
            # Nesterov's momentum: the direction is the gradient plus the factor times the new momentum.
            directions = []
            for kernel in kernels:
                # The state's tensor is updated in place; the group's "momentum" is the factor.
                momentum = self.state[kernel]["momentum"].mul_(group["momentum"]).add_(kernel.grad)
                directions.append((kernel.grad + momentum * group["momentum"]).flatten(1))
            rows, columns = directions[0].shape
            # The rows of a tall orthogonal matrix are small: the root, Jordan's factor, enlarges the update.
            scale = -group["lr"] * math.sqrt(max(1.0, rows / columns))
            for kernel, update in zip(kernels, orthogonal(torch.stack(directions)), strict=True):
                kernel.mul_(1 - group["lr"] * group["weight_decay"]).add_(update.view(kernel.shape) * scale)


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """Return matrices (N, R, C) with their singular values drawn towards 1, by five Newton-Schulz iterations.

    With x a matrix (R, C), transposed if R > C, each iteration multiplies x by a polynomial of x x^T. The
    product of these polynomials is gathered in square matrices of the shorter side, so that products over the
    longer side are two in all, not two an iteration.
    """
    wide = matrices if matrices.shape[1] <= matrices.shape[2] else matrices.transpose(1, 2)
    # Division by the Frobenius norm makes singular values at most 1; 1e-7 avoids 0 / 0.
    x = wide / (wide.square().sum((1, 2), keepdim=True).sqrt() + 1e-7)
    square = x @ x.transpose(1, 2)  # x x^T of the iteration's present x
    gathered = identity = torch.eye(square.shape[1], device=square.device).expand_as(square)
    for _ in range(5):  # the coefficients are Jordan's, for a fast approach to 1 rather than an exact one
        factor = 3.4445 * identity - 4.7750 * square + 2.0315 * square @ square
        gathered = factor @ gathered
        square = factor @ square @ factor
    x = gathered @ x
    return x if wide is matrices else x.transpose(1, 2)


Moments = dict[str, torch.Tensor]
"""Tensors of the optimizers' state, by names such as `muon/3/momentum`.

A name has the optimizer, the index of one of its parameters, and the tensor's name in the parameter's state.
"""


class Optimizers:
    """Muon for kernels of inner convolutions, AdamW for all other weights.

    Inner convolutions are all but the networks' first and last ones. The norm of all gradients together is
    clipped to 1.

    Args:
        weights: parameters by their names.
        traced: whether JAX traces the weights.
    """

    def __init__(self, weights: dict[str, nn.Parameter], *, traced: bool = False):
        """Make a torch optimizer for each kind of weights, with moments of 0.

        With `traced`, AdamW is `differentiable`: it computes with its step number and learning rate as
        tensors, so that they are traced, not compiled in as constants.
        """
        self._weights = weights
        self._traced = traced
        kernels = [weight for name, weight in weights.items() if _is_inner_kernel(name, weight)]
        others = [weight for name, weight in weights.items() if not _is_inner_kernel(name, weight)]
        adamw = torch.optim.AdamW(
            others, lr=OTHERS_RATE, betas=(0.9, 0.98), weight_decay=1e-3, differentiable=traced
        )
        for weight in others:  # AdamW makes its state in the first step; a checkpoint needs it before
            adamw.state[weight] = {
                "step": torch.zeros((), device=weight.device),
                "exp_avg": torch.zeros_like(weight, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(weight, requires_grad=False),
            }
        self._by_kind = {"muon": Muon(kernels, lr=KERNELS_RATE), "adamw": adamw}

    def step(self, average: list[torch.Tensor], rate: Any, decay: Any) -> torch.Tensor:
        """Step the optimizers, then the average; return the norm of all gradients before it is clipped to 1.

        Weights, average and moments change in place. If the norm is not finite, nothing changes; a traced
        step cannot branch on the norm, and its caller chooses between the results and the old tensors.

        Args:
            average: the averaged weights, in the order of the weights.
            rate: factor of both optimizers' largest learning rates, which they were made with.
            decay: fraction of the average that this step keeps.
        """
        weights = list(self._weights.values())
        norm = nn.utils.clip_grad_norm_(weights, 1.0)
        if not self._traced and not math.isfinite(norm):
            return norm
        for optimizer in self._by_kind.values():
            optimizer.param_groups[0]["lr"] = optimizer.defaults["lr"] * rate  # of its only group
            optimizer.step()
        with torch.no_grad():
            for averaged, weight in zip(average, weights, strict=True):
                averaged.lerp_(weight, 1 - decay)
        return norm

    @property
    def moments(self) -> Moments:
        """The tensors of the optimizers' state, such as momenta, by names such as `muon/3/momentum`."""
        return {
            f"{kind}/{index}/{name}": moment
            for kind, optimizer in self._by_kind.items()
            for index, weight in enumerate(optimizer.param_groups[0]["params"])  # its only group
            for name, moment in optimizer.state[weight].items()
        }


class CompiledOptimizers(Optimizers):
    """`Optimizers` on JAX: both optimizers and the average are traced into one program."""

    @functools.cached_property
    def _program(self) -> Any:
        """The function `_traced_step`, compiled at its first use."""
        return runtime.jit_torch(_traced_step)

    def step(self, average: list[torch.Tensor], rate: float, decay: float) -> torch.Tensor:
        """Make the step as one program, and assign its results to weights, average and moments.

        Arguments and result are those of `Optimizers.step`.
        """
        weights = list(self._weights.values())
        gradients = [weight.grad for weight in weights]
        state = [weights, average, list(self.moments.values())]
        # `scalars` is an argument of the program: constants would have it compiled again in each step.
        scalars = runtime.to_jax(torch.tensor([rate, decay]))
        # The first argument, the names of the weights, is static.
        norm, *advanced = self._program(tuple(self._weights), scalars, gradients, *state)
        for tensor, value in zip(itertools.chain(*state), advanced, strict=True):
            runtime.assign(tensor, value)
        return runtime.to_torch(norm)


def _traced_step(
    names: tuple[str, ...],
    scalars: Any,
    gradients: list[Any],
    weights: list[Any],
    average: list[Any],
    moments: list[Any],
) -> tuple[Any, ...]:
    """Return the gradients' norm, then weights, average and moments after a step; traced as one program.

    Moments are the tensors of the optimizers' state. If the norm is not finite, weights, average and
    moments are returned as they were before the step.

    Args:
        names: names of the weights.
        scalars: (factor of the learning rates, fraction of the average to keep).
        gradients, weights, average: in the order of the weights' names.
        moments: in the order of `Optimizers.moments`.
    """
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient
    optimizers = Optimizers(dict(zip(names, weights, strict=True)), traced=True)
    for zeros, moment in zip(optimizers.moments.values(), moments, strict=True):
        zeros.copy_(moment)
    # The step changes weights and average in place, and of the moments the optimizers' copies.
    before = [*(tensor.clone() for tensor in (*weights, *average)), *moments]
    norm = optimizers.step(average, scalars[0], scalars[1])
    after = [*weights, *average, *optimizers.moments.values()]
    is_finite = torch.isfinite(norm)
    return norm, *(torch.where(is_finite, new, old) for new, old in zip(after, before, strict=True))


def _is_inner_kernel(name: str, weight: torch.Tensor) -> bool:
    """Return whether a parameter is a convolution's kernel, but not of `conv_in` or `conv_out`.

    These are the first and the last convolution of the encoder and of the decoder.
    """
    return weight.ndim > 1 and "conv_in" not in name and "conv_out" not in name


def schedule(step: int, steps: int) -> float:
    """Return the learning rate of a step as a share of the largest: a rise, then a cosine down to `LOWEST`.

    `step` is the step's number, from 0 on; `steps` is the number of steps of the whole training.
    """
    cosine = 0.5 * (1 + math.cos(math.pi * min(step / steps, 1.0)))
    return min(1.0, (step + 1) / WARM_UP) * (LOWEST + (1 - LOWEST) * cosine)


def average_decay(step: int) -> float:
    """Return the fraction of the weights' average that step number `step` keeps: it rises to `AVERAGE`.

    The average starts at the first weights, which the small fractions of early steps soon forget.
    """
    return min(AVERAGE, (1 + step) / (10 + step))
