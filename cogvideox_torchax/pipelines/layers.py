"""The layers of a pipeline's networks, ported: each class is a subclass of the layer that it replaces.

Plain torch tensors run the inherited forward, torchax tensors run a kernel of `jax_kernels`, unless somebody
has replaced a method of the inherited class (`runtime.trees`). `torch_view` turns a kernel, a function of JAX
arrays, into a function of tensors. A program is traced from its own copy of the network, which may change.

Axis letters: N videos, S positions of a sequence (text first, then patches), C channels, H heads, D channels
of a head.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from diffusers.models.attention_processor import CogVideoXAttnProcessor2_0, FusedCogVideoXAttnProcessor2_0
from diffusers.models.embeddings import CogVideoXPatchEmbed
from torch import nn

import jax_kernels
from cogvideox_torchax import runtime, upstream
from cogvideox_torchax.pipelines.weights import read_only
from cogvideox_torchax.runtime import on_accelerator, torch_view
from cogvideox_torchax.runtime.trees import replaced_method, runs_kernel


def _in_eight_bits(tokens: torch.Tensor) -> torch.Tensor:
    """Return tokens rounded to 255 values each; the gradient is that of whole ones, as of `linear`."""
    whole = tokens.detach()
    largest = whole.float().abs().amax(-1, keepdim=True)
    levels = (whole * (127 / largest).where(largest != 0, 0)).round()
    return (levels * (largest / 127)).to(tokens.dtype) + (tokens - whole)  # zeros that have the gradient


class Linear(nn.Linear):
    """A linear layer that is rounded once, after the bias is added (`jax_kernels.linear`).

    It may keep its weight in fewer bits (`hold`). The buffer `weight_scale`, if there is one, then has a
    factor for each output channel. The parameter, and the state dict, have the bits. Who reads the attribute
    `weight` gets the values that they stand for, written out at each read: a write into them is refused.

    Attributes:
        compute_dtype: the dtype in which bits are written out; None if the weight has none.
        quant_type: GGUF's number for the format of a parameter that is bytes; None for one of numbers.
        dynamic: whether the input is rounded to int8 too, with a scale for each token; the weight is int8.
    """

    compute_dtype: torch.dtype | None = None
    quant_type: int | None = None
    dynamic: bool = False

    inputs_split: bool = False
    """True if the weight is split by its inputs, so that the product is a sum over devices.

    `SequencePlacement.watching` sets it on a program's own copy of the layer.
    """

    @property
    def scale(self) -> torch.Tensor | None:
        """The factors (O) of the weight; None if it has none."""
        return self._buffers.get("weight_scale")

    @property
    def bits(self) -> Any:
        """The parameter itself."""
        return self._parameters["weight"]

    @property
    def matrix(self) -> Any:
        """The weight without its factors, as kernels take it: in int8, or in floats."""
        is_whole = self.compute_dtype is None or self.bits.dtype == torch.int8
        return self.bits if is_whole else self._written_out(self.bits)

    def _written_out(self, bits: torch.Tensor) -> torch.Tensor:
        values = bits if self.quant_type is None else upstream.from_gguf(bits, self.quant_type)
        return values.to(self.compute_dtype)

    def hold(
        self,
        weight: torch.Tensor,
        scale: torch.Tensor | None,
        compute_dtype: torch.dtype,
        quant_type: int | None = None,
    ) -> None:
        """Keep a weight (O, I) of any dtype, or GGUF's bytes (O, bytes), and its scale (O) in float32."""
        self._parameters["weight"] = nn.Parameter(weight, requires_grad=False)
        self._buffers |= {} if scale is None else {"weight_scale": scale}
        self.compute_dtype, self.quant_type = compute_dtype, quant_type

    def __getattr__(self, name: str) -> Any:
        value: Any = super().__getattr__(name)
        if name != "weight" or self.compute_dtype is None:
            return value
        values = self._written_out(value)
        if self.scale is not None:
            values = (values.float() * self.scale[:, None]).to(self.compute_dtype)
        return read_only(values.detach())

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight" and self.compute_dtype and value.dtype != self.bits.dtype:
            # It is no such bits, and has all of its values.
            self.compute_dtype, self.quant_type, self.dynamic = None, None, False
            self._buffers.pop("weight_scale", None)
        super().__setattr__(name, value)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        scale, tensors, dtype = self.scale, self._parameters, self.compute_dtype
        weight: Any = tensors.get("weight")
        if dtype is not None:  # the weight moves, but a cast of the model would change its bits
            self._parameters = {name: tensor for name, tensor in tensors.items() if tensor is not weight}
        super()._apply(fn, recurse)
        if scale is not None:  # it would be rounded too
            self._buffers["weight_scale"] = scale.to(fn(scale).device)
        if dtype is not None:
            example = fn(weight.new_zeros(1, dtype=dtype))
            moved = nn.Parameter(weight.to(example.device), requires_grad=False)
            self._parameters = {**tensors, **self._parameters, "weight": moved}
            self.compute_dtype = example.dtype
        return self

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not runs_kernel(self, input):
            return super().forward(_in_eight_bits(input) if self.dynamic else input)
        # If the product is a sum over devices, each device rounds its summand before the all-reduce. In
        # bfloat16 this halves the bytes that it sends.
        return torch_view(jax_kernels.linear)(
            input,
            self.matrix,
            self.bias,
            scale=self.scale,
            dynamic=self.dynamic,
            rounded_parts=self.inputs_split,
        )


