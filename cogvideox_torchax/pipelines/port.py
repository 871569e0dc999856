"""Whole diffusers pipelines on JAX: `port` for a pipeline, and what a ported pipeline has beside its class's.

Networks on JAX run in diffusers' own pipelines, with their own schedulers. A ported pipeline is of a subclass
of its class. Around four methods this module has a function of the pipeline, the inherited method
(`inherited`), and the call's arguments as a tuple and a dictionary:

- `__call__`: the processes of a mesh make the same call; models that were replaced since `port` are refused;
  a step cache starts anew; the decoder is compiled beside the first steps; a NaN or Inf names its step;
  other people's "cuda" means JAX.
- `check_inputs`: a size that the transformer cannot cut into patches is refused before any work.
- `encode_prompt`: one thread at a time, as pipelines share tokenizers.
- `decode_latents`: each chunk of frames goes to the host while the next is computed.
"""

import functools
import hashlib
import inspect
import logging
import math
import re
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from diffusers.models.autoencoders.autoencoder_kl_cogvideox import (
    AutoencoderKLCogVideoX as DiffusersAutoencoder,
)
from diffusers.pipelines.cogvideo.pipeline_cogvideox import CogVideoXPipeline
from diffusers.pipelines.cogvideo.pipeline_cogvideox_fun_control import CogVideoXFunControlPipeline
from diffusers.pipelines.cogvideo.pipeline_cogvideox_image2video import CogVideoXImageToVideoPipeline
from diffusers.pipelines.cogvideo.pipeline_cogvideox_video2video import CogVideoXVideoToVideoPipeline
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from torch import nn
from torch.utils import _pytree as pytree

from cogvideox_torchax import runtime, upstream
from cogvideox_torchax.pipelines import loras, sharding, steps
from cogvideox_torchax.pipelines.eight_bits import Weights, has_bits, quantize, take_bits
from cogvideox_torchax.pipelines.known import port_network, ported_class
from cogvideox_torchax.pipelines.networks import KnownNetwork, device_bytes_of
from cogvideox_torchax.pipelines.offload import Offload
from cogvideox_torchax.pipelines.transformer import CogVideoXTransformer3DModel
from cogvideox_torchax.runtime.models import PicklesAsStock, PortedModel
from cogvideox_torchax.runtime.trees import change_in, replaced_method
from cogvideox_torchax.sharding import Parallel, check_one_slice, check_same
from cogvideox_torchax.vae.directions import DECODE
from cogvideox_torchax.vae.torchax.autoencoder import AutoencoderKLCogVideoX, check_vae_class, port_vae

logger = logging.getLogger("cogvideox_torchax")

GIB = 2**30

PIPELINES = (
    CogVideoXPipeline,
    CogVideoXImageToVideoPipeline,
    CogVideoXVideoToVideoPipeline,
    CogVideoXFunControlPipeline,
)

_ENCODING = threading.RLock()
"""Held while a prompt is encoded, in all pipelines.

Pipelines may share a tokenizer, which changes its state in a call: it sets the padding. The lock can be taken
again by the thread that holds it, as `encode_prompt` of a subclass may call that of its base.
"""


