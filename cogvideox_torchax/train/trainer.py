"""The loop: a step, the weights' average, and all that goes into a checkpoint."""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from cogvideox_torchax import runtime
from cogvideox_torchax.backends import Backend
from cogvideox_torchax.train.checkpoints import State
from cogvideox_torchax.train.clips import Sampler
from cogvideox_torchax.train.optimizers import CompiledOptimizers, Optimizers, average_decay, schedule
from cogvideox_torchax.train.stages import Plan

L1, MSE, KL = 1.0, 4.0, 1e-3
"""Weights of the losses; the KL divergence is a mean over latent values, not a sum."""

TINY = 1e-12
"""Keeps the gradient of a square root finite where there is no error."""


@dataclass(frozen=True)
class Losses:
    """The losses of a step.

    Attributes:
        total: the weighted sum, which is minimised.
        l1, mse: errors of the reconstruction, whose values are in [-1, 1].
        kl: divergence of the posterior from a standard normal distribution.
        mean_color: the root mean square error of frames' mean colors.
        gradient: the norm of the gradients before they are clipped.
    """

    total: float
    l1: float
    mse: float
    kl: float
    mean_color: float
    gradient: float

    @property
    def psnr(self) -> float:
        """The peak signal-to-noise ratio in decibels; for values in [-1, 1] the peak is 2, squared 4."""
        return 10 * torch.log10(torch.tensor(4 / self.mse)).item()


class Trainer:
    """A VAE on a backend, its optimizers, and the average of its weights.

    Args:
        backend: the backend with the model to train.
        sampler: draws the batches.
        plan: settings of the training.
    """

    def __init__(self, backend: Backend, sampler: Sampler, plan: Plan):
        """Begin before the first step: the weights' average is the weights, the optimizers' moments are 0."""
        self._backend = backend
        self._sampler = sampler
        self.plan = plan
        self.step_number = 0
        self.vae = backend.vae.train()
        self._weights = dict(self.vae.named_parameters())
        if backend.compiled_by_jax:
            runtime.enable()  # for PyTorch's operations of a step, on weights that are on JAX
        kind = CompiledOptimizers if backend.compiled_by_jax else Optimizers
        self._optimizers = kind(self._weights)
        self._average = {name: weight.detach().clone() for name, weight in self._weights.items()}

    def step(self) -> Losses:
        """Make the next training step, whose number selects batch and noise; return its losses.

        Raises:
            FloatingPointError: a gradient that was not finite; everything stays as it was.
        """
        plan, number = self.plan, self.step_number
        x = self._sampler.batch(number, plan.shape(number))
        # Below a million steps no two pairs of seed, below 2**44, and step have the same noise.
        noise = torch.Generator().manual_seed((plan.seed * 1_000_003 + number) % 2**64)
        losses = self._losses(x, noise)
        self.vae.zero_grad()
        losses[0].backward()  # the weighted sum
        rate = plan.settings.learning_rate_factor * schedule(number, plan.steps)
        average = list(self._average.values())  # in the order of the weights; the step updates it too
        gradient_norm = self._optimizers.step(average, rate, average_decay(number)).item()
        if not math.isfinite(gradient_norm):  # then weights, average and moments are unchanged
            raise FloatingPointError(f"the gradient of step {number} is {gradient_norm}")
        self.step_number += 1
        total, l1, mse, kl, mean_color = (self._backend.to_torch(value).item() for value in losses)
        return Losses(total, l1, mse, kl, mean_color, gradient_norm)

    def _losses(self, x: torch.Tensor, noise: torch.Generator) -> tuple[torch.Tensor, ...]:
        """Return (total, l1, mse, kl, mean_color) of a batch, scalar tensors explained by `Losses`.

        Args:
            x: the batch (N, C, T, H, W), in [-1, 1].
            noise: draws the posterior's sample.
        """
        # Channels last, as `start` stores the kernels for PyTorch.
        x = self._backend.put(x.contiguous(memory_format=torch.channels_last_3d))
        with self._precision():
            posterior = self.vae.encode(x).latent_dist
            mean, logvar = posterior.mean.float(), posterior.logvar.float()
            # The noise is drawn on the host, so that every backend has the same.
            drawn = self._backend.put(torch.randn(mean.shape, generator=noise))
            y = self.vae.decode(mean + torch.exp(0.5 * logvar) * drawn).sample
        difference = y.float() - x
        l1, mse = difference.abs().mean(), difference.square().mean()
        kl = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).mean()
        # `TINY` keeps the gradient of the root finite at 0.
        mean_color = (difference.mean((3, 4)).square().mean() + TINY).sqrt()
        total = L1 * l1 + MSE * mse + KL * kl + self.plan.settings.mean_color_weight * mean_color
        return total, l1, mse, kl, mean_color

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which layers compute in bfloat16 if the plan is `mixed`, else in float32."""
        # Plans are mixed only in PyTorch, which trains on the CPU.
        return torch.autocast("cpu", torch.bfloat16, enabled=self.plan.mixed)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[Any]:
        """Yield the VAE with the weights' average in its parameters; put the weights back after the block."""
        with torch.no_grad():
            saved = {name: weight.detach().clone() for name, weight in self._weights.items()}
            for name, weight in self._weights.items():
                weight.copy_(self._average[name])
            try:
                yield self.vae
            finally:
                for name, weight in self._weights.items():
                    weight.copy_(saved[name])

    def reconstruct(self, video: torch.Tensor) -> torch.Tensor:
        """Encode and decode a video (N, C, T, H, W) in [-1, 1] with the average of the weights; return it."""
        with self.averaged() as vae, self._precision():
            latents = vae.encode(self._backend.put(video)).latent_dist.mode().float()
            return self._backend.to_torch(vae.decode(latents).sample).float()

    def state(self) -> State:
        """Return weights, their average and optimizer moments: plain tensors by name in a checkpoint."""
        return {name: self._backend.to_torch(tensor.detach()) for name, tensor in self._tensors().items()}

    def _tensors(self) -> State:
        """Return the weights, their average and the optimizers' moments, by their names in a checkpoint.

        The tensors are the training's own, not copies. Moments are the tensors of the optimizers' state.
        """
        kinds = {"weights": self._weights, "average": self._average}
        return {
            f"{kind}/{name}": tensor for kind, tensors in kinds.items() for name, tensor in tensors.items()
        } | self._optimizers.moments

    def restore(self, state: State, step: int) -> None:
        """Set weights, average and moments to those of a checkpoint.

        Args:
            state: the checkpoint's tensors by name, as the method `state` returned them.
            step: number of steps that were done before the checkpoint.

        Raises:
            ValueError: the state of another model.
        """
        current = self._tensors()
        shapes = {name: tuple(tensor.shape) for name, tensor in current.items()}
        if {name: tuple(tensor.shape) for name, tensor in state.items()} != shapes:
            raise ValueError(
                "the checkpoint is of a model with another config: give the same, or another directory"
            )
        with torch.no_grad():
            # Copied in place: a tensor keeps its memory layout, on which PyTorch's rounding may depend.
            for name, tensor in current.items():
                tensor.copy_(self._backend.put(state[name]))
        self.step_number = step
