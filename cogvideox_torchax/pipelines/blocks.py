"""CogVideoX's transformer on one sequence: text and patches are joined, and padded, once a step.

diffusers' own forward keeps the two apart and joins them in every attention. Here a block takes the whole
sequence, which may be split over devices (`pipelines.sequence.Sequence`); the result is the same.

Axis letters: N videos, S positions of a sequence (text first, then patches), C channels, H heads, D channels
of a head, P parts of the channels, one for each device that has some of the tokens. In names with SC but no
N, S is the tokens of all videos, one video's after the other's.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from diffusers.models.activations import GELU as DiffusersGELU
from diffusers.models.attention_processor import Attention
from diffusers.models.normalization import CogVideoXLayerNormZero
from diffusers.models.transformers.cogvideox_transformer_3d import CogVideoXBlock

import jax_kernels
from cogvideox_torchax.pipelines.layers import (
    AttnProcessor,
    FusedAttnProcessor,
    LayerNorm,
    Linear,
    check_positions,
)
from cogvideox_torchax.pipelines.sequence import Sequence
from cogvideox_torchax.runtime import array_of, tensor_of, torch_view
from cogvideox_torchax.runtime.layers import by_kernel, is_watched
from cogvideox_torchax.upstream import scaling_loras

Tables = tuple[torch.Tensor, ...]
"""Cosines and sines of all positions, (S, D) each; nothing for a model without rotary positions."""


class GELU(DiffusersGELU):
    """GELU rounded once (`jax_kernels.gelu`)."""

    def gelu(self, gate: torch.Tensor) -> torch.Tensor:
        if not by_kernel(self, gate) or self.approximate != "tanh":
            return super().gelu(gate)
        return torch_view(jax_kernels.gelu)(gate)


class Block(CogVideoXBlock):
    """A layer of the transformer, which also takes text and patches as one sequence."""

    # A step with a cache sets both in its own copy of the block, by part of the block: "attn1", its
    # attention, or "ff", its feed-forward.
    replaced: dict[str, torch.Tensor | None] = {}  # noqa: RUF012 - set anew, not written to
    """Results (N, S, C) to use instead of running a part; None for zeros."""
    collected: dict[str, list[torch.Tensor]] = {}  # noqa: RUF012
    """Lists to which the results of parts that run are appended."""

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
        """Run the layer on text and patches as one `sequence`; without one, run diffusers' own forward.

        Args:
            hidden_states: the whole sequence (N, S, C); without `sequence` the patches.
            encoder_hidden_states: the text; None with a sequence.
            temb: embedded timestep, (N, E).
            image_rotary_emb: rotary (cos, sin) of all positions, or of the patches; () for none.
            attention_kwargs: options of diffusers' own forward; None with a sequence.
            sequence: the layout of `hidden_states`.
        """
        if sequence is None:
            return super().forward(
                hidden_states, encoder_hidden_states, temb, image_rotary_emb, attention_kwargs
            )

        def run_local_arrays(*arrays: Any) -> Any:
            (x_NSC, replaced), temb_NE, tables = cast(Any, tensor_of(arrays))
            return array_of(self._run_local_tokens(x_NSC, replaced, temb_NE, tables, sequence))

        # Like the tokens, the results of parts are split by videos and tokens.
        x_NSC, results = torch_view(sequence.map_local_tokens(run_local_arrays))(
            (hidden_states, self.replaced), temb, image_rotary_emb
        )
        for part, y_NSC in results.items():
            self.collected[part].append(y_NSC)
        return x_NSC

    def _run_local_tokens(
        self,
        x_NSC: torch.Tensor,
        replaced: dict[str, torch.Tensor | None],
        temb_NE: torch.Tensor,
        tables: Tables,
        sequence: Sequence,
    ) -> Any:
        """Run the layer on a device's local tokens; return them, and the results of `collected` parts."""
        # Tokens before the first patch are text: a norm has other shifts, scales and gates for them.
        first_patch = sequence.first_patch()
        results: dict[str, Any] = {}
        for part, norm, run_part in (
            ("attn1", self.norm1, lambda h_NSC: self._attend(h_NSC, tables, sequence)),
            ("ff", self.norm2, lambda h_NSC: self._feed_forward(h_NSC, sequence)),
        ):
            shift, scale, gate = modulation(norm, temb_NE)
            layer_norm: Any = norm.norm
            norm_kernel = functools.partial(jax_kernels.adaptive_layer_norm, eps=layer_norm.eps)
            h_NSC = torch_view(sequence.shard_norm(norm_kernel))(
                x_NSC, layer_norm.weight, layer_norm.bias, scale, shift, first_patch
            )
            if part in replaced:
                y_NSC = torch.zeros_like(h_NSC) if replaced[part] is None else replaced[part]
            else:
                projection = run_part(h_NSC)  # the part's last linear layer, not computed yet, and its input
                linear, *_dropouts = projection.layers
                if part not in self.collected and supports_fused(linear, sequence):
                    x_NSC = projection.added(x_NSC, gate, first_patch)  # fused with the gate and the residual
                    continue
                y_NSC = projection.result()
            if part in self.collected:
                results[part] = y_NSC
            x_NSC = torch_view(jax_kernels.gated_residual)(x_NSC, y_NSC, gate, first_patch)
        return x_NSC, results

    def _feed_forward(self, h_NSC: torch.Tensor, sequence: Sequence) -> "LastProjection":
        """Run the feed-forward on normed tokens, except for its last projection."""
        # `widen` is the first projection and GELU; `layers` are the last projection and its dropout.
        widen, dropout, *layers = self.ff.net
        if type(widen) is GELU and widen.approximate == "tanh" and supports_fused(widen.proj, sequence):
            project: Any = widen.proj
            h_NSC = torch_view(jax_kernels.linear_gelu)(h_NSC, project.weight, project.bias)
        else:
            h_NSC = widen(h_NSC)
        return LastProjection(layers, dropout(h_NSC))

    def _attend(self, h_NSC: torch.Tensor, tables: Tables, sequence: Sequence) -> "LastProjection":
        """Run attention on normed local tokens, except for its output projection."""
        attn: Any = self.attn1
        videos = h_NSC.shape[0]
        qk_norm_rope = torch_view(sequence.shard_heads(jax_kernels.qk_norm_rope, attn.heads))
        # P devices exchange local tokens for parts of the channels (whole heads).
        q, k, v = (
            torch_view(sequence.to_heads)(y_PSC, videos)
            for y_PSC in projections(attn, h_NSC.flatten(0, 1), sequence)
        )
        head_channels = q.shape[-1] * sequence.parts / attn.heads  # `q` has one of `parts` parts
        # The attention kernel computes 2 ** (score * log2(e) * its scale). With the scale ln(2) it multiplies
        # no score: the queries carry log2(e) / sqrt(head_channels) instead.
        query_scale = math.log2(math.e) / math.sqrt(head_channels)
        norm_q, norm_k = attn.norm_q, attn.norm_k
        q = qk_norm_rope(q, norm_q.weight, norm_q.bias, *tables, eps=norm_q.eps, scale=query_scale)
        k = qk_norm_rope(k, norm_k.weight, norm_k.bias, *tables, eps=norm_k.eps)
        y_NHDS = torch_view(jax_kernels.attention_transposed)(
            q,
            k,
            qk_norm_rope(v),  # without weights and tables it changes the layout alone
            scale=math.log(2),
            num_keys=sequence.tokens,
        )
        y_NCS = torch_view(sequence.to_tokens)(y_NHDS.flatten(1, 2))  # all channels of local tokens again
        return LastProjection(list(attn.to_out), y_NCS, transposed=True)


