"""CogVideoX's transformer on one sequence: text and patches are joined, and padded, once a step.

diffusers' own forward keeps text and patches apart and joins them in every attention. Here a block takes the
whole sequence, which may be split over devices (`pipelines.sequence.Sequence`); the result is the same. The
local tokens are those of the sequence that one device computes.

A block has two parts, named as their modules: "attn1" (attention) and "ff" (feed-forward). A part begins with
a norm and ends with a projection, whose result is multiplied by a gate and added to the residual.

Axis letters: N videos, S positions of a sequence (text first, then patches, then padding), C channels, E
channels of the embedded timestep, H heads, D channels of a head, P parts of the channels, one for each device
that has some of the tokens. In names with SC but no N, S is the tokens of all videos, one video's after the
other's. Of an axis of 2, index 0 is for text, index 1 for patches.

In the shape of latents, (N, T, C, H, W), T, H and W are their frames, rows and columns.

`torch_view` turns a function of JAX arrays, such as a kernel, into one of tensors. With "tensor"
(`pipelines.sequence`) a kernel has to be mapped over the devices: the methods `shard_norm` and `shard_heads`
of `Sequence` do so, and otherwise return the kernel as it is.
"""

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from diffusers.models.activations import GELU as DiffusersGELU
from diffusers.models.attention import FeedForward
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
from cogvideox_torchax.runtime import array_of, tensor_of, torch_view
from cogvideox_torchax.runtime.trees import runs_kernel
from cogvideox_torchax.upstream import scaling_loras

Tables = tuple[torch.Tensor, ...]
"""Cosines and sines of all positions, (S, D) each; () for a model without rotary positions."""


class GELU(DiffusersGELU):
    """GELU that is rounded to the input's dtype only at its end (`jax_kernels.gelu`)."""

    def gelu(self, gate: torch.Tensor) -> torch.Tensor:
        if self.approximate != "tanh" or not runs_kernel(self, gate):  # the kernel has the tanh form alone
            return super().gelu(gate)
        return torch_view(jax_kernels.gelu)(gate)


