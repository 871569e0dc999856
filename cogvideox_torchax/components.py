"""The two networks of a CogVideoX pipeline besides its VAE, ported: the transformer and the T5 text encoder.

As in `modules`, each class is the one that it stands in for with a second way to run: a plain torch tensor
takes the inherited forward, a torchax tensor one compiled program.

Axis letters: N videos, S positions of a sequence (text first, then patches), H heads, D channels of a head.
"""

import contextlib
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from diffusers.models.attention_processor import CogVideoXAttnProcessor2_0
from diffusers.models.embeddings import CogVideoXPatchEmbed
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from diffusers.models.transformers.cogvideox_transformer_3d import (
    CogVideoXTransformer3DModel as DiffusersTransformer,
)
from torch import nn
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.t5.modeling_t5 import T5EncoderModel as TransformersT5Encoder

import jax_kernels
from cogvideox_torchax import runtime
from cogvideox_torchax.modules import SiLU
from cogvideox_torchax.runtime import on_jax, torch_view


class Linear(nn.Linear):
    """A matrix product rounded once, bias included (`jax_kernels.linear`)."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not on_jax(input):
            return super().forward(input)
        return torch_view(jax_kernels.linear)(input, self.weight, self.bias)


class LayerNorm(nn.LayerNorm):
    """LayerNorm over the last axis, whose statistics are float32 (`jax_kernels.layer_norm`)."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not on_jax(input) or len(self.normalized_shape) != 1:
            return super().forward(input)
        return torch_view(jax_kernels.layer_norm)(input, self.weight, self.bias, self.eps)


class AttnProcessor(CogVideoXAttnProcessor2_0):
    """CogVideoX's joint attention over text and patches, through `jax_kernels.attention`."""

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: Any = None,
    ) -> Any:
        if not on_jax(hidden_states) or attention_mask is not None or attn.is_cross_attention:
            return super().__call__(
                attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb
            )
        text = encoder_hidden_states.shape[1]
        x_NSC = torch.cat([encoder_hidden_states, hidden_states], dim=1)
        q, k, v = (
            project(x_NSC).unflatten(-1, (attn.heads, -1)) for project in (attn.to_q, attn.to_k, attn.to_v)
        )
        q = q if attn.norm_q is None else attn.norm_q(q)
        k = k if attn.norm_k is None else attn.norm_k(k)
        if image_rotary_emb is not None:  # the last positions are patches; text has none
            q, k = (torch_view(jax_kernels.rotate)(x, *image_rotary_emb) for x in (q, k))
        y_NSHD = torch_view(jax_kernels.attention)(q, k, v)
        project, dropout = attn.to_out
        y_NSC = dropout(project(y_NSHD.flatten(2)))
        return y_NSC[:, text:], y_NSC[:, :text]