def port_pipeline(
    pipe: Any,
    mesh: Any = None,
    parallel: Parallel | None = None,
    weights: Weights | None = None,
    *,
    offload: bool = False,
) -> None:
    """Port a pipeline, or another object with models as attributes, as `port` documents.

    With `offload`, or where hooks of diffusers' offloading are on a model, models take turns on the devices.

    Raises:
        ValueError: as `port` raises it; nothing has been moved then.
    """
    check_one_slice(mesh)
    models = _models(pipe)
    parallelisms = {}  # how each network uses the mesh, by the network's name
    in_bits = set()  # the names of networks with weights in fewer bits
    # All models are checked before the first one is moved.
    for name, model in models.items():
        _check_acyclic(name, model)
        if _is_known(model) and not runtime.is_on_jax(model):
            if has_bits(name, model):
                in_bits.add(name)
        else:
            _check_not_cast(model)
        if not isinstance(model, DiffusersAutoencoder):
            check_vae_class(model)  # a VAE of another package must not be taken for an unknown network
            requested = parallel if name == "transformer" else None  # no other network has a choice
            parallelisms[name] = _parallelism_of(model, mesh, requested)
    if weights and not any(map(_is_known, models.values())):
        raise ValueError(
            f"got weights={weights!r} for a {type(pipe).__name__}, which has neither of the networks that "
            "take it, diffusers' CogVideoXTransformer3DModel and transformers' T5EncoderModel: leave it out"
        )
    for name, model in models.items():
        if getattr(pipe, name) is not model:  # it is torch.compile's wrapper: JAX compiles the model instead
            setattr(pipe, name, model)
        if upstream.take_offloading(model):
            offload, pipe._all_hooks = True, []  # the pipeline's own list of the hooks
        if isinstance(model, DiffusersAutoencoder):
            vae = port_vae(model)
            if mesh is not None:
                vae.place_on(mesh)
            continue
        if name in in_bits:
            take_bits(model)
        network = port_network(model)
        network.component = name
        if weights and isinstance(network, KnownNetwork):
            quantize(network, weights)
        if name in in_bits or (weights and isinstance(network, KnownNetwork)):
            # Whether weights are gathered depends on their bytes.
            parallelisms[name] = _parallelism_of(network, mesh, parallel if name == "transformer" else None)
        if parallelisms[name] is not None:
            # Without a new mesh the network keeps that of an earlier `port`.
            network.use_mesh(network.mesh if mesh is None else mesh, parallelisms[name])
        if not isinstance(network, KnownNetwork):
            notes = f"; weights={weights!r} leaves it as it is" if weights else ""
            notes += "" if network.mesh is None else f"; {network.parallelism}"
            logger.warning("%s: %s, compiled as it is%s", name, type(network).__name__, notes)
    offload_models(models, mesh, getattr(pipe, "model_cpu_offload_seq", None), wanted=offload)
    for model in models.values():
        model.put_weights()  # pyright: ignore[reportCallIssue]
    if isinstance(pipe, DiffusionPipeline) and not isinstance(pipe, PortedPipeline):
        pipe.__class__ = _ported_pipeline_class(type(pipe))


def offload_models(models: dict[str, Any], mesh: Any, sequence: str | None, *, wanted: bool) -> None:
    """Have ported models take turns on the devices: if it is `wanted`, or some do so, or all do not fit.

    Args:
        models: the models, by name; of several calls for a pipeline the last has all.
        mesh: the mesh that they are on; None for one device, or for the mesh of an earlier port.
        sequence: the names of those that take turns, as in diffusers' `model_cpu_offload_seq`; None for all.
        wanted: whether the user has asked for it.
    """
    offloads = (model.offload for model in models.values() if model.offload and model.offload.is_on)
    offload = next(offloads, None)
    sizes = {name: device_bytes_of(model) / GIB for name, model in models.items()}
    memory = (sharding.memory_of(mesh) or math.inf) / GIB
    if offload is None and not wanted and sum(sizes.values()) > memory:
        wanted = True
        logger.warning(
            "%.2f GiB of weights for %.2f GiB of a device: they wait on the host between uses, as by "
            "pipe.enable_model_cpu_offload(), which needs %.2f GiB beside a program's temporaries",
            *(sum(sizes.values()), memory, max(sizes.values())),
        )
    if offload is None and not wanted:
        return
    offload = offload or Offload()
    for name, model in models.items():
        if model.offload is not offload:
            offload.add(model, takes_turns=sequence is None or name in sequence.split("->"))


def _models(pipe: Any) -> dict[str, nn.Module]:
    """Return the models that can move to JAX, without torch.compile's wrappers; warn of the others."""
    parts = pipe.components if isinstance(pipe, DiffusionPipeline) else vars(pipe)
    models: dict[str, nn.Module] = {}
    for name, part in parts.items():
        if not isinstance(part, nn.Module):
            continue
        model = upstream.uncompiled(part)
        # One for each weight that cannot move; the warning gives the first one.
        obstacles = [
            f"JAX has no {type(tensor).__name__} of {tensor.dtype}, as its {weight_name} is"
            for weight_name, tensor in runtime.named_tensors(model).items()
            if not runtime.is_movable(tensor)
        ]
        if obstacles and not _is_known(model):  # `has_bits` looks at a known network's
            logger.warning("%s: %s stays on the host, since %s", name, type(model).__name__, obstacles[0])
        else:
            models[name] = model
    return models


def _is_known(model: Any) -> bool:
    return issubclass(ported_class(type(model)), KnownNetwork)


