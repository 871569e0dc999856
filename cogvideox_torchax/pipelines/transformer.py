"""CogVideoX's transformer, ported: a denoising step, with a cache of steps or without, is one program."""

import contextlib
import functools
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from diffusers.models.transformers.cogvideox_transformer_3d import (
    CogVideoXTransformer3DModel as DiffusersTransformer,
)
from jax.sharding import Mesh
from torch import nn

from cogvideox_torchax import runtime, upstream
from cogvideox_torchax.pipelines import cached_layers, caches, sharding
from cogvideox_torchax.pipelines.blocks import Block, joined_step
from cogvideox_torchax.pipelines.layers import PatchEmbed
from cogvideox_torchax.pipelines.networks import KnownNetwork, bytes_of, check_split
from cogvideox_torchax.runtime.trees import change_in, replaced_method
from cogvideox_torchax.sharding import Parallel


class TransformerStep(nn.Module):
    """A denoising step of the transformer: the module that a program is compiled from.

    It runs text and patches as one sequence if the transformer's layers allow it, else diffusers' forward.
    The options `attention_kwargs` of a call are compiled in: other values need another program.
    """

    component = "transformer"
    is_for_stock = True  # a model that is not stock runs as it is, but with a cache there is no other way

    def __init__(self, model: Any, attention_kwargs: dict[str, Any] | None = None):
        super().__init__()
        self.model = model
        self.options = dict(attention_kwargs or {})

    @functools.cached_property
    def joined(self) -> bool:
        """True if text and patches run as one sequence; `joined_step` knows no option but "scale"."""
        return change_in(self.model) is None and self.options.keys() <= {"scale"}

    def predict(self, tensors: dict[str, Any]) -> torch.Tensor:
        """Return the transformer's prediction for a step's tensors, by the names of its forward's arguments.

        "positions", a table where it is needed, is for `patch_embed` alone.
        """
        arguments = {**tensors, "attention_kwargs": dict(self.options) or None}
        if "positions" in arguments:
            self.model.patch_embed.use_table(arguments.pop("positions"))
        if self.joined:
            return joined_step(self.model, **arguments)
        return DiffusersTransformer.forward(self.model, **arguments, return_dict=False)[0]

    def forward(self, tensors: dict[str, Any], cache: None) -> tuple[torch.Tensor, None]:
        """Return the prediction, and the cache for the next step, which this class does not have: None."""
        return self.predict(tensors), cache


class CachedStep(TransformerStep):
    """A step that reuses results of earlier steps, which it takes as its program's cache.

    `form` tells which layers are skipped, and which results are kept (`caches.Form`).
    """

    # A step that skips nothing may not read the cached arrays. JAX would drop arguments that a program does
    # not read: they would not be donated, and would take memory beside the arrays that replace them.
    keep_unused = True
    is_for_stock = False

    def __init__(self, model: Any, attention_kwargs: dict[str, Any] | None, form: caches.Form):
        super().__init__(model, attention_kwargs)
        self.form = form

    @functools.cached_property
    def joined(self) -> bool:
        """True if text and patches run as one sequence: the form has to allow it too."""
        return super().joined and cached_layers.takes_sequences(self.form)

    def forward(self, tensors: dict[str, Any], cache: Any) -> tuple[Any, Any]:
        """Return ((prediction, scalar for the host or None), arrays to keep for the next step).

        Args:
            tensors: the step's tensors, and its numbers (`cached_layers.NUMBERS`), by name.
            cache: the arrays that the last step kept; None in a trace that only finds out their shapes.
        """
        inputs = dict(tensors)
        numbers = {name: inputs.pop(name) for name in cached_layers.NUMBERS if name in inputs}
        # `runner` decides by the form which layers of the model run, and keeps their results.
        runner = cached_layers.STEP_CLASSES[self.form.kind](self.form, cache, numbers)
        prediction = runner.step(self.model, self.predict, inputs, self.joined)
        return (prediction, runner.host_scalar), runner.next_arrays


