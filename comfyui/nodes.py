"""Nodes for ComfyUI: CogVideoX's pipelines and their VAE on torchax.

One node loads a pipeline, and one samples the latents of a video from a prompt. The other nodes load, tile
and run the VAE alone.

An IMAGE is (frames, height, width, channels), float32 in [0, 1]; a LATENT is {"samples": (N, C, T, H, W)},
the VAE's own, not multiplied by `scaling_factor`.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch

DTYPES = ["bfloat16", "float32", "float16"]
PIPELINE = "COGVIDEOX_TORCHAX_PIPELINE"
"""The type of a loaded pipeline in ComfyUI, which connects inputs and outputs of one type."""
VAE = "COGVIDEOX_TORCHAX_VAE"
"""The type of a loaded VAE in ComfyUI."""
SCHEDULERS = {
    "of the model": None,
    "CogVideoXDDIM": "CogVideoXDDIMScheduler",
    "CogVideoXDPMScheduler": "CogVideoXDPMScheduler",
}
"""By a name in the sampler's menu, a class of diffusers. The names are those of ComfyUI-CogVideoXWrapper."""
PREVIEW_PIXELS = 512
"""The longest side of a preview, in pixels."""


class Node:
    """Attributes that ComfyUI requires of every node.

    `FUNCTION` names the method that ComfyUI calls with the inputs that `INPUT_TYPES` declares. The method
    returns a tuple with an item for each of `RETURN_TYPES`.
    """

    CATEGORY = "CogVideoX/torchax"


class LoadPipeline(Node):
    """A pipeline of a directory or a hub id, on JAX's devices, and its VAE for the other nodes."""

    FUNCTION = "load"
    RETURN_TYPES = (PIPELINE, VAE)
    RETURN_NAMES = ("pipeline", "vae")

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        devices = {"default": 1, "min": 1, "max": 256}
        return {
            "required": {
                "model": ("STRING", {"default": "zai-org/CogVideoX-5b"}),
                "dtype": (DTYPES, {"default": "bfloat16"}),
                "dp": ("INT", {**devices, "tooltip": "2 runs the two passes of guidance side by side"}),
                "tp": (
                    "INT",
                    {**devices, "min": 0, "tooltip": "devices that share a pass; 0 for all, for cfg 1"},
                ),
            },
            "optional": {
                "offload": (
                    "BOOLEAN",
                    {"default": False, "tooltip": "keep the weights on the host between uses"},
                )
            },
        }

    def load(self, model: str, dtype: str, dp: int, tp: int, offload: bool = False) -> tuple[Any, Any]:
        from cogvideox_torchax import describe, load_pipeline, make_mesh

        heads = describe(model, clip=False).transformer["num_attention_heads"]
        mesh = make_mesh(dp, tp or None, heads=heads) if dp * tp != 1 else None
        pipeline = load_pipeline(model, mesh=mesh, offload=offload, dtype=getattr(torch, dtype))
        return (pipeline, pipeline.vae)


