"""A video generated from a prompt with a diffusers pipeline, in stages that can be saved and resumed.

Everything that a user passes is checked against the model's configs before any weight is loaded.
"""

import argparse
import contextlib
import difflib
import functools
import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from cogvideox_torchax.cli import common, stages
from cogvideox_torchax.files import faults, latents as latent_files, video
from cogvideox_torchax.files.models import locate
from cogvideox_torchax.pipelines import cache_options
from cogvideox_torchax.pipelines.description import (
    CLASSES,
    CONTROL,
    IMAGE,
    TEXT,
    VIDEO,
    Model,
    RequestError,
    check_size,
)
from cogvideox_torchax.runtime import to_torch
from cogvideox_torchax.vae import memory


def check(request: stages.Request, model: Model) -> None:
    """Raise an error unless the model can serve the request, and the request's image and clip can be read.

    Raises:
        ValueError: mostly a `RequestError`; the message says what the model takes.
        VideoError: an image or a clip that cannot be read.
    """
    check_size(model, request.frames, request.height, request.width)
    _check_prompt(request, model)
    faults.refuse(
        (
            request.num_inference_steps < 1,
            f"got --num-inference-steps {request.num_inference_steps}: at least 1",
        ),
        (
            not math.isfinite(request.guidance_scale),
            f"got --guidance-scale {request.guidance_scale}: give a number such as 6",
        ),
        (not 0 < request.strength <= 1, f"got --strength {request.strength}: more than 0, and at most 1"),
        (
            request.negative_prompt and request.guidance_scale <= 1,
            f"got --negative-prompt with --guidance-scale {request.guidance_scale}, which does not use it: "
            "leave it out, or give a scale above 1",
        ),
        error=RequestError,
    )
    if steps_of(request, model) < 1:
        raise RequestError(
            f"got --strength {request.strength} with --num-inference-steps {request.num_inference_steps}: "
            f"no step is left of {request.num_inference_steps} x {request.strength}; give more of either"
        )
    if request.image is not None:
        video.read_image(request.image)  # only for its error: the image is read again when it is used
    if request.video is not None:
        num_frames = video.probe(request.video, request.frames).num_frames
        if num_frames < request.frames:
            raise RequestError(
                f"{request.video} has {num_frames} frames, {request.frames} are wanted: pass --frames"
            )


def steps_of(request: stages.Request, model: Model) -> int:
    """Return the number of denoising steps that run: of a `VIDEO` pipeline the share `strength`, else all."""
    return (
        int(request.num_inference_steps * request.strength)
        if model.kind == VIDEO
        else request.num_inference_steps
    )


def _check_prompt(request: stages.Request, model: Model) -> None:
    """Raise `RequestError` if a prompt has more tokens than the model takes: the pipelines would cut it."""
    limit = model.transformer["max_text_seq_length"]
    tokenizer = _tokenizer(locate(model.name, "tokenizer", files=("*",)))
    for name, text in (("--prompt", request.prompt), ("--negative-prompt", request.negative_prompt)):
        count = len(tokenizer(text).input_ids)
        if count > limit:
            unknown = common.unknown_words(model.name, text)
            advice = f"it does not know {unknown}" if unknown else "shorten it"
            raise RequestError(f"got a {name} of {count} tokens: {model.name} takes {limit}; {advice}")


@functools.lru_cache(1)  # many prompts are checked by one
def _tokenizer(path: Path) -> Any:
    from transformers import AutoTokenizer

    # torchax is off while files are loaded: with it on, some of the `from_pretrained` methods fail.
    return AutoTokenizer.from_pretrained(path)


@contextlib.contextmanager
def _loading(name: str) -> Iterator[None]:
    """Raise a `RequestError` of one line for an error in the `with` block, where diffusers loads `name`."""
    try:
        yield
    except (OSError, ValueError, RuntimeError, ImportError, SafetensorError) as error:
        # Messages of diffusers may have many lines: one line with their beginning is enough.
        raise RequestError(f"cannot load {name}: {' '.join(str(error).split())[:300]}") from error


