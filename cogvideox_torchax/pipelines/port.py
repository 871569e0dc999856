"""Whole diffusers pipelines on JAX: `port` for a pipeline, and the methods that its own call needs."""

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

import torch
from diffusers.pipelines.cogvideo.pipeline_cogvideox import CogVideoXPipeline
from diffusers.pipelines.cogvideo.pipeline_cogvideox_fun_control import CogVideoXFunControlPipeline
from diffusers.pipelines.cogvideo.pipeline_cogvideox_image2video import CogVideoXImageToVideoPipeline
from diffusers.pipelines.cogvideo.pipeline_cogvideox_video2video import CogVideoXVideoToVideoPipeline
from diffusers.pipelines.pipeline_utils import DiffusionPipeline

from cogvideox_torchax import runtime, upstream
from cogvideox_torchax.pipelines import loras, networks
from cogvideox_torchax.pipelines.scheduler import port_scheduler
from cogvideox_torchax.runtime.models import PicklesAsStock, PortedModel
from cogvideox_torchax.sharding import Parallel
from cogvideox_torchax.vae.torchax.autoencoder import port_vae

PIPELINES = (
    CogVideoXPipeline,
    CogVideoXImageToVideoPipeline,
    CogVideoXVideoToVideoPipeline,
    CogVideoXFunControlPipeline,
)

_ENCODING = threading.RLock()
"""Held while a prompt is encoded, T5's run included.

A tokenizer, which pipelines may share, keeps the padding of its last call. A subclass may encode a prompt in
parts, so the lock can be taken again.
"""


def port_pipeline(pipe: Any, mesh: Any = None, parallel: Parallel | None = None) -> None:
    """Port a pipeline's VAE and networks and put them on JAX, on one device or over a mesh.

    Args:
        pipe: a CogVideoX pipeline.
        mesh: of `make_mesh`, or None.
        parallel: "context" splits the tokens over "tp", "tensor" the weights' channels; None to choose.

    Raises:
        ValueError: a mesh that does not divide the networks' weights, networks of another kind, or weights
            that are offloaded. Nothing has been moved then.
    """
    around_vae = [network for network in (pipe.transformer, pipe.text_encoder) if network is not None]
    for network in around_vae:
        _check_network(network, mesh, parallel)
    if pipe.vae is not None:
        _check_in_place(pipe.vae)
    for network in around_vae:
        networks.port_network(network).place(mesh, parallel)
    if pipe.vae is not None:
        vae = port_vae(pipe.vae)
        if mesh is not None:
            vae.place_on(mesh)
        vae.place()
    if pipe.scheduler is not None:
        port_scheduler(pipe.scheduler)
    upstream.wrap_from_pipe(_port_from_pipe)  # diffusers' `from_pipe` of a ported pipeline gives a ported one
    if not isinstance(pipe, PortedPipeline):
        pipe.__class__ = _ported_class(type(pipe))


def _check_network(network: Any, mesh: Any, parallel: Parallel | None) -> None:
    """Raise `ValueError` for a network that cannot be ported, or whose weights the mesh cannot split.

    A network that is ported already passes the first check.

    Args:
        network: the transformer or the text encoder of a pipeline.
        mesh: of `make_mesh`; None for the network's present mesh, if it has one.
        parallel: "context" to split tokens, "tensor" to split the weights' channels; None to choose.
    """
    kind = type(network)
    ported_kind = networks.PORTED_CLASSES.get(kind, kind)
    if not issubclass(ported_kind, networks.CompiledNetwork):
        raise ValueError(
            f"port got a pipeline with a {kind.__name__}: it takes CogVideoXTransformer3DModel and "
            "T5EncoderModel, unquantized, and without torch.compile, as JAX compiles them"
        )
    _check_in_place(network)
    mesh = mesh if mesh is not None else getattr(network, "mesh", None)
    if mesh is not None:
        networks.parallelism_of(network, mesh, parallel)  # for its errors alone