class LayerNorm(nn.LayerNorm):
    """LayerNorm over the last axis, with its statistics in float32 (`jax_kernels.layer_norm`)."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if len(self.normalized_shape) != 1 or not runs_kernel(self, input):
            return super().forward(input)
        return torch_view(jax_kernels.layer_norm)(input, self.weight, self.bias, self.eps)


def check_positions(table: torch.Tensor, patches: int) -> None:
    """Raise `ValueError` unless a rotary table has one position for each patch.

    A patch without a position would go unnoticed: it would be treated like text, which has no positions.
    """
    if table.shape[0] != patches:
        raise ValueError(
            f"got rotary tables of {table.shape[0]} positions for {patches} patches: make them for the "
            "frames, height and width of these latents"
        )


class JointAttention:
    """Mixin for diffusers' attention processors: attention over text and patches by `jax_kernels.attention`.

    On torchax tensors the inherited code would give wrong results: it writes rotated queries into a view of a
    view, and torchax loses this write.
    """

    @property
    def __call__(self) -> Any:
        """`_attend`, or the inherited method, with its own parameters, if somebody has replaced one."""
        inherited: Any = super()
        return self._attend if replaced_method(type(self)) is None else inherited.__call__

    def _attend(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: Any = None,
    ) -> Any:
        """Return attention's results (patches, text), computed on one sequence of text and patches.

        The inherited code runs for plain tensors, and for cross-attention and masks, which the kernel lacks.
        """
        if not on_accelerator(hidden_states) or attention_mask is not None or attn.is_cross_attention:
            return super().__call__(  # pyright: ignore[reportAttributeAccessIssue]
                attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb
            )
        x_NSC = torch.cat([encoder_hidden_states, hidden_states], dim=1)
        if isinstance(self, FusedCogVideoXAttnProcessor2_0):  # one layer computes the three projections
            projected = attn.to_qkv(x_NSC).chunk(3, dim=-1)
        else:
            projected = (layer(x_NSC) for layer in (attn.to_q, attn.to_k, attn.to_v))
        q, k, v = (x.unflatten(-1, (attn.heads, -1)) for x in projected)  # (N, S, H, D) each
        q = q if attn.norm_q is None else attn.norm_q(q)
        k = k if attn.norm_k is None else attn.norm_k(k)
        if image_rotary_emb is not None:
            # The tables are shorter than the sequence: the kernel rotates its last positions, the patches.
            check_positions(image_rotary_emb[0], hidden_states.shape[1])
            q, k = (torch_view(jax_kernels.apply_rotary)(x, *image_rotary_emb) for x in (q, k))
        y_NSHD = torch_view(jax_kernels.attention)(q, k, v)
        project, dropout = attn.to_out
        y_NSC = dropout(project(y_NSHD.flatten(2)))
        text_length = encoder_hidden_states.shape[1]
        return y_NSC[:, text_length:], y_NSC[:, :text_length]


class AttnProcessor(JointAttention, CogVideoXAttnProcessor2_0):
    """CogVideoX's attention, for three separate projections."""


