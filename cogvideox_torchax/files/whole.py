"""Files written whole or not at all.

What is written lies meanwhile in a directory beside the output, whose lock its run holds for as long as it
lives. The next run of the same output removes those that nobody holds.
"""

import contextlib
import fcntl
import os
import re
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

SILENCE = 24 * 3600
"""Seconds without a write after which another machine's run, whose lock may not show here, counts as dead."""


class OutputError(ValueError):
    """An output that cannot be written; the message says why."""


def check_output(path: str | Path) -> Path:
    """The path, if a file can be written there.

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
    """The path, if a file that is no directory can be written there; raises as `check_output` does."""
    if check_output(path).is_dir():
        raise OutputError(f"cannot write {path}: it is a directory")
    return Path(path)


def followed(path: str | Path) -> Path:
    """The absolute path that links lead to."""
    return Path(os.path.realpath(path))


@contextlib.contextmanager
def whole_file(path: str | Path) -> Iterator[Path]:
    """A temporary path beside `path` that becomes it when the block ends well, and vanishes when it does not.

    A file gets the mode that the umask leaves it, whatever the one that its writer gave it. A link stays, and
    leads to what was written.
    """
    path = followed(check_output(path))
    with workplace(path) as directory:
        temporary = directory / path.name
        yield temporary
        if temporary.is_file():
            temporary.chmod(stat.S_IMODE(_lock_of(directory).stat().st_mode))
        if path.is_dir() and temporary.is_dir():
            path.rmdir()
        os.replace(temporary, path)


@contextlib.contextmanager
def workplace(path: str | Path) -> Iterator[Path]:
    """A directory beside `path` for this run alone, gone afterwards.

    Those that killed runs of the same output have left are removed. A run that lives keeps its own: several
    may write one output, and the last to end is the one that stays.

    Raises:
        OutputError: the directory of `path` is missing or cannot be written.
    """
    path = followed(check_output(path))
    _remove_left(path)
    try:
        directory, lock = _locked_directory(path)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}") from error
    try:
        yield directory
    finally:
        os.close(lock)  # first: NFS keeps a file that is open, and the directory with it
        shutil.rmtree(directory, ignore_errors=True)


def _marks(path: Path) -> tuple[str, str]:
    """What the names of its directories begin and end with; between them are eight characters of chance."""
    name = os.fsencode(path.name)[:120].decode(errors="ignore")  # a name has room for 255 bytes
    return f".{name}.writing-", f"-{socket.gethostname()}"


def _remove_left(path: Path) -> None:
    prefix, suffix = _marks(path)
    _remove_all_left(path.parent, re.escape(prefix), suffix)


def remove_left_in(directory: str | Path) -> None:
    """Removes what killed runs have left beside any output in a directory; a live run keeps its own."""
    _remove_all_left(Path(directory), r"\..+\.writing-", f"-{socket.gethostname()}")


def _remove_all_left(directory: Path, prefix: str, suffix: str) -> None:
    pattern = re.compile(prefix + r"[a-z0-9_]{8}-.+")
    with contextlib.suppress(OSError):  # a directory that cannot be listed
        for entry in directory.iterdir():
            if pattern.fullmatch(entry.name):
                with contextlib.suppress(OSError):  # another user's, gone meanwhile, or no locks here
                    _remove_if_left(entry, elsewhere=not entry.name.endswith(suffix))


def _remove_if_left(directory: Path, *, elsewhere: bool) -> None:
    written = max(entry.stat().st_mtime for entry in (directory, *directory.iterdir()))
    if elsewhere and time.time() - written < SILENCE:
        return
    lock = _open_lock(directory)
    try:
        if not _take(lock, directory):
            return
        shutil.rmtree(directory, ignore_errors=True)
    finally:
        os.close(lock)
    directory.rmdir()  # still there on NFS, empty now; not empty if its run has begun meanwhile


def _locked_directory(path: Path) -> tuple[Path, int]:
    """A new directory, and the descriptor that holds its lock.

    Where the file system knows no locks none is held, and `_remove_left` leaves every directory alone.
    """
    prefix, suffix = _marks(path)
    while True:
        directory = Path(tempfile.mkdtemp(prefix=prefix, suffix=suffix, dir=path.parent))
        with contextlib.suppress(FileNotFoundError):  # another run found it unlocked, and removed it
            lock = _open_lock(directory)
            try:
                held = _take(lock, directory)
            except FileNotFoundError:
                held = False
            except OSError:
                held = True
            if held:
                return directory, lock
            os.close(lock)


def _lock_of(directory: Path) -> Path:
    return directory / directory.name


def _open_lock(directory: Path) -> int:
    return os.open(_lock_of(directory), os.O_CREAT | os.O_RDWR, 0o666)


def _take(lock: int, directory: Path) -> bool:
    """Whether the lock could be taken, and is still the directory's, which may have been removed."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return os.path.samestat(os.fstat(lock), _lock_of(directory).stat())
