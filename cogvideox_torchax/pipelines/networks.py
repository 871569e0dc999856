"""The two networks of a CogVideoX pipeline besides its VAE, ported: the transformer and the T5 text encoder.

Each class subclasses the class that it replaces and adds a second way to run: plain torch tensors run the
inherited forward, torchax tensors one compiled program.

Axis letters: N videos, S positions of a sequence (text first, then patches), H heads, D channels of a head.
"""

import contextlib
import functools
import inspect
import threading
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import torch
from diffusers.models.activations import GELU as DiffusersGELU
from diffusers.models.attention import FeedForward
from diffusers.models.attention_processor import (
    Attention,
    CogVideoXAttnProcessor2_0,
    FusedCogVideoXAttnProcessor2_0,
)
from diffusers.models.embeddings import CogVideoXPatchEmbed
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from diffusers.models.normalization import CogVideoXLayerNormZero
from diffusers.models.transformers.cogvideox_transformer_3d import (
    CogVideoXBlock,
)
from diffusers.models.transformers.cogvideox_transformer_3d import (
    CogVideoXTransformer3DModel as DiffusersTransformer,
)
from jax.sharding import Mesh
from torch import nn
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.t5.modeling_t5 import T5EncoderModel as TransformersT5Encoder
from transformers.models.t5.modeling_t5 import T5LayerFF, T5LayerSelfAttention

from cogvideox_torchax import runtime, upstream
from cogvideox_torchax.files.models import saved_from_host
from cogvideox_torchax.pipelines import cached_layers, caches, loras, sharding
from cogvideox_torchax.pipelines.blocks import GELU, Block, joined_step, takes_sequences
from cogvideox_torchax.pipelines.layers import (
    AttnProcessor,
    FusedAttnProcessor,
    LayerNorm,
    Linear,
    PatchEmbed,
)
from cogvideox_torchax.pipelines.sequence import SequencePlacement
from cogvideox_torchax.runtime import on_jax
from cogvideox_torchax.runtime.models import PortedModel, save_as_stock
from cogvideox_torchax.sharding import BatchPlacement, Parallel, check_mesh
from cogvideox_torchax.vae.torchax.modules import SiLU


class TransformerStep(nn.Module):
    """A denoising step of the transformer, the module that a program is compiled from.

    It runs text and patches as one sequence if its layers allow it, else diffusers' own forward.

    Args:
        model: the transformer.
        attention_kwargs: options of a call, such as a LoRA's scale; other values are another program.

    Attributes:
        options: the attention_kwargs, {} for None.
        joined: whether text and patches run as one sequence.
    """

    component = "transformer"

    def __init__(self, model: Any, attention_kwargs: dict[str, Any] | None = None):
        """Take a ported transformer, and the `attention_kwargs` of its call."""
        super().__init__()
        self.model = model
        self.options = dict(attention_kwargs or {})
        # Whether text and patches run as one sequence, by `joined_step`, which knows no option but "scale".
        self.joined = takes_sequences(model) and self.options.keys() <= {"scale"}

    def predict(self, tensors: dict[str, Any]) -> torch.Tensor:
        """Return the prediction of a step from its tensors by name (`step_tensors`)."""
        arguments = {**tensors, "attention_kwargs": dict(self.options) or None}
        if "positions" in arguments:  # a table of sinusoidal positions, for `patch_embed` alone
            self.model.patch_embed.use_table(arguments.pop("positions"))
        if self.joined:  # text and patches as one sequence
            return joined_step(self.model, **arguments)
        return DiffusersTransformer.forward(self.model, **arguments, return_dict=False)[0]

    def forward(self, tensors: dict[str, Any], cache: None) -> tuple[torch.Tensor, None]:
        """Return (prediction, None) of a step from its tensors by name.

        A program's network takes and returns a cache too: this one has none, and `cache` is None.
        """
        return self.predict(tensors), cache


