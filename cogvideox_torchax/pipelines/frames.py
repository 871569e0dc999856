"""Frames as a pipeline returns them: pictures, whose bytes are made on the device, or floats.

Axis letters: N videos, C channels, T frames, H rows, W columns.
"""

from typing import Any

import jax
import jax.numpy as jnp
import torch
from diffusers.video_processor import VideoProcessor
from PIL import Image

from cogvideox_torchax import runtime


@runtime.torch_view
@jax.jit
def to_bytes(frames: jax.Array) -> jax.Array:
    """Return frames in [-1, 1], tensors on JAX, as the bytes that diffusers makes of them."""
    bits = jnp.finfo(frames.dtype)
    halved = frames.astype(jnp.float32) * 0.5 + 0.5
    # diffusers computes this in the dtype of the frames, to which XLA would not round a value in between.
    rounded = jax.lax.reduce_precision(halved, bits.nexp, bits.nmant)
    return jnp.round(rounded.clip(0, 1) * 255).astype(jnp.uint8)


class FrameProcessor(VideoProcessor):
    """diffusers' video processor, which takes frames on JAX, and bytes; its results are diffusers' own."""

    def postprocess_video(self, video: torch.Tensor, output_type: str = "np", **kwargs: Any) -> Any:
        """Return videos (N, C, T, H, W) in [-1, 1], or as bytes, as pictures ("pil") or floats in [0, 1]."""
        is_usual = self.config["do_normalize"] and not kwargs
        if output_type == "pil" and runtime.on_jax(video) and is_usual:
            video = to_bytes(video)
        video = runtime.to_torch(video)
        if video.dtype == torch.uint8:
            return [[_picture(frame_CHW) for frame_CHW in video_CTHW.unbind(1)] for video_CTHW in video]
        if output_type not in ("np", "pt") or not is_usual:
            return super().postprocess_video(video, output_type, **kwargs)
        axes = (0, 2, 3, 4, 1) if output_type == "np" else (0, 2, 1, 3, 4)
        frames = video.permute(axes).clone(memory_format=torch.contiguous_format)
        frames.mul_(0.5).add_(0.5).clamp_(0, 1)
        return frames if output_type == "pt" else frames.float().numpy()


def _picture(frame_CHW: torch.Tensor) -> Image.Image:
    return Image.merge("RGB", [Image.fromarray(plane_HW.numpy()) for plane_HW in frame_CHW])
