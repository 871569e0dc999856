"""An output directory of many clips: a file or a directory for each, and a list of those that failed.

A clip whose output exists is done. Outputs are complete or absent (`files/whole.py`), so a run may be killed
at any time, and the same command completes its work.
"""

import contextlib
import json
import os
import reprlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cogvideox_torchax.files import reports
from cogvideox_torchax.files.whole import WRITING, OutputError, hidden, remove_leftover, reserved


@dataclass(frozen=True)
class ProcessShard:
    """The part of one of several processes in the work: process `index` has every `count`-th clip."""

    index: int = 0
    count: int = 1


class OutputDirectory:
    """One process's part of the work on a directory.

    A subclass sets `FAILED`, the name of the file with a line for each clip that failed, and adds the clips.

    Args:
        directory: made if it does not exist; `OutputError` if it cannot be written.
        shard: the part of this process.
        retry: whether clips that failed in an earlier run are tried again.

    Attributes:
        missing: by a clip's id, what this process makes the clip's output of.
        bad: by id, why an output of this process cannot be made.
        done_before: number of this process's clips that an earlier run has made.
        failed: path of the list of clips that failed.
    """

    FAILED: str

    def __init__(self, directory: str | Path, shard: ProcessShard, *, retry: bool):
        self.directory, self.shard = Path(directory), shard
        self.missing: dict[str, Any] = {}
        self.bad: dict[str, str] = {}
        self.done_before = 0
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"cannot write into {self.directory}: {error.strerror}") from error
        self.failed = self.directory / self.FAILED
        self._failed_before = {} if retry else failures(self.failed)

    def locked(self) -> contextlib.AbstractContextManager[Any]:
        """Exclude a second process of the same part for a `with` block; `LockedError` if there is one."""
        return reserved(self.directory / f"{self.FAILED}-{self.shard.index}", ".lock")

    def add(self, clip_id: str, path: Path, given: Any) -> None:
        """Count a clip, made of `given` at `path`, as done, as bad in an earlier run, or as missing."""
        if path.exists():
            remove_leftover(hidden(path, WRITING))  # of a run that was killed when the output was in place
            self.done_before += 1
        elif clip_id in self._failed_before:
            self.bad[clip_id] = self._failed_before[clip_id]
        else:
            self.missing[clip_id] = given

    def refuse(self, clip_id: str, reason: str) -> None:
        """Add a clip to `bad`, and its line to the list of those that failed."""
        self.bad[clip_id] = reason
        # One write, which is added at the end of the file as a whole: several processes may share the list.
        with self.failed.open("ab", buffering=0) as file:
            file.write(json.dumps({"id": clip_id, "error": reason}).encode() + b"\n")
            os.fsync(file.fileno())


def failures(path: Path) -> dict[str, str]:
    """Return the reasons in a list of clips that failed, by id; the last line of an id counts."""
    found: dict[str, str] = {}
    for text in path.read_bytes().splitlines() if path.exists() else ():
        with contextlib.suppress(LookupError, TypeError, ValueError):  # a line that a killed run began
            line = reports.parse(text)
            found[str(line["id"])] = str(line["error"])
    return found


def check_settings(found: Any, wanted: dict[str, Any], where: Path) -> None:
    """Raise `OutputError`, which names what differs, unless the settings `found` in `where` are `wanted`."""
    if not isinstance(found, dict):
        raise OutputError(f"{where} does not say by which settings it was made: give another directory")
    differing = [
        f"{name} is {reprlib.repr(found.get(name))} there and {reprlib.repr(value)} here"
        for name, value in wanted.items()
        if found.get(name) != value
    ]
    if differing:
        raise OutputError(
            f"{where} was made with other settings ({'; '.join(differing)}): give those, or another directory"
        )