class CogVideoXTransformer3DModel(KnownNetwork, DiffusersTransformer):
    """CogVideoX's transformer on torchax, by diffusers' own names: a denoising step is one program."""

    parts: Mapping[str, tuple[type, ...]] = {
        "patch_embed": (PatchEmbed,),
        "transformer_blocks": (Block,),
    }
    network_class = TransformerStep
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

        From then on steps skip what the hooks would skip. With `warn` a cache that is enabled, but skips
        nothing, causes a warning.
        """
        hooks = upstream.take_hooks(self)
        if hooks:
            self.step_cache = caches.cache_of(hooks)
        if warn and self.is_cache_enabled and self.step_cache is None:
            # This method is called by `enable_cache` and `put_weights`. The warning shall name the line that
            # called these: that is `stacklevel` 3.
            warnings.warn(caches.WITHOUT_EFFECT.format(type(self._cache_config).__name__), stacklevel=3)

    @contextlib.contextmanager
    def cache_context(self, name: str, **kwargs: Any) -> Iterator[None]:
        """Have the cache use the state called `name` for the steps of a `with` block, as in diffusers."""
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
            memory=memory,
            requested=requested,
        )
        return check_split(network, mesh, chosen)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Move or cast as `PortedModel.to` does; when it leaves JAX, its cache's hooks go back to modules."""
        moved = super().to(*args, **kwargs)
        if self.step_cache is not None and not runtime.is_on_jax(self):
            upstream.put_hooks(self, vars(self).pop("step_cache").hooks)
        return moved

    def _name_idle_devices(self, videos: int) -> None:
        """Log a line, once, if the devices along "dp" do the same work for a batch of so many videos."""
        dp = 1 if self.mesh is None else self.mesh.shape["dp"]
        is_split = dp == 1 or self.placement.batch_axis(videos) or "dp" in self.placement.token_axes(videos)
        if not is_split:
            runtime.warn_once(
                self,
                f"{self.component}: the dp={dp} groups of devices do the same work, as they share a batch of "
                f"{videos}; without guidance pass mesh=make_mesh(dp=1, tp={self.placement.mesh.size})",
            )

    @functools.wraps(DiffusersTransformer.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # A forward that somebody has put into diffusers' class may take other arguments than `_step`.
        is_replaced = replaced_method(DiffusersTransformer, "forward") is not None
        if is_replaced and self.step_cache is None and not self.is_stock():
            return self.run_as_it_is(DiffusersTransformer.forward, *args, **kwargs)
        return self._step(*args, **kwargs)

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
        # By name: diffusers' LoRA scaling reads `attention_kwargs` there.
        options = {
            "timestep_cond": timestep_cond,
            "ofs": ofs,
            "image_rotary_emb": image_rotary_emb,
            "attention_kwargs": attention_kwargs,
            "return_dict": return_dict,
        }
        inputs_on_jax = runtime.on_jax(hidden_states)
        if inputs_on_jax != runtime.is_on_jax(self):
            inputs, weights = ("jax", "in PyTorch") if inputs_on_jax else ("the host", "on jax")
            raise ValueError(f'got inputs on {inputs} for weights {weights}: move both .to("jax")')
        if not inputs_on_jax:
            return super().forward(hidden_states, encoder_hidden_states, timestep, **options)
        self._name_idle_devices(len(hidden_states))
        frames, _channels, height, width = hidden_states.shape[1:]
        patch_embed: Any = self.patch_embed
        # The program's inputs, by name; those that are None are left out.
        tensors = {
            "hidden_states": hidden_states,
            "encoder_hidden_states": encoder_hidden_states,
            "timestep": timestep,
            "timestep_cond": timestep_cond,
            "ofs": ofs,
            "image_rotary_emb": image_rotary_emb,
            # A table of sinusoidal positions, which the host computes in float64: a program has no float64.
            # None if the module's own table is of this size, or if the model has no such positions.
            "positions": patch_embed.table_for(height, width, frames),
        }
        with torch.no_grad():
            if self.step_cache is None:
                sample = self.run_program(TransformerStep(self, attention_kwargs), tensors)
            else:
                # The cache chooses the step's form, and makes the `CachedStep` of that form.
                sample = self.step_cache.step(
                    self, functools.partial(CachedStep, self, attention_kwargs), tensors
                )
        if sample is None:  # this model is not stock
            return self.run_as_it_is(
                DiffusersTransformer.forward, hidden_states, encoder_hidden_states, timestep, **options
            )
        # A program's result has no gradient: a backward pass through `sample` raises this message.
        sample = runtime.without_gradient(
            self, [hidden_states], sample, "on JAX a transformer has no gradients"
        )
        return Transformer2DModelOutput(sample=sample) if return_dict else (sample,)