@dataclass(frozen=True)
class LastProjection:
    """The last projection of attention or of the feed-forward, not computed yet, and its input.

    `layers` are the projection and the dropouts after it. `h` is its input, (N, S, C), or (N, C, S) if
    `transposed`.
    """

    layers: list[Any]
    h: torch.Tensor
    transposed: bool = False

    def result(self) -> torch.Tensor:
        h_NSC = self.h.transpose(1, 2) if self.transposed else self.h
        y_SC = h_NSC.flatten(0, 1)  # the tokens of all videos on one axis
        for layer in self.layers:
            y_SC = layer(y_SC)
        return y_SC.unflatten(0, (self.h.shape[0], -1))

    def added(self, x_NSC: torch.Tensor, gate_N2C: torch.Tensor, first_patch: Any) -> torch.Tensor:
        """Return `x_NSC + gate * linear(h)` by one kernel; the gate has vectors for text and for patches."""
        fused = functools.partial(jax_kernels.gated_linear, transposed=self.transposed)
        linear, *_dropouts = self.layers
        return torch_view(fused)(self.h, linear.weight, linear.bias, x_NSC, gate_N2C, first_patch)


def supports_fused(project: Any, sequence: Sequence) -> bool:
    """Return whether a kernel may replace a projection: one without a LoRA, and not sharded by XLA."""
    return type(project) is Linear and sequence.shared is None


