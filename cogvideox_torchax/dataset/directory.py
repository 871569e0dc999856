"""Output directories: clips are encoded into a `LatentDirectory`, and decoded into a `VideoDirectory`.

A *unit*, an `EncodeClip` or a `DecodeClip`, holds the model and its settings. A clip's *output* is a file, or
a directory with a file for each window; if it exists, the clip is done. A list names the clips that failed,
and why. Outputs are complete or absent (`files/whole.py`), so a run may be killed at any time, and the same
command completes its work. All outputs in a directory have the same settings, which `latents.json` or
`videos.json` has.
"""

import contextlib
import json
import os
import reprlib
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from cogvideox_torchax.dataset import loop
from cogvideox_torchax.dataset.clip import Clip, ClipPart, DecodeClip, EncodeClip
from cogvideox_torchax.dataset.names import ClipError, check_file, check_id
from cogvideox_torchax.files import latents as latent_files, reports, video
from cogvideox_torchax.files.whole import (
    LockedError,
    OutputError,
    locked,
    make_directory,
    remove_leftover,
    whole_file,
)


@dataclass(frozen=True)
class ProcessShard:
    """One process's share of the clips: every `count`-th clip, from the one with the number `index` on."""

    index: int = 0
    count: int = 1


class OutputDirectory:
    """A directory of outputs, and this process's share of the clips: it makes their outputs.

    A subclass adds the clips. It sets `FAILED`, the name of the file with a line for each clip that failed,
    and `SETTINGS`, that of the file with the settings of all outputs.

    Args:
        directory: made if it does not exist; `OutputError` if it cannot be written.
        shard: the share of this process.
        retry: whether clips that failed in an earlier run are tried again.

    Attributes:
        missing: by the id of each clip that has no output yet: the `Clip` to encode, or the latent file.
        bad: by id, why a clip's output cannot be made.
        done_before: number of this process's clips that were done before.
        failed: path of the list of clips that failed.
    """

    FAILED: str
    SETTINGS: str
    FORMAT = "cogvideox-torchax-settings/1"

    def __init__(self, directory: str | Path, shard: ProcessShard, *, retry: bool):
        self.directory, self.shard = make_directory(directory), shard
        self.missing: dict[str, Any] = {}
        self.bad: dict[str, str] = {}
        self.done_before = 0
        self.failed, self._settings = self.directory / self.FAILED, self.directory / self.SETTINGS
        self._failed_before = {} if retry else failures(self.failed)

    def locked(self) -> contextlib.AbstractContextManager[Any]:
        """Lock this process's share for a `with` block; `LockedError` if another run works on it."""
        return locked(self.directory / f"{self.FAILED}-{self.shard.index}", self.directory)

    def save_or_check_settings(self, settings: dict[str, Any]) -> None:
        """Write the settings' file unless it exists; raise `OutputError` if it holds other settings."""
        # Of several processes one writes the file. The others wait until it is there.
        first = self.directory / f"{self.SETTINGS}-first"
        while not self._settings.exists():
            try:
                with locked(first):
                    if not self._settings.exists():  # nobody has written it before the lock was there
                        reports.write_json(self._settings, {"format": self.FORMAT, "settings": settings})
            except LockedError:
                time.sleep(0.1)
        for path in (first, self._settings):
            remove_leftover(path)
        saved = reports.load(self._settings, self.FORMAT).get("settings")
        check_settings(saved, settings, self._settings)

    def add(self, clip_id: str, path: Path, source: Any) -> None:
        """Count a clip as done if its output `path` exists, as bad if it failed before, else as missing.

        `OutputError` if the output exists in a directory without the settings' file.
        """
        if path.exists():
            if not self._settings.exists():  # a run writes it before its first output
                raise OutputError(
                    f"{self.directory} has {path.name} and no {self.SETTINGS}, so this command has not made "
                    "it: give another directory"
                )
            remove_leftover(path)
            self.done_before += 1
        elif clip_id in self._failed_before:
            self.bad[clip_id] = self._failed_before[clip_id]
        else:
            self.missing[clip_id] = source

    def refuse(self, clip_id: str, reason: str) -> None:
        """Add a clip to `bad`, and its line to the list of those that failed."""
        self.bad[clip_id] = reason
        # Unbuffered, so that one write appends the line: lines of several processes do not mix.
        with self.failed.open("ab", buffering=0) as file:
            file.write(json.dumps({"id": clip_id, "error": reason}).encode() + b"\n")
            os.fsync(file.fileno())


