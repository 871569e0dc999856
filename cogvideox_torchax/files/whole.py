"""Write files and directories whole or not at all.

An *output* is made under a hidden name beside its path, and is then moved to the path. A lock file beside it
keeps a second writer away. The next writer of the same output removes what a killed one has left.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import filelock

from cogvideox_torchax.files import faults

WRITING, LOCK = ".partial", ".lock"
"""Suffixes of the hidden names of an unfinished output, and of the lock on it."""


class OutputError(ValueError):
    """An output that cannot be written; the message says why."""


def refuse(path: str | Path, *checks: tuple[bool, str]) -> None:
    """Raise `OutputError` with the message of the first (is present, message) that is present."""
    prefixed = ((is_present, f"cannot write {path}: {message}") for is_present, message in checks)
    faults.refuse(*prefixed, error=OutputError)


def check_output(path: str | Path) -> Path:
    """Return the path, if a file or a directory can be written there; else raise `OutputError`."""
    path, parent = Path(path), resolved(path).parent  # the parent of a symbolic link's target
    refuse(
        path,
        (
            path.exists() and not (path.is_file() or path.is_dir()),
            "it is a device or a pipe; give a file",
        ),
        (not parent.is_dir(), f"there is no directory {parent}"),
        (not os.access(parent, os.W_OK), f"{parent} is not writable"),
    )
    return path


def check_file(path: str | Path) -> None:
    """Raise `OutputError` for a directory, and for a path at which no file can be written."""
    refuse(path, (check_output(path).is_dir(), "it is a directory"))


def make_directory(name: str | Path) -> Path:
    """Make and return a directory to write into; raise `OutputError` if it cannot be made."""
    path = Path(name)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot write into {path}: {error.strerror}") from error
    return path


def resolved(path: str | Path) -> Path:
    """Return the absolute path, with symbolic links followed."""
    return Path(os.path.realpath(path))


@contextlib.contextmanager
def whole_file(path: str | Path, *, directory: bool = False) -> Iterator[Path]:
    """Yield an empty temporary file that replaces `path` when the `with` block ends without an error.

    The block must write into the file, not replace it. If the block raises, `path` stays as it was. A
    symbolic link stays, and its target is replaced. With `directory` the output is a directory of files,
    which may replace an empty directory.

    Raises:
        OutputError: `path` cannot be written, or another run is writing it.
    """
    path = resolved(path)
    temporary = hidden(path, WRITING)
    with locked(path):
        _remove(temporary)  # what a killed run has left
        temporary.mkdir() if directory else temporary.touch()
        try:
            yield temporary
            # The data must be on the disk before the new name is: else a crash could leave an incomplete
            # output.
            for entry in (*(temporary.iterdir() if directory else ()), temporary):
                _sync(entry)
            os.replace(temporary, path)
        finally:
            _remove(temporary)


@contextlib.contextmanager
def locked(path: str | Path, whole: str | Path | None = None, *, wait: float = 0) -> Iterator[None]:
    """Lock an output for the `with` block, and wait for it so many seconds; raise as `whole_file` does.

    The message of the error names the output, or the `whole` of which it is a part.
    """
    place = hidden(check_output(path), LOCK)
    # Not of one thread: an output may be completed by another thread than began it.
    lock = filelock.FileLock(place, thread_local=False)
    try:
        # More than once, as its owner may just have removed the file of the lock.
        lock.acquire(timeout=max(wait, 0.1), poll_interval=0.02)
    except filelock.Timeout as error:
        raise OutputError(
            f"cannot write {whole or path}: another run is writing it; wait for it, or end it"
        ) from error
    try:
        yield
    finally:
        place.unlink(missing_ok=True)  # while it is locked: who has opened it sees that it is gone
        lock.release(force=True)  # however often it was acquired


def remove_leftover(path: str | Path) -> None:
    """Remove the lock of an output that is complete, which a run that was killed then may have left."""
    hidden(path, LOCK).unlink(missing_ok=True)


def hidden(path: str | Path, suffix: str) -> Path:
    """Return the hidden path `.NAMEsuffix` beside `path`."""
    path = resolved(path)
    return path.with_name(f".{path.name}{suffix}")


def _remove(path: Path) -> None:
    """Remove a file or a directory, if it is there."""
    shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Wait until a file, or a directory's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
