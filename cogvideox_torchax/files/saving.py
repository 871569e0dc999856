"""`save_video`: the frames that a pipeline returns, in any of their forms, to a file."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cogvideox_torchax import runtime
from cogvideox_torchax.files import faults, video
from cogvideox_torchax.files.video import VideoError

ROUNDING = 0.5 / 255
"""Largest distance at which a float may lie outside of [0, 1]: it still rounds to the byte 0 or 255."""


def save_video(frames: Any, path: str | Path, fps: Fraction | float) -> None:
    """Write the video that a pipeline returned: an .mp4 or .gif file, or a directory of PNG pictures.

    The output is complete or absent. An .mp4 needs the extra `video`.

    Args:
        frames: `frames` or `frames[0]` of a pipeline's result, of every `output_type` but "latent": Pillow
            images; arrays (T, H, W, 3) or (1, T, H, W, 3); or torch tensors (T, 3, H, W) or (1, T, 3, H, W),
            also on JAX. Values are floats in [0, 1], or uint8.
        path: of the file or the directory.
        fps: frames a second. CogVideoX makes 8, CogVideoX 1.5 makes 16.

    Raises:
        VideoError: frames of another type, shape or range, or several videos.
        OutputError: an output that cannot be written.
    """
    frames_THWC = _one_video(_array(frames), original=frames)
    # A `Fraction` can be made of Python's numbers, and of no NumPy scalar.
    with video.writing(path, fps if isinstance(fps, Fraction) else float(fps)) as write:
        for pixels in frames_THWC:
            if pixels.dtype != np.uint8:
                # Not Python's 255, with which NumPy would compute float16 in float16, and so round twice.
                pixels = (pixels.clip(0, 1) * np.float32(255)).round().astype(np.uint8)
            frame = torch.from_numpy(np.ascontiguousarray(pixels)).permute(2, 0, 1)
            write(frame[None, :, None])  # (3, H, W) as (1, 3, 1, H, W)


def _array(frames: Any) -> np.ndarray:
    """Return frames, or a list of them, as a NumPy array on the host with the channels last."""
    if isinstance(frames, torch.Tensor):
        host = runtime.to_torch(frames).detach().cpu()
        host = host.float() if host.is_floating_point() else host  # NumPy has no bfloat16
        # Torch's frames (..., 3, H, W) as (..., H, W, 3). `_one_video` refuses tensors with fewer axes.
        return np.moveaxis(host.numpy(), -3, -1) if host.ndim >= 3 else host.numpy()
    if isinstance(frames, list | tuple):
        arrays = [_array(frame) for frame in frames]
        if len({array.shape for array in arrays}) > 1:
            raise VideoError(f"got frames of several sizes: {sorted({array.shape for array in arrays})}")
        return np.stack(arrays) if arrays else np.empty(0)
    # Pillow's images have the method `convert`, arrays do not.
    return np.asarray(frames.convert("RGB") if hasattr(frames, "convert") else frames)


def _one_video(array: np.ndarray, *, original: Any) -> np.ndarray:
    """Return the video in an array, as (T, H, W, 3); raise `VideoError` unless it holds one video."""
    # The error names the type and shape of `original`, the user's argument, from which the array was made.
    kind, shape = type(original).__name__, tuple(getattr(original, "shape", array.shape))
    is_float = np.issubdtype(array.dtype, np.floating)
    video_THWC = array[0] if array.ndim == 5 and len(array) else array
    faults.refuse(
        (
            not is_float and array.dtype != np.uint8,
            f"got {kind} of {array.dtype}: give a pipeline's frames, images, floats or uint8",
        ),
        (
            array.ndim == 5 and len(array) != 1,
            f"got {shape[0] if shape else 0} videos, {kind} of shape {shape}: save frames[0] and so on alone",
        ),
        (
            video_THWC.ndim != 4 or video_THWC.shape[-1] != 3 or not video_THWC.size,
            f"got {kind} of shape {shape}: give images, arrays (T, H, W, 3) or torch tensors (T, 3, H, W); "
            "of a VAE's (1, 3, T, H, W), frames[0].transpose(0, 1) / 2 + 0.5; decode latents first",
        ),
        error=VideoError,
    )
    low, high = video_THWC.min(), video_THWC.max()
    # `ROUNDING` allows values slightly outside of [0, 1], which still round to 0 or 255. NaN is refused, as
    # every comparison with it is False.
    if is_float and not (low >= -ROUNDING and high <= 1 + ROUNDING):
        raise VideoError(
            f"got values from {low:.3g} to {high:.3g}, floats in [0, 1] are wanted: of [-1, 1] give "
            "frames / 2 + 0.5, of [0, 255] uint8"
        )
    return video_THWC
