"""The T5 text encoder of CogVideoX's pipelines, ported."""

from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.t5.modeling_t5 import T5EncoderModel as TransformersT5Encoder

from cogvideox_torchax import runtime
from cogvideox_torchax.pipelines.networks import KnownNetwork


class TextEncoding(nn.Module):
    """A call of the text encoder: the module that a program is compiled from."""

    component = "text_encoder"
    is_for_stock = True

    def __init__(self, model: TransformersT5Encoder):
        super().__init__()
        self.model = model

    def forward(self, tensors: dict[str, Any], cache: None) -> tuple[torch.Tensor, None]:
        """Return the last hidden states (N, tokens, channels), and `cache` unchanged: there is none."""
        # `self.model(...)` would be the ported forward, which runs the program that is traced here.
        return TransformersT5Encoder.forward(self.model, **tensors)[0], cache


class T5EncoderModel(KnownNetwork, TransformersT5Encoder):
    """The T5 encoder on torchax, with the names of transformers: one program encodes a prompt."""

    network_class = TextEncoding

    def forward(
        self,
        input_ids: Any = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **options: Any,
    ) -> Any:
        """Encode by a program if weights are on JAX and no option is set; else by transformers' forward."""
        if not runtime.is_on_jax(self) or any(value is not None for value in options.values()):
            return super().forward(input_ids, attention_mask, inputs_embeds, **options)
        tensors = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "inputs_embeds": inputs_embeds,
        }
        hidden_states = self.run_program(TextEncoding(self), tensors)
        if hidden_states is None:  # this model is not stock
            return self.run_as_it_is(TransformersT5Encoder.forward, **tensors)
        return BaseModelOutput(last_hidden_state=hidden_states)  # pyright: ignore[reportArgumentType]