class Block(CogVideoXBlock):
    """A block of the transformer, which also takes text and patches as one sequence.

    A step with a cache sets the two attributes on its own copy of the block; without a cache they are empty.

    Attributes:
        replaced: by the name of a part that is skipped, the result (N, S, C) to use; None stands for zeros.
        collected: by the name of a part, the list that its result is appended to when it runs.
    """

    parts: Mapping[str, tuple[type, ...]] = {
        "attn1": (Attention,),
        "attn1.processor": (AttnProcessor, FusedAttnProcessor),
        "attn1.norm_q": (LayerNorm,),
        "attn1.norm_k": (LayerNorm,),
        "norm1": (CogVideoXLayerNormZero,),
        "norm1.norm": (LayerNorm,),
        "norm2": (CogVideoXLayerNormZero,),
        "norm2.norm": (LayerNorm,),
        "ff": (FeedForward,),
    }
    replaced: dict[str, torch.Tensor | None] = {}  # noqa: RUF012 - set anew, not written to
    collected: dict[str, list[torch.Tensor]] = {}  # noqa: RUF012

    @property
    def unsupported(self) -> str | None:
        """What no kernel computes: other layers than dropouts around the last projections."""
        to_out: Any = self.attn1.to_out
        net: Any = self.ff.net
        around = (*to_out[1:], net[1], *net[3:])
        if len(to_out) == 2 and len(net) in (3, 4) and all(type(each) is nn.Dropout for each in around):
            return None
        return "has other layers than dropouts after a projection"

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
        """Run the block on text and patches as one `sequence`; without one, run diffusers' own forward.

        With a sequence, `hidden_states` and the result are the whole sequence (N, S, C), `temb` (N, E) is the
        embedded timestep, `image_rotary_emb` has the `Tables` of all positions, and the other two arguments
        are None. Without one, the arguments and the result (patches, text) are those of diffusers.
        """
        if sequence is None:
            return super().forward(
                hidden_states, encoder_hidden_states, temb, image_rotary_emb, attention_kwargs
            )

        # `map_local_tokens` calls a function of JAX arrays on each device; the block's code takes tensors.
        def run_local_arrays(*arrays: Any) -> Any:
            (x_NSC, replaced), temb_NE, tables = cast(Any, tensor_of(arrays))
            return array_of(self._run_local_tokens(x_NSC, replaced, temb_NE, tables, sequence))

        # `self.replaced` goes with the tokens, as its results are split over devices in the same way. The
        # results to collect are returned too: on a mesh, arrays that the function stored elsewhere would be
        # traced ones, which are of no use outside of it.
        x_NSC, collected_results = torch_view(sequence.map_local_tokens(run_local_arrays))(
            (hidden_states, self.replaced), temb, image_rotary_emb
        )
        for part, y_NSC in collected_results.items():
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
        """Run the block on local tokens; return its result (N, S, C), and by part the results to collect."""
        # The position of the first patch, counted from the first local token: the tokens before it are text.
        # The kernels shift, scale and gate text by other vectors than patches.
        first_patch = sequence.first_patch()
        collected_results: dict[str, Any] = {}
        for part, norm, run_part in (
            ("attn1", self.norm1, lambda normed_NSC: self._attend(normed_NSC, tables, sequence)),
            ("ff", self.norm2, lambda normed_NSC: self._feed_forward(normed_NSC, sequence)),
        ):
            shift, scale, gate = modulation(norm, temb_NE)  # (N, 2, C) each
            layer_norm: Any = norm.norm  # the LayerNorm inside, which does not know the timestep
            norm_kernel = functools.partial(jax_kernels.adaptive_layer_norm, eps=layer_norm.eps)
            normed_NSC = torch_view(sequence.shard_norm(norm_kernel))(
                x_NSC, layer_norm.weight, layer_norm.bias, scale, shift, first_patch
            )
            # A step with a cache may give the part's result in `replaced`. The part is then skipped, and the
            # compiler drops the norm, as nothing reads it.
            if part in replaced:
                y_NSC = torch.zeros_like(normed_NSC) if replaced[part] is None else replaced[part]
            else:
                projection = run_part(normed_NSC)  # the part's last linear layer, not computed yet
                linear, *_dropouts = projection.layers
                if part not in self.collected and supports_fused(linear, sequence):
                    # One kernel computes the projection, multiplies by the gate and adds the residual: the
                    # part is done. A collected part cannot use this kernel, which does not return the
                    # projection's result.
                    x_NSC = projection.added_to(x_NSC, gate, first_patch)
                    continue
                y_NSC = projection.result()
            if part in self.collected:
                collected_results[part] = y_NSC
            x_NSC = torch_view(jax_kernels.gated_residual)(x_NSC, y_NSC, gate, first_patch)
        return x_NSC, collected_results

    def _feed_forward(self, normed_NSC: torch.Tensor, sequence: Sequence) -> "LastProjection":
        """Run the feed-forward on normed local tokens, except for its last projection."""
        # The first layer of `net` is a projection and GELU, the last ones are a projection and a dropout.
        projection_gelu, dropout, *last_layers = self.ff.net
        if (
            type(projection_gelu) is GELU
            and projection_gelu.approximate == "tanh"  # the one form that the kernel has
            and supports_fused(projection_gelu.proj, sequence)
        ):
            linear: Any = projection_gelu.proj
            hidden = torch_view(jax_kernels.linear_gelu)(
                normed_NSC, linear.matrix, linear.bias, scale=linear.scale, dynamic=linear.dynamic
            )
        else:
            hidden = projection_gelu(normed_NSC)
        return LastProjection(last_layers, dropout(hidden))

    def _attend(self, normed_NSC: torch.Tensor, tables: Tables, sequence: Sequence) -> "LastProjection":
        """Run attention on normed local tokens, except for its output projection."""
        attn: Any = self.attn1
        videos = normed_NSC.shape[0]
        # This kernel takes (N, S, C), splits C into heads, normalizes and rotates each head's channels (as
        # far as it is given a norm's weights and rotary tables), and returns (N, H, D, S). `shard_heads` sets
        # its number of heads to that of a device. Attention after it needs no mapping: it stays on a device.
        qk_norm_rope = torch_view(sequence.shard_heads(jax_kernels.qk_norm_rope, attn.heads))
        # The devices exchange local tokens for parts of the channels: each gets all tokens of some heads.
        # Queries, keys and values are (N, S, C / P) then.
        q, k, v = (
            torch_view(sequence.to_heads)(y_PSC, videos)
            for y_PSC in projections(attn, normed_NSC.flatten(0, 1), sequence)
        )
        head_channels = q.shape[-1] * sequence.parts / attn.heads  # C / P times P is C, of all heads
        # The attention kernel computes exp(scale * score) as 2 ** (log2(e) * scale * score). If its scale is
        # ln(2), that factor is 1, and the kernel does not multiply the scores. So the queries, which are
        # fewer than the scores, are multiplied here by log2(e) / sqrt(head_channels).
        query_scale = math.log2(math.e) / math.sqrt(head_channels)
        norm_q, norm_k = attn.norm_q, attn.norm_k
        q = qk_norm_rope(q, norm_q.weight, norm_q.bias, *tables, eps=norm_q.eps, scale=query_scale)
        k = qk_norm_rope(k, norm_k.weight, norm_k.bias, *tables, eps=norm_k.eps)
        y_NHDS = torch_view(jax_kernels.attention_transposed)(
            q,
            k,
            qk_norm_rope(v),  # without weights and tables: this only changes the layout to (N, H, D, S)
            scale=math.log(2),
            num_keys=sequence.tokens,  # no token attends to the padding after them
        )
        y_NCS = torch_view(sequence.to_tokens)(y_NHDS.flatten(1, 2))  # all channels of local tokens again
        return LastProjection(list(attn.to_out), y_NCS, transposed=True)


