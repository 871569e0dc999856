"""Load a pipeline from its files onto the devices.

The weights of the transformer and of the text encoder go there a tensor at a time: the host never holds all
weights of such a network.
"""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import diffusers
import numpy as np
import torch
from accelerate import init_empty_weights
from diffusers.models.transformers.cogvideox_transformer_3d import CogVideoXTransformer3DModel
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from jax.sharding import Mesh
from transformers import T5Config, T5EncoderModel

from cogvideox_torchax import runtime, upstream
from cogvideox_torchax.files import faults
from cogvideox_torchax.files.models import INDEX, ModelError, local, not_on_hub, read_json
from cogvideox_torchax.pipelines.call import PIPELINES
from cogvideox_torchax.pipelines.eight_bits import Weights, as_int8, check_weights
from cogvideox_torchax.pipelines.networks import tie_weights
from cogvideox_torchax.pipelines.offload import offload_models
from cogvideox_torchax.pipelines.port import place_network, port_pipeline
from cogvideox_torchax.pipelines.weights import feed_weights
from cogvideox_torchax.sharding import Parallel, check_mesh, check_one_slice
from cogvideox_torchax.vae.checkpoint import (
    WEIGHTS_STEM,
    check_loading_info,
    dtype_name_of,
    read_tensors,
    weight_files,
)

logger = logging.getLogger("cogvideox_torchax")

Pipeline = TypeVar("Pipeline")

Dtype = torch.dtype | str | None | dict[str, torch.dtype | str | None]
"""Dtype of a pipeline's weights, as diffusers takes it."""

STEMS = {"transformer": WEIGHTS_STEM, "text_encoder": "model"}
"""The networks that are read a weight at a time, and the stems with which their weight files' names begin."""

WITH_WEIGHTS = STEMS.keys() | {"vae"}
"""The parts of a pipeline that have weights, and so a dtype."""


def load_pipeline(
    pretrained_model_name_or_path: str | Path,
    *,
    pipeline_class: type[Pipeline] | None = None,
    mesh: Mesh | None = None,
    parallel: Parallel | None = None,
    weights: Weights | None = None,
    offload: bool = False,
    dtype: Dtype = "bfloat16",
    variant: str | None = None,
    **diffusers_options: Any,
) -> Pipeline:
    """Load and port a pipeline, each weight going from its file straight to its devices.

    The result equals `port(pipeline.from_pretrained(...))`. The host holds one tensor at a time and the
    VAE: a pipeline of 21 GB loads on a host with less memory.

    Args:
        pretrained_model_name_or_path: a directory or a hub id, of safetensors.
        pipeline_class: one of diffusers' for CogVideoX; None for the one that model_index.json names.
        mesh: of `make_mesh`; None for one device.
        parallel: the dimension that the transformer splits over the mesh's axis "tp": "context" for tokens,
            "tensor" for weights' channels; None chooses.
        weights: "int8" has the matrices of the transformer's and the text encoder's blocks in eight bits, and
            "int8-dynamic" multiplies in eight bits too, as by `port`; None has all weights in `dtype`.
        offload: whether the weights of a network that is not used wait in the host's memory, as by
            `pipe.enable_model_cpu_offload()`. They do so too if all weights do not fit the devices, and a
            warning says so.
        dtype: dtype of the weights, or its name; "auto" for that of the files, None for float32. A dictionary
            has these by the names of parts, and under "default" for all others.
        variant: variant of the weight files, such as "fp16", in the parts that have it.
        diffusers_options: options of `from_pretrained`, parts of the pipeline among them:
            `text_encoder=None`, or networks that are loaded already; and `torch_dtype`, the older name of
            `dtype`.

    Returns:
        The ported pipeline, of the class that was given.

    Raises:
        ModelError: missing files, or weights that do not match their config.
        ValueError: anything that `port` refuses, and options that would load weights in another way.
    """
    check_weights(weights)
    refused = {"quantization_config", "device_map"} & diffusers_options.keys()
    # The default dtype is the name "bfloat16". Any other value, `torch.bfloat16` among them, is the user's.
    has_two_dtypes = "torch_dtype" in diffusers_options and dtype != "bfloat16"
    faults.refuse(
        (
            refused,
            f"load_pipeline got {', '.join(sorted(refused))}: leave it out; weights='int8' quantizes them",
        ),
        (
            parallel is not None and mesh is None,
            f"load_pipeline got parallel={parallel!r}: it is for a mesh; pass both, or none",
        ),
        (has_two_dtypes, "load_pipeline got both dtype and torch_dtype, which are one option: leave one out"),
        (
            not isinstance(pipeline_class, type | None),
            f"load_pipeline got pipeline_class={pipeline_class!r}: give the class, not its name",
        ),
    )
    if mesh is not None:
        check_mesh(mesh)
    check_one_slice(mesh)
    diffusers_options.pop("use_safetensors", None)  # only safetensors are read, whatever it says
    dtype = diffusers_options.pop("torch_dtype", dtype)
    directory = _directory(str(pretrained_model_name_or_path), variant, diffusers_options)
    index = read_json(directory / INDEX)
    loaded_class: Any = pipeline_class or getattr(diffusers, index["_class_name"], None)
    if not (isinstance(loaded_class, type) and issubclass(loaded_class, PIPELINES)):
        raise ModelError(
            f"load_pipeline got {getattr(loaded_class, '__name__', index['_class_name'])}: it takes "
            f"{', '.join(kind.__name__ for kind in PIPELINES)}; load others by their own class, and port them"
        )
    # The index has a pair (library, class) for each part: (None, None) if the pipeline was saved without it.
    # A part that the options give is not loaded.
    parts = {
        part for part in WITH_WEIGHTS - diffusers_options.keys() if index.get(part, [None])[0] is not None
    }
    # As in diffusers, a part that lacks the variant is loaded without it; but one part has to have it.
    variants = {
        part: variant
        for part in parts
        for file in (directory / part).glob("*.safetensors")
        if variant and f".{variant}." in file.name.replace("-", ".")  # a single file, or a shard
    }
    if variant and parts and not variants:
        raise ModelError(f"{directory} has no weights of variant={variant!r}: leave it out, or give another")
    dtypes = _dtypes_of(dtype, directory, parts, variants)
    # The transformer and the text encoder are loaded here, a weight at a time. diffusers loads all other
    # parts, and takes these two as options.
    networks = {
        part: place_network(
            _on_meta(directory / part, part, dtypes[part]).eval(), part, mesh, parallel, weights
        )
        for part in STEMS.keys() & parts
    }
    offload_models(networks, mesh, loaded_class.model_cpu_offload_seq, wanted=offload)
    for part, network in networks.items():
        _load_weights(network, directory / part, part, dtypes[part], variants.get(part))
    # `dtype_option` is the name of the argument for the dtype, which depends on diffusers' version.
    pipe: Any = loaded_class.from_pretrained(
        directory, **{upstream.dtype_option(): dtypes, "variant": variant, **diffusers_options, **networks}
    )
    port_pipeline(pipe, mesh, parallel, weights, offload=offload)
    config = getattr(pipe.transformer, "config", {})
    if config.get("sample_height") == config.get("sample_width") == 300:  # as diffusers' script converts 1.5
        logger.warning(
            "%s has a default size of 2400 x 2400 pixels: pass another one, such as height=768, width=1360",
            pretrained_model_name_or_path,
        )
    return pipe


