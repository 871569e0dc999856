"""The stages of a generation as files: embeddings of the prompt (text), and the final latents.

Each is a safetensors file, from which the generation can be resumed. It is written whole or not at all. The
text stage also holds the request and the model's fingerprint.
"""

import json
import reprlib
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

import torch

from cogvideox_torchax.files import reports, tensors as tensor_files

FORMAT = "cogvideox-torchax-stage/1"
TEXT, LATENTS = "text", "latents"
"""Names of the stages."""

TEXT_FIELDS = ("prompt", "negative_prompt", "dtype")
"""Fields of a request that the embeddings of its prompt depend on."""


class StageError(ValueError):
    """A stage's file that generation cannot resume from; the message gives the reason and the remedy."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request to generate a video.

    Attributes:
        prompt: text that the video shall follow.
        negative_prompt: text that guidance leads away from; "" for none.
        image, video: paths of an image or a clip that conditions the video, or None.
        frames, height, width: size of the video, in frames and pixels.
        num_inference_steps: denoising steps.
        guidance_scale: scale of classifier-free guidance; 1 or less for none.
        strength: share of the steps, and so of the noise, that an input video goes through.
        seed: seed of the noise.
        dtype: name of the dtype of weights and latents.
    """

    prompt: str
    negative_prompt: str = ""
    image: str | None = None
    video: str | None = None
    frames: int
    height: int
    width: int
    num_inference_steps: int = 50
    guidance_scale: float = 6.0
    strength: float = 0.8
    seed: int = 0
    dtype: str = "bfloat16"


FIELDS = [field.name for field in fields(Request)]
"""Names of a request's fields."""


@dataclass(frozen=True)
class Stage:
    """The content of the text stage's file.

    Attributes:
        tensors: the embeddings of the prompts, by the pipeline's argument names.
        request: the request that the embeddings were made for.
    """

    tensors: dict[str, torch.Tensor]
    request: Request


def option(name: str) -> str:
    """Return the command line's option for a field of a request, such as "--num-inference-steps"."""
    return f"--{name.replace('_', '-')}"


def request_from_options(options: dict[str, Any], size: tuple[int, int, int], text: Stage | None) -> Request:
    """Return the request of a command line's options, completed by defaults.

    Args:
        options: options by name, a request's fields among them; an option that was not given is None.
        size: default of (frames, height, width).
        text: the text stage to resume from, whose prompts and dtype are used; None without one.

    Raises:
        ValueError: no prompt, or options that contradict the stage.
    """
    from_options = {name: options[name] for name in FIELDS if options[name] is not None}
    # The embeddings of the stage depend on these fields, so options cannot change them.
    from_stage = {} if text is None else {name: getattr(text.request, name) for name in TEXT_FIELDS}
    for name, value in from_stage.items():
        if from_options.get(name, value) != value:
            raise ValueError(
                f"the stage was made with {option(name)} {value!r}, got {from_options[name]!r}: "
                f"leave {option(name)} out"
            )
    if "prompt" not in {**from_options, **from_stage}:
        raise ValueError("a prompt is needed: give --prompt")
    default_size = dict(zip(("frames", "height", "width"), size, strict=True))
    request = Request(**{**default_size, **from_options, **from_stage})
    guided = request.guidance_scale > 1
    # A stage has embeddings of the negative prompt only if it was made with guidance.
    if text is not None and guided != ("negative_prompt_embeds" in text.tensors):
        raise ValueError(
            f"the text stage was made {'without' if guided else 'with'} guidance, got --guidance-scale "
            f"{request.guidance_scale}: generate from the prompt again"
        )
    return request


def path_of(directory: str | Path, name: str) -> Path:
    """Return the path of a stage's file; `name` is `TEXT` or `LATENTS`."""
    return Path(directory) / f"{name}.safetensors"


def save_text(
    directory: str | Path, tensors: dict[str, torch.Tensor | None], *, request: Request, model: str
) -> None:
    """Write the text stage, whole or not at all, in a directory that exists.

    Args:
        directory: directory of the stages.
        tensors: embeddings, by the pipeline's argument names; those that are None are left out.
        request: the request that they were made for.
        model: fingerprint of the model that made them.
    """
    embeddings = {key: value for key, value in tensors.items() if value is not None}
    metadata = {"format": FORMAT, "stage": TEXT, "request": json.dumps(asdict(request)), "model": model}
    tensor_files.save(embeddings, path_of(directory, TEXT), metadata)


def load_text(directory: str | Path, model: str) -> Stage:
    """Read the text stage that the model of a fingerprint (`description.Model.fingerprint`) has made.

    Raises:
        StageError: no such file, or one that is truncated, broken, no stage or another model's.
    """
    path = path_of(directory, TEXT)
    if not path.is_file():
        raise StageError(f"there is no stage {path}: generate with --save-stages {path.parent} first")
    metadata, tensors = tensor_files.load(path, StageError)
    if metadata.get("format") != FORMAT or metadata.get("stage") != TEXT:
        raise StageError(
            f"{path} is no {TEXT!r} stage of this program: generate with --save-stages {directory}"
        )
    try:
        request, maker = _request(reports.parse(metadata["request"])), metadata["model"]
    except (KeyError, TypeError, ValueError) as error:
        raise StageError(f"{path} is broken ({error}): delete it, and generate from the prompt") from error
    if maker != model:
        raise StageError(f"{path} is of another model: give the --model that it was made with")
    return Stage(tensors, request)


def _request(values: dict[str, Any]) -> Request:
    """Return the request that has these values of a stage's JSON.

    Raises:
        TypeError: a field is missing, unknown or of another type.
    """
    request = Request(**values)  # raises for an unknown field
    # The defaults of `Request` are for a user's request: a file has all fields.
    if missing := sorted({*FIELDS} - values.keys()):
        raise TypeError(f"it has no {missing[0]}")
    for name, kind in get_type_hints(Request).items():  # a dataclass does not check the types itself
        value = getattr(request, name)
        if not isinstance(value, (int | float) if kind is float else kind):  # JSON may have 6 for 6.0
            raise TypeError(f"its {name} is {reprlib.repr(value)}")
    return request
