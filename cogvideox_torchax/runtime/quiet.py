"""Warnings and progress bars of other packages, kept off a user's terminal."""

import importlib
import importlib.util
import logging
import os
import warnings


def quiet_libraries(*, bars: bool = True) -> None:
    """Keep other packages' warnings off a user's terminal; `bars` is whether progress bars stay on it."""
    warnings.filterwarnings("ignore")
    for name in ("diffusers", "transformers", "jax", "torchax", "torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for name in ("diffusers", "transformers"):
        # The package sets its level by this variable when it is imported.
        os.environ.setdefault(f"{name.upper()}_VERBOSITY", "error")
        if not bars and importlib.util.find_spec(name):
            importlib.import_module(f"{name}.utils.logging").disable_progress_bar()
    if not bars:
        importlib.import_module("huggingface_hub.utils").disable_progress_bars()
