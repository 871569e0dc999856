"""Other packages kept quiet on a user's terminal."""

import logging
import warnings


def quiet_libraries() -> None:
    """Keeps other packages' warnings and download chatter off a user's terminal."""
    warnings.filterwarnings("ignore")
    for name in ("diffusers", "transformers", "jax", "torchax"):
        logging.getLogger(name).setLevel(logging.ERROR)