@dataclass(frozen=True)
class LastProjection:
    """The last projection of a block's part, not computed yet: a kernel may fuse it with what follows.

    Attributes:
        layers: the projection, which is a linear layer, and the dropouts after it.
        input: the input of the projection, (N, S, C), or (N, C, S) if `transposed`, as attention returns it.
    """

    layers: list[Any]
    input: torch.Tensor
    transposed: bool = False

    def result(self) -> torch.Tensor:
        """Return the result (N, S, C) of all `layers`."""
        input_NSC = self.input.transpose(1, 2) if self.transposed else self.input
        y_SC = input_NSC.flatten(0, 1)  # the tokens of all videos on one axis
        for layer in self.layers:
            y_SC = layer(y_SC)
        return y_SC.unflatten(0, (self.input.shape[0], -1))

    def added_to(self, x_NSC: torch.Tensor, gate_N2C: torch.Tensor, first_patch: Any) -> torch.Tensor:
        """Return `x_NSC + gate * linear(input)` by one kernel, without the dropouts.

        The gate has a vector for text, before the position `first_patch`, and one for patches.
        """
        linear, *_dropouts = self.layers  # dropouts are no-ops: programs do not drop values
        fused = functools.partial(
            jax_kernels.gated_linear, dynamic=linear.dynamic, transposed=self.transposed
        )
        return torch_view(fused)(
            self.input, linear.matrix, linear.bias, x_NSC, gate_N2C, first_patch, scale=linear.scale
        )


def supports_fused(linear: Any, sequence: Sequence) -> bool:
    """Return whether one kernel may compute a linear layer and the operations right before or after it."""
    # A layer with a LoRA, or of a user's class, runs its own forward. A layer that XLA shards (`shared`)
    # stays with XLA, which cannot shard a kernel.
    return type(linear) is Linear and sequence.shared is None