class Sample(Node):
    """Samples the latents of a video from a prompt and, with an image-to-video model, its first image.

    The bar counts the steps that the host has sent to the device, which are at most one more than the device
    has computed. An interrupt stops the node after a step.
    """

    FUNCTION = "sample"
    RETURN_TYPES = ("LATENT",)
    RETURN_NAMES = ("samples",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        size = {"min": 16, "max": 4096, "step": 16}
        text = {"multiline": True, "default": ""}
        largest_seed = 2**64 - 1
        return {
            "required": {
                "pipeline": (PIPELINE,),
                "prompt": ("STRING", text),
                "negative_prompt": ("STRING", {**text, "tooltip": "is not used if cfg is 1 or less"}),
                "num_frames": ("INT", {"default": 49, "min": 1, "max": 1025, "step": 4}),
                "height": ("INT", {"default": 480, **size}),
                "width": ("INT", {"default": 720, **size}),
                "steps": ("INT", {"default": 50, "min": 1, "max": 1000}),
                "cfg": (
                    "FLOAT",
                    {"default": 6.0, "min": 0.0, "max": 30.0, "step": 0.1, "tooltip": "the guidance scale"},
                ),
                "scheduler": (list(SCHEDULERS), {"default": "of the model"}),
                "seed": (
                    "INT",
                    {"default": 0, "min": 0, "max": largest_seed, "control_after_generate": True},
                ),
            },
            "optional": {
                "image": ("IMAGE", {"tooltip": "for an image-to-video model; it is resized to the video"})
            },
        }

    def sample(
        self,
        pipeline: Any,
        prompt: str,
        negative_prompt: str,
        num_frames: int,
        height: int,
        width: int,
        steps: int,
        cfg: float,
        scheduler: str,
        seed: int,
        image: torch.Tensor | None = None,
    ) -> tuple[dict[str, torch.Tensor]]:
        _check_image(pipeline, image)
        _check_size(pipeline, num_frames, height, width)
        first_image = {} if image is None else {"image": _picture(image[0, ..., :3])}
        advance = _progress(steps)

        def on_step_end(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            advance(1)
            return {}  # the pipeline keeps its tensors

        with _scheduled(pipeline, scheduler):
            sampled = pipeline(
                **first_image,
                prompt=prompt,
                negative_prompt=negative_prompt,
                num_frames=num_frames,
                height=height,
                width=width,
                num_inference_steps=steps,
                guidance_scale=cfg,
                generator=torch.Generator("cpu").manual_seed(seed),
                max_sequence_length=pipeline.transformer.config["max_text_seq_length"],
                callback_on_step_end=on_step_end,
                output_type="latent",
            ).frames
        # CogVideoX 1.5 pads the latents (N, T, C, H, W) in front, to whole patches: the padding is cut off.
        padding = sampled.shape[1] - ((num_frames - 1) // pipeline.vae_scale_factor_temporal + 1)
        return ({"samples": _unscaled(sampled.cpu(), padding, pipeline.vae)},)


class LoadVAE(Node):
    """A VAE of a directory or a hub id, on JAX's devices."""

    FUNCTION = "load"
    RETURN_TYPES = (VAE,)
    RETURN_NAMES = ("vae",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "model": ("STRING", {"default": "zai-org/CogVideoX-5b"}),
                "dtype": (DTYPES, {"default": "bfloat16"}),
                "devices": (
                    "INT",
                    {"default": 1, "min": 1, "max": 256, "tooltip": "a frame's width is split over them"},
                ),
            }
        }

    def load(self, model: str, dtype: str, devices: int) -> tuple[Any]:
        from cogvideox_torchax import AutoencoderKLCogVideoX, make_mesh, port

        vae = AutoencoderKLCogVideoX.from_pretrained(model, subfolder="vae", dtype=getattr(torch, dtype))
        return (port(vae, mesh=make_mesh(1, devices) if devices > 1 else None).to("jax"),)


class TileVAE(Node):
    """A copy of a VAE that works in tiles, for frames too large for a device; the VAE stays as it is."""

    FUNCTION = "tile"
    RETURN_TYPES = (VAE,)
    RETURN_NAMES = ("vae",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        size = {"min": 64, "max": 4096, "step": 8}
        return {
            "required": {
                "vae": (VAE,),
                "height": ("INT", {"default": 240, **size}),
                "width": ("INT", {"default": 360, **size}),
            }
        }

    def tile(self, vae: Any, height: int, width: int) -> tuple[Any]:
        tiled = copy.copy(vae)
        tiled.enable_tiling(tile_sample_min_height=height, tile_sample_min_width=width)
        return (tiled,)


class Encode(Node):
    """Encodes the frames of one video to the mean of their latents, a chunk at a time."""

    FUNCTION = "encode"
    RETURN_TYPES = ("LATENT",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"vae": (VAE,), "pixels": ("IMAGE",)}}

    def encode(self, vae: Any, pixels: torch.Tensor) -> tuple[dict[str, torch.Tensor]]:
        frames = (pixels[..., :3].movedim(-1, 1) * 2 - 1).to(vae.dtype)  # (T, 3, H, W), without alpha
        total = len(frames)
        advance = _progress(total)
        posteriors = vae.encode_stream(_counted(frames, advance), num_frames=total)
        latents = torch.cat([posterior.mode() for posterior in posteriors], dim=2)
        return ({"samples": latents.float()},)


class Decode(Node):
    """Decodes latents to frames; the last frame of each chunk is shown while the next chunk is computed."""

    FUNCTION = "decode"
    RETURN_TYPES = ("IMAGE",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"vae": (VAE,), "samples": ("LATENT",)}}

    def decode(self, vae: Any, samples: dict[str, Any]) -> tuple[torch.Tensor]:
        latents = samples["samples"]
        if latents.ndim != 5:
            raise ValueError(
                f"got latents of shape {tuple(latents.shape)}: a video's are (N, C, T, H, W); encode it with "
                "this VAE"
            )
        # The sampler of ComfyUI-CogVideoXWrapper, and it alone, names a number of padding frames.
        if "additional_frames" in samples:
            latents = _unscaled(latents, samples["additional_frames"], vae)
        # Each latent frame becomes several frames, but the first of an odd number becomes one.
        alone = latents.shape[2] % 2
        advance = _progress(alone + (latents.shape[2] - alone) * vae.config["temporal_compression_ratio"])
        decoded = []
        for chunk in vae.decode_stream(latents.to(vae.dtype)):
            images = (chunk.float() / 2 + 0.5).clamp(0, 1).movedim(1, -1)  # N t H W C
            advance(images.shape[1], images[0, -1])
            decoded.append(images)
        return (torch.cat(decoded, dim=1).flatten(0, 1),)  # an IMAGE has the frames of all videos in one axis


def _check_image(pipeline: Any, image: torch.Tensor | None) -> None:
    """Raise `ValueError` unless the pipeline samples from what is given: one image, or none."""
    from diffusers.pipelines.cogvideo.pipeline_cogvideox import CogVideoXPipeline
    from diffusers.pipelines.cogvideo.pipeline_cogvideox_image2video import CogVideoXImageToVideoPipeline

    name, takes_image = type(pipeline).__name__, isinstance(pipeline, CogVideoXImageToVideoPipeline)
    if not takes_image and not isinstance(pipeline, CogVideoXPipeline):
        raise ValueError(
            f"got a {name}: the node samples from a prompt, or from a prompt and an image; load a model of "
            "CogVideoXPipeline or CogVideoXImageToVideoPipeline"
        )
    if image is None and takes_image:
        raise ValueError(f"got no image: a {name} starts from one; connect it to image")
    if image is not None and not takes_image:
        raise ValueError(
            f"got an image: a {name} takes none; disconnect it, or load an image-to-video model such as "
            "zai-org/CogVideoX-5b-I2V"
        )
    if image is not None and len(image) != 1:
        raise ValueError(f"got {len(image)} images: a video starts from one; choose it by ImageFromBatch")


def _check_size(pipeline: Any, num_frames: int, height: int, width: int) -> None:
    """Raise `ValueError` for a size that the model cannot have; the pipeline itself checks for patches."""
    multiple = pipeline.vae_scale_factor_temporal
    if (num_frames - 1) % multiple:
        # Of an even number of latent frames the VAE makes more frames than were asked for: both are odd.
        fewer = num_frames - (num_frames - 1) % (2 * multiple)
        raise ValueError(
            f"got num_frames={num_frames}: the model generates {fewer} or {fewer + 2 * multiple} of them"
        )
    config, scale = pipeline.transformer.config, pipeline.vae_scale_factor_spatial
    if config["use_learned_positional_embeddings"]:
        learned_height, learned_width = config["sample_height"] * scale, config["sample_width"] * scale
        if (height, width) != (learned_height, learned_width):
            raise ValueError(
                f"got height={height}, width={width}: the model has learned its positions, and takes "
                f"height={learned_height}, width={learned_width} alone"
            )


@contextlib.contextmanager
def _scheduled(pipeline: Any, name: str) -> Iterator[None]:
    """Let a pipeline have one of `SCHEDULERS` for a `with` block, and afterwards its own again.

    ComfyUI runs one node at a time, so that no other node samples with this scheduler.
    """
    own, chosen = pipeline.scheduler, SCHEDULERS[name]
    if chosen is not None:
        import diffusers

        pipeline.scheduler = getattr(diffusers, chosen).from_config(own.config)
    try:
        yield
    finally:
        pipeline.scheduler = own


def _unscaled(latents: torch.Tensor, padding: int, vae: Any) -> torch.Tensor:
    """Return a pipeline's latents (N, T, C, H, W) as the VAE has them: (N, C, T, H, W), in float32.

    The first `padding` latent frames are left out.
    """
    return latents[:, padding:].movedim(2, 1).float() / vae.config["scaling_factor"]


def _counted(frames: torch.Tensor, advance: Callable[..., None]) -> Iterator[torch.Tensor]:
    """Yield frames (T, C, H, W) one by one, each (1, C, H, W), and call `advance(1)` after each."""
    for frame in frames:
        yield frame[None]
        advance(1)


def _progress(total: int) -> Callable[..., None]:
    """Return `advance(count, shown=None)`, which moves ComfyUI's bar by `count` of `total` frames or steps.

    It shows the frame `shown` (H, W, C), if there is one, and raises ComfyUI's exception if the user has
    interrupted the run. Outside ComfyUI it does nothing.
    """
    try:
        from comfy.model_management import (  # pyright: ignore[reportMissingImports]
            throw_exception_if_processing_interrupted,
        )
        from comfy.utils import ProgressBar  # pyright: ignore[reportMissingImports]
    except ImportError:
        return lambda count, shown=None: None
    bar, done = ProgressBar(total), 0

    def advance(count: int, shown: torch.Tensor | None = None) -> None:
        nonlocal done
        throw_exception_if_processing_interrupted()
        done += count
        preview = None if shown is None else ("JPEG", _picture(shown), PREVIEW_PIXELS)
        bar.update_absolute(done, total, preview)

    return advance


def _picture(frame_HWC: torch.Tensor) -> Any:
    """Return the Pillow image of a frame in [0, 1]."""
    from PIL import Image

    return Image.fromarray((frame_HWC.clamp(0, 1) * 255).round().to(torch.uint8).numpy())


NODE_CLASS_MAPPINGS = {
    "CogVideoXTorchaxLoadPipeline": LoadPipeline,
    "CogVideoXTorchaxSample": Sample,
    "CogVideoXTorchaxLoadVAE": LoadVAE,
    "CogVideoXTorchaxTileVAE": TileVAE,
    "CogVideoXTorchaxEncode": Encode,
    "CogVideoXTorchaxDecode": Decode,
}
NODE_DISPLAY_NAME_MAPPINGS = {
    "CogVideoXTorchaxLoadPipeline": "Load CogVideoX pipeline (torchax)",
    "CogVideoXTorchaxSample": "Sample video from prompt, CogVideoX (torchax)",
    "CogVideoXTorchaxLoadVAE": "Load CogVideoX VAE (torchax)",
    "CogVideoXTorchaxTileVAE": "Tile CogVideoX VAE (torchax)",
    "CogVideoXTorchaxEncode": "Encode video, CogVideoX VAE (torchax)",
    "CogVideoXTorchaxDecode": "Decode video, CogVideoX VAE (torchax)",
}
