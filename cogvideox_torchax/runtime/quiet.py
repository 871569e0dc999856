"""Warnings and progress bars of other packages, kept off a user's terminal."""

import importlib
import importlib.util
import logging
import os
import warnings


def quiet_libraries(*, bars: bool = True) -> None:
    """Keep other packages' warnings off a user's terminal, and their progress bars too unless `bars`."""
    warnings.filterwarnings("ignore")
    for name in ("diffusers", "transformers", "jax", "torchax"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for name in ("diffusers", "transformers"):
        os.environ.setdefault(f"{name.upper()}_VERBOSITY", "error")  # sets the level when it is imported
        if not bars and importlib.util.find_spec(name):
            importlib.import_module(f"{name}.utils.logging").disable_progress_bar()
    if not bars:
        importlib.import_module("huggingface_hub.utils").disable_progress_bars()
