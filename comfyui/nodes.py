"""Nodes for ComfyUI: CogVideoX's VAE on torchax: load, tile, encode, decode with a preview.

An IMAGE is (frames, height, width, channels), float32 in [0, 1]; a LATENT is {"samples": (N, C, T, H, W)},
the VAE's own, not multiplied by `scaling_factor`.
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch

DTYPES = ["bfloat16", "float32", "float16"]
VAE = "COGVIDEOX_TORCHAX_VAE"
"""The type of a loaded VAE in ComfyUI, which connects inputs and outputs of one type."""
PREVIEW_PIXELS = 512
"""The longest side of a preview, in pixels."""


class Node:
    """Attributes that ComfyUI requires of every node.

    `FUNCTION` names the method that ComfyUI calls with the inputs that `INPUT_TYPES` declares. The method
    returns a tuple with an item for each of `RETURN_TYPES`.
    """

    CATEGORY = "CogVideoX/torchax"


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
        from cogvideox_torchax import make_mesh
        from cogvideox_torchax.backends import backend

        mesh = make_mesh(1, devices) if devices > 1 else None
        return (backend("torchax").load(model, getattr(torch, dtype), mesh).vae,)


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

    def decode(self, vae: Any, samples: dict[str, torch.Tensor]) -> tuple[torch.Tensor]:
        latents = samples["samples"]
        if latents.ndim != 5:
            raise ValueError(
                f"got latents of shape {tuple(latents.shape)}: a video's are (N, C, T, H, W); encode it with "
                "this VAE"
            )
        from cogvideox_torchax.vae import chunks

        doublings = chunks.temporal_steps(vae.config["temporal_compression_ratio"])
        advance = _progress(chunks.decoded_length(latents.shape[2], doublings))
        decoded = []
        for chunk in vae.decode_stream(latents.to(vae.dtype)):
            images = (chunk.float() / 2 + 0.5).clamp(0, 1).movedim(1, -1)  # N t H W C
            advance(images.shape[1], images[0, -1])
            decoded.append(images)
        return (torch.cat(decoded, dim=1).flatten(0, 1),)  # an IMAGE has the frames of all videos in one axis


def _counted(frames: torch.Tensor, advance: Callable[..., None]) -> Iterator[torch.Tensor]:
    """Yield frames (T, C, H, W) one by one, each (1, C, H, W), and call `advance(1)` after each."""
    for frame in frames:
        yield frame[None]
        advance(1)


def _progress(total: int) -> Callable[..., None]:
    """Return `advance(count, shown=None)`, which moves ComfyUI's bar by `count` of `total` frames.

    It shows the frame `shown` (H, W, C), if there is one. Outside ComfyUI it does nothing.
    """
    try:
        from comfy.utils import ProgressBar  # pyright: ignore[reportMissingImports]
    except ImportError:
        return lambda count, shown=None: None
    bar, done = ProgressBar(total), 0

    def advance(count: int, shown: torch.Tensor | None = None) -> None:
        nonlocal done
        done += count
        preview = None if shown is None else ("JPEG", _picture(shown), PREVIEW_PIXELS)
        bar.update_absolute(done, total, preview)

    return advance


def _picture(frame_HWC: torch.Tensor) -> Any:
    """Return the Pillow image of a frame in [0, 1]."""
    from PIL import Image

    return Image.fromarray((frame_HWC * 255).round().to(torch.uint8).numpy())


NODE_CLASS_MAPPINGS = {
    "CogVideoXTorchaxLoadVAE": LoadVAE,
    "CogVideoXTorchaxTileVAE": TileVAE,
    "CogVideoXTorchaxEncode": Encode,
    "CogVideoXTorchaxDecode": Decode,
}
NODE_DISPLAY_NAME_MAPPINGS = {
    "CogVideoXTorchaxLoadVAE": "Load CogVideoX VAE (torchax)",
    "CogVideoXTorchaxTileVAE": "Tile CogVideoX VAE (torchax)",
    "CogVideoXTorchaxEncode": "Encode video, CogVideoX VAE (torchax)",
    "CogVideoXTorchaxDecode": "Decode video, CogVideoX VAE (torchax)",
}
