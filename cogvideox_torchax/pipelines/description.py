"""A pipeline described by its configs, without its weights: what conditions its videos, and their sizes."""

import hashlib
import json
import math
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from cogvideox_torchax.files.models import INDEX, locate, read_json
from cogvideox_torchax.vae.checkpoint import WEIGHTS_STEM, first_rows, weight_files

TEXT, IMAGE, VIDEO, CONTROL = "text", "image", "video", "control"
"""Kinds of pipelines, by what conditions the video besides the prompt: nothing, an image or a clip.

A `VIDEO` pipeline changes a clip: it adds noise, and denoises it. A `CONTROL` pipeline follows a clip.
"""

CLASSES = {
    TEXT: "CogVideoXPipeline",
    IMAGE: "CogVideoXImageToVideoPipeline",
    VIDEO: "CogVideoXVideoToVideoPipeline",
    CONTROL: "CogVideoXFunControlPipeline",
}
"""The name of diffusers' class of each kind of pipeline."""

FILES = (INDEX, "*/config.json", "*/scheduler_config.json", "tokenizer/*")
"""Patterns of the files of a pipeline that are read before its weights are loaded."""

WEIGHTS = {"text_encoder": "model", "transformer": WEIGHTS_STEM, "vae": WEIGHTS_STEM}
"""Parts of a pipeline that have weights, and the stems with which their weight files' names begin."""


class RequestError(ValueError):
    """A request that the model cannot serve; the message says which requests it can serve."""


@dataclass(frozen=True)
class Model:
    """A description of a pipeline, whose weights are not loaded yet.

    Attributes:
        name: a directory or a hub id.
        directory: where its files are.
        kind: `TEXT`, `IMAGE`, `VIDEO` or `CONTROL`.
        transformer, vae, scheduler: the configs of its parts.
    """

    name: str
    directory: Path
    kind: str
    transformer: dict[str, Any]
    vae: dict[str, Any]
    scheduler: dict[str, Any]

    def sha256(self) -> str:
        """Return a hash of configs, the tokenizer, and the first row of each weight.

        Keys that begin with "_" are left out, such as diffusers' version: they do not change the model. A hub
        id's files are downloaded.

        Raises:
            ModelError: a file of weights is missing or broken.
        """
        weights = [f"{part}/{stem}*.safetensors*" for part, stem in WEIGHTS.items()]
        directory = locate(self.name, files=[*FILES, *weights])
        configs = {
            part: {key: value for key, value in getattr(self, part).items() if not key.startswith("_")}
            for part in ("transformer", "vae", "scheduler")
        }
        digest = hashlib.sha256(json.dumps(configs, sort_keys=True, default=str).encode())
        for part, stem in WEIGHTS.items():
            for file in weight_files(directory / part, stem=stem):
                for piece in first_rows(file):
                    digest.update(piece)
        for file in sorted(file for file in directory.glob("tokenizer/*") if file.is_file()):
            digest.update(file.read_bytes())
        return digest.hexdigest()

    @property
    def fps(self) -> Fraction:
        """The frames a second that the model was trained with, by its model card."""
        return Fraction(16 if self.transformer.get("patch_size_t") else 8)  # CogVideoX 1.5 alone joins frames

    @property
    def spatial_compression_ratio(self) -> int:
        """Pixels along a frame's side for each latent pixel: all VAE levels but the last halve the side."""
        return 2 ** (len(self.vae["block_out_channels"]) - 1)

    @property
    def temporal_scale(self) -> int:
        """Frames for each latent frame but the first latent frame, which stands for a single frame."""
        return int(self.vae["temporal_compression_ratio"])

    def latent_frames(self, frames: int) -> int:
        """Return the number of latent frames of a video of so many frames."""
        return (frames - 1) // self.temporal_scale + 1

    @property
    def size(self) -> tuple[int, int, int]:
        """(frames, height, width) of the videos that the model was made for, in frames and pixels."""
        config = self.transformer
        return (
            config["sample_frames"],
            config["sample_height"] * self.spatial_compression_ratio,
            config["sample_width"] * self.spatial_compression_ratio,
        )