class CachedStep(TransformerStep):
    """A step that reuses results of earlier steps.

    Its cache is the arrays that the step before has kept. With None a call is only traced, for the shapes and
    dtypes of the arrays that a step keeps.

    Args:
        model, attention_kwargs: as `TransformerStep` takes them.
        form: which layers run, and which results are kept (`caches.Form`).
    """

    keep_unused = True  # cached arrays that a full step does not read must be donated, or stay alive

    def __init__(self, model: Any, attention_kwargs: dict[str, Any] | None, form: caches.Form):
        """Take a ported transformer, the `attention_kwargs` of its call, and the form of a step with a cache.

        `form` has the layers that run, and the results that are kept.
        """
        super().__init__(model, attention_kwargs)
        self.form = form
        # Whether text and patches run as one sequence: if the model and its options allow it, and the form
        # too.
        self.joined = self.joined and cached_layers.takes_sequences(form)

    def forward(self, tensors: dict[str, Any], cache: Any) -> tuple[Any, Any]:
        """Return ((prediction, scalar for the host or None), arrays to keep for the next step).

        Args:
            tensors: by name the step's inputs, and numbers that tell what to reuse (`cached_layers.NUMBERS`).
            cache: the arrays that the last step kept; None in a trace for their shapes.
        """
        inputs = dict(tensors)
        numbers = {name: inputs.pop(name) for name in cached_layers.NUMBERS if name in inputs}
        # The step's form tells which layers run; its kind, the class that runs them.
        reuse = cached_layers.REUSES[self.form.kind](self.form, cache, numbers)
        prediction = reuse.step(self.model, self.predict, inputs, self.joined)
        return (prediction, reuse.seen), reuse.kept


class TextEncoding(nn.Module):
    """A call of the text encoder, the module that a program is compiled from."""

    component = "text_encoder"

    def __init__(self, model: TransformersT5Encoder):
        super().__init__()
        self.model = model

    def forward(self, tensors: dict[str, Any], cache: None) -> tuple[torch.Tensor, None]:
        """Return (last hidden states, None) for `tensors`, the encoder's arguments by name.

        A program's network takes and returns a cache too: this one has none, and `cache` is None.
        """
        # Transformers' own forward: the ported model's forward would run the program that is traced here.
        return TransformersT5Encoder.forward(self.model, **tensors)[0], cache


class _Foreign(threading.local):
    """The networks whose `forward`, set on the object, this thread runs, with their modules before."""

    modules: dict[nn.Module, list[nn.Module]] = {}  # noqa: RUF012 - set anew, not written to


_FOREIGN = _Foreign()


