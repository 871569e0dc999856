"""The difference of two videos as a picture."""

import torch

GAIN = 4
"""Factor by which differences are amplified: without it they are hardly seen."""


def amplified_difference(source: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """Return `GAIN` times the difference of two uint8 tensors, uint8."""
    # In int32: in uint8, differences below 0 and products above 255 would wrap around.
    return (GAIN * (source.int() - result.int()).abs()).clamp(max=255).to(source.dtype)
