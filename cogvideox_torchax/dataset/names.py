"""Ids of clips, which are the paths of their files below an output directory."""

from collections import Counter
from collections.abc import Container, Iterable
from pathlib import Path, PurePosixPath
from typing import Any

LONGEST_NAME, LONGEST_PATH, MOST_PARTS = 255, 4095, 100
"""Most bytes of a file's name and of a path, by Linux's limits.h; most parts of a path.

The last is our own: `Path.mkdir` makes directories by recursion, which Python limits.
"""


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


def check_ids(names: Iterable[str], where: str) -> None:
    """Raise `ClipError` for an id that comes twice or is not valid; `where` begins the message."""
    for name, count in Counter(names).items():
        if count > 1:
            raise ClipError(f"{where} names {name} twice: give each clip an id of its own")
        check_id(name, f"{where}: ")


def check_file(
    name: str, path: Path, directory: Path, taken: Container[Path], *, is_directory: bool = False
) -> None:
    """Raise `ClipError` for the id of a clip whose output cannot be written.

    Args:
        name: the id.
        path: path of the clip's output, below the output directory.
        directory: the output directory.
        taken: the paths of all clips' outputs; `path` may not lie below one of them.
        is_directory: whether the output is a directory, not a file.
    """
    check_id(name)
    try:
        sizes = [len(part.encode()) for part in path.parts]  # bytes; raises for an id that UTF-8 cannot hold
    except UnicodeEncodeError as error:
        raise ClipError(f"got the id {name!r}: it is no UTF-8 ({error.reason})") from error
    # With a slash for each part, and as many bytes as the name of the temporary file beside the output needs.
    path_size = sum(sizes) + len(sizes) + LONGEST_NAME
    if max(sizes) > LONGEST_NAME or path_size > LONGEST_PATH or len(sizes) > MOST_PARTS:
        raise ClipError(
            f"its file would have a name of {max(sizes)} bytes, {LONGEST_NAME} are the most, and a path of "
            f"{sum(sizes)} in {len(sizes)} parts"
        )
    # The directories between `directory` and `path`; the last of `parents` is "." for `directory` itself.
    above = [directory / parent for parent in path.relative_to(directory).parents[:-1]]
    if path.is_file() if is_directory else path.is_dir():
        raise ClipError(f"its {path} is a {'file' if is_directory else 'directory'}: give it another id")
    if any(parent in taken or parent.is_file() for parent in above):
        raise ClipError(f"its file {path} would be below another file: give it another id")
