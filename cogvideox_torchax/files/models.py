"""Models saved in their own packages' format, wherever their weights are."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cogvideox_torchax.runtime import on_host, without_torchax


def saved_from_host(save_pretrained: Callable[..., None]) -> Callable[..., None]:
    """A model's inherited `save_pretrained`, given the model as it would be in PyTorch.

    The files get the mode that the umask leaves them: safetensors gives its own to their owner alone.
    """

    @functools.wraps(save_pretrained)
    def save(model: Any, save_directory: str | Path, *args: Any, **options: Any) -> None:
        directory = Path(save_directory)
        before = {file: file.stat().st_mtime_ns for file in directory.glob("*.safetensors")}
        without_torchax(save_pretrained, on_host(model), save_directory, *args, **options)
        config = directory / "config.json"
        for file in directory.glob("*.safetensors") if config.exists() else ():
            if file.stat().st_mtime_ns != before.get(file):  # written by this call
                file.chmod(config.stat().st_mode)

    return save