def failures(path: Path) -> dict[str, str]:
    """Read a list of clips that failed, if it exists; return the reason in the last line of each id."""
    reasons: dict[str, str] = {}
    for line in path.read_bytes().splitlines() if path.exists() else ():
        # A line that a killed run has not finished raises one of these errors, and is skipped.
        with contextlib.suppress(LookupError, TypeError, ValueError):
            entry = reports.parse(line)
            reasons[str(entry["id"])] = str(entry["error"])
    return reasons


def check_settings(found: Any, wanted: dict[str, Any], where: Path) -> None:
    """Raise `OutputError`, which names the differences, unless `where` has the `wanted` settings."""
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


# Encoding

PendingOutput = tuple[contextlib.ExitStack, list[dict[str, Any]]]
"""An output in a temporary place: the stack whose `close` moves it to its path, the files' `about`s."""


class LatentDirectory(OutputDirectory):
    """A directory of latents. The method `work` encodes the clips whose latents are not there yet.

    Args:
        unit: encodes the clips.
        clips: all clips, of all processes.
        directory, shard, retry: as for `OutputDirectory`; without a shard, this process has all clips.

    Raises:
        OutputError: the directory cannot be written, or holds latents of other settings.
    """

    FAILED, SETTINGS = "failed.jsonl", "latents.json"

    def __init__(
        self,
        directory: str | Path,
        unit: EncodeClip,
        clips: Sequence[Clip],
        shard: ProcessShard | None = None,
        *,
        retry: bool = False,
    ):
        super().__init__(directory, shard or ProcessShard(), retry=retry)
        self._unit = unit
        settings = unit.config.fixed_settings(unit.model_sha256)
        if self._settings.exists():  # other settings are refused before anything is written
            self.save_or_check_settings(settings)
        paths = {self.path(clip) for clip in clips}  # of all outputs, none of which may be below another
        for clip in clips[self.shard.index :: self.shard.count]:
            try:
                check_file(clip.id, self.path(clip), self.directory, paths, is_directory=unit.config.windows)
                self.add(clip.id, self.path(clip), clip)
            except ClipError as error:
                self.refuse(clip.id, str(error))
        self.save_or_check_settings(settings)

    def path(self, clip: Clip) -> Path:
        return self.directory / (clip.id if self._unit.config.windows else f"{clip.id}.safetensors")

    def work(self, *, readers: int = loop.READERS) -> Iterator[loop.Step]:
        """Encode the missing clips; yield the outcome of each.

        Its result is a list with the `about` of each of the clip's latent files: the facts that the file's
        metadata has about the clip.
        """
        for step in loop.work(
            jobs=self.missing,
            read=lambda clip_id: self._unit.read(self.missing[clip_id]),
            # `part` is a `ClipPart`: the frames of a clip that are encoded. The result is a `PendingOutput`:
            # (stack, `about`s).
            compute=lambda part: write(self._unit, part, self.path(part.clip)),
            # `output[0]` is the stack. Closing it moves the output to its path. That waits for the disk, so
            # the computing thread does not do it.
            write=lambda _, output: output[0].close(),
            refuse=self.refuse,
            readers=readers,
        ):
            yield replace(step, result=step.result[1]) if step.result else step  # the `about`s alone


def write(unit: EncodeClip, part: ClipPart, path: Path) -> PendingOutput:
    """Encode a clip into a temporary file or directory; closing the result's stack moves it to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    abouts = []
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(whole_file(path, directory=unit.config.windows))
        for latents in unit.encode_all(part):
            file = place / f"{len(abouts):05}.safetensors" if unit.config.windows else place
            file.write_bytes(latent_files.dumps(latents))
            abouts.append(latents.about)
        # The new stack keeps the temporary output for the caller; after an error `with` removes it.
        return stack.pop_all(), abouts


def write_at_once(unit: EncodeClip, part: ClipPart, path: Path) -> list[dict[str, Any]]:
    """Encode a clip into `path`; return the `about` of each latent file."""
    stack, abouts = write(unit, part, path)
    stack.close()  # moves the output to `path`
    return abouts


class Changes:
    """Counts the clips whose frames were changed, and how, by the `about` of their latents."""

    def __init__(self) -> None:
        self._counts = Counter(
            latents=0,
            frames_dropped=0,
            frames_repeated=0,
            clips_resampled=0,
            clips_of_variable_rate=0,
            clips_enlarged=0,
        )
        self._rates: set[Fraction] = set()  # frames a second of the latents

    def add(self, abouts: Sequence[dict[str, Any]]) -> None:
        """Count a clip, given the `about` of each of its latent files."""
        # If a Ray actor that wrote the files died before it could return their `about`s, there are none, and
        # nothing is counted.
        for about in abouts[:1]:  # of the first file: what is counted is the same for a clip's windows
            # None for `fps` if every frame was taken, whatever its time.
            fps, is_variable = about["settings"]["fps"], about["variable_frame_rate"]
            is_resampled = bool(fps) and (is_variable or Fraction(fps) != Fraction(about["source_fps"]))
            self._rates.add(Fraction(fps or about["source_fps"]))
            self._counts.update(
                latents=len(abouts),
                frames_dropped=about["dropped_frames"],
                frames_repeated=about["repeated_frames"],
                clips_resampled=is_resampled,
                clips_of_variable_rate=is_variable and not fps,  # and not resampled to an even one
                clips_enlarged=about["enlarged"] > 1,
            )

    def report(self) -> dict[str, Any]:
        """Return the counts, and the latents' frames a second as a text: "8", or for several "8 to 30"."""
        rates = [f"{float(rate):.6g}" for rate in sorted(self._rates)]
        # The keys of a dict: a single rate, which is both the lowest and the highest, comes once.
        return {**self._counts, "fps": " to ".join(dict.fromkeys(rates[:1] + rates[-1:]))}


