"""The stages of a generation as files: embeddings of the prompt, and the final latents.

Each is a safetensors file that holds the request and the model's fingerprint, is written whole or not at all,
and is enough to resume the generation from.
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
    """A stage that cannot be resumed from; the message gives the reason and the remedy."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request to generate a video; the model gives the size, if the user does not.

    Attributes:
        prompt, negative_prompt: texts; no negative one is "".
        image, video: paths of what conditions it, or None.
        frames, height, width: size of the video, in frames and pixels.
        num_inference_steps: denoising steps.
        guidance_scale: scale of classifier-free guidance; 1 or less for none.
        strength: share of the steps, and so of the noise, that an input video goes through.
        seed: seed of the noise.
        dtype: dtype of weights and latents.
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
        path: path of the file.
        tensors: the prompts' embeddings, by the pipeline's argument names.
        request, model: the request that they were made for, and its model's `generate.Model.fingerprint`.
    """

    path: Path
    tensors: dict[str, torch.Tensor]
    request: Request
    model: str

    def check_model(self, model: str) -> None:
        if self.model != model:
            raise StageError(f"{self.path} is of another model: give the --model that it was made with")


def option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def request_from_options(options: dict[str, Any], size: tuple[int, int, int], text: Stage | None) -> Request:
    """Return the request of a command line's options, completed by defaults.

    Args:
        options: options by name, a request's fields among them; an option that was not given is None.
        size: default of (frames, height, width).
        text: the text stage to resume from, whose prompts and dtype are used; None for none.

    Raises:
        ValueError: no prompt, or options that contradict the stage.
    """
    given = {name: options[name] for name in FIELDS if options[name] is not None}
    # Fields that the stage's embeddings fix.
    fixed = {} if text is None else {name: getattr(text.request, name) for name in TEXT_FIELDS}
    for name, value in fixed.items():
        if given.get(name, value) != value:
            raise ValueError(
                f"the stage was made with {option(name)} {value!r}, got {given[name]!r}: "
                f"leave {option(name)} out"
            )
    if "prompt" not in {**given, **fixed}:
        raise ValueError("a prompt is needed: give --prompt")
    sizes = dict(zip(("frames", "height", "width"), size, strict=True))
    request = Request(**{**sizes, **given, **fixed})
    guided = request.guidance_scale > 1
    if text is not None and guided != ("negative_prompt_embeds" in text.tensors):
        raise ValueError(
            f"the text stage was made {'without' if guided else 'with'} guidance, got --guidance-scale "
            f"{request.guidance_scale}: generate from the prompt again"
        )
    return request


def path_of(directory: str | Path, name: str) -> Path:
    return Path(directory) / f"{name}.safetensors"


def save_text(
    directory: str | Path, tensors: dict[str, torch.Tensor | None], *, request: Request, model: str
) -> None:
    """Write the text stage, whole or not at all, in a directory that exists; leave out None values."""
    given = {key: value for key, value in tensors.items() if value is not None}
    metadata = {"format": FORMAT, "stage": TEXT, "request": json.dumps(asdict(request)), "model": model}
    tensor_files.save(given, path_of(directory, TEXT), metadata)


def load_text(directory: str | Path) -> Stage:
    """Read the text stage.

    Raises:
        StageError: no such file, or one that is truncated, broken or no stage.
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
        return Stage(path, tensors, _request(reports.parse(metadata["request"])), metadata["model"])
    except (KeyError, TypeError, ValueError) as error:
        raise StageError(f"{path} is broken ({error}): delete it, and generate from the prompt") from error


def _request(values: dict[str, Any]) -> Request:
    """Return the request of a JSON object's values; raise `TypeError` for other fields or types of values."""
    request = Request(**values)
    if missing := sorted({*FIELDS} - values.keys()):  # the defaults are for requests, not for files
        raise TypeError(f"it has no {missing[0]}")
    for name, kind in get_type_hints(Request).items():  # a dataclass does not check the types itself
        value = getattr(request, name)
        if not isinstance(value, int | float if kind is float else kind):  # JSON has 6 for 6.0
            raise TypeError(f"its {name} is {reprlib.repr(value)}")
    return request
