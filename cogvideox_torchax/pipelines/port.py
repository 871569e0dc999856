"""`port` for networks and pipelines: their ported classes, which are subclasses of those that they replace.

The class that a ported class replaces is called `kind` here. `KNOWN` has the ported class of each stock
class, a class of diffusers or of transformers; for any other network a class is made. A ported pipeline runs
diffusers' own call, with its own scheduler, with what `call` adds to its methods.
"""

import functools
import logging
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_cogvideox import (
    AutoencoderKLCogVideoX as DiffusersAutoencoder,
)
from diffusers.models.transformers.cogvideox_transformer_3d import (
    CogVideoXTransformer3DModel as DiffusersTransformer,
)
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from diffusers.video_processor import VideoProcessor
from torch import nn
from transformers.models.t5.modeling_t5 import T5EncoderModel as TransformersT5Encoder

from cogvideox_torchax import runtime, upstream
from cogvideox_torchax.pipelines.blocks import Block
from cogvideox_torchax.pipelines.call import WRAPPERS
from cogvideox_torchax.pipelines.eight_bits import Weights, check_bits, quantize, take_bits
from cogvideox_torchax.pipelines.frames import FrameProcessor
from cogvideox_torchax.pipelines.networks import CompiledNetwork, KnownNetwork, port_layers, tie_weights
from cogvideox_torchax.pipelines.offload import offload_models
from cogvideox_torchax.pipelines.text_encoder import T5EncoderModel
from cogvideox_torchax.pipelines.transformer import CogVideoXTransformer3DModel
from cogvideox_torchax.runtime.models import CopiesWithoutPrograms, PortedModel, class_of, save_as_stock
from cogvideox_torchax.sharding import Parallel, check_one_slice
from cogvideox_torchax.vae.torchax.autoencoder import check_vae_class, port_vae

logger = logging.getLogger("cogvideox_torchax")

KNOWN: dict[type[nn.Module], type[KnownNetwork]] = {
    DiffusersTransformer: CogVideoXTransformer3DModel,
    TransformersT5Encoder: T5EncoderModel,
}
"""The ported class of each class whose layers this package knows."""

METHODS = ("forward", "encode", "decode")
"""Methods of a network that are compiled, if its class has them."""


def known_class(kind: Any) -> type[CompiledNetwork]:
    """Return the class of this package for networks of class `kind`: `CompiledNetwork` for an unknown one."""
    bases = (
        # A subclass that computes the same as its stock class also gets the methods of the ported class.
        known
        for stock, known in KNOWN.items()
        if issubclass(kind, known) or (issubclass(kind, stock) and kind.forward is stock.forward)
    )
    return next(bases, CompiledNetwork)


@functools.cache
def ported_class(kind: Any) -> type[CompiledNetwork]:
    """Return the class that a network of class `kind` becomes; a ported class is returned unchanged."""
    if issubclass(kind, CompiledNetwork):
        return kind
    base = known_class(kind)
    if kind in KNOWN:
        return base
    # This package does not know what any other class computes: its methods are compiled as they are.
    compiled = METHODS if base is CompiledNetwork else ()
    members = {
        name: _wrapped(kind, name, CompiledNetwork.run_as_it_is) for name in compiled if hasattr(kind, name)
    }
    return class_of(ported_class, kind, (base, kind), **members)


@functools.cache
def pipeline_class(kind: type) -> type:
    """Return the ported subclass of a pipeline's class `kind`, with that class's own name and signatures.

    It has the methods of `PortedPipeline`, and around those of `kind` the wrappers of `call`.
    """
    around = {
        name: _wrapped(kind, name, wrapper) for name, wrapper in WRAPPERS.items() if hasattr(kind, name)
    }
    return type(kind.__name__, (PortedPipeline, kind), {**around, "__module__": kind.__module__})


def _wrapped(kind: type, name: str, wrapper: Any) -> Any:
    """Return a method that runs `wrapper(self, method, ...)`, with the signature of the method `kind.name`.

    The method is looked up in each call: a user may replace it on the class.
    """

    @functools.wraps(getattr(kind, name))
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return wrapper(self, getattr(kind, name), *args, **kwargs)

    return call


def port_network(network: Any) -> Any:
    """Give a network and its layers their ported classes, in place; return the network.

    On a ported network this ports the layers that were added since.
    """
    is_new = not isinstance(network, CompiledNetwork)
    network.__class__ = ported_class(type(network))
    save_as_stock(network)  # a saved pipeline then names the original class, and loads without this package
    port_layers(network)
    if is_new and hasattr(network, "tie_weights"):
        tie_weights(network)
    upstream.register_block(Block)  # diffusers' caches take only classes of blocks that are registered
    return network


def place_network(
    model: Any, name: str, mesh: Any, parallel: Parallel | None, weights: Weights | None
) -> CompiledNetwork:
    """Port the network `name` of a pipeline for a mesh, with its weights in fewer bits, where they are.

    Without a mesh the network keeps that of an earlier port, if there is one. `parallel` is for a transformer
    alone, and `weights` for a network that this package knows.
    """
    network = port_network(model)
    network.component = name
    if isinstance(network, KnownNetwork):
        if not runtime.is_on_jax(network):
            take_bits(network)
        if weights:
            quantize(network, weights)
    mesh = network.mesh if mesh is None else mesh
    if mesh is not None:  # after `weights`, as their bytes decide whether they are gathered
        network.place_on(mesh, parallel if name == "transformer" else None)
    return network