def _parallelism_of(network: Any, mesh: Any, requested: Parallel | None) -> Any:
    """Return how a network, ported or not, will use `mesh`; None stands for the mesh that it has, if any."""
    present_mesh: Any = getattr(network, "mesh", None)
    new_mesh = present_mesh if mesh is None else mesh
    if new_mesh is None:
        return None
    if new_mesh == present_mesh and requested is None:
        return network.parallelism  # an earlier choice stays
    return ported_class(type(network)).choose_parallelism(network, new_mesh, requested)


def _check_acyclic(name: str, module: nn.Module, parents: tuple[nn.Module, ...] = ()) -> None:
    """Raise `ValueError` if a module, whose `parents` contain it, contains one of them or itself.

    On such a module, methods of torch such as `to` would call themselves without end.
    """
    if any(module is parent for parent in parents):
        raise ValueError(f"{name} is a module that contains itself: take it out of one of the two")
    for child_name, child in module.named_children():
        _check_acyclic(f"{name}.{child_name}", child, (*parents, module))


def _check_not_cast(model: Any) -> None:
    """Raise `ValueError` for a model with diffusers' hooks that cast its weights during a call."""
    if upstream.is_cast(model):
        raise ValueError(
            f"the weights of a {type(model).__name__} are cast layer by layer, which works on JAX only where "
            "it is enabled before port, for a transformer and a text encoder: load the pipeline again"
        )


class PortedPipeline(PicklesAsStock, DiffusionPipeline):
    """Mixin for the class of a ported pipeline.

    A copy runs on JAX too. An unpickled pipeline is in PyTorch, as its models are, until it is ported again.
    """

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Move as diffusers' `to` does; "cuda" and "jax" mean JAX, on the device or the mesh of `port`."""
        device, dtype = runtime.device_and_dtype(args, kwargs)
        if device is None or not (runtime.is_jax_device(device) or torch.device(device).type == "cuda"):
            return super().to(*args, **kwargs)
        port_pipeline(self)  # puts weights on JAX that were moved to the host
        return self if dtype is None else super().to(dtype)

    def enable_model_cpu_offload(self, *args: Any, **kwargs: Any) -> None:
        """Keep each network's weights in the host's memory while it is not used, on one device and on a mesh.

        Networks in `model_cpu_offload_seq` take turns on the devices; others stay there until the call ends.
        Frames do not change. The arguments, a GPU, have no effect.
        """
        port_pipeline(self, offload=True)

    def enable_sequential_cpu_offload(self, *args: Any, **kwargs: Any) -> None:
        """Do what `enable_model_cpu_offload` does: moving by layer gains nothing where a network fits."""
        logger.warning("offload moves whole networks on JAX, as by enable_model_cpu_offload()")
        self.enable_model_cpu_offload()

    enable_group_offload = enable_sequential_cpu_offload

    def maybe_free_model_hooks(self) -> None:
        """Move all weights to the host, if they are offloaded; a pipeline's call ends with this."""
        super().maybe_free_model_hooks()
        for offload in self._offloads():
            offload.free()

    def remove_all_hooks(self) -> None:
        """End the offload: a network's weights go to the devices when it is next used, and stay there."""
        super().remove_all_hooks()
        for offload in self._offloads():
            offload.is_on = False

    def _offloads(self) -> set[Any]:
        return {model.offload for model in _models(self).values() if getattr(model, "offload", None)}

    def set_lora_device(self, *args: Any, **kwargs: Any) -> None:
        raise ValueError("a ported pipeline's LoRAs stay with their networks: take set_lora_device out")

    def progress_bar(self, iterable: Any = None, total: Any = None) -> Any:
        """Return diffusers' progress bar, which ends with the number of steps that a cache has skipped."""
        inherited: Any = super()
        bar = inherited.progress_bar(iterable, total)
        cache = getattr(getattr(self, "transformer", None), "step_cache", None)
        if cache is not None and not bar.disable:
            close_bar = bar.close

            def close_with_skips() -> None:
                bar.close = close_bar  # the bar's destructor closes it a second time
                bar.set_postfix_str(str(cache))
                close_bar()

            # The pipeline closes the bar after the last step, when it leaves its `with` block.
            bar.close = close_with_skips
        return bar