def _check_in_place(model: Any) -> None:
    """Raise `ValueError` for a model with hooks that move or cast its weights."""
    if upstream.is_offloaded(model):
        raise ValueError(
            f"the weights of a {type(model).__name__} are offloaded, or cast layer by layer, which does not "
            "work on JAX: load the pipeline again without it; a mesh splits the weights"
        )


def _port_from_pipe(make: Callable[..., Any], kind: type, pipeline: Any, **options: Any) -> Any:
    """Make a pipeline of the parts of `pipeline` by diffusers' `from_pipe`; port it if `pipeline` is ported.

    Args:
        make: diffusers' own `from_pipe`.
        kind: the class of the pipeline to make.
        pipeline: the pipeline whose parts are used.
        options: of `from_pipe`.
    """
    made = make(kind, pipeline, **options)
    if not isinstance(pipeline, PortedPipeline) or not isinstance(made, PIPELINES):
        return made
    # All parts are on the same devices: the first one that is not None tells the mesh. A transformer, which
    # comes first, has a parallelism too, its use of the mesh's "tp".
    parts = (pipeline.transformer, pipeline.vae, pipeline.text_encoder)
    first = next((part for part in parts if part is not None), None)
    if first is not None and runtime.is_on_jax(first):
        parallelism = getattr(first, "parallelism", None)
        port_pipeline(made, first.mesh, parallelism.kind if parallelism else None)
    else:  # the parts, which the two pipelines share, were moved to the host: they stay there
        made.__class__ = _ported_class(type(made))
    return made


class PortedPipeline(PicklesAsStock, DiffusionPipeline):
    """Mixin of `port_pipeline`: the methods that a pipeline's `__call__` uses, for JAX.

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
        """Raise `ValueError`: the weights are on JAX.

        Raises:
            ValueError: always.
        """
        raise ValueError("a ported pipeline's weights stay on JAX: take the offload out; a mesh splits them")

    enable_sequential_cpu_offload = enable_group_offload = enable_model_cpu_offload
    set_lora_device = enable_model_cpu_offload

    def progress_bar(self, iterable: Any = None, total: Any = None) -> Any:
        """Return diffusers' progress bar, which ends with the number of steps that a cache has skipped."""
        inherited: Any = super()
        bar, cache = inherited.progress_bar(iterable, total), self.transformer.step_cache
        if cache is not None and not bar.disable:
            close = bar.close  # called when the pipeline leaves its `with` block, after the last step

            def close_with_skips() -> None:
                """Show how many steps were skipped, and close the bar."""
                bar.close = close  # a bar is closed again when it is deleted
                bar.set_postfix_str(str(cache))
                close()

            bar.close = close_with_skips
        return bar

    def decode_latents(self, latents: torch.Tensor) -> torch.Tensor:
        """Decode latents (N, T, C, H, W) to frames (N, 3, T', H', W') on the host.

        Each chunk goes to the host while the next is computed.
        """
        # Between two steps, where a callback may decode, diffusers' `_current_timestep` is set.
        if self.transformer is not None and getattr(self, "_current_timestep", None) is None:
            self.transformer._reset_stateful_cache()  # frees the steps' kept arrays for the decoder
        with runtime.active():
            # The pipelines call the VAE's scaling factor `vae_scaling_factor_image`, for videos too.
            z = 1 / self.vae_scaling_factor_image * latents.permute(0, 2, 1, 3, 4)
            if _is_users_own(self.vae.decode):  # set on the model, or in a subclass
                return runtime.to_torch(self.vae.decode(z).sample)
        return torch.cat(list(self.vae.decode_stream(z)), dim=2)


