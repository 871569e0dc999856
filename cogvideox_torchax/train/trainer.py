"""The loop: a step, the weights' average, and all that goes into a checkpoint."""

import contextlib
import math
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from cogvideox_torchax.backends import Backend
from cogvideox_torchax.train.checkpoints import State
from cogvideox_torchax.train.clips import Sampler
from cogvideox_torchax.train.optimizers import CompiledOptimizers, Optimizers
from cogvideox_torchax.train.stages import shape_of
from cogvideox_torchax.vae.sizes import check_sides, parse_size

L1, MSE, KL = 1.0, 4.0, 1e-3
"""Weights of the losses; the last is a mean over latent values."""

TINY = 1e-12
"""Keeps the gradient of a square root finite where there is no error."""


@dataclass(frozen=True)
class TrainingRecipe:
    """The differences of a training from the plain one; a file of it is TOML with these fields.

    Attributes:
        cuts: whether a tenth of the crops cut to another scene, and half of a video's windows lie where it
            changes fast.
        colour: how much the errors of frames' means count, beside L1's 1.
        rate: of the learning rates, of which the usual is 1.
        whole: height and width of whole frames that half of the batches of clips are of, multiples of 16;
            in a file a text such as "128x192".
    """

    cuts: bool = False
    colour: float = 0.0
    rate: float = 1.0
    whole: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.cuts, bool):
            raise ValueError(f"got cuts = {self.cuts!r}: give true or false")
        for name, wanted in (("colour", "0 or more"), ("rate", "a number above 0")):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (number and 0 <= value < math.inf and (value or name == "colour")):
                raise ValueError(f"got {name} = {value!r}: give {wanted}")
        if self.whole:
            check_sides("whole frames", *self.whole, multiple=16)

    @classmethod
    def load(cls, path: Path) -> "TrainingRecipe":
        """Return the recipe of a TOML file; `ValueError` for one that is none, or a field that is wrong."""
        try:
            given = tomllib.loads(path.read_text("utf-8"))
            unknown = sorted(given.keys() - {field.name for field in fields(cls)})
            if unknown:
                raise ValueError(f"got {', '.join(unknown)}: a recipe has {', '.join(vars(cls()))}")
            if "whole" in given:
                given["whole"] = parse_size(str(given["whole"]), "whole frames")
            return cls(**given)
        except (OSError, RecursionError, ValueError) as error:
            raise ValueError(f"{path} is no recipe: {error}") from error


@dataclass(frozen=True)
class Plan:
    """The settings of a training, but for its clips.

    Attributes:
        steps: of the whole training; the learning rate's course is stretched over them.
        clips: in a batch.
        frames: of the longest clips, 8 n + 1.
        size: of the square crops in pixels, a multiple of 16.
        seed: of the first weights, the batches and the noise.
        mixed: whether layers compute in bfloat16, around float32 weights.
        stills: whether most of the first batches are stills, for weights that know nothing yet.
        recipe: how it differs from the plain one.
    """

    steps: int
    clips: int = 1
    frames: int = 17
    size: int = 64
    seed: int = 0
    mixed: bool = False
    stills: bool = True
    recipe: TrainingRecipe = TrainingRecipe()

    def __post_init__(self) -> None:
        if self.size % 16:
            raise ValueError(f"got crops of {self.size} pixels: give a multiple of 16")
        if self.recipe.whole and self.frames == 1:
            raise ValueError(
                "got whole frames with clips of 1 frame: they are of longer clips, give 9 or more"
            )
        if self.frames % 8 != 1:
            raise ValueError(f"got clips of {self.frames} frames: give 8 n + 1, as 1, 9, 17 or 49")


@dataclass(frozen=True)
class Losses:
    """The losses of a step.

    `total` is minimised; `colour` is the root mean square of the errors of frames' means; `psnr` is in
    decibels, before values are clipped.
    """

    total: float
    l1: float
    mse: float
    kl: float
    colour: float
    gradient: float

    @property
    def psnr(self) -> float:
        return 10 * torch.log10(torch.tensor(4 / self.mse)).item()