def _decode_in_chunks(pipe: Any, latents: torch.Tensor) -> torch.Tensor:
    """Decode latents (N, T, C, H, W) as CogVideoX's pipelines do; return (N, 3, frames, rows, columns).

    The result is on the host. Each chunk goes to the host while the next is computed.
    """
    # After the last step the arrays that a step cache keeps are freed, to leave memory for the decoder. A
    # callback may also decode between two steps, where the next step needs them: `_current_timestep` is set
    # there.
    reset_cache = getattr(pipe.transformer, "_reset_stateful_cache", None)
    if reset_cache is not None and getattr(pipe, "_current_timestep", None) is None:
        reset_cache()
    # The pipelines call the VAE's scaling factor `vae_scaling_factor_image`, for videos too.
    z = 1 / pipe.vae_scaling_factor_image * latents.permute(0, 2, 1, 3, 4)
    if not _decodes_by_programs(pipe.vae):
        with pipe.vae.in_use():  # the other `decode` may call modules of the VAE by themselves
            return runtime.to_torch(pipe.vae.decode(z).sample)
    return torch.cat(list(pipe.vae.decode_stream(z)), dim=2)


def _decodes_by_programs(vae: Any) -> bool:
    """Return whether no other library replaced `decode`, on the model, on its class or in a subclass."""
    package = vae.decode.__module__.partition(".")[0]  # that defines the method
    return package in ("diffusers", "cogvideox_torchax") and replaced_method(DiffusersAutoencoder) is None