def port_pipeline(
    pipe: Any,
    mesh: Any = None,
    parallel: Parallel | None = None,
    weights: Weights | None = None,
    *,
    offload: bool = False,
) -> list[Any]:
    """Port a pipeline, or another object with models as attributes, as `port` documents; return its models.

    With `offload`, or where hooks of diffusers' offloading are on a model, models take turns on the devices.

    Raises:
        ValueError: as `port` raises it; nothing has been moved then.
    """
    check_one_slice(mesh)
    models = _models(pipe)
    # All models are checked before the first one is moved.
    for name, model in models.items():
        _check(name, model, mesh, parallel)
    if weights and not any(map(_is_known, models.values())):
        raise ValueError(
            f"got weights={weights!r} for a {type(pipe).__name__}, which has neither of the networks that "
            "take it, diffusers' CogVideoXTransformer3DModel and transformers' T5EncoderModel: leave it out"
        )
    for name, model in models.items():
        if upstream.take_offloading(model):
            offload, pipe._all_hooks = True, []  # the pipeline's own list of the hooks
        if isinstance(model, DiffusersAutoencoder):
            port_vae(model, mesh)
            continue
        network = place_network(model, name, mesh, parallel, weights)
        if not isinstance(network, KnownNetwork):
            notes = f"; weights={weights!r} leaves it as it is" if weights else ""
            notes += "" if network.mesh is None else f"; {network.parallelism}"
            logger.warning("%s: %s, compiled as it is%s", name, type(network).__name__, notes)
    offload_models(models, mesh, getattr(pipe, "model_cpu_offload_seq", None), wanted=offload)
    for model in models.values():
        model.put_weights()  # pyright: ignore[reportCallIssue]
    if isinstance(pipe, DiffusionPipeline) and not isinstance(pipe, PortedPipeline):
        pipe.__class__ = pipeline_class(type(pipe))
        processor = getattr(pipe, "video_processor", None)
        if type(processor) is VideoProcessor:
            processor.__class__ = FrameProcessor
    return [*models.values()]


def _check(name: str, model: Any, mesh: Any, parallel: Parallel | None) -> None:
    """Raise `ValueError` for a model that cannot be ported to the mesh."""
    mesh = getattr(model, "mesh", None) if mesh is None else mesh
    if mesh is not None and not isinstance(model, DiffusersAutoencoder):
        requested = parallel if name == "transformer" else None
        known_class(type(model)).choose_parallelism(model, mesh, requested)
    takes_bits = _is_known(model) and not runtime.is_on_jax(model)
    check_vae_class(model)  # a VAE of another package must not be taken for an unknown network
    if takes_bits:
        check_bits(name, model)
    elif upstream.is_cast(model):
        raise ValueError(CAST % type(model).__name__)


def _models(pipe: Any) -> dict[str, nn.Module]:
    """Return the models that can move to JAX, and put them in the place of torch.compile's wrappers."""
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
        if obstacles and not _is_known(model):  # `check_bits` looks at a known network's
            logger.warning("%s: %s stays on the host, since %s", name, type(model).__name__, obstacles[0])
        else:
            models[name] = model
            if model is not part:  # JAX compiles the model itself
                setattr(pipe, name, model)
    return models


def _is_known(model: Any) -> bool:
    return known_class(type(model)) is not CompiledNetwork


CAST = (
    "the weights of a %s are cast layer by layer, which works on JAX only where it is enabled before port, "
    "for a transformer and a text encoder: load the pipeline again"
)
"""The error for a model with diffusers' hooks that cast its weights during a call."""


class PortedPipeline(CopiesWithoutPrograms, DiffusionPipeline):
    """Mixin for the class of a ported pipeline.

    A copy runs on JAX too. An unpickled pipeline is in PyTorch, as its models are, until it is ported again.
    """

    def __reduce_ex__(self, _protocol: Any) -> Any:
        # The last base is the class from before `port`; pickle could not import the class that `port` made.
        # Unpickling calls `object.__new__` with this base, and then sets the state.
        return object.__new__, type(self).__bases__[-1:], vars(self)

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

    def check_ported(self) -> None:
        """Raise `ValueError` if one of the pipeline's models was replaced, offloaded or cast after `port`."""
        for name, model in _models(self).items():
            if not isinstance(model, PortedModel):
                raise ValueError(
                    f"the pipeline's {name}, a {type(model).__name__}, was set after port: call port(pipe) "
                    "again"
                )
            if runtime.is_on_jax(model):
                if upstream.is_cast(model):
                    raise ValueError(CAST % type(model).__name__)
                if upstream.is_offloaded(model):
                    raise ValueError(
                        f"the weights of the pipeline's {name} were offloaded after port: call "
                        "pipe.enable_model_cpu_offload() in place of that"
                    )

    def _offloads(self) -> set[Any]:
        return {model.offload for model in _models(self).values() if getattr(model, "offload", None)}
