"""Contact sheets: frames of a video and of its reconstruction in one picture."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont, ImageOps

LABEL_HEIGHT, MARGIN = 16, 4
"""Pixels above a frame, for its label, and between frames."""
GAIN = 4
"""Factor by which differences are amplified: without it they are hardly seen."""


def amplified_difference(source: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """Return `GAIN` times the difference of two uint8 tensors, uint8."""
    # In int32: in uint8, differences below 0 and products above 255 would wrap around.
    return (GAIN * (source.int() - result.int()).abs()).clamp(max=255).to(source.dtype)


def contact_sheet(
    source: torch.Tensor,
    result: torch.Tensor,
    columns: int = 5,
    names: tuple[str, str] = ("source", "reconstruction"),
) -> Any:
    """Return a Pillow image with a row of frames each for source, reconstruction and amplified difference.

    `source` and `result` are uint8 (1, 3, T, H, W), and `names` label their rows. At most `columns` frames
    are shown, spread over the video.
    """
    count = min(columns, source.shape[2])
    # Evenly spread numbers of frames, from the first to the last; `max` is for a sheet of one column.
    chosen = [round(i * (source.shape[2] - 1) / max(count - 1, 1)) for i in range(count)]
    difference = amplified_difference(source, result)
    rows = dict(zip((*names, f"{GAIN} x difference"), (source, result, difference), strict=True))
    labels = {(name, t): f"{name}, frame {t}" for name in rows for t in chosen}
    height, width = source.shape[3:]
    # Pixels from one column's left edge to the next one's. A label may be wider than its frame.
    label_widths = (math.ceil(ImageFont.load_default().getlength(label)) for label in labels.values())
    pitch = max(width, *label_widths) + MARGIN
    sheet = Image.new("RGB", (count * pitch + MARGIN, len(rows) * (height + LABEL_HEIGHT + MARGIN)), "white")
    draw = ImageDraw.Draw(sheet)
    for row, (name, frames) in enumerate(rows.items()):
        for column, t in enumerate(chosen):
            left, top = MARGIN + column * pitch, row * (height + LABEL_HEIGHT + MARGIN)
            draw.text((left, top + 2), labels[name, t], fill="black")
            pixels = frames[0, :, t].permute(1, 2, 0).contiguous().numpy()  # (H, W, 3)
            sheet.paste(Image.fromarray(pixels), (left, top + LABEL_HEIGHT))
    return sheet


def stacked(sheets: Sequence[Any]) -> Any:
    """Return Pillow images one below the other, as one image on white."""
    width = max(sheet.width for sheet in sheets)
    below = [
        np.asarray(ImageOps.pad(sheet, (width, sheet.height), color="white", centering=(0, 0)))
        for sheet in sheets
    ]
    return Image.fromarray(np.concatenate(below))
