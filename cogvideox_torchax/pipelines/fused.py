"""Attention whose three projections were fused into one (`fuse_qkv_projections`)."""

import functools
from typing import Any

import torch
from diffusers.models.attention_processor import FusedCogVideoXAttnProcessor2_0

from cogvideox_torchax.pipelines.layers import AttnProcessor
from cogvideox_torchax.runtime import on_jax


class FusedAttnProcessor(FusedCogVideoXAttnProcessor2_0):
    """`AttnProcessor` for a fused projection.

    The inherited code writes rotated queries into a view of a view, which torchax loses.
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: Any = None,
    ) -> Any:
        given = (hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)
        if not on_jax(hidden_states) or attention_mask is not None:
            return super().__call__(attn, *given)
        return AttnProcessor()(_InThree(attn), *given)


class _InThree:
    """An attention layer by its own names, with the fused layer's projections as three."""

    def __init__(self, attn: Any):
        self._attn = attn
        self.to_q, self.to_k, self.to_v = (functools.partial(self._part, i) for i in range(3))

    def _part(self, index: int, x_NSC: torch.Tensor) -> torch.Tensor:
        return self._attn.to_qkv(x_NSC).chunk(3, dim=-1)[index]  # one product, once XLA has seen all three

    def __getattr__(self, name: str) -> Any:
        return getattr(self._attn, name)
