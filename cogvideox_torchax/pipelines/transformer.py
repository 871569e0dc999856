"""CogVideoX's transformer, ported: a denoising step, with a cache of steps or without, is one program."""

import contextlib
import functools
import warnings
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from diffusers.models.transformers.cogvideox_transformer_3d import (
    CogVideoXTransformer3DModel as DiffusersTransformer,
)
from jax.sharding import Mesh
from torch import nn

from cogvideox_torchax import runtime, upstream
from cogvideox_torchax.files.models import saved_from_host
from cogvideox_torchax.pipelines import cached_layers, caches, loras, sharding
from cogvideox_torchax.pipelines.blocks import joined_step, takes_sequences
from cogvideox_torchax.pipelines.networks import (
    STOCK_CLASSES,
    KnownNetwork,
    TensorSpecs,
    bytes_of,
    check_split,
    memory_of,
)
from cogvideox_torchax.sharding import Parallel


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
        # `runner` decides by the form which layers of the model run, and keeps their results.
        runner = cached_layers.STEP_CLASSES[self.form.kind](self.form, cache, numbers)
        prediction = runner.step(self.model, self.predict, inputs, self.joined)
        return (prediction, runner.host_scalar), runner.next_arrays


class CogVideoXTransformer3DModel(KnownNetwork, DiffusersTransformer):
    """CogVideoX's transformer on torchax, by diffusers' own names: a denoising step is one program."""

    network_class = TransformerStep
    save_pretrained = saved_from_host(DiffusersTransformer.save_pretrained)
    step_cache: caches.StepCache | None = None
    """The enabled cache, which has the number of steps that it skipped; None without a cache."""

    def enable_cache(self, config: Any) -> None:
        """Enable a cache as diffusers does; on JAX, take its hooks off the modules (`take_cache`)."""
        super().enable_cache(config)
        if runtime.is_on_jax(self):
            self.take_cache()

    def disable_cache(self) -> None:
        super().disable_cache()
        vars(self).pop("step_cache", None)  # `self.step_cache` is then the class's attribute, None

    def take_cache(self, *, warn: bool = True) -> None:
        """Take the hooks of diffusers' cache, if there are any, off the modules, into `step_cache`.

        From then on steps skip what the hooks would skip. `warn` is whether to warn of an enabled cache that
        skips nothing.
        """
        hooks = upstream.take_hooks(self)
        if hooks:
            self.step_cache = caches.cache_of(hooks)
        if warn and self.is_cache_enabled and self.step_cache is None:
            # The warning names the line that called `enable_cache` or `place`, our caller: `stacklevel` 3.
            warnings.warn(caches.WITHOUT_EFFECT.format(type(self._cache_config).__name__), stacklevel=3)

    @contextlib.contextmanager
    def cache_context(self, name: str, **kwargs: Any) -> Iterator[None]:
        """Have the steps of a `with` block share a cache's state called `name`, as in diffusers."""
        with super().cache_context(name, **kwargs), caches.context(name):
            yield

    def _reset_stateful_cache(self, recurse: bool = True) -> None:
        super()._reset_stateful_cache(recurse)
        if self.step_cache is not None:
            self.step_cache.reset()

    def put_weights(self) -> None:
        super().put_weights()
        self.take_cache()

    @staticmethod
    def choose_parallelism(
        network: Any, mesh: Mesh, requested: Parallel | None = None, memory: float | None = None
    ) -> Any:
        """Return the split of tokens or of weights' channels, by the weights' bytes and a device's memory."""
        chosen = sharding.choose_parallelism(
            mesh,
            heads=network.config["num_attention_heads"],
            weight_bytes=bytes_of(network),
            memory=memory_of(mesh, memory),
            requested=requested,
        )
        return check_split(network, mesh, chosen)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Move or cast the model as `PortedModel.to` does; off JAX, put diffusers' cache hooks back on it."""
        moved = super().to(*args, **kwargs)
        # On JAX the hooks are off the modules, in `step_cache`; in PyTorch they do diffusers' work again.
        if self.step_cache is not None and not runtime.is_on_jax(self):
            upstream.put_hooks(self, vars(self).pop("step_cache").hooks)
        return moved

    @functools.wraps(DiffusersTransformer.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not any(map(upstream.is_patched, STOCK_CLASSES)):
            return self._step(*args, **kwargs)
        if self.step_cache is not None:
            raise ValueError(
                f"got a cache ({self.step_cache}) and a class of diffusers of which a method was replaced: "
                "call disable_cache(), or take the replacement out"
            )
        return self.run_as_it_is(DiffusersTransformer.forward, *args, **kwargs)

    def _step(
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
        """Return diffusers' output for a step, by its own code for plain tensors, else by a program."""
        if runtime.on_jax(hidden_states) != runtime.is_on_jax(self):
            inputs, weights = (
                ("jax", "in PyTorch") if runtime.on_jax(hidden_states) else ("the host", "on jax")
            )
            raise ValueError(f'got inputs on {inputs} for weights {weights}: move both .to("jax")')
        if not runtime.on_jax(hidden_states):
            return super().forward(
                hidden_states,
                encoder_hidden_states,
                timestep,
                timestep_cond=timestep_cond,
                ofs=ofs,
                image_rotary_emb=image_rotary_emb,
                attention_kwargs=attention_kwargs,  # by name: diffusers' LoRA scaling reads it there
                return_dict=return_dict,
            )
        self.check_modules()
        frames, _channels, height, width = hidden_states.shape[1:]
        patch_embed: Any = self.patch_embed
        tensors = {
            "hidden_states": hidden_states,
            "encoder_hidden_states": encoder_hidden_states,
            "timestep": timestep,
            "timestep_cond": timestep_cond,
            "ofs": ofs,
            "image_rotary_emb": image_rotary_emb,
            # A table of sinusoidal positions, made on the host before the trace; None if the module's own
            # table is of this size.
            "positions": patch_embed.table_for(height, width, frames),
        }
        with runtime.active(), torch.no_grad():
            if self.step_cache is None:
                sample = self.run_program(TransformerStep(self, attention_kwargs), tensors)
            else:
                cached_step = functools.partial(CachedStep, self, attention_kwargs)  # takes a form
                sample = self.step_cache.step(self, cached_step, tensors)
        sample = runtime.without_gradient(
            self, hidden_states, sample, "on JAX a transformer has no gradients"
        )
        return Transformer2DModelOutput(sample=sample) if return_dict else (sample,)


for _name, _method in loras.methods_in_pytorch(DiffusersTransformer, loras.NETWORK_METHODS).items():
    setattr(CogVideoXTransformer3DModel, _name, _method)


def step_tensors(
    transformer: Any, *, batch: int, frames: int, height: int, width: int, text: int | None = None
) -> TensorSpecs:
    """Return the (shape, JAX dtype) of each input of a denoising step, by name.

    Args:
        transformer: a ported transformer; with weights or without.
        batch: number of videos; with classifier-free guidance each counts as two.
        frames, height, width: size of the latents.
        text: number of tokens of a prompt; None for the model's limit.
    """
    # A transformer of another class than diffusers' may lack what its default means.
    config = {"patch_size_t": None, "ofs_embed_dim": None, **transformer.config}
    dtype = runtime.jax_dtype(transformer.dtype)
    text = text or config["max_text_seq_length"]
    tensors: TensorSpecs = {
        "hidden_states": ((batch, frames, config["in_channels"], height, width), dtype),
        "encoder_hidden_states": ((batch, text, config["text_embed_dim"]), dtype),
        "timestep": ((batch,), jnp.int32),
    }
    patch, patch_t = config["patch_size"], config["patch_size_t"] or 1
    patches = frames // patch_t * (height // patch) * (width // patch)
    if config["use_rotary_positional_embeddings"]:
        table = ((patches, config["attention_head_dim"]), jnp.float32)
        tensors["image_rotary_emb"] = (table, table)  # cosines and sines
    elif issubclass(type(transformer), KnownNetwork) and transformer.patch_embed.needs_table(
        height, width, frames
    ):  # the module's own table does not fit
        tensors["positions"] = ((1, text + patches, transformer.patch_embed.embed_dim), jnp.float32)
    if config["ofs_embed_dim"]:
        tensors["ofs"] = ((1,), dtype)
    return tensors
