"""Refusals that several kernels share: what would be broadcast in silence."""

from typing import Any


def check_channels(kernel: str, channels: int, **vectors: Any) -> None:
    """Raise `ValueError` for vectors, by name, that are not None and have not one number a channel.

    Raises:
        ValueError: a vector of another shape than (channels,).
    """
    for name, vector in vectors.items():
        if vector is not None and vector.shape != (channels,):
            raise ValueError(
                f"{kernel} got a {name} of shape {vector.shape} for {channels} channels: it needs one number "
                f"for each, ({channels},)"
            )
