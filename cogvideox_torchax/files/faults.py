"""Checks of an input as a table of pairs: whether a fault is present, and the message about it."""

from typing import Any


def refuse(*faults: tuple[Any, str], error: type[Exception] = ValueError) -> None:
    """Raise `error` with the message of the first (is present, message) in `faults` that is present."""
    for is_present, message in faults:
        if is_present:
            raise error(message)