class CompiledNetwork(PortedModel):
    """Mixin of a network of any class: a call is a compiled program of the class's own forward.

    The class that it is mixed into comes after it, and defines the forward. A subclass may know a faster one.

    Attributes:
        component: the network's name in its pipeline.
        parallelism: the use of the mesh, in words if it is printed; None without a mesh.
    """

    component = "network"
    parallelism: Any = None

    @property
    def placement(self) -> Any:
        """The sharding of inputs and weights, a `sharding.MeshPlace`; None without a mesh."""
        return None if self.mesh is None else BatchPlacement(self.mesh, split=self.parallelism.split)

    def run_as_it_is(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the result of a method of the stock class: on JAX as a program, else by PyTorch.

        Args:
            method: a function of the network and the other arguments, which another package defines.
            args, kwargs: of the call.
        """
        if not runtime.is_on_jax(self):
            return method(self, *args, **kwargs)
        self.check_modules()
        return runtime.run_method(self, method, *args, place=self.placement, name=self.component, **kwargs)

    def described_program(self, tensors: "TensorSpecs") -> tuple[runtime.Program, "TensorSpecs"]:
        """Return the program of a call, and its inputs, from each tensor's (shape, JAX dtype) by name."""
        stock: Any = type(self).__bases__[-1]  # the class that `port` made this one of
        takes = inspect.signature(stock.forward).parameters
        options = {"return_dict": False} if "return_dict" in takes else {}
        return runtime.method_program(self, stock.forward, tensors, self.placement, **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the network; a `forward` that was set on the object runs operation by operation on JAX."""
        if "forward" not in vars(self) or not runtime.is_on_jax(self):
            return super().__call__(*args, **kwargs)
        setter = upstream.module_of(vars(self)["forward"])
        runtime.warn_once(self, f"{self.component}: the forward set by {setter} runs operation by operation")
        outer, _FOREIGN.modules = _FOREIGN.modules, {**_FOREIGN.modules, self: [*self.modules()]}
        try:
            with runtime.mixing():
                return super().__call__(*args, **kwargs)
        finally:
            _FOREIGN.modules = outer

    def check_modules(self) -> None:
        """Raise `ValueError` if a `forward` that was set on the object runs, and has put in other modules.

        Libraries that cache steps do so: their modules keep arrays of a step, which no program may.
        """
        before = _FOREIGN.modules.get(self)
        if before is not None and before != [*self.modules()]:
            name, setter = self.component, upstream.module_of(vars(self)["forward"])
            raise ValueError(
                f"{name}.forward was set by {setter}, which puts in other modules while it runs: take it "
                f"out, or set it before port. For a cache of steps call {name}.enable_cache(config) with a "
                "config of diffusers, such as FirstBlockCacheConfig(threshold=0.05)"
            )

    def place(self, mesh: Mesh | None = None, parallel: Parallel | None = None) -> None:
        """Put the weights on JAX, on the default device or over a mesh; later calls run there.

        Args:
            mesh: a mesh of `make_mesh`; None keeps the present mesh, if there is one.
            parallel: the dimension that a transformer splits over the mesh's axis "tp": "context" for tokens,
                "tensor" for weights' channels; None chooses, and keeps an earlier choice on the same mesh.

        Raises:
            ValueError: a mesh not made by `make_mesh`, or one that does not divide the weights.
        """
        port_network(self)  # again, for layers that were added later, such as a LoRA's
        mesh = self.mesh if mesh is None else mesh
        if mesh is not None:
            self.place_on(mesh, parallel)
        runtime.put_weights(self, self.put_weight)

    def put_weight(self, name: str, array: Any) -> Any:
        """Return a weight, given as a NumPy or a JAX array, on the default device or on the mesh."""
        if self.mesh is None:
            return runtime.on_default_device(name, array)
        return self.placement.weight(name, array)

    def place_on(self, mesh: Mesh, parallel: Parallel | None = None, memory: float | None = None) -> None:
        """Compile for a mesh from now on, without moving the weights; programs for another mesh are dropped.

        Args:
            mesh: of `make_mesh`.
            parallel: the dimension that a transformer splits over the mesh's axis "tp": "context" for tokens,
                "tensor" for weights' channels; None chooses, and keeps an earlier choice on the same mesh.
            memory: bytes of a device; None asks the device.

        Raises:
            ValueError: a mesh not made by `make_mesh`, or one that does not divide the weights.
        """
        if mesh == self._mesh and parallel is None and memory is None:
            return  # the earlier choice stays
        chosen = parallelism_of(self, mesh, parallel, memory)
        if (mesh, chosen) != (self._mesh, self.parallelism):
            self._mesh, self.parallelism = mesh, chosen
            runtime.forget_programs(self)


class KnownNetwork(CompiledNetwork):
    """Base of the networks whose layers this package knows, and whose sequences it can split over a mesh.

    Attributes:
        network_class: the module that a program is compiled from, made from the model and a call's options.
    """

    network_class: Any

    @property
    def placement(self: Any) -> Any:
        """The sharding of the sequences, a `pipelines.sequence.SequencePlacement`; None without a mesh."""
        if self.mesh is None:
            return None
        return SequencePlacement(self.mesh, self.parallelism, self.config.num_attention_heads)

    @property
    def program(self) -> runtime.Program:
        """The program of a call without options, to read its count of compilations or to `lower` it."""
        return self.program_of(self.network_class(self))

    def program_of(self, network: nn.Module) -> runtime.Program:
        """Return the program of `network`, a `network_class` or `CachedStep` around this model.

        The model keeps its programs by the network's form, what a cached step skips.
        """
        return runtime.programs_of(self).get(getattr(network, "form", None), network, self._compile_for)

    def build_program(self) -> runtime.Program:
        """Return a new program to inspect its text: the program of a call without `attention_kwargs`."""
        return self._compile_for(self.network_class(self))

    def _compile_for(self, network: Any) -> runtime.Program:
        """Return a new program of a module around this model, for the mesh if there is one."""
        if self.mesh is None:
            return runtime.Program(network)
        types = SPLIT_LAYERS  # modules whose inputs and outputs are constrained to the sharding
        if self.parallelism.kind == sharding.CONTEXT:
            # Blocks take and return local tokens if text and patches are one sequence (`joined`). If not, no
            # module is constrained.
            types = (Block,) if network.joined else ()
        return runtime.Program(network, replace(self.placement, types=types))

    def described_program(self, tensors: "TensorSpecs") -> tuple[runtime.Program, "TensorSpecs"]:
        """Return the program of a call without options; it takes the tensors by their names."""
        return self.program, tensors

    def run_program(self, *options: Any, **tensors: Any) -> torch.Tensor:
        """Return the result of the program of `network_class(self, *options)`.

        Args:
            options: further arguments of `network_class`, which may differ between calls.
            tensors: arguments of the forward, by name: tensors, or tuples of them.
        """
        network = self.network_class(self, *options)
        program = self.program_of(network)
        result, _cache = program.run(program.weights(network), program.put(tensors))
        return runtime.tensor_of(result)


def parallelism_of(
    network: Any, mesh: Mesh, requested: Parallel | None = None, memory: float | None = None
) -> Any:
    """Return how a network, ported or not, uses the mesh's axis "tp": for tokens or for weights' channels.

    Args:
        network: a transformer or a text encoder.
        mesh: of `make_mesh`.
        requested: "context" for tokens, "tensor" for weights' channels; None chooses for a transformer.
        memory: bytes of a device, for the choice; None asks the device.

    Raises:
        ValueError: a mesh not made by `make_mesh`, or one that does not divide the weights, or an impossible
            request.
    """
    check_mesh(mesh)
    memory = sharding.memory_of(mesh) if memory is None else memory
    weight_bytes = sum(weight.numel() * weight.element_size() for weight in network.parameters())
    if not issubclass(ported_class(type(network)), KnownNetwork):
        if requested is not None:
            raise ValueError(
                f"got parallel={requested!r} for a {type(network).__name__}, whose tokens and channels are "
                "not split: pass parallel=None"
            )
        return sharding.BatchParallelism(split=sharding.exceed(weight_bytes, memory))
    chosen = sharding.Parallelism()  # a text encoder's: weights' channels, as its sequences are short
    if isinstance(network, DiffusersTransformer):
        chosen = sharding.choose_parallelism(
            mesh,
            heads=network.config["num_attention_heads"],
            weight_bytes=weight_bytes,
            memory=memory,
            requested=requested,
        )
    for name, weight in runtime.named_tensors(network).items():
        sharding.weight_sharding(mesh, name, tuple(weight.shape), chosen)  # raises where "tp" does not divide
    return chosen


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
        """Disable the cache as diffusers does, and drop the cache on JAX."""
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
        """Have the steps of a `with` block share a cache's state called `name`, as in diffusers.

        Diffusers' context is for hooks, and `caches.context` for the caches of ported transformers.
        """
        with super().cache_context(name, **kwargs), caches.context(name):
            yield

    def _reset_stateful_cache(self, recurse: bool = True) -> None:
        """Drop the arrays of earlier steps, those of diffusers' hooks and those of a cache on JAX."""
        super()._reset_stateful_cache(recurse)
        if self.step_cache is not None:
            self.step_cache.reset()

    def place(self, mesh: Mesh | None = None, parallel: Parallel | None = None) -> None:
        """Put the weights on JAX, and run diffusers' cache, if enabled, as programs."""
        super().place(mesh, parallel)
        self.take_cache()

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Move or cast the model as `PortedModel.to` does; off JAX, put diffusers' cache hooks back on it."""
        moved = super().to(*args, **kwargs)
        # On JAX the hooks are off the modules, in `step_cache`; in PyTorch they do diffusers' work again.
        if self.step_cache is not None and not runtime.is_on_jax(self):
            upstream.put_hooks(self, vars(self).pop("step_cache").hooks)
        return moved

    def run_program(self, *options: Any, **tensors: Any) -> torch.Tensor:
        """Return a step's prediction, through the cache if one is enabled.

        Args:
            options: one value, the `attention_kwargs` of the call.
            tensors: arguments of the forward, by name.
        """
        if self.step_cache is None:
            return super().run_program(*options, **tensors)
        # `step` adds the third argument, `form`: which layers run.
        return self.step_cache.step(self, functools.partial(CachedStep, self, *options), tensors)

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
        """Return diffusers' output for a denoising step: by its own code for plain tensors, else a program.

        On JAX a backward pass raises `ValueError`.
        """
        if on_jax(hidden_states) != runtime.is_on_jax(self):
            inputs, weights = ("jax", "in PyTorch") if on_jax(hidden_states) else ("the host", "on jax")
            raise ValueError(f'got inputs on {inputs} for weights {weights}: move either .to("jax")')
        if not on_jax(hidden_states):
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
        run = functools.partial(
            self.run_program,
            attention_kwargs,
            hidden_states=hidden_states,
            encoder_hidden_states=encoder_hidden_states,
            timestep=timestep,
            timestep_cond=timestep_cond,
            ofs=ofs,
            image_rotary_emb=image_rotary_emb,
            # A table of sinusoidal positions, made on the host before the trace; None if the module's own
            # table is of this size.
            positions=patch_embed.table_for(height, width, frames),
        )
        with runtime.active():
            sample = runtime.without_gradient(
                self, hidden_states, run, "on JAX a transformer has no gradients"
            )
        return Transformer2DModelOutput(sample=sample) if return_dict else (sample,)


for _name, _method in loras.methods_in_pytorch(DiffusersTransformer, loras.NETWORK_METHODS).items():
    setattr(CogVideoXTransformer3DModel, _name, _method)


class T5EncoderModel(KnownNetwork, TransformersT5Encoder):
    """The T5 encoder on torchax, by transformers' own names: a prompt's encoding is one program."""

    network_class = TextEncoding
    save_pretrained = saved_from_host(TransformersT5Encoder.save_pretrained)

    def forward(
        self,
        input_ids: Any = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **options: Any,
    ) -> Any:
        """Return the prompts' encoding, by a program if the weights are on JAX and no option is set.

        Else transformers' own forward runs; `options` are its further arguments.
        """
        if upstream.is_patched(TransformersT5Encoder):
            return self.run_as_it_is(
                TransformersT5Encoder.forward, input_ids, attention_mask, inputs_embeds, **options
            )
        on_torch = not runtime.is_on_jax(self)
        if on_torch or any(value is not None for value in options.values()):
            with contextlib.nullcontext() if on_torch else runtime.active():  # weights on JAX need torchax
                return super().forward(input_ids, attention_mask, inputs_embeds, **options)
        hidden = self.run_program(
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
        )
        return BaseModelOutput(last_hidden_state=hidden)  # pyright: ignore[reportArgumentType]


TensorSpecs = dict[str, Any]
"""(shape, JAX dtype) of each argument of a program, or a tuple of such pairs, by name."""


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


def prompt_tensors(*, batch: int, text: int) -> TensorSpecs:
    """Return the (shape, JAX dtype) of each input, by name, for `batch` prompts of `text` tokens each."""
    return {"input_ids": ((batch, text), jnp.int32)}


SPLIT_LAYERS = (PatchEmbed, Block, Attention, FeedForward, T5LayerSelfAttention, T5LayerFF)
"""The layers whose inputs and outputs are sequences split over a mesh."""

LAYERS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: Linear,
    nn.LayerNorm: LayerNorm,
    nn.SiLU: SiLU,
    DiffusersGELU: GELU,
    CogVideoXBlock: Block,
    CogVideoXPatchEmbed: PatchEmbed,
}
"""The class that each layer of a network becomes."""

KNOWN: dict[type[nn.Module], type[KnownNetwork]] = {
    DiffusersTransformer: CogVideoXTransformer3DModel,
    TransformersT5Encoder: T5EncoderModel,
}
"""The class that each network becomes that this package knows."""

STOCK_CLASSES: tuple[type, ...] = (
    DiffusersTransformer,
    Attention,
    CogVideoXLayerNormZero,
    FeedForward,
    *LAYERS,
    CogVideoXAttnProcessor2_0,
    FusedCogVideoXAttnProcessor2_0,
)
"""The classes that a step of the transformer computes for; if a method of one was replaced, it does not."""

PROCESSORS: dict[Any, Any] = {
    CogVideoXAttnProcessor2_0: AttnProcessor,
    FusedCogVideoXAttnProcessor2_0: FusedAttnProcessor,
}
"""The class that each attention processor becomes."""


METHODS = ("forward", "encode", "decode")
"""Methods of a network that are compiled, if its class has them."""


@functools.cache
def ported_class(kind: Any) -> type[CompiledNetwork]:
    """Return the class that a network of class `kind` becomes; a ported class is returned unchanged."""
    if issubclass(kind, CompiledNetwork):
        return kind
    if kind in KNOWN:
        return KNOWN[kind]
    members = {
        "__module__": kind.__module__,
        "__doc__": kind.__doc__,
        "__reduce_ex__": lambda self, _protocol: (_revived, (kind,), self.__getstate__()),
        **loras.methods_in_pytorch(kind, loras.NETWORK_METHODS),
    }
    if hasattr(kind, "save_pretrained"):
        members["save_pretrained"] = saved_from_host(kind.save_pretrained)
    for stock, known in KNOWN.items():
        if issubclass(kind, stock) and kind.forward is stock.forward:  # a subclass that computes the same
            return type(kind.__name__, (known, kind), members)
    members |= {name: _as_it_is(kind, name) for name in METHODS if hasattr(kind, name)}
    return type(kind.__name__, (CompiledNetwork, kind), members)


def _as_it_is(kind: type, name: str) -> Any:
    """Return a method that runs the method `name` of class `kind`, as it is at the time of a call."""

    @functools.wraps(getattr(kind, name))
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.run_as_it_is(getattr(kind, name), *args, **kwargs)

    return call


def _revived(kind: type) -> Any:
    """Return a blank instance of the ported class of `kind`, for unpickling."""
    return object.__new__(ported_class(kind))


def port_network(network: Any) -> Any:
    """Give a loaded network, and its layers, their ported classes; return it.

    The objects stay, their `__class__` changes. A second call ports layers that were added since.
    """
    for module in network.modules():
        module.__class__ = LAYERS.get(type(module), type(module))
        processor = getattr(module, "processor", None)
        if type(processor) in PROCESSORS:
            processor.__class__ = PROCESSORS[type(processor)]
    network.__class__ = ported_class(type(network))
    upstream.cached_block(Block)  # registers the class, which diffusers' caches look up
    save_as_stock(network)  # a saved pipeline names the original class: it loads without this package
    if hasattr(network, "tie_weights"):
        # T5's token embedding is one weight under two names. torch's own `to` with torchax, before `port`,
        # and loading weights by name make two tensors of it.
        network.tie_weights()
    return network
