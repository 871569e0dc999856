"""Tables of faults: the checks of one input, each a message and whether the fault is there."""

from typing import Any


def refuse(faults: dict[str, Any], error: type[Exception] = ValueError) -> None:
    """Raise `error` with the first message in `faults` whose value is true; return if none is."""
    for message, is_present in faults.items():
        if is_present:
            raise error(message)