# Decoding


class VideoDirectory(OutputDirectory):
    """A directory of videos. The method `work` decodes the clips whose videos are not there yet.

    Args:
        files: latent files, one a clip.
        fps: frames a second; None for each clip's own.
        directory, shard, retry: as for `OutputDirectory`; without a shard, this process has all clips.

    Raises:
        OutputError: the directory cannot be written, or holds videos of these clips that were not decoded
            there.
    """

    FAILED, SETTINGS = "failed-videos.jsonl", "videos.json"

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
        self._fps = fps
        refused: dict[str, str] = {}
        clips = self._clips(files, refused)
        # Every process meets a file that cannot be read, and a clip whose video cannot have its name; the
        # first process alone reports them.
        if self.shard.index == 0:
            self.bad |= refused
        for clip_id in list(clips)[self.shard.index :: self.shard.count]:
            self.add(clip_id, self._path(clip_id), clips[clip_id])

    def _clips(self, files: Sequence[Path], refused: dict[str, str]) -> dict[str, Path]:
        """Return by id the latent files of the clips whose videos can be written.

        `refused` gets the reasons: by id for other clips, and by path for files that cannot be read.
        """
        ids: dict[Path, Any] = {}
        for file in files:
            try:
                ids[file] = latent_files.about(file).get("id", file.stem)  # any value, in a broken file
            except latent_files.LatentsError as error:
                refused[str(file)] = str(error)
        paths = {self._path(clip_id) for clip_id in ids.values() if isinstance(clip_id, str)}
        owners: dict[Path, Path] = {}  # by a video's path: the first latent file of that path
        for file, clip_id in ids.items():
            try:
                check_id(clip_id)
                path = self._path(clip_id)
                # The video may not be below another one, nor below the settings' file.
                check_file(clip_id, path, self.directory, {*paths, self._settings})
                if (owner := owners.setdefault(path, file)) != file:
                    raise ClipError(f"its video would replace that of {owner}: give it another id")
            except ClipError as error:
                refused[str(clip_id)] = f"{file}: {error}"
        return {ids[file]: file for file in owners.values()}

    def _path(self, clip_id: str) -> Path:
        return self.directory / f"{clip_id.removesuffix('.mp4')}.mp4"

    def first_latents(self) -> latent_files.Latents | None:
        """Return the first readable latents of a clip that has no video yet; None if there are none."""
        for file in self.missing.values():
            with contextlib.suppress(*loop.READING_ERRORS):  # `work` meets the error again, and reports it
                return latent_files.load(file)
        return None

    def work(self, unit: DecodeClip, *, readers: int = loop.READERS) -> Iterator[loop.Step]:
        """Decode with `unit`, chunk by chunk, the clips whose video is missing; yield the outcome of each."""

        def decode(clip: tuple[str, latent_files.Latents]) -> None:
            clip_id, latents = clip
            path = self._path(clip_id)
            path.parent.mkdir(parents=True, exist_ok=True)
            with video.writing(path, self._fps or latents.fps) as sink:
                video.write_all(sink, unit.stream(latents))

        return loop.work(
            jobs=self.missing,
            read=lambda clip_id: (clip_id, latent_files.load(self.missing[clip_id])),
            compute=decode,
            write=lambda *_: None,  # `decode` has written the video, as its frames came
            refuse=self.refuse,
            readers=readers,
        )
