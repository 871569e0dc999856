"""Write files and directories whole or not at all.

What is written lies meanwhile beside the output, under one hidden name that follows from the output's. The
writer holds a lock on it for as long as it lives: no second one writes there, and what a killed one has left
is removed by the next writer of the same output.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

WRITING, EXCHANGE = ".writing", ".exchange"
"""Suffixes of the hidden names: of an output in the making, and of what its processes tell each other."""


class OutputError(ValueError):
    """An output that cannot be written; the message says why."""


def check_output(path: str | Path) -> Path:
    """Return the path, if a file or a directory can be written there.

    Raises:
        OutputError: its directory is missing or cannot be written, or a device or a pipe is there.
    """
    path = Path(path)
    try:
        kind = stat.S_IFMT(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        kind = stat.S_IFREG
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}") from error
    if kind not in (stat.S_IFREG, stat.S_IFDIR):
        raise OutputError(f"cannot write {path}: it is a device or a pipe; give a file")
    parent = followed(path).parent
    if not parent.is_dir():
        raise OutputError(f"cannot write {path}: there is no directory {parent}")
    if not os.access(parent, os.W_OK):
        raise OutputError(f"cannot write {path}: {parent} is not writable")
    return path


def check_file(path: str | Path) -> Path:
    """Return the path, if a file that is no directory can be written there; raises as `check_output` does."""
    if check_output(path).is_dir():
        raise OutputError(f"cannot write {path}: it is a directory")
    return Path(path)


def followed(path: str | Path) -> Path:
    """Return the absolute path that links lead to."""
    return Path(os.path.realpath(path))


@contextlib.contextmanager
def whole_file(path: str | Path, *, directory: bool = False) -> Iterator[Path]:
    """Yield an empty file beside `path` that becomes it, on the disk, when the block ends well.

    Where the block raises, the file vanishes and what was at `path` stays. A link stays, and leads to what
    was written. The block writes into the file and puts no other in its place.

    Args:
        path: of the output.
        directory: whether it is a directory of files, which may replace an empty one.

    Raises:
        OutputError: `path` cannot be written, or another run is writing it.
    """
    path = followed(path)
    _remove_left(hidden(path, EXCHANGE))
    with _reserved(path, WRITING, directory=directory) as (place, handle):
        yield place
        if not _is_at(handle, place):
            raise OutputError(f"cannot write {path}: another run writes it, and files cannot be locked there")
        for written in (*(place.iterdir() if directory else ()), place):
            _sync(written)
        os.replace(place, path)
        with contextlib.suppress(OSError):  # the output is whole; not every file system syncs directories
            _sync(path.parent)


@contextlib.contextmanager
def exchange_of(path: str | Path) -> Iterator[None]:
    """Make the directory `hidden(path, EXCHANGE)`, for the processes that write `path` together.

    It is empty at first, and gone afterwards.

    Raises:
        OutputError: `path` cannot be written, or another run is writing it.
    """
    with _reserved(path, EXCHANGE, directory=True):
        yield


def hidden(path: str | Path, suffix: str) -> Path:
    """Return the name beside `path` for what belongs to it; a hash where the name has no room for more."""
    path = followed(path)
    name = f".{path.name}{suffix}"
    if len(os.fsencode(name)) > 255:
        name = f".{hashlib.sha256(os.fsencode(path.name)).hexdigest()}{suffix}"
    return path.with_name(name)


@contextlib.contextmanager
def _reserved(path: str | Path, suffix: str, *, directory: bool) -> Iterator[tuple[Path, int]]:
    """Yield the hidden name that belongs to `path`, something empty there, and the descriptor of its lock.

    Afterwards it is removed, where it is still there.
    """
    place = hidden(check_output(path), suffix)
    try:
        handle = _locked(place, directory=directory)
    except BlockingIOError as error:
        raise OutputError(
            f"cannot write {path}: another run is writing it; wait for it, or end it"
        ) from error
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}") from error
    try:
        yield place, handle
    finally:
        if _is_at(handle, place):
            _remove(place)
        os.close(handle)


def _locked(place: Path, *, directory: bool) -> int:
    """Return the descriptor of a locked file or directory, new or without what a killed run has left there.

    Raises:
        BlockingIOError: another run holds the lock.
    """
    while True:
        if directory:
            place.mkdir(exist_ok=True)
        flags = os.O_RDONLY if directory else os.O_CREAT | os.O_RDWR
        handle = os.open(place, flags | os.O_NOFOLLOW, 0o666)
        try:
            lock(handle)
        except BlockingIOError:
            os.close(handle)
            raise
        if _is_at(handle, place):  # else its run has ended since it was opened
            if not (any(place.iterdir()) if directory else place.stat().st_size):
                return handle
            _remove(place)
        os.close(handle)


def lock(handle: int) -> None:
    """Lock what is open for as long as it is; raise `BlockingIOError` where another run has locked it.

    On a file system without locks nothing is locked: who comes later takes the place of who was there.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if isinstance(error, BlockingIOError):
            raise


def _remove_left(place: Path) -> None:
    """Remove what a killed run has left; where files cannot be locked it stays, as its run may be alive."""
    with contextlib.suppress(OSError):
        handle = os.open(place, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(place)
        finally:
            os.close(handle)


def _is_at(handle: int, path: Path) -> bool:
    """Whether what is open still lies at a path."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(handle), path.stat())
    return False


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