def scheduler_of(name: str, model: Model) -> Any:
    """Return a scheduler of diffusers' class `name`, made of the config of the model's own scheduler.

    Raises:
        RequestError: diffusers has no class of that name that is a scheduler for CogVideoX; the message has
            the names of the nearest ones.
    """
    import diffusers

    own = getattr(diffusers, model.scheduler["_class_name"]).from_config(model.scheduler)
    # diffusers' list of compatible classes lacks those that were made for CogVideoX.
    compatible = (kind.__name__ for kind in own.compatibles)
    names = {"CogVideoXDDIMScheduler", "CogVideoXDPMScheduler", *compatible}
    if name not in names:
        raise RequestError(
            f"got --scheduler {name}: diffusers has no such scheduler for CogVideoX; the nearest names are "
            f"{', '.join(difflib.get_close_matches(name, names, cutoff=0))}"
        )
    with _loading(f"the scheduler {name}"):
        return getattr(diffusers, name).from_config(own.config)


def lora_path(name: str, model: Model) -> Path:
    """Return the file or the directory of a LoRA for a model's transformer, after its file has been read.

    `name` is a safetensors file, a directory with one, or a hub id, whose files are downloaded.

    Raises:
        RequestError: there is no such file, it cannot be read, or it has no weights for the transformer.
        ModelError: neither a directory nor the hub has this name.
    """
    import diffusers

    path = Path(name).expanduser()
    if path.suffix == ".safetensors" and not path.is_file():
        raise RequestError(f"there is no LoRA {name}: give a safetensors file, its directory, or a hub id")
    path = path if path.is_file() else locate(name, files=("*.safetensors",))
    with _loading(f"the LoRA {name}"):
        weights = getattr(diffusers, CLASSES[model.kind]).lora_state_dict(path, use_safetensors=True)
    # diffusers would only log a warning, and generate without the LoRA.
    if not any(key.startswith("transformer.") and "lora" in key for key in weights):
        raise RequestError(
            f"cannot load the LoRA {name}: none of its weights is one of a LoRA for CogVideoX's transformer, "
            "as diffusers names them, such as transformer.transformer_blocks.0.attn1.to_q.lora_A.weight"
        )
    return path


def prepared(
    args: argparse.Namespace, model: Model, request: stages.Request, *, with_text: bool = True
) -> Callable[[Any], Any]:
    """Check a pipeline's options; return the function that loads and ports it.

    The function's argument is a mesh of `make_mesh`, or None for one device.

    Args:
        args: the options, which say with `request` how the pipeline runs.
        model: the model, as `describe` returns it.
        request: its dtype is that of all weights.
        with_text: whether to load the text encoder; False if the prompt's embeddings are there already.

    Raises:
        ValueError: mostly a `RequestError`, now, or as the pipeline or its LoRA is loaded.
    """
    memory.check_tiling(args.tiling, model.spatial_compression_ratio)
    cache_config = functools.partial(
        cache_options.config_of,
        args.cache,
        steps=steps_of(request, model),
        guided=request.guidance_scale > 1,  # a scale of 1 or less is no guidance
    )
    if args.cache:
        cache_config()  # for its error
    scheduler = scheduler_of(args.scheduler, model) if args.scheduler else None
    lora = lora_path(args.lora, model) if args.lora else None

    def load(mesh: Any) -> Any:
        import diffusers

        from cogvideox_torchax.pipelines.loading import load_pipeline

        # diffusers does not load a component that is passed as an object or as None.
        omitted = {} if with_text else {"text_encoder": None, "tokenizer": None}
        with _loading(model.name):
            pipe: Any = load_pipeline(
                model.name,
                pipeline_class=getattr(diffusers, CLASSES[model.kind]),
                mesh=mesh,
                weights=args.weights,
                offload=args.offload,
                dtype=common.parse_dtype(request.dtype),
                **omitted,
                **({"scheduler": scheduler} if scheduler else {}),
            )
        if lora:
            with _loading(f"the LoRA {lora}"):
                pipe.load_lora_weights(lora, adapter_name="lora", use_safetensors=True)
                pipe.set_adapters("lora", 1.0 if args.lora_scale is None else args.lora_scale)
        if args.cache:
            pipe.transformer.enable_cache(cache_config(timestep=lambda: pipe.current_timestep))
        pipe.set_progress_bar_config(disable=args.quiet, desc="denoise", leave=False)
        return pipe

    return load


