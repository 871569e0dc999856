"""Ids of clips, which are the paths of their files below an output directory."""

import re
from collections.abc import Container, Iterable
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

LONGEST_NAME, LONGEST_PATH, MOST_PARTS = 255, 4095, 100
"""Most bytes of a file's name and of a path, by Linux's limits.h; most parts of a path.

The last is our own: `Path.mkdir` makes directories by recursion, which Python limits.
"""
WORK = "work"
"""Folder of clips that wait for their shard, in a data set's directory."""
_WAITING = re.compile(WORK + r"/\d{8}(\.safetensors)?")
"""Paths of these clips: a number in eight digits, as `DatasetDirectory.clip_path` names them."""


class ClipError(ValueError):
    """A clip that cannot be encoded or decoded; the message says why."""


def is_waiting(path: PurePath) -> bool:
    """Return whether a path in a data set's directory is of a clip whose shard is not written yet."""
    return _WAITING.fullmatch(path.as_posix()) is not None


def check_id(name: Any) -> None:
    """Raise `ClipError` unless an id is a relative path below an output directory, in its shortest spelling.

    "a//b" and "./a" are refused, and so are the names of temporary files of clips whose shard is not written
    yet (`is_waiting`).
    """
    path = PurePosixPath(name) if isinstance(name, str) else PurePosixPath()
    if not path.parts or path.is_absolute() or ".." in path.parts or path.as_posix() != name:
        raise ClipError(f"got the id {name!r}: a path that must not lead out of the output is wanted")
    if "\0" in name or is_waiting(path):
        raise ClipError(f"got the id {name!r}: no output can have that name")


def check_ids(names: Iterable[str], where: str) -> None:
    """Raise `ClipError` for an id that comes twice or is not valid; `where` begins the message."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ClipError(f"{where} names {name} twice: give each clip an id of its own")
        try:
            check_id(name)
        except ClipError as error:
            raise ClipError(f"{where}: {error}") from error
        seen.add(name)


def check_file(name: str, path: Path, directory: Path, taken: Container[Path]) -> None:
    """Raise `ClipError` for an id or a file of a clip that cannot be written.

    Args:
        name: the id.
        path: path of the file.
        directory: the output directory, which the file is in or below.
        taken: the files of all clips, none of which may be a directory of `path`.
    """
    try:
        name.encode()
        sizes = [len(part.encode()) for part in path.parts]
    except UnicodeEncodeError as error:
        raise ClipError(f"got the id {name!r}: it is no UTF-8 ({error.reason})") from error
    if max(sizes) > LONGEST_NAME:
        raise ClipError(f"its file would have a name of {max(sizes)} bytes, {LONGEST_NAME} are the most")
    # `LONGEST_NAME` bytes are left for the name of the temporary file beside it.
    if sum(sizes) + len(sizes) + LONGEST_NAME > LONGEST_PATH or len(sizes) > MOST_PARTS:
        raise ClipError(f"its file would have a path of {sum(sizes)} bytes in {len(sizes)} parts: too long")
    # The directories between the output and the file; the last of `parents` is the output itself.
    above = [directory / parent for parent in path.relative_to(directory).parents[:-1]]
    if path.is_dir() or any(parent in taken or parent.is_file() for parent in above):
        raise ClipError(
            f"its file {path} would lie below another file, or is a directory: give it another id"
        )