def projections(attn: Any, h_SC: torch.Tensor, sequence: Sequence) -> Iterator[torch.Tensor]:
    """Yield queries, keys and values of tokens (S, C) of all videos: (P, S, C / P) each, in whole heads."""

    def split(y_SC: torch.Tensor) -> torch.Tensor:
        return y_SC.unflatten(-1, (sequence.parts, -1)).transpose(0, 1)

    if type(attn.processor) is FusedAttnProcessor:  # diffusers keeps `to_qkv`, and the flag, when it unfuses
        yield from map(split, attn.to_qkv(h_SC).chunk(3, dim=-1))
        return
    kernel = torch_view(functools.partial(jax_kernels.split_linear, parts=sequence.parts))
    for project in (attn.to_q, attn.to_k, attn.to_v):
        if supports_fused(project, sequence):
            yield kernel(h_SC, project.weight, project.bias)
        else:  # a projection with a LoRA, of a user's class, or sharded by XLA
            yield split(project(h_SC))


def modulation(norm: Any, temb_NE: torch.Tensor) -> list[torch.Tensor]:
    """Return a norm's [shift, scale, gate] for an embedded timestep, each (N, 2, C): text, then patches."""
    shift, scale, gate, text_shift, text_scale, text_gate = norm.linear(norm.silu(temb_NE)).chunk(6, dim=1)
    pairs = (text_shift, shift), (text_scale, scale), (text_gate, gate)
    return [torch.stack(pair, dim=1) for pair in pairs]


def takes_sequences(model: Any) -> bool:
    """Return whether each layer of a transformer is of the type that `port` gave it, and has no hooks."""
    return all(_as_ported(block) for block in model.transformer_blocks)


def _as_ported(block: Any) -> bool:
    if type(block) is not Block:
        return False
    attn: Any = block.attn1
    types = (
        (attn, Attention),
        (block.norm1, CogVideoXLayerNormZero),
        (block.norm2, CogVideoXLayerNormZero),
        *((norm, LayerNorm) for norm in (block.norm1.norm, block.norm2.norm, attn.norm_q, attn.norm_k)),
    )
    return (
        all(type(module) is kind for module, kind in types)
        and type(attn.processor) in (AttnProcessor, FusedAttnProcessor)
        and not any(map(is_watched, block.modules()))
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
    """Return the prediction (N, T, C, H, W) of diffusers' transformer, with the layers run on one sequence.

    `takes_sequences` must hold. "scale", for the model's LoRAs, is the one option; the decorator reads it.
    """
    dtype = hidden_states.dtype
    temb = model.time_embedding(model.time_proj(timestep).to(dtype), timestep_cond)
    if model.ofs_embedding is not None:
        temb = temb + model.ofs_embedding(model.ofs_proj(ofs).to(dtype))
    temb = temb.expand(hidden_states.shape[0], -1)  # one timestep may be given for all videos
    x_NSC = model.embedding_dropout(model.patch_embed(encoder_hidden_states, hidden_states))
    sequence = Sequence.from_placement(
        model.placement, videos=x_NSC.shape[0], text=encoder_hidden_states.shape[1], tokens=x_NSC.shape[1]
    )
    tables: Tables = ()
    if image_rotary_emb is not None:  # text has no position: cosine 1, sine 0
        cos, sin = image_rotary_emb
        check_positions(cos, sequence.tokens - sequence.text)
        fill = torch_view(sequence.pad_table)
        tables = fill(cos, 1.0), fill(sin, 0.0)
    x_NSC = torch_view(sequence.pad_tokens)(x_NSC)
    for block in model.transformer_blocks:
        x_NSC = block(x_NSC, temb=temb, image_rotary_emb=tables, sequence=sequence)
    x_NSC = model.proj_out(model.norm_out(model.norm_final(x_NSC), temb=temb))
    return joined_patches(x_NSC[:, sequence.text : sequence.tokens], hidden_states.shape, model.config)


def joined_patches(y_NPC: torch.Tensor, shape: torch.Size, config: Any) -> torch.Tensor:
    """Join patches (N, P, C), with p_t frames of p x p latent pixels on C, to latents (N, T, C, H, W)."""
    p, p_t = config["patch_size"], config["patch_size_t"] or 1
    videos, frames, _, height, width = shape
    grid = -(-frames // p_t), height // p, width // p  # patches along time (rounded up), height and width
    # (N, T, H, W, C, t, h, w): T, H, W number the patches; t, h, w are inside a patch.
    y = y_NPC.unflatten(1, grid).unflatten(-1, (-1, p_t, p, p))
    # To (N, T, t, C, H, h, W, w), where neighbours join.
    return y.permute(0, 1, 5, 4, 2, 6, 3, 7).reshape(videos, -1, y.shape[4], height, width)
