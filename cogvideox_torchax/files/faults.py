"""Checks of an input as a table: the key is the message about a fault, the value whether it is present."""

from typing import Any


def refuse(faults: dict[str, Any], error: type[Exception] = ValueError) -> None:
    """Raise `error` with the first message in `faults` whose value is true; return if none is."""
    for message, is_present in faults.items():
        if is_present:
            raise error(message)