def _compile_decoder_ahead(pipe: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Start to compile, in threads, the programs that will decode the video of a `call` of the pipeline.

    Meanwhile the call compiles its other networks. A call that starts from a video has that video's size: for
    it, the decoder is compiled after the last step, when it is first needed.
    """
    if call not in _CALLS_WITH_SIZE or not isinstance(pipe.vae, AutoencoderKLCogVideoX):
        return
    try:
        arguments = inspect.signature(call).bind(pipe, *args, **kwargs).arguments
    except TypeError:  # `call` raises it itself
        return
    config, scale = pipe.transformer.config, pipe.vae_scale_factor_spatial
    frames = arguments.get("num_frames") or config.sample_frames
    height = arguments.get("height") or config.sample_height * scale
    width = arguments.get("width") or config.sample_width * scale
    prompt: Any = arguments.get("prompt")
    embeddings: Any = arguments.get("prompt_embeds")
    if (
        arguments.get("output_type") == "latent"
        or (prompt is None and embeddings is None)
        or not all(isinstance(size, int) for size in (frames, height, width))
        or not _decodes_by_programs(pipe.vae)
    ):
        return
    _check_size(pipe, height, width)  # before minutes of compiling for a size that the call refuses
    videos = len(embeddings) if prompt is None else 1 if isinstance(prompt, str) else len(prompt)
    latent_frames = (frames - 1) // pipe.vae_scale_factor_temporal + 1
    channels = pipe.vae.config["latent_channels"]
    pipe.vae.compile_ahead(DECODE, (videos, channels, latent_frames, height // scale, width // scale))


def _call(pipe: Any, inherited: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Check the pipeline, make its step cache ready, and run the pipeline's own call, `inherited`."""
    _check_ported(pipe)
    _check_same_in_all_processes(pipe, inherited, args, kwargs)
    _check_image_channels(pipe, inherited)
    transformer = getattr(pipe, "transformer", None)
    if isinstance(transformer, CogVideoXTransformer3DModel):
        if runtime.is_on_jax(transformer):
            # diffusers' functions such as `apply_first_block_cache` put a cache's hooks on the modules, too.
            # No warning here: `enable_cache`, if it was called, has given it.
            transformer.take_cache(warn=False)
        transformer._reset_stateful_cache()  # an earlier call that failed may have left kept arrays
    _compile_decoder_ahead(pipe, inherited, args, kwargs)
    with runtime.CudaIsJAX():
        return steps.run_checked(inherited, pipe, args, kwargs)


def _check_same_in_all_processes(pipe: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Raise `ProcessError` in every process if one makes another call, or of a pipeline that differs."""
    parts = pipe.components
    mesh = next((part.mesh for part in parts.values() if getattr(part, "mesh", None) is not None), None)
    if mesh is None or not runtime.of_several_processes(mesh):
        return
    bound = inspect.signature(call).bind(pipe, *args, **kwargs)
    bound.apply_defaults()
    arguments = dict(tuple(bound.arguments.items())[1:])  # without `self`
    if "generator" in arguments and arguments["generator"] is None:
        arguments["generator"] = torch.get_rng_state()  # torch draws by its own generator then
    arguments["mesh"] = (repr(mesh), mesh.device_ids.tolist())
    for name, part in parts.items():
        # What programs and steps depend on: settings, such as those of tiles and of a scheduler, and the
        # names and shapes of weights. A name with "_" is that of a state, or of a path, which may differ.
        settings = dict(getattr(part, "config", {})) if isinstance(part, SchedulerMixin) else {}
        settings |= {k: v for k, v in getattr(part, "__dict__", {}).items() if isinstance(v, int | float)}
        module = part if isinstance(part, nn.Module) else nn.Module()
        weights = runtime.named_tensors(module)
        arguments[name] = (
            [repr((key, value)) for key, value in settings.items() if key[0] != "_"],
            [repr((key, tuple(weight.shape), weight.dtype)) for key, weight in weights.items()],
            [repr(getattr(layer, "scaling", None)) for layer in module.modules()],  # of LoRAs
            [getattr(part, "_cache_config", None), getattr(part, "parallelism", None), type(part)],
        )
    check_same(mesh, {name: _fingerprint(value) for name, value in arguments.items()})


def _fingerprint(value: Any) -> str:
    """Return a hash that is equal for equal arguments of a call, whatever process they are in."""
    texts = []
    for leaf in pytree.tree_leaves(value):
        leaf = leaf.get_state() if isinstance(leaf, torch.Generator) else leaf
        leaf = runtime.host_array(runtime.to_torch(leaf)) if isinstance(leaf, torch.Tensor) else leaf
        if hasattr(leaf, "__array_interface__"):  # NumPy's arrays, and pictures
            array = np.ascontiguousarray(leaf)
            text = f"{array.shape} {array.dtype} {hashlib.sha256(array.tobytes()).hexdigest()}"
        else:
            text = getattr(leaf, "__qualname__", None) or re.sub(r" at 0x\w+", "", repr(leaf))
        texts.append(text)
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


def _check_image_channels(pipe: Any, call: Callable[..., Any]) -> None:
    """Raise `ValueError` if an image pipeline's transformer takes no image, such as a text-to-video model's.

    Only diffusers' own call is checked, if nothing was changed that may give the transformer other channels.
    """
    stock = CogVideoXImageToVideoPipeline
    model = getattr(pipe, "transformer", None)
    if (
        call is not stock.__call__
        or type(pipe).__bases__[-1].prepare_latents is not stock.prepare_latents  # the class before `port`
        or "prepare_latents" in vars(pipe)
        or pipe.vae is None
        or not isinstance(model, CogVideoXTransformer3DModel)
        or change_in(nn.ModuleList([model])) is not None  # in a list, for its own hooks to count
    ):
        return
    embed: Any = model.patch_embed
    # The shape of the first layer's weight is (outputs, inputs) or (outputs, inputs, rows, columns): for an
    # output it has as many numbers as the pixels of a patch have channels.
    channels = math.prod(embed.proj.weight.shape[1:]) // (embed.patch_size**2 * (embed.patch_size_t or 1))
    latent_channels = pipe.vae.config["latent_channels"]
    if channels != 2 * latent_channels:
        raise ValueError(
            f"got a {type(pipe).__name__} with a transformer whose patch embedding takes {channels} "
            f"channels: it must take {2 * latent_channels}, the VAE's {latent_channels} of the video and of "
            "the image; load an image-to-video model, or make a pipeline of the transformer's own class"
        )


def _check_inputs(pipe: Any, inherited: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Check that whole patches make up the video's size, then the inputs as diffusers does (`inherited`)."""
    arguments = inspect.signature(inherited).bind(pipe, *args, **kwargs).arguments
    config = getattr(getattr(pipe, "transformer", None), "config", None)
    has_patches = isinstance(config, dict) and "patch_size" in config  # not of a user's transformer
    if has_patches and arguments.get("height") and arguments.get("width"):
        _check_size(pipe, arguments["height"], arguments["width"])
    inherited(pipe, *args, **kwargs)


def _check_size(pipe: Any, height: int, width: int) -> None:
    """Check a size as `check_size` does; positions of a user's own may go beyond the model's sample size."""
    name, kind = upstream.ROTARY_TABLES, type(pipe).__bases__[-1]  # the class before `port`
    tables = vars(pipe).get(name, getattr(kind, name, None))
    is_stock = tables in _ROTARY_TABLES and upstream.module_of(
        tables.__globals__["get_3d_rotary_pos_embed"]
    ).startswith("diffusers.")
    check_size(height, width, pipe.transformer.config, pipe.vae_scale_factor_spatial, is_limited=is_stock)


def _encode_prompt(pipe: Any, inherited: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    _check_same_in_all_processes(pipe, inherited, args, kwargs)
    with _ENCODING:  # one thread at a time: pipelines may share a tokenizer, which keeps a state
        return inherited(pipe, *args, **kwargs)


def _decode_latents(pipe: Any, inherited: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Decode latents to frames on the host, in chunks unless the method is one of a user's class."""
    if inherited in _DECODE_LATENTS:
        return _decode_in_chunks(pipe, *args, **kwargs)
    return pytree.tree_map_only(torch.Tensor, runtime.to_torch, inherited(pipe, *args, **kwargs))


_WRAPPERS: dict[str, Callable[..., Any]] = {
    "__call__": _call,
    "check_inputs": _check_inputs,
    "encode_prompt": _encode_prompt,
    "decode_latents": _decode_latents,
}
"""By the name of a pipeline's method, the function that runs in its place."""

_CALLS_WITH_SIZE = (CogVideoXPipeline.__call__, CogVideoXImageToVideoPipeline.__call__)
"""The calls whose arguments, or else the transformer's config, give the size of the video to decode."""

_DECODE_LATENTS = tuple(kind.decode_latents for kind in PIPELINES)
"""`decode_latents` of CogVideoX's pipelines, which decode a whole video at once."""

_ROTARY_TABLES = tuple(getattr(kind, upstream.ROTARY_TABLES) for kind in PIPELINES)
"""The methods of CogVideoX's pipelines that make rotary tables."""


@functools.cache
def _ported_pipeline_class(kind: type) -> type:
    """Return the ported subclass of a pipeline's class `kind`, with that class's own name and signatures."""
    return type(
        kind.__name__,
        (PortedPipeline, kind),
        {
            **{name: _wrapped(kind, name) for name in _WRAPPERS if hasattr(kind, name)},
            "__module__": kind.__module__,
            # Methods that load and change LoRAs: they run while the weights are in PyTorch.
            **loras.methods_in_pytorch(kind, loras.PIPELINE_METHODS),
        },
    )


def _wrapped(kind: type, name: str) -> Callable[..., Any]:
    """Return a method that runs the wrapper of the method `name` of `kind`, with that method's signature."""

    @functools.wraps(getattr(kind, name))
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        # The inherited method is looked up in each call: a user may replace it on the class.
        return _WRAPPERS[name](self, getattr(kind, name), args, kwargs)

    return call


def _check_ported(pipe: Any) -> None:
    """Raise `ValueError` if one of a pipeline's models was replaced, offloaded or cast after `port`."""
    for name, model in _models(pipe).items():
        if getattr(pipe, name) is not model:  # it is torch.compile's wrapper, as in `port_pipeline`
            setattr(pipe, name, model)
        if not isinstance(model, PortedModel):
            raise ValueError(
                f"the pipeline's {name}, a {type(model).__name__}, was set after port: call port(pipe) again"
            )
        if runtime.is_on_jax(model):
            _check_not_cast(model)
            if upstream.is_offloaded(model):
                raise ValueError(
                    f"the weights of the pipeline's {name} were offloaded after port: call "
                    "pipe.enable_model_cpu_offload() in place of that"
                )


def check_size(
    height: int, width: int, config: Any, spatial_compression_ratio: int, *, is_limited: bool = True
) -> None:
    """Raise `ValueError` unless the transformer has whole patches, and positions, for a video of this size.

    CogVideoX 1.5 cuts its rotary positions out of a table for its sample size, and has none for larger sides.
    The other models compute theirs for any size. Without `is_limited`, positions are not checked.
    """
    # The pipelines themselves ask for multiples of 8.
    multiple = math.lcm(spatial_compression_ratio * config["patch_size"], 8)
    is_limited &= bool(config.get("patch_size_t") and config.get("use_rotary_positional_embeddings"))
    limits = [
        config[name] * spatial_compression_ratio // multiple * multiple if is_limited else math.inf
        for name in ("sample_height", "sample_width")
    ]
    shrinking = min(1, limits[0] / height, limits[1] / width)
    if height % multiple or width % multiple or shrinking < 1:
        near_height, near_width = (
            max(round(side * shrinking / multiple), 1) * multiple  # the nearest multiple, but not 0
            for side in (height, width)
        )
        rule = (
            f"the model has positions for at most height={limits[0]}, width={limits[1]}"
            if shrinking < 1
            else f"both must be multiples of {multiple}"
        )
        raise ValueError(
            f"got height={height}, width={width}: {rule}; try height={near_height}, width={near_width}"
        )
