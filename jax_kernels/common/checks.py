"""Checks that several kernels share, of vectors that would be broadcast without an error."""

from typing import Any


def check_channels(kernel: str, channels: int, **vectors: Any) -> None:
    """Raise `ValueError` unless each vector, given by name, is None or has one number for each channel.

    Raises:
        ValueError: a vector of another shape than (channels,).
    """
    for name, vector in vectors.items():
        if vector is not None and vector.shape != (channels,):
            raise ValueError(
                f"{kernel} got a {name} of shape {vector.shape} for {channels} channels: it needs one number "
                f"for each, ({channels},)"
            )