def encode_text(pipe: Any, model: Model, request: stages.Request) -> dict[str, torch.Tensor | None]:
    """Return the embeddings (1, tokens, channels) of a request's prompts by the pipeline's argument names.

    Without guidance the negative prompt has None.
    """
    with torch.no_grad():
        positive, negative = pipe.encode_prompt(
            request.prompt,
            request.negative_prompt,
            do_classifier_free_guidance=request.guidance_scale > 1,
            max_sequence_length=model.transformer["max_text_seq_length"],
        )
    return {"prompt_embeds": positive, "negative_prompt_embeds": negative}


def sample(
    pipe: Any,
    model: Model,
    request: stages.Request,
    embeddings: dict[str, torch.Tensor | None],
    fps: Fraction,
    show: Callable[[torch.Tensor], None] | None = None,
) -> latent_files.Latents:
    """Generate the latents of a request, and return them as the content of a latent file.

    Args:
        pipe: the pipeline, loaded by the function of `prepared`.
        model, request: the model and the request.
        embeddings: those of the request's prompts, by the pipeline's argument names.
        fps: frames a second of the video.
        show: called after each step with its latents (N, T, C, H, W) on the host, as the VAE's decoder takes
            them: divided by the VAE's scaling factor. None for no call.
    """

    def unscaled_on_host(latents: torch.Tensor) -> torch.Tensor:
        return 1 / model.vae["scaling_factor"] * to_torch(latents)

    def show_step(pipe: Any, step: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        if show is not None:
            show(unscaled_on_host(kwargs["latents"]))
        return {}  # the pipeline replaces its variables by those in this dictionary: by none

    sampled = pipe(
        **_arguments(model, request),
        **embeddings,
        callback_on_step_end=show_step if show else None,
        output_type="latent",
    ).frames  # (1, T, C, H, W)
    # To get whole patches, the pipelines pad the latents before the first frame: the padding is cut off.
    padding = sampled.shape[1] - model.latent_frames(request.frames)
    return latent_files.Latents(
        # A latent file has (1, C, T, H, W), the channels before the frames.
        tensor=unscaled_on_host(sampled)[:, padding:].permute(0, 2, 1, 3, 4).contiguous(),
        config=dict(pipe.vae.config),
        model=model.name,
        fps=fps,
        num_frames=request.frames,
    )


def _arguments(model: Model, request: stages.Request) -> dict[str, Any]:
    """Return the arguments of the pipeline's call that its kind takes, without the embeddings."""
    arguments: dict[str, Any] = {
        "height": request.height,
        "width": request.width,
        "num_inference_steps": request.num_inference_steps,
        "guidance_scale": request.guidance_scale,
        "generator": torch.Generator("cpu").manual_seed(request.seed),
    }
    if model.kind in (TEXT, IMAGE):
        arguments["num_frames"] = request.frames
    if model.kind == IMAGE:
        arguments["image"] = video.read_image(str(request.image))
    if model.kind == VIDEO:
        arguments |= {"video": _input_frames(request), "strength": request.strength}
    if model.kind == CONTROL:
        arguments["control_video"] = _input_frames(request)
    return arguments


def _input_frames(request: stages.Request) -> list[Any]:
    """Return the first frames of a request's clip, resized to the request's size, as pictures."""
    from PIL import Image

    framing = video.Framing(request.height, request.width)
    frames = video.read_frames(str(request.video), framing, request.frames)
    # A frame is (1, 3, H, W) bytes, an image's array (H, W, 3).
    return [Image.fromarray(frame.squeeze(0).permute(1, 2, 0).numpy()) for frame in frames]