def _directory(name: str, variant: str | None, options: dict[str, Any]) -> Path:
    """Return the directory of a pipeline's files, which are downloaded if `name` is a hub id."""
    directory = local(name)
    if directory is not None:
        if not (directory / INDEX).is_file():
            raise ModelError(f"{name} has no {INDEX}: give the directory of a whole pipeline, or a hub id")
        return directory
    try:
        # `options` are those of the hub, and parts that the user has: their files are not downloaded.
        return Path(DiffusionPipeline.download(name, variant=variant, use_safetensors=True, **options))
    except (OSError, ValueError) as error:
        raise not_on_hub(name, error) from error


def _dtypes_of(
    dtype: Dtype, directory: Path, parts: set[str], variants: dict[str, str]
) -> dict[str, torch.dtype]:
    """Return the dtype of each of the `parts`, by the user's `dtype`; "auto" is that of the part's files."""
    requested_by_part = dtype if isinstance(dtype, dict) else {"default": dtype}
    unknown = requested_by_part.keys() - WITH_WEIGHTS - {"default"}
    if unknown:
        raise ValueError(
            f"load_pipeline got a dtype for {', '.join(sorted(unknown))}: its keys are "
            f"{', '.join(sorted(WITH_WEIGHTS))} and default"
        )
    names = {
        part: dtype_name_of(
            requested_by_part.get(part, requested_by_part.get("default")),
            # These three tell where the part's files are, which are only read for "auto".
            directory / part,
            variants.get(part),
            stem=STEMS.get(part, WEIGHTS_STEM),
        )
        for part in parts
    }
    return {part: getattr(torch, name) for part, name in names.items()}


def _load_weights(network: Any, directory: Path, part: str, dtype: torch.dtype, variant: str | None) -> None:
    """Put the weights of the network `part` on its devices, or with offload on the host, one at a time."""
    files = weight_files(directory, variant, stem=STEMS[part])
    # The class of a network, such as T5's, names the modules that overflow in float16.
    float32_modules = getattr(network, "_keep_in_fp32_modules", None) if dtype == torch.float16 else None
    tensors = as_int8(network, _cast(read_tensors(files), dtype, tuple(float32_modules or ())))
    # Each weight goes to its devices, by `put_weight`, before the next one is read. `missing` are the names
    # of weights that no file has, `unexpected` the names of tensors in the files that are no weights.
    missing, unexpected = feed_weights(network, tensors, network.put_weight)
    if part == "text_encoder":
        tie_weights(network)  # T5's token embedding has two names, of which the files may have one
    # A weight under two names is not missing if a file has it under one of them: then it has left "meta".
    still_on_meta = {name for name, weight in network.named_parameters() if weight.is_meta}
    check_loading_info({"missing_keys": missing & still_on_meta, "unexpected_keys": unexpected}, directory)
    network.put_weights()  # the buffers, which no file has


def _on_meta(directory: Path, part: str, dtype: torch.dtype) -> Any:
    """Return a network by the config in `directory`, whose parameters take no memory: they are on "meta".

    Its buffers, which no file has, are computed.
    """
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # new parameters get it
    try:
        with init_empty_weights():
            if part == "text_encoder":
                return T5EncoderModel(T5Config.from_pretrained(directory))
            config: Any = CogVideoXTransformer3DModel.load_config(directory)
            return CogVideoXTransformer3DModel.from_config(config)
    finally:
        torch.set_default_dtype(default_dtype)


def _cast(
    tensors: Iterable[tuple[str, np.ndarray]], dtype: torch.dtype, float32_modules: tuple[str, ...]
) -> Iterable[tuple[str, np.ndarray]]:
    """Yield each (name, tensor) in `dtype`; `float32_modules`, which overflow in float16, stay in float32."""
    for name, tensor in tensors:
        in_float32 = any(part in float32_modules for part in name.split("."))
        yield name, tensor.astype(runtime.jax_dtype(torch.float32 if in_float32 else dtype), copy=False)