class FusedAttnProcessor(JointAttention, FusedCogVideoXAttnProcessor2_0):
    """CogVideoX's attention, for projections that `fuse_qkv_projections` has made one."""


class PatchEmbed(CogVideoXPatchEmbed):
    """The patch embedding, which can add other positions than those of the module's own table.

    The module's own table of sinusoidal positions fits latents of one size. For another size a table is
    computed on the host, in float64, and the program takes it as its input "positions". A table is (1, S, C).
    Sizes are in latent frames and latent pixels, unless said otherwise.
    """

    table: torch.Tensor | None = None
    """The table to add instead of the module's own; None for the module's own."""

    def needs_table(self, height: int, width: int, frames: int) -> bool:
        """Return whether latents of this size need another table of sinusoidal positions."""
        # The module has the size of its own table: height and width in latent pixels, but `sample_frames` in
        # frames of the video.
        video_frames = (frames - 1) * self.temporal_compression_ratio + 1
        return (
            self.use_positional_embeddings
            and not self.use_learned_positional_embeddings
            and (height, width, video_frames) != (self.sample_height, self.sample_width, self.sample_frames)
        )

    def table_for(self, height: int, width: int, frames: int) -> torch.Tensor | None:
        """Return the table for latents of this size; None if the module's own will do (`needs_table`)."""
        if not self.needs_table(height, width, frames):
            return None
        return _table(
            tuple((name, value) for name, value in vars(self).items() if isinstance(value, int | float)),
            height,
            width,
            frames,
        )

    def use_table(self, table: torch.Tensor) -> None:
        """Have `forward` add `table` instead of the module's own; call this on a program's own copy."""
        self.table = table
        self.use_positional_embeddings = False  # so that the inherited forward adds no positions

    def forward(self, text_embeds: torch.Tensor, image_embeds: torch.Tensor) -> torch.Tensor:
        """Return text and patches, embedded, as one sequence (N, S, C), with positions added.

        As in diffusers, `image_embeds` are latents (N, T, channels, H, W), which are cut into patches here.
        """
        has_positions = (
            self.use_positional_embeddings or self.use_learned_positional_embeddings or self.table is not None
        )
        tokens = text_embeds.shape[1]
        expected = self.max_text_seq_length  # a table begins with the positions of so many tokens of text
        if has_positions and tokens != expected:
            raise ValueError(
                f"got a prompt of {tokens} tokens, padding among them: this transformer has positions for "
                f"{expected} (max_text_seq_length); pass max_sequence_length={expected} to the pipeline"
            )
        embeds = super().forward(text_embeds, image_embeds)
        # With a table of `use_table` the inherited forward has added no positions.
        return embeds if self.table is None else embeds + self.table.to(embeds.dtype)


@functools.lru_cache(maxsize=2)
def _table(numbers: tuple[tuple[str, float], ...], height: int, width: int, frames: int) -> torch.Tensor:
    """Return the table of a patch embedding whose attributes have these `numbers`, such as `patch_size`."""
    return runtime.to_jax(upstream.positions(CogVideoXPatchEmbed, dict(numbers), height, width, frames))
