"""Checks that several kernels share, of vectors that would be broadcast without an error."""

from typing import Any


def check_channels(kernel: str, channels: int, **vectors: Any) -> None:
    """Raise `ValueError` unless each vector is None or has one number for each channel.

    Args:
        kernel: name of the function that checks its arguments, for the message.
        channels: number of channels.
        vectors: weights, biases and the like, each by the name of its argument.

    Raises:
        ValueError: a vector of another shape than (channels,).
    """
    for name, vector in vectors.items():
        if vector is not None and vector.shape != (channels,):
            raise ValueError(
                f"{kernel} got a {name} of shape {vector.shape} for {channels} channels: it needs one number "
                f"for each, ({channels},)"
            )
