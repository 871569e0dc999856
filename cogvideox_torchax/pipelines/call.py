"""What a ported pipeline does around its class's own methods.

Around five methods this module has a function of the pipeline, the inherited method (`inherited`), and the
call's arguments:

- `__call__`: the processes of a mesh make the same call; models that were replaced since `port` are refused;
  a step cache starts anew; the decoder is compiled beside the first steps; a NaN or Inf names its step;
  other people's "cuda" means JAX.
- `check_inputs`: a size that the transformer cannot cut into patches is refused before any work.
- `encode_prompt`: one thread at a time, as pipelines share tokenizers.
- `_prepare_rotary_positional_embeddings`: the tables are made on the host.
- `decode_latents`: each chunk of frames goes to the host while the next is computed, as bytes if the call
  returns pictures.
"""

import contextvars
import hashlib
import inspect
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
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from torch import nn
from torch.utils import _pytree as pytree

from cogvideox_torchax import runtime, upstream
from cogvideox_torchax.pipelines import frames, steps
from cogvideox_torchax.pipelines.transformer import CogVideoXTransformer3DModel
from cogvideox_torchax.runtime.trees import replaced_method
from cogvideox_torchax.sharding import check_same, of_several_processes
from cogvideox_torchax.vae.directions import DECODE
from cogvideox_torchax.vae.torchax.autoencoder import AutoencoderKLCogVideoX

PIPELINES = (
    CogVideoXPipeline,
    CogVideoXImageToVideoPipeline,
    CogVideoXVideoToVideoPipeline,
    CogVideoXFunControlPipeline,
)

_PICTURES_OF: contextvars.ContextVar[Any] = contextvars.ContextVar("pictures of", default=None)
"""The pipeline whose running call, in this thread, returns pictures, so that decoded frames are bytes."""

_ENCODING = threading.RLock()
"""Held while a prompt is encoded, in all pipelines.

Pipelines may share a tokenizer, which changes its state in a call: it sets the padding. The lock can be taken
again by the thread that holds it, as `encode_prompt` of a subclass may call that of its base.
"""


def _decode_in_chunks(pipe: Any, latents: torch.Tensor) -> torch.Tensor:
    """Decode latents (N, T, C, H, W) as CogVideoX's pipelines do; return (N, 3, frames, rows, columns).

    The result is on the host. Each chunk goes to the host while the next is computed; of a call that returns
    pictures it is bytes already.
    """
    # A callback may decode between two steps, where `_current_timestep` is set.
    is_last = getattr(pipe, "_current_timestep", None) is None
    # After the last step the arrays that a step cache keeps are freed, to leave memory for the decoder.
    reset_cache = getattr(pipe.transformer, "_reset_stateful_cache", None)
    if reset_cache is not None and is_last:
        reset_cache()
    # The pipelines call the VAE's scaling factor `vae_scaling_factor_image`, for videos too.
    z = 1 / pipe.vae_scaling_factor_image * latents.permute(0, 2, 1, 3, 4)
    if not _decodes_by_programs(pipe.vae):
        with pipe.vae.in_use():  # the other `decode` may call modules of the VAE by themselves
            return runtime.to_torch(pipe.vae.decode(z).sample)
    if _PICTURES_OF.get() is pipe and is_last and runtime.is_on_jax(pipe.vae):
        chunks = pipe.vae._stream(DECODE, z, None, finish=frames.to_bytes)
    else:
        chunks = pipe.vae.decode_stream(z)
    return torch.cat(list(chunks), dim=2)


def _decodes_by_programs(vae: Any) -> bool:
    """Return whether no other library replaced `decode`, on the model, on its class or in a subclass."""
    package = vae.decode.__module__.partition(".")[0]  # that defines the method
    return package in ("diffusers", "cogvideox_torchax") and replaced_method(DiffusersAutoencoder) is None


def _arguments(pipe: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Any]:
    """Return all arguments of a call of the pipeline by name, defaults among them."""
    bound = inspect.signature(call).bind(pipe, *args, **kwargs)
    bound.apply_defaults()
    return dict([*bound.arguments.items()][1:])  # without `self`


