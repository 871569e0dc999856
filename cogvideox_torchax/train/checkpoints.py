"""A training's state in one safetensors file, written whole or not at all, to resume it from."""

import json
from pathlib import Path
from typing import Any

import torch

from cogvideox_torchax.files import reports, tensors

FORMAT = "cogvideox-torchax-training/4"
NAME = "checkpoint.safetensors"

State = dict[str, torch.Tensor]
"""Plain tensors by their names: `weights/...`, `average/...`, `muon/3/momentum` and so on."""


def save(directory: Path, state: State, *, step: int, seconds: float, settings: dict[str, Any]) -> None:
    """Write the state after `step` steps, whole or not at all.

    Args:
        directory: directory of the training.
        state: the tensors.
        step: number of steps done.
        seconds: time that they took.
        settings: settings that a resumed training must have too.
    """
    tensors.save(
        state,
        directory / NAME,
        {
            "format": FORMAT,
            "step": str(step),
            "seconds": repr(seconds),
            "settings": json.dumps(settings, sort_keys=True),
        },
    )


def load(directory: Path, *, settings: dict[str, Any]) -> tuple[State, int, float]:
    """Return a checkpoint's tensors by name, the number of steps done, and the seconds that they took.

    Args:
        directory: directory of the training.
        settings: settings of the training that resumes, which the saved ones must equal.

    Raises:
        ValueError: no checkpoint there, one that is broken, or of a training with other settings.
    """
    path = directory / NAME
    if not path.is_file():
        raise ValueError(f"there is no {path} to resume: leave out --resume")
    metadata, state = tensors.load(path)
    if metadata.get("format") != FORMAT:
        raise ValueError(f"{path} is no checkpoint of this program, or of another version of it")
    try:
        saved = dict(reports.parse(metadata["settings"]))
        step, seconds = int(metadata["step"]), float(metadata["seconds"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is broken ({error!r}): give another directory") from error
    model = directory / "vae"  # written when a training ends
    advice = f", or begin another with its weights (--model {model}) in another directory"
    for name, value in json.loads(json.dumps(settings)).items():  # as saved: JSON makes lists of tuples
        if saved.get(name) != value:
            raise ValueError(
                f"{path} is of a training with {name} {saved.get(name)}, this one has {value}: give the same"
                f"{advice if model.is_dir() else ''}"
            )
    return state, step, seconds