class PatchEmbed(CogVideoXPatchEmbed):
    """The patch embedding, its table of positions computed on the host, in float64 as the reference has it.

    The table of a size that is not the model's own is as large as an activation: the transformer's program
    takes it as an argument.
    """

    def needs_table(self, height: int, width: int, frames: int) -> bool:
        """Whether latents of this size take another table than the model's own."""
        return (
            self.use_positional_embeddings
            and not self.use_learned_positional_embeddings
            and self._size(height, width, frames)
            != (self.sample_height, self.sample_width, self.sample_frames)
        )

    def _size(self, height: int, width: int, frames: int) -> tuple[int, int, int]:
        return height, width, (frames - 1) * self.temporal_compression_ratio + 1

    def table_for(self, height: int, width: int, frames: int) -> torch.Tensor | None:
        """Positions (1, S, C) of latents of this size; None where the model's own, or none, serve."""
        if not self.needs_table(height, width, frames):
            return None
        size = self._size(height, width, frames)
        cached = self.__dict__.setdefault("_table", {})
        if size not in cached:
            cached.clear()
            cached[size] = runtime.to_jax(super()._get_positional_embeddings(*size))
        return cached[size]

    @contextlib.contextmanager
    def using(self, table: torch.Tensor | None) -> Iterator[None]:
        self.__dict__["_given"] = table
        try:
            yield
        finally:
            del self.__dict__["_given"]

    def _get_positional_embeddings(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        given = self.__dict__.get("_given")
        return super()._get_positional_embeddings(*args, **kwargs) if given is None else given

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_table"}


class TransformerStep(nn.Module):
    """The transformer's own forward, as a network that a program is compiled of."""

    def __init__(self, model: DiffusersTransformer):
        super().__init__()
        self.model = model

    def forward(self, options: Any, positions: torch.Tensor | None = None, **tensors: Any) -> torch.Tensor:
        attention_kwargs, _ = options
        given: dict[str, Any] = {**tensors, "attention_kwargs": dict(attention_kwargs) or None}
        model: Any = self.model
        with model.patch_embed.using(positions):
            return DiffusersTransformer.forward(model, **given, return_dict=False)[0]


class TextEncoding(nn.Module):
    """The text encoder's own forward, as a network that a program is compiled of."""

    def __init__(self, model: TransformersT5Encoder):
        super().__init__()
        self.model = model

    def forward(self, options: Any, **tensors: Any) -> torch.Tensor:
        result: Any = TransformersT5Encoder.forward(self.model, **tensors)
        return result.last_hidden_state


class Compiled(nn.Module):
    """What both ported networks share: a program, built at the first call, on the mesh if there is one."""

    network_class: Any

    def options(self) -> Hashable:
        """What a program is compiled for besides tensors, as a plain call has it."""
        return layer_options(self)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state.pop("_program", None)  # compiled for this very object
        return state

    @property
    def program(self) -> runtime.ModuleProgram:
        """The compiled program, for what it counts and for `lower`."""
        if "_program" not in self.__dict__:
            self.__dict__["_program"] = self.build_program()
        return self.__dict__["_program"]

    def build_program(self) -> runtime.ModuleProgram:
        """A program of its own, for one that only looks at what it compiles to."""
        network = self.network_class(self)
        if self.mesh is None:
            return runtime.ModuleProgram(network)
        from cogvideox_torchax.sharding.sequences import SequencePlacement, ShardedModuleProgram

        return ShardedModuleProgram(network, SequencePlacement(self.mesh))

    @property
    def mesh(self) -> Any:
        """The `jax.sharding.Mesh` that this network runs on, as given to `port`; None for a single device."""
        return self.__dict__.get("_mesh")

    def place(self, mesh: Any = None) -> None:
        """Puts the weights on JAX: on its default device, or split over a mesh; later calls run there.

        Raises:
            ValueError: a mesh not made by `make_mesh`, or one that does not divide the weights.
        """
        if mesh is not None:
            self.place_on(mesh)
        if self.mesh is None:
            import jax.numpy as jnp

            runtime.put_weights(self, lambda _, array: jnp.asarray(array))
            return
        from cogvideox_torchax.sharding import sequences

        sequences.put_weights(self, self.mesh)

    def place_on(self, mesh: Any) -> None:
        """Compiles for a mesh from now on, wherever the weights are; the program so far is dropped.

        Raises:
            ValueError: a mesh not made by `make_mesh`, or one that does not divide the weights.
        """
        from cogvideox_torchax.sharding import check_mesh, sequences

        sequences.check_weights(self, check_mesh(mesh))
        self.__dict__["_mesh"] = mesh
        self.__dict__.pop("_program", None)


class CogVideoXTransformer3DModel(Compiled, DiffusersTransformer):
    """CogVideoX's transformer on torchax, by diffusers' own names: a denoising step is one program."""

    network_class = TransformerStep

    def options(self, attention_kwargs: dict[str, Any] | None = None) -> Hashable:
        return tuple(sorted((attention_kwargs or {}).items())), layer_options(self)

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        timestep: Any,
        timestep_cond: torch.Tensor | None = None,
        ofs: Any = None,
        image_rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_kwargs: dict[str, Any] | None = None,
        return_dict: bool = True,
    ) -> Any:
        if not on_jax(hidden_states):
            return super().forward(
                hidden_states,
                encoder_hidden_states,
                timestep,
                timestep_cond,
                ofs,
                image_rotary_emb,
                attention_kwargs,
                return_dict,
            )
        frames, _, height, width = hidden_states.shape[1:]
        patch_embed: Any = self.patch_embed
        sample = self.program(
            self.options(attention_kwargs),
            hidden_states=hidden_states,
            encoder_hidden_states=encoder_hidden_states,
            timestep=timestep,
            timestep_cond=timestep_cond,
            ofs=ofs,
            image_rotary_emb=image_rotary_emb,
            positions=patch_embed.table_for(height, width, frames),
        )
        return Transformer2DModelOutput(sample=sample) if return_dict else (sample,)