def _compile_decoder_ahead(pipe: Any, arguments: dict[str, Any]) -> None:
    """Start to compile, in threads, the programs that will decode the video of a call of the pipeline.

    Meanwhile the call compiles its other networks.
    """
    config, scale = pipe.transformer.config, pipe.vae_scale_factor_spatial
    num_frames = arguments["num_frames"] or config.sample_frames
    height = arguments["height"] or config.sample_height * scale
    width = arguments["width"] or config.sample_width * scale
    prompt, embeddings = arguments["prompt"], arguments["prompt_embeds"]
    if (
        arguments["output_type"] == "latent"
        or (prompt is None and embeddings is None)
        or not all(isinstance(size, int) for size in (num_frames, height, width))
        or not _decodes_by_programs(pipe.vae)
    ):
        return
    _check_size(pipe, height, width)  # before minutes of compiling for a size that the call refuses
    videos = len(embeddings) if prompt is None else 1 if isinstance(prompt, str) else len(prompt)
    latent_frames = (num_frames - 1) // pipe.vae_scale_factor_temporal + 1
    channels = pipe.vae.config["latent_channels"]
    pipe.vae.compile_ahead(DECODE, (videos, channels, latent_frames, height // scale, width // scale))


def _call(pipe: Any, inherited: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Check the pipeline, make its step cache ready, and run the pipeline's own call, `inherited`."""
    pipe.check_ported()
    arguments = _arguments(pipe, inherited, args, kwargs)
    _check_same_in_all_processes(pipe, arguments)
    transformer = getattr(pipe, "transformer", None)
    if isinstance(transformer, CogVideoXTransformer3DModel):
        if runtime.is_on_jax(transformer):
            # diffusers' functions such as `apply_first_block_cache` put a cache's hooks on the modules, too.
            # No warning here: `enable_cache`, if it was called, has given it.
            transformer.take_cache(warn=False)
        transformer._reset_stateful_cache()  # an earlier call that failed may have left kept arrays
    # A call that starts from a video has that video's size: its decoder is compiled when it is first needed.
    if inherited in _CALLS_WITH_SIZE and isinstance(pipe.vae, AutoencoderKLCogVideoX):
        _compile_decoder_ahead(pipe, arguments)
    returns_pictures = (
        inherited in _CALLS
        and arguments["output_type"] == "pil"
        and type(pipe.video_processor) is frames.FrameProcessor
        and pipe.video_processor.config["do_normalize"]
    )
    token = _PICTURES_OF.set(pipe if returns_pictures else None)
    try:
        with CudaIsJAX():
            return steps.run_checked(inherited, pipe, args, kwargs)
    finally:
        _PICTURES_OF.reset(token)


class CudaIsJAX(torch.overrides.TorchFunctionMode):
    """Mode in which "cuda" in other people's code means JAX: as a device, and as a tensor's `cuda()`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            func, args = torch.Tensor.to, (args[0], "jax")
        elif func is torch.Tensor.to:
            args = tuple("jax" if _is_cuda(value) else value for value in args)
        if kwargs and _is_cuda(kwargs.get("device")):
            kwargs = kwargs | {"device": "jax"}
        return func(*args, **kwargs or {})


def _is_cuda(value: Any) -> bool:
    return isinstance(value, str | torch.device) and str(value).partition(":")[0] == "cuda"


def _check_same_in_all_processes(pipe: Any, arguments: dict[str, Any]) -> None:
    """Raise `ProcessError` in every process if one makes another call, or of a pipeline that differs."""
    parts = pipe.components
    mesh = next((part.mesh for part in parts.values() if getattr(part, "mesh", None) is not None), None)
    if mesh is None or not of_several_processes(mesh):
        return
    arguments = {**arguments, "mesh": (repr(mesh), mesh.device_ids.tolist())}
    if arguments.get("generator", "") is None:
        arguments["generator"] = torch.get_rng_state()  # torch draws by its own generator then
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


def _check_inputs(pipe: Any, inherited: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
    """Check that whole patches make up the video's size, then the inputs as diffusers does (`inherited`)."""
    arguments = _arguments(pipe, inherited, args, kwargs)
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


def _encode_prompt(pipe: Any, inherited: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    _check_same_in_all_processes(pipe, _arguments(pipe, inherited, args, kwargs))
    with _ENCODING:  # one thread at a time: pipelines may share a tokenizer, which keeps a state
        return inherited(pipe, *args, **kwargs)


def _decode_latents(pipe: Any, inherited: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Decode latents to frames on the host, in chunks unless the method is one of a user's class."""
    if inherited in _DECODE_LATENTS:
        return _decode_in_chunks(pipe, *args, **kwargs)
    return pytree.tree_map_only(torch.Tensor, runtime.to_torch, inherited(pipe, *args, **kwargs))


def _rotary_tables(pipe: Any, inherited: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Make rotary tables on the host, and move them: on JAX many small operations would take far longer."""
    if inherited not in _ROTARY_TABLES:
        return inherited(pipe, *args, **kwargs)
    arguments = _arguments(pipe, inherited, args, kwargs)
    tables = inherited(pipe, **arguments | {"device": torch.device("cpu")})
    return tuple(table.to(arguments["device"]) for table in tables)


WRAPPERS: dict[str, Callable[..., Any]] = {
    "__call__": _call,
    "check_inputs": _check_inputs,
    "encode_prompt": _encode_prompt,
    "decode_latents": _decode_latents,
    upstream.ROTARY_TABLES: _rotary_tables,
}
"""By the name of a pipeline's method, the function that runs in its place."""

_CALLS = tuple(kind.__call__ for kind in PIPELINES)
"""The calls of CogVideoX's pipelines, which make frames of what `decode_latents` returns."""

_CALLS_WITH_SIZE = _CALLS[:2]
"""The calls whose arguments, or else the transformer's config, give the size of the video to decode."""

_DECODE_LATENTS = tuple(kind.decode_latents for kind in PIPELINES)
"""`decode_latents` of CogVideoX's pipelines, which decode a whole video at once."""

_ROTARY_TABLES = tuple(getattr(kind, upstream.ROTARY_TABLES) for kind in PIPELINES)
"""The methods of CogVideoX's pipelines that make rotary tables."""


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