def projections(attn: Any, normed_SC: torch.Tensor, sequence: Sequence) -> Iterator[torch.Tensor]:
    """Yield attention's queries, then its keys, then its values, each as (P, S, C / P).

    The channels are split into P parts. P divides the number of heads, so a part has some whole heads.
    """

    def split_channels(y_SC: torch.Tensor) -> torch.Tensor:
        return y_SC.unflatten(-1, (sequence.parts, -1)).transpose(0, 1)

    # The processor tells whether the projections are fused: `attn` keeps `to_qkv` after diffusers unfuses.
    if type(attn.processor) is FusedAttnProcessor:
        yield from map(split_channels, attn.to_qkv(normed_SC).chunk(3, dim=-1))
        return
    split_linear = torch_view(functools.partial(jax_kernels.split_linear, parts=sequence.parts))
    for linear in (attn.to_q, attn.to_k, attn.to_v):
        if supports_fused(linear, sequence):
            yield split_linear(
                normed_SC, linear.matrix, linear.bias, scale=linear.scale, dynamic=linear.dynamic
            )
        else:
            yield split_channels(linear(normed_SC))


def modulation(norm: Any, temb_NE: torch.Tensor) -> list[torch.Tensor]:
    """Return the shift, scale and gate, (N, 2, C) each, that a norm computes from an embedded timestep."""
    shift, scale, gate, text_shift, text_scale, text_gate = norm.linear(norm.silu(temb_NE)).chunk(6, dim=1)
    return [
        torch.stack(pair, dim=1) for pair in ((text_shift, shift), (text_scale, scale), (text_gate, gate))
    ]


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
    """Return diffusers' prediction, latents (N, T, C, H, W), with the blocks run on one sequence.

    The model must be stock (`runtime.trees`). The arguments are those of the forward of diffusers'
    transformer. Of the options `attention_kwargs` only "scale" may be set: the decorator scales the model's
    LoRAs by it.
    """
    dtype = hidden_states.dtype
    temb = model.time_embedding(model.time_proj(timestep).to(dtype), timestep_cond)
    if model.ofs_embedding is not None:  # CogVideoX1.5's image-to-video model alone has the input `ofs`
        temb = temb + model.ofs_embedding(model.ofs_proj(ofs).to(dtype))
    temb = temb.expand(hidden_states.shape[0], -1)  # one timestep may be given for all videos
    # `patch_embed` returns text and embedded patches as one sequence, which has no padding yet.
    x_NSC = model.embedding_dropout(model.patch_embed(encoder_hidden_states, hidden_states))
    sequence = Sequence.from_placement(
        model.placement, videos=x_NSC.shape[0], text=encoder_hidden_states.shape[1], tokens=x_NSC.shape[1]
    )
    tables: Tables = ()
    if image_rotary_emb is not None:
        cos, sin = image_rotary_emb  # of the patches
        check_positions(cos, sequence.tokens - sequence.text)
        pad_table = torch_view(sequence.pad_table)
        # Text is not rotated, so its angle is 0: cosine 1, sine 0.
        tables = pad_table(cos, 1.0), pad_table(sin, 0.0)
    x_NSC = torch_view(sequence.pad_tokens)(x_NSC)
    for block in model.transformer_blocks:
        x_NSC = block(x_NSC, temb=temb, image_rotary_emb=tables, sequence=sequence)
    x_NSC = model.proj_out(model.norm_out(model.norm_final(x_NSC), temb=temb))
    return join_patches(x_NSC[:, sequence.text : sequence.tokens], hidden_states.shape, model.config)


def join_patches(y_NSC: torch.Tensor, shape: torch.Size, config: Any) -> torch.Tensor:
    """Return latents (N, T, C, H, W) joined from patches (N, S, C), without text and padding among them.

    The latents have N, T, H and W of `shape`, the shape of the transformer's input, with T rounded up to a
    multiple of p_t. A patch has on its axis C the channels of p_t frames of p x p latent pixels.
    """
    p, p_t = config["patch_size"], config["patch_size_t"] or 1  # None: a patch has one frame
    videos, frames, _, height, width = shape
    grid = -(-frames // p_t), height // p, width // p  # patches along time (rounded up), height and width
    # (N, T, H, W, C, t, h, w): T, H, W number the patches; t, h, w are inside a patch.
    y = y_NSC.unflatten(1, grid).unflatten(-1, (-1, p_t, p, p))
    # To (N, T, t, C, H, h, W, w): the reshape then joins T with t, H with h, and W with w.
    return y.permute(0, 1, 5, 4, 2, 6, 3, 7).reshape(videos, -1, y.shape[4], height, width)
