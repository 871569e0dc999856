"""A pipeline described by its configs, without its weights: what conditions its videos, and their sizes."""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from cogvideox_torchax.files.models import INDEX, locate, read_json

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

CONFIGS = (INDEX, "*/config.json", "*/scheduler_config.json")
"""Patterns of the files of a pipeline that are read before its weights are loaded."""

VAE_CONFIG = "vae/config.json"


class RequestError(ValueError):
    """A request that the model cannot serve; the message says which requests it can serve."""


@dataclass(frozen=True)
class Model:
    """A description of a pipeline, whose weights are not loaded yet.

    Attributes:
        name: a directory or a hub id.
        kind: `TEXT`, `IMAGE`, `VIDEO` or `CONTROL`.
        transformer, vae, scheduler: the configs of its parts.
    """

    name: str
    kind: str
    transformer: dict[str, Any]
    vae: dict[str, Any]
    scheduler: dict[str, Any]

    @property
    def fingerprint(self) -> str:
        """A hash of the configs, by which a saved stage tells whether it was made with this model.

        Keys that begin with "_" are left out, such as diffusers' version: they do not change the model.
        """
        configs = {
            part: {key: value for key, value in getattr(self, part).items() if not key.startswith("_")}
            for part in ("transformer", "vae", "scheduler")
        }
        return hashlib.sha256(json.dumps(configs, sort_keys=True, default=str).encode()).hexdigest()[:16]

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


def describe(name: str, *, image: bool, clip: bool) -> Model:
    """Return the description of a pipeline, of which only the configs are read.

    Args:
        name: a directory or a hub id.
        image, clip: whether an image or a clip conditions the video.

    Raises:
        ModelError: no pipeline there, or one that lacks a config.
        RequestError: a pipeline that needs another input, or does not take the given one.
    """
    index = config_of(name, INDEX)  # model_index.json, which names the class of the pipeline and of each part
    kind = _kind(name, str(index.get("_class_name")), image, clip)
    transformer = config_of(name, "transformer/config.json")
    scheduler = config_of(name, "scheduler/scheduler_config.json")
    # The index has (library, class) for each part. diffusers loads that class, even where the part's own
    # config names another: so this config gets that name.
    _library, scheduler["_class_name"] = index["scheduler"]
    return Model(name, kind, transformer, config_of(name, VAE_CONFIG), scheduler)


def config_of(name: str, file: str) -> dict[str, Any]:
    """Return a pipeline's JSON file, one of `CONFIGS`; raise `ModelError` if it cannot be read."""
    return read_json(locate(name, files=CONFIGS) / file)


def _kind(name: str, class_name: str, image: bool, clip: bool) -> str:
    """Return the kind of a pipeline by its class and its inputs; raise `RequestError` if they do not fit."""
    if class_name not in CLASSES.values():
        raise RequestError(f"{name} is a {class_name}: it takes one of {', '.join(CLASSES.values())}")
    # Pipelines of the kinds TEXT and VIDEO have the same parts. So the index may name the class of either,
    # and the kind depends on whether there is a clip.
    kind_by_class = {CLASSES[IMAGE]: IMAGE, CLASSES[CONTROL]: CONTROL}
    kind = kind_by_class.get(class_name, VIDEO if clip else TEXT)
    # The kind IMAGE needs an image, and no other kind takes one. The kind CONTROL needs a clip.
    if (kind == IMAGE) != image or (kind == CONTROL and not clip):
        takes = {IMAGE: "an image", CONTROL: "a control video"}.get(kind, "no image")
        raise RequestError(
            f"{name} is a {class_name}: it takes {takes}: change the request, or give another model"
        )
    if image and clip:
        raise RequestError("got both an image and a video: give one")
    return kind


def check_size(model: Model, frames: int, height: int, width: int) -> None:
    """Raise `RequestError` or `ValueError` for a size that the model's patches or positions do not fit."""
    # Imported here, as it imports diffusers, which takes seconds.
    from cogvideox_torchax.pipelines import port

    port.check_size(height, width, model.transformer, model.spatial_compression_ratio)
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
        # The message suggests two sizes: the latent frames rounded down to whole patches, but not to 0, and
        # one patch more. Both are given as numbers of frames.
        rounded_down = max(latent_frames // patch_frames * patch_frames, patch_frames)
        fewer, more = ((n - 1) * scale + 1 for n in (rounded_down, rounded_down + patch_frames))
        raise RequestError(f"got {frames} frames: {model.name} generates {fewer} or {more} of them")
