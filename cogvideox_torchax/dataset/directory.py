"""Output directories: clips are encoded into a `LatentDirectory`, and decoded into a `VideoDirectory`.

A *unit*, an `EncodeClip` or a `DecodeClip`, holds the model and its settings. A clip's *output* is a file, or
a directory with a file for each window; if it exists, the clip is done. A list names clips that failed, and
why; the next run tries them again. Outputs are complete or absent (`files/whole.py`), so a run may be killed
at any time, and the same command completes its work. All outputs in a directory have the same settings, which
`latents.json` or `videos.json` has.
"""

import contextlib
import json
import os
import reprlib
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from cogvideox_torchax.dataset import loop
from cogvideox_torchax.dataset.clip import Clip, ClipError, DecodeClip, EncodeClip, check_id
from cogvideox_torchax.files import latents as latent_files, reports, video
from cogvideox_torchax.files.whole import OutputError, locked, make_directory, remove_leftover, whole_file

PATIENCE = 60.0
"""Seconds in which another process writes the settings of a directory."""


ALL = slice(0, None, 1)
"""The share of a process that has all clips; of several, it is every so many-th from its own number on."""


class OutputDirectory:
    """A directory of outputs, and this process's share of the clips: it makes their outputs.

    A subclass adds the clips. It sets `FAILED`, the name of the file with a line for each clip that failed,
    and `SETTINGS`, that of the file with the settings of all outputs.

    Args:
        directory: made if it does not exist; `OutputError` if it cannot be written.
        share: the share of this process, such as `ALL`.

    Attributes:
        missing: by the id of each clip that has no output yet: the `Clip` to encode, or the latent file.
        bad: by id, why a clip's output cannot be made.
        done_before: number of this process's clips that were done before.
        failed: path of the list of clips that failed.
    """

    FAILED: str
    SETTINGS: str
    FORMAT = "cogvideox-torchax-settings/1"

    def __init__(self, directory: str | Path, share: slice):
        self.directory, self._share = make_directory(directory), share
        self.missing: dict[str, Any] = {}
        self.bad: dict[str, str] = {}
        self.done_before = 0
        self.failed, self._settings = self.directory / self.FAILED, self.directory / self.SETTINGS

    def locked(self) -> contextlib.AbstractContextManager[Any]:
        """Lock this process's share for a `with` block; `OutputError` if another run works on it."""
        return locked(self.directory / f"{self.FAILED}-{self._share.start}", self.directory)

    def save_or_check_settings(self, settings: dict[str, Any]) -> None:
        """Write the settings' file unless it exists; raise `OutputError` if it holds other settings."""
        # Of several processes one writes the file. The others wait until it is there.
        with locked(self.directory / f"{self.SETTINGS}-first", wait=PATIENCE):
            if not self._settings.exists():
                reports.write_json(self._settings, {"format": self.FORMAT, "settings": settings})
            remove_leftover(self._settings)
        saved = reports.load(self._settings, self.FORMAT).get("settings")
        check_settings(saved, settings, self._settings)

    def add(self, clip_id: str, path: Path, source: Any) -> None:
        """Count a clip as done if its output `path` exists, else as missing.

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
        else:
            self.missing[clip_id] = source

    def refuse(self, clip_id: str, reason: str) -> None:
        """Add a clip to `bad`, and its line to the list of those that failed."""
        self.bad[clip_id] = reason
        # Unbuffered, so that one write appends the line: lines of several processes do not mix.
        with self.failed.open("ab", buffering=0) as file:
            file.write(json.dumps({"id": clip_id, "error": reason}).encode() + b"\n")
            os.fsync(file.fileno())


def check_settings(found: Any, wanted: dict[str, Any], where: Path) -> None:
    """Raise `OutputError`, which names the differences, unless `where` has the `wanted` settings."""
    found = found if isinstance(found, dict) else {}
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


class LatentDirectory(OutputDirectory):
    """A directory of latents. The method `work` encodes the clips whose latents are not there yet.

    Args:
        unit: encodes the clips.
        clips: all clips, of all processes.
        directory, share: as for `OutputDirectory`.

    Raises:
        OutputError: the directory cannot be written, or holds latents of other settings.
    """

    FAILED, SETTINGS = "failed.jsonl", "latents.json"

    def __init__(self, directory: str | Path, unit: EncodeClip, clips: Sequence[Clip], share: slice = ALL):
        super().__init__(directory, share)
        self._unit = unit
        for clip in clips[share]:
            self.add(clip.id, self.path(clip), clip)
        self.save_or_check_settings(unit.config.fixed_settings(unit.model_sha256))

    def path(self, clip: Clip) -> Path:
        return self.directory / (clip.id if self._unit.config.windows else f"{clip.id}.safetensors")

    def work(self, *, readers: int = loop.READERS) -> Iterator[loop.Step]:
        """Encode the missing clips; yield the outcome of each."""
        return loop.work(
            jobs=self.missing,
            read=lambda clip_id: self._unit.read(self.missing[clip_id]),
            # `part` is a `ClipPart`: the frames of a clip that are encoded.
            compute=lambda part: list(self._unit.encode_all(part)),
            write=lambda clip_id, latents: save(latents, self.path(self.missing[clip_id]), self._unit),
            refuse=self.refuse,
            readers=readers,
        )


def save(latents: Sequence[latent_files.Latents], path: Path, unit: EncodeClip) -> None:
    """Write a clip's latents to a file, or those of its windows into a directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if unit.config.windows:
        with whole_file(path, directory=True) as place:
            for number, each in enumerate(latents):
                latent_files.save(each, place / f"{number:05}.safetensors")
    else:
        latent_files.save(latents[0], path)


# Decoding


class VideoDirectory(OutputDirectory):
    """A directory of videos. The method `work` decodes the clips whose videos are not there yet.

    Args:
        files: latent files, one a clip.
        fps: frames a second; None for each clip's own.
        directory, share: as for `OutputDirectory`.

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
        share: slice = ALL,
    ):
        super().__init__(directory, share)
        self._fps = fps
        clips: dict[Path, tuple[str, Path]] = {}  # (id, latent file) by the video's path
        for file in files:
            try:
                clip_id = latent_files.about(file).get("id", file.stem)  # any value, in a broken file
                check_id(clip_id)
                _, first = clips.setdefault(self._path(clip_id), (clip_id, file))
                if first != file:
                    raise ClipError(f"its video would replace that of {first}: give it another id")
            except (latent_files.LatentsError, ClipError) as error:
                if share.start == 0:  # every process meets it; the first one alone reports it
                    self.bad[str(file)] = str(error)
        for path, (clip_id, file) in list(clips.items())[share]:
            self.add(clip_id, path, file)

    def _path(self, clip_id: str) -> Path:
        return self.directory / f"{clip_id.removesuffix('.mp4')}.mp4"

    def work(self, unit: DecodeClip, *, readers: int = loop.READERS) -> Iterator[loop.Step]:
        """Decode with `unit`, chunk by chunk, the clips whose video is missing; yield the outcome of each."""

        def decode(clip: tuple[str, latent_files.Latents]) -> None:
            clip_id, latents = clip
            path = self._path(clip_id)
            path.parent.mkdir(parents=True, exist_ok=True)
            with video.writing(path, self._fps or latents.fps) as write:
                for frames in unit.stream(latents):
                    write(frames)

        return loop.work(
            jobs=self.missing,
            read=lambda clip_id: (clip_id, latent_files.load(self.missing[clip_id])),
            compute=decode,
            write=lambda *_: None,  # `decode` has written the video, as its frames came
            refuse=self.refuse,
            readers=readers,
        )
