"""The tables of a training as curves: its losses and its held-out clips."""

import csv
from pathlib import Path
from typing import Any

import numpy as np

from cogvideox_torchax.files import reports

POINTS = 400
"""Most points of a drawn curve; each is the mean over an equal part of the steps."""


def curves(losses_table: Path, validation_table: Path) -> dict[str, Any]:
    """Return a training's losses, as means over equal parts of its steps, and the quality of held-out clips.

    Args:
        losses_table: CSV file with a line for each step.
        validation_table: CSV file with a line for each held-out clip and checkpoint.

    Returns:
        "losses": by column of the table, the list of its means; the mean "step" is the middle of a part.
        "validation": a list of the table's lines.
    """
    # A record for each step, with a field for each column; cut into at most `POINTS` parts.
    lines: Any = np.genfromtxt(losses_table, delimiter=",", names=True, ndmin=1, loose=False)
    parts = np.array_split(lines, min(POINTS, len(lines)))
    with validation_table.open(newline="") as file:
        validation = [
            {
                "step": int(line["step"]),
                "minutes": float(line["minutes"]),
                "clip": line["clip"],
                "psnr": round(float(line["psnr"]), 3),
                "ssim": round(float(line["ssim"]), 4),
            }
            for line in csv.DictReader(file)
        ]
    # Rounded to five digits, for a short file.
    losses = {name: [float(f"{part[name].mean():.5g}") for part in parts] for name in lines.dtype.names}
    return {"losses": losses, "validation": validation}


def draw(found: dict[str, Any], path: Path) -> None:
    """Draw the losses, and the PSNR of the held-out clips, over the steps, to an image file.

    Args:
        found: the result of `curves`: "losses", numbers by column, and "validation", a list of lines.
        path: path of the file.
    """
    figure, (left, right) = reports.pyplot().subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    losses = found["losses"]
    for name in ("loss", "l1"):
        left.plot(losses["step"], losses[name], label=name, linewidth=1)
    left.set(xlabel="step", ylabel="loss of a batch", yscale="log")
    left.legend()
    for clip in sorted({line["clip"] for line in found["validation"]}):
        lines = [line for line in found["validation"] if line["clip"] == clip]
        right.plot([line["step"] for line in lines], [line["psnr"] for line in lines], ".-", label=clip)
    for axes in (left, right):
        axes.xaxis.get_major_locator().set_params(integer=True)
    right.set(xlabel="step", ylabel="PSNR in dB, average of the weights")
    if found["validation"]:
        right.legend()  # without lines it would warn
    reports.save_figure(figure, path)
