"""Decode a directory's latents to videos, one .mp4 a clip. `videos.json` names the settings of the videos."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from cogvideox_torchax.dataset import formats, loop
from cogvideox_torchax.dataset.clip import DecodeClip
from cogvideox_torchax.dataset.directory import OutputDirectory, ProcessShard, check_settings
from cogvideox_torchax.dataset.names import ClipError, check_file, check_id
from cogvideox_torchax.files import reports, video
from cogvideox_torchax.files.latents import Latents, LatentsError
from cogvideox_torchax.files.whole import LockedError, OutputError


class VideoDirectory(OutputDirectory):
    """A directory of decoded clips; `missing` has the function that reads each one's latents.

    A file that cannot be read, and a clip whose video cannot be written, are in the first process's `bad`.

    Args:
        directory: made if it does not exist.
        files: files of latents, of one clip or several.
        fps: frames a second; None for each clip's own.
        shard: the part of this process.
        retry: whether clips that failed in an earlier run are tried again.

    Raises:
        OutputError: the directory cannot be written, or has videos of the clips from elsewhere.
    """

    FAILED, SETTINGS, FORMAT = "failed-videos.jsonl", "videos.json", "cogvideox-torchax-videos/1"

    def __init__(
        self,
        directory: str | Path,
        files: Sequence[Path],
        fps: Fraction | None = None,
        shard: ProcessShard | None = None,
        *,
        retry: bool = False,
    ):
        super().__init__(directory, shard or ProcessShard(), retry=retry)
        self._fps, self._settings = fps, self.directory / self.SETTINGS
        refused: dict[str, str] = {}
        entries = list(self._valid_entries(files, refused))
        if self.shard.index == 0:
            self.bad |= refused
        for clip_id, read in entries[self.shard.index :: self.shard.count]:
            self.add(clip_id, self._path(clip_id), read)
        if self.done_before and not self._settings.exists():  # a run writes it before its first video
            raise OutputError(
                f"{self.directory} holds videos of these names that were not decoded there: give another "
                "directory"
            )

    def _valid_entries(self, files: Sequence[Path], refused: dict[str, str]) -> Iterator[formats.Entry]:
        """Yield the entries whose videos can be written; add all others to `refused`."""
        clips: list[tuple[Path, formats.Entry]] = []
        for file in files:
            try:
                clips += [(file, entry) for entry in formats.entries(file)]
            except LatentsError as error:
                refused[str(file)] = str(error)
        # A broken file may have any value as an id: `check_id` refuses it.
        paths = {self._path(clip_id) for _, (clip_id, _) in clips if isinstance(clip_id, str)}
        owners: dict[Path, str] = {}  # by a video's path: the first clip, which gets it, and its file
        for file, (clip_id, read) in clips:
            try:
                check_id(clip_id)
                path = self._path(clip_id)
                check_file(clip_id, path, self.directory, {*paths, self._settings})
                if path in owners:
                    raise ClipError(f"its video would replace {owners[path]}: give it another id")
                owners[path] = f"{clip_id}'s in {file}"
                yield clip_id, read
            except ClipError as error:
                refused[str(clip_id)] = f"{file}: {error}"

    def _path(self, clip_id: str) -> Path:
        return self.directory / f"{clip_id.removesuffix('.mp4')}.mp4"

    def fix_settings(self, settings: dict[str, Any]) -> None:
        """Write the settings of the videos if a clip is missing; raise `OutputError` if others are there."""
        settings = {**settings, "fps": None if self._fps is None else str(self._fps)}
        while self.missing and not self._settings.exists():
            try:
                reports.write_json(self._settings, {"format": self.FORMAT, "settings": settings})
            except (FileNotFoundError, LockedError):  # another process of this run is writing it
                time.sleep(0.1)
        if self._settings.exists():
            saved = reports.load(self._settings, self.FORMAT).get("settings")
            check_settings(saved, settings, self._settings)

    def first_latents(self) -> Latents | None:
        """Return the first readable latents of a clip that has no video yet; None if there are none."""
        for read in self.missing.values():
            with contextlib.suppress(*loop.IN_READING):  # `work`, which decodes all, meets the error again
                return read()
        return None

    def work(self, unit: DecodeClip, *, readers: int = loop.READERS) -> Iterator[loop.Step]:
        """Decode the clips whose video is missing, chunk by chunk; yield the outcome of each.

        `unit` decodes one clip's latents. `readers` is the number of clips whose latents are read at a time.
        """

        def compute(given: tuple[str, Latents]) -> None:
            clip_id, latents = given
            path = self._path(clip_id)
            path.parent.mkdir(parents=True, exist_ok=True)
            with video.writing(path, self._fps or latents.fps) as sink:
                video.write_all(sink, unit.stream(latents))

        return loop.work(
            jobs=self.missing,
            read=lambda clip_id: (clip_id, self.missing[clip_id]()),
            compute=compute,
            keep=lambda *_: None,
            refuse=self.refuse,
            readers=readers,
        )
