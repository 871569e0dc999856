"""CogVideoX's transformer on one sequence: text and patches are joined, and padded, once a step.

diffusers' own forward keeps the two apart and joins them in every attention. Here a block takes the whole
sequence, which may be split over devices (`pipelines.sequence.Sequence`); the result is the same.

Axis letters: N videos, S positions of a sequence (text first, then patches), C channels, H heads, D channels
of a head, P parts of the channels, one for each device that has some of the tokens.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.models.activations import GELU as DiffusersGELU
from diffusers.models.attention_processor import Attention
from diffusers.models.normalization import CogVideoXLayerNormZero
from diffusers.models.transformers.cogvideox_transformer_3d import CogVideoXBlock
from torch import nn

import jax_kernels
from cogvideox_torchax.pipelines.layers import (
    AttnProcessor,
    FusedAttnProcessor,
    LayerNorm,
    Linear,
    check_positions,
)
from cogvideox_torchax.pipelines.sequence import Sequence
from cogvideox_torchax.runtime import array_of, on_jax, tensor_of, torch_view
from cogvideox_torchax.runtime.layers import is_watched
from cogvideox_torchax.upstream import scaling_loras

Tables = tuple[torch.Tensor, ...]
"""Cosines and sines of all positions, (S, D) each; nothing for a model without rotary positions."""


class GELU(DiffusersGELU):
    """GELU rounded once (`jax_kernels.gelu`)."""

    def gelu(self, gate: torch.Tensor) -> torch.Tensor:
        """Apply GELU by the kernel on JAX, if it is the approximation by tanh."""
        if not on_jax(gate) or self.approximate != "tanh":
            return super().gelu(gate)
        return torch_view(jax_kernels.gelu)(gate)


class Block(CogVideoXBlock):
    """A layer of the transformer, which also takes text and patches as one sequence."""

    parts: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    """By part, "attn1" or "ff": results that replace it, and lists that collect it; see `stand_in`."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: Any = None,
        temb: Any = None,
        image_rotary_emb: Any = None,
        attention_kwargs: dict[str, Any] | None = None,
        *,
        sequence: Sequence | None = None,
    ) -> Any:
        """Run diffusers' own forward; with a `sequence`, map all its tokens (N, S, C) to all its tokens.

        Args:
            hidden_states: the patches, or the whole sequence.
            encoder_hidden_states: the text; None with a sequence.
            temb: embedded timestep, (N, E).
            image_rotary_emb: tables of the patches, or `Tables` of the whole sequence.
            attention_kwargs: options of diffusers' own forward; None with a sequence.
            sequence: the layout of `hidden_states`.
        """
        if sequence is None:
            return super().forward(
                hidden_states, encoder_hidden_states, temb, image_rotary_emb, attention_kwargs
            )

        def layer(x: Any, vectors_NE: torch.Tensor, tables: Tables) -> Any:
            x_NSC, given = x
            return self._joined(x_NSC, given, vectors_NE, tables, sequence)

        x_and_given = hidden_states, self.parts[0]
        x_NSC, results = sequence_view(sequence.map_local_tokens, layer)(x_and_given, temb, image_rotary_emb)
        for name, y_NSC in results.items():
            self.parts[1][name].append(y_NSC)
        return x_NSC

    def stand_in(self, part: str, given: dict[str, Any], results: dict[str, Any], name: str) -> None:
        """Replace a part's result by a given one, zeros for None, or record the result.

        Args:
            part: "attn1" or "ff".
            given: by a part's name, a tuple of the sequence (N, S, C) that replaces its result, or None.
            results: by a part's name, the list that gets its result.
            name: name of this part in the model.
        """
        replaced, collected = self.parts
        if name in given:
            self.parts = {**replaced, part: given[name] and given[name][0]}, collected
        else:
            self.parts = replaced, {**collected, part: results[name]}

    def _joined(
        self,
        x_NSC: torch.Tensor,
        given: dict[str, torch.Tensor | None],
        temb_NE: torch.Tensor,
        tables: Tables,
        sequence: Sequence,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Run attention and feed-forward on a device's local tokens.

        Returns the tokens, and the results of those parts that are to be collected, by part.
        """
        first, results = sequence.first_patch(), {}
        for name, norm, run_part in (
            ("attn1", self.norm1, lambda h_NSC: self._attend(h_NSC, tables, sequence)),
            ("ff", self.norm2, lambda h_NSC: self._widen(h_NSC, sequence)),
        ):
            shift, scale, gate = modulation(norm, temb_NE)
            layer_norm: Any = norm.norm
            modulated = sequence.shard_tokens(
                functools.partial(jax_kernels.adaptive_layer_norm, eps=layer_norm.eps)
            )
            h_NSC = torch_view(modulated)(x_NSC, layer_norm.weight, layer_norm.bias, scale, shift, first)
            if name in given:
                y_NSC = torch.zeros_like(h_NSC) if given[name] is None else given[name]
            else:
                end = run_part(h_NSC)
                if name not in self.parts[1] and supports_fused(end.layers[0], sequence):
                    x_NSC = end.added(x_NSC, gate, first)
                    continue
                y_NSC = end.result()
            if name in self.parts[1]:
                results[name] = y_NSC
            x_NSC = torch_view(jax_kernels.gated_residual)(x_NSC, y_NSC, gate, first)
        return x_NSC, results

    def _widen(self, h_NSC: torch.Tensor, sequence: Sequence) -> "Last":
        """Run the feed-forward up to its last projection, which is left to `Last`."""
        widen, dropout, *layers = self.ff.net
        if type(widen) is GELU and widen.approximate == "tanh" and supports_fused(widen.proj, sequence):
            project: Any = widen.proj
            h_NSC = torch_view(jax_kernels.linear_gelu)(h_NSC, project.weight, project.bias)
        else:
            h_NSC = widen(h_NSC)
        return Last(layers, dropout(h_NSC))

    def _attend(self, h_NSC: torch.Tensor, tables: Tables, sequence: Sequence) -> "Last":
        """Run attention up to its output projection, which is left to `Last`."""
        attn: Any = self.attn1
        videos = h_NSC.shape[0]
        qk_norm_rope = torch_view(sequence.shard_heads(jax_kernels.qk_norm_rope, attn.heads))
        q, k, v = (
            torch_view(sequence.to_heads)(part_PSC, videos)
            for part_PSC in projections(attn, h_NSC.flatten(0, 1), sequence)
        )
        # The scores' scale, in powers of two, is in the queries.
        scale = math.log2(math.e) / math.sqrt(q.shape[-1] * sequence.parts / attn.heads)
        norm_q, norm_k = attn.norm_q, attn.norm_k
        q = qk_norm_rope(q, norm_q.weight, norm_q.bias, *tables, eps=norm_q.eps, scale=scale)
        k = qk_norm_rope(k, norm_k.weight, norm_k.bias, *tables, eps=norm_k.eps)
        y_NHDS = torch_view(jax_kernels.attention_transposed)(
            q,
            k,
            qk_norm_rope(v),
            scale=math.log(2),
            num_keys=sequence.tokens,
        )
        return Last(list(attn.to_out), torch_view(sequence.to_tokens)(y_NHDS.flatten(1, 2)), transposed=True)


@dataclass(frozen=True)
class Last:
    """The end of attention or of the feed-forward: a projection, the layers after it, and their input.

    Attributes:
        layers: the projection, and dropouts.
        h: the input, (N, S, C), or (N, C, S) if `transposed`.
        transposed: whether channels of `h` come before its tokens.
    """

    layers: list[Any]
    h: torch.Tensor
    transposed: bool = False

    def result(self) -> torch.Tensor:
        """Return the result (N, S, C), computed by the layers one after the other."""
        y_SC = (self.h.transpose(1, 2) if self.transposed else self.h).flatten(0, 1)
        for layer in self.layers:
            y_SC = layer(y_SC)
        return y_SC.unflatten(0, (self.h.shape[0], -1))

    def added(self, x_NSC: torch.Tensor, gate_N2C: torch.Tensor, first: Any) -> torch.Tensor:
        """Return `x_NSC` plus the gated result, by one kernel; for a projection that `supports_fused`."""
        fused = functools.partial(jax_kernels.gated_linear, transposed=self.transposed)
        project = self.layers[0]
        return torch_view(fused)(self.h, project.weight, project.bias, x_NSC, gate_N2C, first)


def supports_fused(project: Any, sequence: Sequence) -> bool:
    """Return whether a kernel may replace a projection: unwatched, without a LoRA, not sharded by XLA."""
    return type(project) is Linear and sequence.shared is None


def projections(attn: Any, h_SC: torch.Tensor, sequence: Sequence) -> Iterator[torch.Tensor]:
    """Yield queries, keys and values (P, S, C), channels in `sequence.parts`, by three matrices or one."""

    def split(y_SC: torch.Tensor) -> torch.Tensor:
        return y_SC.unflatten(-1, (sequence.parts, -1)).transpose(0, 1)

    if type(attn.processor) is FusedAttnProcessor:  # diffusers keeps `to_qkv`, and the flag, when it unfuses
        yield from map(split, attn.to_qkv(h_SC).chunk(3, dim=-1))
        return
    kernel = torch_view(functools.partial(jax_kernels.split_linear, parts=sequence.parts))
    for project in (attn.to_q, attn.to_k, attn.to_v):
        if supports_fused(project, sequence):
            yield kernel(h_SC, project.weight, project.bias)
        else:  # with a LoRA, somebody's own, or sharded by XLA
            yield split(project(h_SC))


def modulation(norm: Any, temb_NE: torch.Tensor) -> list[torch.Tensor]:
    """Return shift, scale and gate, (N, 2, C) each: a vector for every video's text, one for its patches."""
    shift, scale, gate, text_shift, text_scale, text_gate = norm.linear(norm.silu(temb_NE)).chunk(6, dim=1)
    pairs = ((text_shift, shift), (text_scale, scale), (text_gate, gate))
    return [torch.stack(pair, dim=1) for pair in pairs]


def sequence_view(map_local_tokens: Any, function: Any) -> Any:
    """Return a torch function that runs on each device's local tokens."""

    def arrays(*args: Any) -> Any:
        return array_of(function(*tensor_of(args)))

    return torch_view(map_local_tokens(arrays))


def takes_sequences(model: Any) -> bool:
    """Return whether every layer is as it was ported: no part is replaced or watched."""
    return all(_as_ported(block) for block in model.transformer_blocks)


def _as_ported(block: nn.Module) -> bool:
    """Return whether a layer's modules have the types that `port` gave them, and no hooks."""
    if type(block) is not Block:
        return False
    attn: Any = block.attn1
    parts = (block, attn, block.norm1, block.norm2, block.norm1.norm, block.norm2.norm)
    kinds = (Block, Attention, CogVideoXLayerNormZero, CogVideoXLayerNormZero, LayerNorm, LayerNorm)
    norms = (attn.norm_q, attn.norm_k)
    return (
        all(type(part) is kind for part, kind in zip(parts, kinds, strict=True))
        and all(type(norm) is LayerNorm for norm in norms)
        and not any(map(is_watched, block.modules()))
        and type(attn.processor) in (AttnProcessor, FusedAttnProcessor)
    )


@scaling_loras
def joined_step(
    model: Any,
    *,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor,
    timestep: torch.Tensor,
    timestep_cond: torch.Tensor | None = None,
    ofs: torch.Tensor | None = None,
    image_rotary_emb: Any = None,
    attention_kwargs: dict[str, Any] | None = None,
) -> torch.Tensor:
    """Return diffusers' transformer's result for these tensors, with the layers run on one sequence.

    Args:
        model: a ported transformer for which `takes_sequences` holds.
        hidden_states: latents (N, T, C, H, W).
        encoder_hidden_states: embedded prompt, (N, S, C).
        timestep, timestep_cond, ofs, image_rotary_emb: as the transformer takes them.
        attention_kwargs: {"scale": scale of its LoRAs} or None.

    Returns:
        (N, T, C, H, W).
    """
    temb = embedded_time(model, timestep, timestep_cond, ofs, hidden_states.dtype)
    temb = temb.expand(hidden_states.shape[0], -1)
    x_NSC = model.embedding_dropout(model.patch_embed(encoder_hidden_states, hidden_states))
    sequence = Sequence.from_placement(
        model.placement, videos=x_NSC.shape[0], text=encoder_hidden_states.shape[1], tokens=x_NSC.shape[1]
    )
    tables: Tables = ()
    if image_rotary_emb is not None:  # text has no position: cosine 1, sine 0
        cos, sin = image_rotary_emb
        check_positions(cos, sequence.tokens - sequence.text)
        fill = torch_view(sequence.fill_table)
        tables = fill(cos, 1.0), fill(sin, 0.0)
    x_NSC = torch_view(sequence.fill_up)(x_NSC)
    for block in model.transformer_blocks:
        x_NSC = block(x_NSC, temb=temb, image_rotary_emb=tables, sequence=sequence)
    x_NSC = model.proj_out(model.norm_out(model.norm_final(x_NSC), temb=temb))
    return unpatched(x_NSC[:, sequence.text : sequence.tokens], hidden_states.shape, model.config)


def embedded_time(model: Any, timestep: Any, timestep_cond: Any, ofs: Any, dtype: torch.dtype) -> Any:
    """Return the vectors (N, E) of the timestep, and of `ofs` if the model has it."""
    temb = model.time_embedding(model.time_proj(timestep).to(dtype), timestep_cond)
    if model.ofs_embedding is None:
        return temb
    return temb + model.ofs_embedding(model.ofs_proj(ofs).to(dtype))


def unpatched(y_NPC: torch.Tensor, shape: torch.Size, config: Any) -> torch.Tensor:
    """Return latents (N, T, C, H, W) from the patches that were cut of latents of this shape."""
    p, p_t = config["patch_size"], config["patch_size_t"] or 1
    videos, frames, _, height, width = shape
    y = y_NPC.unflatten(1, (-(-frames // p_t), height // p, width // p)).unflatten(-1, (-1, p_t, p, p))
    # (N, T, H, W, C, t, h, w)
    return y.permute(0, 1, 5, 4, 2, 6, 3, 7).reshape(videos, -1, y.shape[4], height, width)