@functools.cache
def _ported_class(kind: type) -> type:
    """Return the ported subclass of a pipeline's class `kind`, with that class's own name and signatures."""
    inherited: Any = kind

    @functools.wraps(inherited.__call__)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Make the scheduler and the cache ready for JAX, and run the pipeline.

        Raises:
            NonFiniteError: a step gave NaN or Inf.
        """
        _check_ported(self)
        port_scheduler(self.scheduler)  # the user may have replaced it
        if runtime.is_on_jax(self.transformer):
            # A step cache may be set by hooks alone, as by diffusers' `apply_first_block_cache`. The model's
            # `enable_cache` has warned already, if it was called.
            self.transformer.take_cache(warn=False)
        self.transformer._reset_stateful_cache()  # a run that failed may have left arrays
        result = inherited.__call__(self, *args, **kwargs)
        self.scheduler.log.check()
        return result

    @functools.wraps(inherited.check_inputs)
    def check_inputs(self: Any, *args: Any, **kwargs: Any) -> None:
        """Check the size against the transformer's patches, then the inputs as diffusers does."""
        arguments = inspect.signature(inherited.check_inputs).bind(self, *args, **kwargs).arguments
        check_size(
            arguments["height"], arguments["width"], self.transformer.config, self.vae_scale_factor_spatial
        )
        inherited.check_inputs(self, *args, **kwargs)

    @functools.wraps(inherited.encode_prompt)
    def encode_prompt(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Encode prompts as diffusers does, for one thread at a time."""
        with _ENCODING:
            return inherited.encode_prompt(self, *args, **kwargs)

    @functools.wraps(inherited.decode_latents)
    def decode_latents(self: Any, latents: torch.Tensor) -> torch.Tensor:
        """Decode latents as the user's own class does, to frames on the host."""
        return runtime.to_torch(inherited.decode_latents(self, latents))

    decodes_itself = _is_users_own(inherited.decode_latents)
    members = {
        # `active()` is a decorator too: each call of a method runs with torchax enabled.
        **{name: runtime.active()(getattr(kind, name)) for name in _added_methods(kind)},
        "__module__": kind.__module__,
        "__call__": runtime.active()(call),
        "check_inputs": check_inputs,
        "encode_prompt": runtime.active()(encode_prompt),
        **({"decode_latents": runtime.active()(decode_latents)} if decodes_itself else {}),
        # The method that makes rotary tables, on the host; they are then moved to the transformer's device.
        **upstream.rotary_tables(inherited, _on_transformer_device),
        # Methods that load and change LoRAs: they run while the weights are in PyTorch.
        **loras.methods_in_pytorch(kind, loras.PIPELINE_METHODS),
    }
    return type(kind.__name__, (PortedPipeline, kind), members)


def _check_ported(pipe: Any) -> None:
    """Raise `ValueError` if a model was replaced, or had its weights offloaded, after `port`."""
    for name in ("text_encoder", "transformer", "vae"):
        part = getattr(pipe, name)
        if not isinstance(part, PortedModel | None):
            raise ValueError(
                f"the pipeline's {name}, a {type(part).__name__}, was set after port: call port(pipe) again"
            )
        if part is not None and runtime.is_on_jax(part):
            _check_in_place(part)


def _is_users_own(method: Any) -> bool:
    """Return whether a method is neither diffusers' nor of this package."""
    return method.__module__.partition(".")[0] not in ("diffusers", __name__.partition(".")[0])


def _added_methods(kind: type) -> list[str]:
    """Return the names of a pipeline class's methods, special ones aside, that `PortedPipeline` lacks."""
    # `kind`, and its bases below diffusers' base.
    classes = kind.__mro__[: kind.__mro__.index(DiffusionPipeline)]
    names = {name for each in classes for name, member in vars(each).items() if inspect.isfunction(member)}
    return [name for name in names if not name.startswith("__") and not hasattr(PortedPipeline, name)]


def _on_transformer_device(pipe: Any, table: torch.Tensor) -> torch.Tensor:
    """Return a rotary table on JAX if the pipeline's transformer is on JAX, else unchanged."""
    return runtime.to_jax(table) if runtime.is_on_jax(pipe.transformer) else table


def check_size(height: int, width: int, config: Any, spatial_compression_ratio: int) -> None:
    """Raise `ValueError` unless the transformer can cut a video of this size into whole patches."""
    multiple = spatial_compression_ratio * config["patch_size"]
    if height % multiple or width % multiple:
        near_height, near_width = (max(round(side / multiple), 1) * multiple for side in (height, width))
        raise ValueError(
            f"got height={height}, width={width}: both must be multiples of {multiple}; try "
            f"height={near_height}, width={near_width}"
        )