class T5EncoderModel(Compiled, TransformersT5Encoder):
    """The T5 encoder on torchax, by transformers' own names: a prompt's encoding is one program."""

    network_class = TextEncoding

    def forward(
        self,
        input_ids: Any = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **options: Any,
    ) -> Any:
        on_torch = not on_jax(next(self.parameters()))
        if on_torch or any(value is not None for value in options.values()):
            return super().forward(input_ids, attention_mask, inputs_embeds, **options)
        hidden = self.program(
            self.options(),
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
        )
        return BaseModelOutput(last_hidden_state=hidden)  # pyright: ignore[reportArgumentType]


def layer_options(network: nn.Module) -> Hashable:
    """What a layer's forward reads besides tensors and what may change between two calls.

    A LoRA's scale, which adapters are active, and the attention's processor: a program compiled with other
    values is another program.
    """
    found: list[Hashable] = []
    for name, module in network.named_modules():
        if hasattr(module, "active_adapters") and hasattr(module, "scaling"):
            layer: Any = module
            scales = tuple(sorted(layer.scaling.items()))
            state = (tuple(layer.active_adapters), layer.disable_adapters, tuple(layer.merged_adapters))
            found.append((name, scales, state))
        elif hasattr(module, "processor"):
            found.append((name, type(module.processor)))
    return tuple(found)


Described = dict[str, Any]
"""Shape and JAX dtype of each argument of a program, or a tuple of such pairs, by name."""


def step_tensors(
    transformer: Any, *, batch: int, frames: int, height: int, width: int, text: int | None = None
) -> Described:
    """What a denoising step takes, as `ModuleProgram.lower_structs` wants it.

    Args:
        transformer: a ported one; with weights or without.
        batch: videos, each counted twice where there is guidance.
        frames, height, width: of the latents.
        text: tokens of a prompt; the model's own limit where None.
    """
    import jax.numpy as jnp

    config, dtype = transformer.config, runtime.jax_dtype(transformer.dtype)
    text = text or config["max_text_seq_length"]
    tensors: Described = {
        "hidden_states": ((batch, frames, config["in_channels"], height, width), dtype),
        "encoder_hidden_states": ((batch, text, config["text_embed_dim"]), dtype),
        "timestep": ((batch,), jnp.int32),
    }
    patches = frames // (config["patch_size_t"] or 1) * (height // config["patch_size"])
    patches *= width // config["patch_size"]
    if config["use_rotary_positional_embeddings"]:
        table = ((patches, config["attention_head_dim"]), jnp.float32)
        tensors["image_rotary_emb"] = (table, table)
    elif transformer.patch_embed.needs_table(height, width, frames):
        channels = config["num_attention_heads"] * config["attention_head_dim"]
        tensors["positions"] = ((1, text + patches, channels), jnp.float32)
    if config["ofs_embed_dim"]:
        tensors["ofs"] = ((1,), dtype)
    return tensors


def prompt_tensors(*, batch: int, text: int) -> Described:
    """What encoding `batch` prompts of `text` tokens takes, as `ModuleProgram.lower_structs` wants it."""
    import jax.numpy as jnp

    return {"input_ids": ((batch, text), jnp.int32)}


SWAPPED: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: Linear,
    nn.LayerNorm: LayerNorm,
    nn.SiLU: SiLU,
    CogVideoXPatchEmbed: PatchEmbed,
    DiffusersTransformer: CogVideoXTransformer3DModel,
    TransformersT5Encoder: T5EncoderModel,
}
"""The class that each module of the two networks becomes."""


def port_network(network: nn.Module) -> None:
    """Gives a loaded transformer or text encoder, and the layers in it, their ported classes."""
    for module in network.modules():
        module.__class__ = SWAPPED.get(type(module), type(module))
        processor = getattr(module, "processor", None)
        if type(processor) is CogVideoXAttnProcessor2_0:
            processor.__class__ = AttnProcessor
    if isinstance(network, TransformersT5Encoder):
        network.tie_weights()  # moving it by hand has untied them