class Trainer:
    """A VAE on a backend, its optimizers, and the average of its weights."""

    def __init__(self, backend: Backend, sampler: Sampler, plan: Plan):
        self._backend = backend
        self._sampler = sampler
        self.plan = plan
        self.step_number = 0
        self.vae = backend.vae.train()
        self._weights = dict(self.vae.named_parameters())
        kind = CompiledOptimizers if backend.compiled_by_jax else Optimizers
        self._optimizers = kind(self._weights, steps=plan.steps, rate=plan.recipe.rate)
        self._average = {name: weight.detach().clone() for name, weight in self._weights.items()}

    def step(self) -> Losses:
        """Make the next step."""
        plan, number = self.plan, self.step_number
        shape = shape_of(
            number,
            plan.steps,
            seed=plan.seed,
            clips=plan.clips,
            frames=plan.frames,
            size=plan.size,
            stills=plan.stills,
            whole=plan.recipe.whole is not None,
        )
        x = self._sampler.batch(number, clips=shape.clips, frames=shape.frames, size=shape.size)
        noise = torch.Generator().manual_seed(plan.seed * 1_000_003 + number)
        losses = self._losses(x, noise)
        self.vae.zero_grad()
        losses[0].backward()
        gradient = self._optimizers.step(number, self._average)
        self.step_number += 1
        total, l1, mse, kl, colour = (self._backend.to_torch(loss).item() for loss in losses)
        return Losses(total, l1, mse, kl, colour, gradient)

    def _losses(self, x: torch.Tensor, noise: torch.Generator) -> tuple[torch.Tensor, ...]:
        """Return the total, L1, MSE, KL and the loss on colours of a batch."""
        x = self._backend.put(x.contiguous(memory_format=torch.channels_last_3d))
        with self._precision():
            posterior = self.vae.encode(x).latent_dist
            mean, logvar = posterior.mean.float(), posterior.logvar.float()
            drawn = self._backend.put(torch.randn(mean.shape, generator=noise))
            y = self.vae.decode(mean + torch.exp(0.5 * logvar) * drawn).sample
        difference = y.float() - x
        l1, mse = difference.abs().mean(), difference.square().mean()
        kl = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).mean()
        colour = (difference.mean((3, 4)).square().mean() + TINY).sqrt()
        total = L1 * l1 + MSE * mse + KL * kl + self.plan.recipe.colour * colour
        return total, l1, mse, kl, colour

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast("cpu", torch.bfloat16, enabled=self.plan.mixed)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[Any]:
        """Give the VAE the average of its weights, for as long as the block lasts."""
        with torch.no_grad():
            own = {name: weight.detach().clone() for name, weight in self._weights.items()}
            for name, weight in self._weights.items():
                weight.copy_(self._average[name])
            try:
                yield self.vae
            finally:
                for name, weight in self._weights.items():
                    weight.copy_(own[name])

    def reconstruct(self, video: torch.Tensor) -> torch.Tensor:
        """Return a video (N, C, T, H, W) in [-1, 1], reconstructed with the average of the weights."""
        with self.averaged() as vae, self._precision():
            latents = vae.encode(self._backend.put(video)).latent_dist.mode().float()
            return self._backend.to_torch(vae.decode(latents).sample).float()

    def state(self) -> State:
        """Return all that `restore` needs, as plain tensors."""
        return {name: self._backend.to_torch(tensor.detach()) for name, tensor in self._tensors().items()}

    def _tensors(self) -> State:
        tensors: State = {f"weights/{name}": weight for name, weight in self._weights.items()}
        tensors |= {f"average/{name}": weight for name, weight in self._average.items()}
        for (kind, index, name), moment in self._optimizers.moments.items():
            tensors[f"{kind}/{index}/{name}"] = moment
        return tensors

    def restore(self, state: State, step: int) -> None:
        """Resume after `step` steps.

        Raises:
            ValueError: the state of another model.
        """
        own = self._tensors()
        shapes = {name: tuple(tensor.shape) for name, tensor in own.items()}
        if {name: tuple(tensor.shape) for name, tensor in state.items()} != shapes:
            raise ValueError(
                "the checkpoint is of a model with another config: give the same, or another directory"
            )
        with torch.no_grad():
            for name, tensor in own.items():  # in its layout: in another, PyTorch may round otherwise
                tensor.copy_(self._backend.put(state[name]))
        self.step_number = step
