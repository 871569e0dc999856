"""Contact sheets: frames of a video and of its reconstruction in one picture."""

from typing import Any

import torch
from PIL import Image

GAIN = 4
"""Factor by which differences are amplified: without it they are hardly seen."""


def amplified_difference(source: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """Return `GAIN` times the difference of two uint8 tensors, uint8."""
    # In int32: in uint8, differences below 0 and products above 255 would wrap around.
    return (GAIN * (source.int() - result.int()).abs()).clamp(max=255).to(source.dtype)


def contact_sheet(source: torch.Tensor, result: torch.Tensor, columns: int = 5) -> Any:
    """Return a Pillow image with a row of frames each for source, reconstruction and amplified difference.

    `source` and `result` are uint8 (1, 3, T, H, W). At most `columns` frames are shown, spread over them.
    """
    count = min(columns, source.shape[2])
    # Evenly spread numbers of frames, from the first to the last; `max` is for a sheet of one column.
    chosen = [round(i * (source.shape[2] - 1) / max(count - 1, 1)) for i in range(count)]
    rows = torch.cat([source, result, amplified_difference(source, result)])[:, :, chosen]
    # (rows, 3, columns, H, W) to (rows * H, columns * W, 3).
    return Image.fromarray(rows.permute(0, 3, 2, 4, 1).flatten(2, 3).flatten(0, 1).contiguous().numpy())
