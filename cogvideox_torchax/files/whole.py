"""Write files and directories whole or not at all.

An *output* is made in a hidden directory beside its path, and is then moved to the path. The writer holds a
lock on the hidden directory, so no second writer uses it. A killed writer loses the lock, and the next writer
of the same output removes its directory.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from cogvideox_torchax.files import faults

WRITING, EXCHANGE = ".partial", ".exchange"
"""Suffixes of hidden directories: for an unfinished output, and for messages between its processes."""


class OutputError(ValueError):
    """An output that cannot be written; the message says why."""


class LockedError(OutputError):
    """An output that another run is writing."""


def refuse(path: str | Path, *checks: tuple[bool, str]) -> None:
    """Raise `OutputError` with the message of the first (is present, message) that is present."""
    prefixed = ((is_present, f"cannot write {path}: {message}") for is_present, message in checks)
    faults.refuse(*prefixed, error=OutputError)


def check_output(path: str | Path) -> Path:
    """Return the path, if a file or a directory can be written there; else raise `OutputError`."""
    path, parent = Path(path), resolved(path).parent  # the parent of a symbolic link's target
    try:
        is_special = path.exists() and not (path.is_file() or path.is_dir())
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}") from error
    refuse(
        path,
        (is_special, "it is a device or a pipe; give a file"),
        (not parent.is_dir(), f"there is no directory {parent}"),
        (not os.access(parent, os.W_OK), f"{parent} is not writable"),
    )
    return path


def check_file(path: str | Path) -> None:
    """Raise `OutputError` for a directory, and for a path at which no file can be written."""
    refuse(path, (check_output(path).is_dir(), "it is a directory"))


def make_directory(name: str | Path, purpose: str = "write into") -> Path:
    """Make and return a directory; if it cannot be made, raise `OutputError`, which names the `purpose`."""
    path = Path(name)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot {purpose} {path}: {error.strerror}") from error
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
        OutputError: `path` cannot be written.
        LockedError: another run is writing it.
    """
    path = resolved(path)
    # A killed run of several processes may have left the hidden directory through which they sent messages.
    remove_leftover(hidden(path, EXCHANGE))
    with reserved(path, WRITING) as (place, handle):  # the hidden directory, and its locked descriptor
        temporary = place / "output"
        temporary.mkdir() if directory else temporary.touch()
        yield temporary
        # On a file system without locks another run may have replaced the directory by its own: raise then.
        if not _is_still_at(handle, place):
            raise LockedError(f"cannot write {path}: another run writes it, and files cannot be locked there")
        # The data must be on the disk before the new name is: else a crash could leave an incomplete output.
        for entry in (*(temporary.iterdir() if directory else ()), temporary):
            _sync(entry)
        os.replace(temporary, path)
        # Not every file system can sync a directory's names; the output is whole without that.
        with contextlib.suppress(OSError):
            _sync(path.parent)


@contextlib.contextmanager
def reserved(path: str | Path, suffix: str) -> Iterator[tuple[Path, int]]:
    """Make and lock the empty directory `hidden(path, suffix)` for the `with` block; then remove it.

    Yield the directory and its open descriptor, which holds the lock. Raise as `whole_file` does.
    """
    place = hidden(check_output(path), suffix)
    try:
        handle = _make_locked(place, path)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}") from error
    try:
        yield place, handle
    finally:
        if _is_still_at(handle, place):  # else another run's directory is there
            shutil.rmtree(place, ignore_errors=True)
        os.close(handle)


def hidden(path: str | Path, suffix: str) -> Path:
    """Return the hidden path `.NAMEsuffix` beside `path`; a hash stands for a NAME that is too long."""
    path = resolved(path)
    name = f".{path.name}{suffix}"
    if len(os.fsencode(name)) > 255:  # bytes, the most for a name on Linux
        name = f".{hashlib.sha256(os.fsencode(path.name)).hexdigest()}{suffix}"
    return path.with_name(name)


def _make_locked(place: Path, path: str | Path) -> int:
    """Make and lock an empty directory for the output `path`; return its descriptor, which holds the lock."""
    # If another run has locked the directory, `lock` raises `LockedError`. Files of a killed run are removed.
    while True:
        place.mkdir(exist_ok=True)
        # Another run may remove the directory before it is opened, or before it is locked: then try again.
        with contextlib.suppress(FileNotFoundError), _opened(place) as handle:
            lock(handle, path)
            if _is_still_at(handle, place):
                if not any(place.iterdir()):
                    return os.dup(handle)  # `_opened` closes `handle`: the copy keeps the lock
                shutil.rmtree(place)  # it has the files of a killed run


def lock(handle: int, path: str | Path) -> None:
    """Lock an open file or directory for the output `path`; raise `LockedError` if another run has locked it.

    On a file system without locks nothing is locked.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise LockedError(
            f"cannot write {path}: another run is writing it; wait for it, or end it"
        ) from error
    except OSError:
        pass


def remove_leftover(place: Path) -> None:
    """Remove a hidden directory that a killed run has left, if there is one; leave it to a run that is alive.

    A run that is alive holds the lock, and `flock` then raises an `OSError`.
    """
    with contextlib.suppress(OSError), _opened(place) as handle:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(place)


def _is_still_at(handle: int, path: Path) -> bool:
    """Return whether the open file or directory `handle` is still the one at `path`."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(handle), path.stat())
    return False


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Open a file or a directory, but no symbolic link; yield its descriptor."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        yield handle
    finally:
        os.close(handle)


def _sync(path: Path) -> None:
    """Wait until a file, or a directory's list of names, is on the disk."""
    with _opened(path) as handle:
        os.fsync(handle)
