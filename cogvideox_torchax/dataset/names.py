"""Ids of clips, which are the paths of their files below an output directory."""

from pathlib import PurePosixPath
from typing import Any


class ClipError(ValueError):
    """A clip that cannot be encoded or decoded; the message says why."""


def check_id(name: Any, where: str = "") -> None:
    """Raise `ClipError` unless an id is a relative path that stays within a directory.

    It must have its shortest spelling, so that two ids cannot name one file. `where` begins the message.
    """
    path = PurePosixPath(name) if isinstance(name, str) else PurePosixPath()
    is_other = path.is_absolute() or ".." in path.parts or path.as_posix() != name or "\0" in name
    if not path.parts or is_other:
        raise ClipError(f"{where}got the id {name!r}: a path that must not lead out of the output is wanted")
