"""Bytes and floats of frames, for torch tensors and JAX arrays alike."""

from typing import Any


def to_uint8(frames: Any) -> Any:
    """Return frames in [-1, 1] as bytes, rounded as diffusers' VideoProcessor does."""
    return _cast(((_cast(frames, "float32") * 0.5 + 0.5).clip(0.0, 1.0) * 255.0).round(), "uint8")


def from_uint8(pixels: Any, dtype: str) -> Any:
    """Return bytes as frames in [-1, 1], of a dtype by its name."""
    return _cast(_cast(pixels, "float32") / 127.5 - 1.0, dtype)


def _cast(x: Any, dtype: str) -> Any:
    """Cast a torch tensor or a JAX array to a dtype by its name."""
    if hasattr(x, "astype"):  # an array
        return x.astype(dtype)
    import torch

    return x.to(getattr(torch, dtype))