def describe(name: str, *, image: bool | None = None, clip: bool) -> Model:
    """Return the description of a pipeline, of which only the configs are read.

    Args:
        name: a directory or a hub id.
        image, clip: whether an image or a clip conditions the video. For many videos `image` is None, and
            `check_inputs` checks each of them.

    Raises:
        ModelError: no pipeline there, or one that lacks a config.
        RequestError: a pipeline that needs another input, or does not take the given one.
    """
    directory = locate(name, files=FILES)
    index = read_json(
        directory / INDEX
    )  # model_index.json, which names the class of the pipeline and of each part
    class_name = str(index.get("_class_name"))
    if class_name not in CLASSES.values():
        raise RequestError(f"{name} is a {class_name}: it takes one of {', '.join(CLASSES.values())}")
    # Pipelines of the kinds TEXT and VIDEO have the same parts. So the index may name the class of either,
    # and the kind depends on whether there is a clip.
    kind = {CLASSES[IMAGE]: IMAGE, CLASSES[CONTROL]: CONTROL}.get(class_name, VIDEO if clip else TEXT)
    transformer = read_json(directory / "transformer/config.json")
    scheduler = read_json(directory / "scheduler/scheduler_config.json")
    # The index has (library, class) for each part. diffusers loads that class, even where the part's own
    # config names another: so this config gets that name.
    _library, scheduler["_class_name"] = index["scheduler"]
    model = Model(name, directory, kind, transformer, read_json(directory / "vae/config.json"), scheduler)
    if image is not None:
        check_inputs(model, image=image, clip=clip)
    return model


def check_inputs(model: Model, *, image: bool, clip: bool) -> None:
    """Raise `RequestError` if a model needs another input than an image or a clip, or does not take it."""
    takes = {IMAGE: "an image", CONTROL: "a control video", VIDEO: "a video"}.get(model.kind, "no image")
    if (image, clip) != (model.kind == IMAGE, model.kind in (VIDEO, CONTROL)):
        raise RequestError(
            f"{model.name} is a {CLASSES[model.kind]}, and takes {takes} beside the prompt: got "
            f"{' and '.join(['an image'] * image + ['a video'] * clip) or 'none'}; give what it takes, or "
            "another model"
        )


def check_size(model: Model, frames: int, height: int, width: int) -> None:
    """Raise `RequestError` or `ValueError` for a size that the model's patches or positions do not fit."""
    # Imported here, as it imports diffusers, which takes seconds.
    from cogvideox_torchax.pipelines import call

    call.check_size(height, width, model.transformer, model.spatial_compression_ratio)
    # Unlike sinusoidal or rotary positions, learned ones cannot be computed for another size.
    if model.transformer["use_learned_positional_embeddings"] and (height, width) != model.size[1:]:
        raise RequestError(
            f"got height={height}, width={width}: {model.name} has learned its positions, "
            f"and takes height={model.size[1]}, width={model.size[2]} alone"
        )
    # A patch may span several latent frames, and their number has to be a multiple of that. Pipelines that
    # take no clip pad the latents to whole patches themselves: for them any number of latent frames will do.
    patch_frames = 1 if model.kind in (TEXT, IMAGE) else model.transformer["patch_size_t"] or 1
    # A video is one frame, for the first latent frame, and `scale` frames for each other latent frame.
    scale = model.temporal_scale
    latent_frames = model.latent_frames(frames)
    if frames < 1 or (frames - 1) % scale or latent_frames % patch_frames:
        # The message suggests two sizes. Of an even number of latent frames the decoder makes more frames
        # than were asked for: so both numbers are odd, unless patches need even ones.
        step = math.lcm(2, patch_frames)
        fewer = patch_frames + max(latent_frames - patch_frames, 0) // step * step
        counts = (fewer, fewer + step)
        asked = " or ".join(str((count - 1) * scale + 1) for count in counts)
        made = "" if fewer % 2 else f" (and makes {' or '.join(str(count * scale) for count in counts)})"
        raise RequestError(f"got {frames} frames: {model.name} generates {asked} of them{made}")
