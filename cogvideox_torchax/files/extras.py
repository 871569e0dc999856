"""Packages that come with an extra of this project."""

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def needing(extra: str, purpose: str, refused: type[Exception] = ValueError) -> Iterator[None]:
    """Raise the error class `refused`, with the command to install, if an import in the block fails.

    Args:
        extra: the extra of this project that installs the packages.
        purpose: the beginning of the message, such as "drawing needs matplotlib".
        refused: the class of the error.
    """
    try:
        yield
    except ImportError as error:
        raise refused(f"{purpose}: pip install 'cogvideox-torchax[{extra}]'") from error
