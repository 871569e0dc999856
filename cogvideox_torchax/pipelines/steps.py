"""A denoising step as the module that a program is compiled from, with a cache of steps or without."""

import functools
from typing import Any

import torch
from diffusers.models.transformers.cogvideox_transformer_3d import (
    CogVideoXTransformer3DModel as DiffusersTransformer,
)
from torch import nn

from cogvideox_torchax.pipelines import cached_layers, caches
from cogvideox_torchax.pipelines.blocks import joined_step, takes_sequences


class TransformerStep(nn.Module):
    """A denoising step of the transformer, the module that a program is compiled from.

    It runs text and patches as one sequence if its layers allow it, else diffusers' own forward. The options
    of a call, `attention_kwargs`, belong to the program: other values are another one.
    """

    component = "transformer"

    def __init__(self, model: Any, attention_kwargs: dict[str, Any] | None = None):
        super().__init__()
        self.model = model
        self.options = dict(attention_kwargs or {})

    @functools.cached_property
    def joined(self) -> bool:
        """True if text and patches run as one sequence: `joined_step` knows no option but "scale"."""
        return takes_sequences(self.model) and self.options.keys() <= {"scale"}

    def predict(self, tensors: dict[str, Any]) -> torch.Tensor:
        arguments = {**tensors, "attention_kwargs": dict(self.options) or None}
        if "positions" in arguments:  # a table of sinusoidal positions, for `patch_embed` alone
            self.model.patch_embed.use_table(arguments.pop("positions"))
        if self.joined:  # text and patches as one sequence
            return joined_step(self.model, **arguments)
        return DiffusersTransformer.forward(self.model, **arguments, return_dict=False)[0]

    def forward(self, tensors: dict[str, Any], cache: None) -> tuple[torch.Tensor, None]:
        """Return (prediction, None) of a step from its tensors by name; it has no cache."""
        return self.predict(tensors), cache


class CachedStep(TransformerStep):
    """A step that reuses results of earlier steps, which it takes as its cache."""

    keep_unused = True  # cached arrays that a full step does not read must be donated, or stay alive

    def __init__(self, model: Any, attention_kwargs: dict[str, Any] | None, form: caches.Form):
        super().__init__(model, attention_kwargs)
        self.form = form

    @functools.cached_property
    def joined(self) -> bool:
        """True if text and patches run as one sequence: the form has to allow it too."""
        return super().joined and cached_layers.takes_sequences(self.form)

    def forward(self, tensors: dict[str, Any], cache: Any) -> tuple[Any, Any]:
        """Return ((prediction, scalar for the host or None), arrays to keep for the next step).

        `tensors` has the numbers of the step too. The cache is None in a trace for shapes.
        """
        inputs = dict(tensors)
        numbers = {name: inputs.pop(name) for name in cached_layers.NUMBERS if name in inputs}
        # The step's form tells which layers run; its kind, the class that runs them.
        reuse = cached_layers.REUSES[self.form.kind](self.form, cache, numbers)
        prediction = reuse.step(self.model, self.predict, inputs, self.joined)
        return (prediction, reuse.seen), reuse.kept
