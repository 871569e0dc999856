"""Frames as bytes and as floats, and their differences, for torch tensors and for JAX and NumPy arrays."""

from typing import Any

GAIN = 4
"""Factor by which differences of frames are amplified: without it they are hardly seen."""


def to_uint8(frames: Any) -> Any:
    """Return frames in [-1, 1] as bytes, rounded as diffusers' `VideoProcessor` rounds them."""
    return _cast(((_cast(frames, "float32") * 0.5 + 0.5).clip(0.0, 1.0) * 255.0).round(), "uint8")


def from_uint8(pixels: Any, dtype: str) -> Any:
    """Return bytes as frames in [-1, 1], in the dtype of this name."""
    return _cast(_cast(pixels, "float32") / 127.5 - 1.0, dtype)


def amplified_difference(source: Any, result: Any) -> Any:
    """Return `GAIN` times the difference of two videos in bytes, as bytes."""
    # As floats: in bytes, differences below 0 and products above 255 would wrap around.
    amplified = GAIN * abs(_cast(source, "float32") - _cast(result, "float32"))
    return _cast(amplified.clip(0, 255), "uint8")


def _cast(x: Any, dtype: str) -> Any:
    if hasattr(x, "astype"):  # an array
        return x.astype(dtype)
    import torch

    return x.to(getattr(torch, dtype))
