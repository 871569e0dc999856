"""A directory of latents, written clip by clip, and resumed by what is there.

A shard is a file of the latents of several clips. Each process writes the shards of its own index
(`ProcessShard`). The latent files count; the manifest lists how they were made.

    clips.json           the config, and the clips in the order in which they got their numbers
    manifest-0.jsonl     a line for each clip done or bad and for each shard; a file for each process
    work/00000012.safetensors    a clip that waits for its shard
    latents-00000.parquet        a shard: clips 0 to 63, or as many of them as could be encoded

A clip's number decides its shard, so shards do not depend on where a run was ended. New clips of a later run
get new numbers that begin a new shard.
"""

import contextlib
import json
import os
import time
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

from cogvideox_torchax.dataset import formats, loop
from cogvideox_torchax.dataset.clip import Clip, EncodeClip
from cogvideox_torchax.dataset.names import WORK, ClipError, check_file, check_id, check_ids
from cogvideox_torchax.files import latents as latent_files
from cogvideox_torchax.files import reports
from cogvideox_torchax.files.whole import LockedError, OutputError, lock

DONE, BAD, SHARD = "done", "bad", "shard"
"""The kinds of a manifest's lines: a clip that is made, one that cannot be made, a shard that is written."""
KEYS: dict[str, tuple[str, type]] = {"manifest": ("index", int), "videos": ("id", str)}
"""By a manifest's name: the field that names a clip in a line, and the field's type."""


@dataclass(frozen=True)
class ProcessShard:
    """The part of one of several processes in the work: process `index` has every `count`-th shard."""

    index: int = 0
    count: int = 1


def open_manifest(directory: Path, name: str) -> BinaryIO:
    """Open a manifest to add lines to, and lock it; remove the incomplete last line of a killed run.

    Args:
        directory: the output directory, made where it is not there.
        name: name of the file.

    Raises:
        OutputError: a directory that cannot be written, or another running process writes the same file.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # Unbuffered: a line is written as soon as it is added.
        file = open(directory / name, "a+b", buffering=0)  # noqa: SIM115
    except OSError as error:
        raise OutputError(f"cannot write into {directory}: {error.strerror}") from error
    try:
        lock(file.fileno(), directory / name)
    except OutputError:
        file.close()
        raise
    file.seek(0)
    # Up to the last newline: `rfind` gives -1, and so an empty file, where there is none.
    file.truncate(file.read().rfind(b"\n") + 1)
    return file


def lines(directory: Path, name: str = "manifest") -> Iterator[dict[str, Any]]:
    """Yield the complete lines of all processes' manifests; `name` is "manifest" or "videos".

    Raises:
        OutputError: a line that this program has not written.
    """
    key_name, key_type = KEYS[name]  # the field that names a line's clip, and its type
    # By the kind of a line: the fields that it must have, and their types.
    types = {DONE: {key_name: key_type}, BAD: {key_name: key_type, "error": str}, SHARD: {}}
    for path in sorted(directory.glob(f"{name}-*.jsonl")):
        # After the last newline there is nothing, or the incomplete line of a killed run.
        *complete, _ = path.read_bytes().split(b"\n")
        for number, text in enumerate(complete, 1):
            try:
                line = reports.parse(text)
                if not all(isinstance(line[field], type_) for field, type_ in types[line["kind"]].items()):
                    raise TypeError("a field is of another type")
            except (KeyError, TypeError, ValueError) as error:
                raise OutputError(
                    f"{path} is broken: line {number} is none of a manifest; remove it"
                ) from error
            yield line


class OutputDirectory:
    """An output directory that is written clip by clip, and one process's part of that work.

    A key names a clip: its number in a data set, or its id. A subclass sets `LIST`, the name of the file with
    the config; `NAME`, the manifests' of `KEYS`; and `FORMAT`, of the file with the config.

    Attributes:
        missing: keys of the clips that this process has to make.
        bad: reasons why clips cannot be made, by key.
        done_before: number of this process's clips that an earlier run has made.

    Raises:
        OutputError: a directory that cannot be written, or whose state is broken or of another config.
    """

    LIST: str
    NAME: str
    FORMAT: str

    def __init__(self, directory: str | Path, process_shard: ProcessShard | None):
        """Take the directory, which `with` opens, and this process's shard; None for a single process."""
        self.directory = Path(directory)
        self.process_shard = process_shard or ProcessShard()
        self.missing: list[Any] = []  # keys of clips that this process has to make
        self.bad: dict[Any, str] = {}  # by a clip's key, why it cannot be made
        self.done_before = 0  # number of clips that an earlier run has made
        self._tries = 100  # to write the file with the config, while another process may be writing it

    def __enter__(self) -> Self:
        """Open and lock this process's manifest, and find out which clips are missing."""
        with contextlib.ExitStack() as stack:
            self._file = stack.enter_context(
                open_manifest(self.directory, f"{self.NAME}-{self.process_shard.index}.jsonl")
            )
            self._scan()
            stack.pop_all()  # closes the file only if `_scan` raised; else `__exit__` does
        return self

    def _scan(self) -> None:
        """Find the clips that are `missing` or `bad`, and count those `done_before`.

        Each subclass overrides this.
        """

    def __exit__(self, *_: object) -> None:
        """Close the manifest, which unlocks it."""
        self._file.close()

    def add_line(self, kind: str, **line: Any) -> None:
        """Append a line to the manifest, and wait until it is on the disk."""
        self._file.write(json.dumps({"kind": kind, **line}).encode() + b"\n")  # unbuffered: needs no flush
        os.fsync(self._file.fileno())

    def clip_id(self, key: Any) -> str:
        """Return a clip's id, as text, for the key that names the clip in a manifest.

        Here the key is the id. A subclass whose keys are numbers overrides this.
        """
        return str(key)

    def bad_clips(self) -> dict[str, str]:
        """Return the reasons why clips of this process could not be made, by id."""
        return {self.clip_id(key): reason for key, reason in self.bad.items()}

    def note(self, key: Any, **about: Any) -> None:
        """Add the manifest's line of a clip that is done.

        `key` is the clip's number or id; `about` are further fields of the line.
        """
        self._add_clip_line(DONE, key, about)

    def refuse(self, key: Any, reason: str) -> None:
        """Add the manifest's line of a clip that cannot be made, with the reason; add the clip to `bad`.

        `key` is the clip's number or id.
        """
        self.bad[key] = reason
        self._add_clip_line(BAD, key, {"error": reason})

    def _add_clip_line(self, kind: str, key: Any, about: dict[str, Any]) -> None:
        """Add the manifest's line of a clip: its kind, the clip's key and id, and the fields `about`."""
        key_name, _key_type = KEYS[self.NAME]  # "index" if keys are numbers; "id" if the key is the clip's id
        self.add_line(kind, **{key_name: key, "id": self.clip_id(key)}, **about)

    def _save_state(self, config: dict[str, Any], **state: Any) -> None:
        """Write the config of the clips and further fields, as JSON, to a file of the directory.

        Processes that begin together write it at the same time. Where that fails it is not written, after a
        pause: the caller loads it again, and calls again where it still lacks something.
        """
        try:
            reports.write_json(self.directory / self.LIST, {"format": self.FORMAT, "config": config, **state})
        except (FileNotFoundError, LockedError):  # without locks another removes the file in the making
            self._tries -= 1
            if not self._tries:
                raise
            time.sleep(0.1)

    def _load_state(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return the JSON object that an earlier run wrote; an empty one where there is no file.

        Raises:
            OutputError: the file is broken, or its config differs from `config` in one of its values.
        """
        path = self.directory / self.LIST
        if not path.exists():
            return {}
        state = reports.load(path, self.FORMAT)
        saved = state.get("config")
        if not isinstance(saved, dict):
            raise OutputError(f"{path} is broken (its config is no object): give another directory")
        wanted = json.loads(json.dumps(config))  # as `saved` was: tuples become lists
        differing = sorted(setting for setting in wanted if saved.get(setting) != wanted[setting])
        if differing:
            raise OutputError(
                f"{self.directory} holds clips that were made with other settings "
                f"({', '.join(differing)}): give those, or another directory"
            )
        return state


class DatasetDirectory(OutputDirectory):
    """A directory of latents, to which the missing clips of a data set are added.

    Args:
        directory: made where it is not there.
        config: settings that the clips depend on, as JSON; a directory has one config for good.
        clips: the requested clips.
        kind: format of the shards, one of `formats`.
        shard_size: number of clips in a shard; for `SAFETENSORS`, a file for each clip, it is always 1.
        process_shard: the part of this process; None for a single process.
        retry: whether bad clips are tried again, under another number.

    Attributes:
        ids: ids of all clips in the order of their numbers, clips of earlier runs first; None for a number
            without a clip.

    Raises:
        OutputError: as `OutputDirectory`.
        ClipError: an id that comes twice, or names no file below the directory.
    """

    LIST, NAME, FORMAT = "clips.json", "manifest", "cogvideox-torchax-clips/1"

    def __init__(
        self,
        directory: str | Path,
        config: dict[str, Any],
        clips: Sequence[Clip],
        *,
        kind: str = formats.SAFETENSORS,
        shard_size: int = 64,
        process_shard: ProcessShard | None = None,
        retry: bool = False,
    ):
        """Check the clips' ids, without reading the directory: entering `with` finds the missing clips."""
        if kind == formats.PARQUET:
            formats.pyarrow()  # raises before the work, not after it
        check_ids((clip.id for clip in clips), "the data set")
        super().__init__(directory, process_shard)
        self.kind = kind
        self.shard_size = 1 if kind == formats.SAFETENSORS else shard_size  # one clip in a safetensors file
        self._clips = {clip.id: clip for clip in clips}
        self._config = {**config, "format": kind, "shard_size": self.shard_size}
        self._retry = retry

    def _scan(self) -> None:
        """Find out which clips of this process's shards are done, bad or missing.

        A complete shard that a killed run did not write is written.
        """
        manifest_lines = list(lines(self.directory))
        self.bad = {line["index"]: line["error"] for line in manifest_lines if line["kind"] == BAD}
        done = {line["index"] for line in manifest_lines if line["kind"] == DONE}
        self.ids = self._load_ids()
        # The latent files of all clips, none of which may be a directory of another.
        taken = {self.clip_path(index) for index, clip_id in enumerate(self.ids) if clip_id is not None}
        for shard in self.shards:
            for index in self.members(shard):
                if index not in self.bad:
                    self._count_clip(index, taken, is_noted=index in done)
            self._write_shard_if_complete(shard)

    def _load_ids(self) -> list[str | None]:
        """Return the ids of all clips in the order of their numbers; if there are new clips, write the list.

        New clips begin a new shard: None stands for each number that is left in the last shard before them.
        """
        state = self._load_state(self._config)
        ids = state.get("clips") if state else []  # of earlier runs' clips
        try:
            if not isinstance(ids, list):
                raise ClipError("its clips are no list")
            for clip_id in ids:
                if clip_id is not None:
                    check_id(clip_id)
        except ClipError as error:
            raise OutputError(f"{self.directory / self.LIST} is broken ({error})") from error
        newest = {clip_id: index for index, clip_id in enumerate(ids)}  # the newest number of each id
        # Ids without a number, and those of bad clips to try again, which get another number.
        new = [
            clip_id
            for clip_id in self._clips
            if clip_id not in newest or (self._retry and newest[clip_id] in self.bad)
        ]
        if new:
            ids += [None] * (-len(ids) % self.shard_size)  # up to a multiple of the shard's size
            ids += new
            self._save_state(self._config, clips=ids)
            return self._load_ids()
        return ids

    def _count_clip(self, index: int, taken: Container[Path], is_noted: bool) -> None:
        """Count a clip as done, missing (not encoded yet) or bad.

        The line of a done clip is added to the manifest where a run was killed before it wrote the line.

        Args:
            index: the clip's number.
            taken: the latent files of all clips; this clip is bad if its own file would be below one of them,
                as if below a directory.
            is_noted: whether the manifest has the clip's line.
        """
        try:
            check_file(self.clip_id(index), self.clip_path(index), self.directory, taken)
            if self.is_done(index):
                self.done_before += 1
                if not is_noted:
                    self.note(index)
            elif self.clip_id(index) in self._clips:
                self.missing.append(index)
            else:
                raise ClipError("it is not among the clips any more")
        except ClipError as error:
            self.refuse(index, str(error))

    def clip_id(self, key: int) -> str:
        """Return the id of the clip whose number is `key`; "" if that number has no clip."""
        return self.ids[key] or ""

    def bad_clips(self) -> dict[str, str]:
        """Return the reasons why clips of this process could not be made, by the clips' ids.

        A clip that was tried again has several numbers, of which the newest counts.
        """
        # `self.bad` has the reasons by number, for clips of all processes; `own` are this process's numbers.
        own = {index for shard in self.shards for index in self.members(shard)}
        newest = {clip_id: index for index, clip_id in enumerate(self.ids) if clip_id}
        return {
            clip_id: self.bad[index]
            for clip_id, index in newest.items()
            if index in self.bad and index in own
        }

    def members(self, shard: int) -> list[int]:
        """Return the numbers of a shard's clips; a number without a clip, whose id is None, is left out."""
        numbers = range(shard * self.shard_size, min((shard + 1) * self.shard_size, len(self.ids)))
        return [number for number in numbers if self.ids[number] is not None]

    @property
    def shards(self) -> range:
        """The numbers of this process's shards: all processes take shards in turn."""
        count = -(-len(self.ids) // self.shard_size)  # of all processes' shards: the quotient, rounded up
        return range(self.process_shard.index, count, self.process_shard.count)

    def shard_path(self, shard: int) -> Path:
        """Return the path of a shard by its number.

        With a file for each clip (safetensors) a shard has one clip, whose number is the shard's number too;
        the clip's id names the file.
        """
        suffix = formats.SUFFIXES[self.kind]
        if self.kind == formats.SAFETENSORS:
            return self.directory / f"{self.ids[shard]}{suffix}"
        return self.directory / f"latents-{shard:05}{suffix}"

    def clip_path(self, index: int) -> Path:
        """Return the path of a clip's latent file, where it stays (safetensors) or waits for its shard."""
        if self.kind == formats.SAFETENSORS:
            return self.shard_path(index)
        return self.directory / WORK / f"{index:08}.safetensors"

    def is_done(self, index: int) -> bool:
        """Return whether a clip's latent file, or the shard that it belongs to, exists."""
        return self.clip_path(index).exists() or self.shard_path(index // self.shard_size).exists()

    def work(self, unit: EncodeClip, *, readers: int = loop.READERS) -> Iterator[loop.Step]:
        """Encode the missing clips on this machine with `unit`; yield the outcome of each.

        `readers` is the number of clips that are read at a time.
        """
        return loop.work(
            jobs=self.missing,
            read=lambda index: unit.read(self.clip(index)),
            compute=unit.encode,
            keep=self.keep,
            refuse=self.refuse,
            readers=readers,
        )

    def clip(self, index: int) -> Clip:
        """Return a clip by its number."""
        return self._clips[self.clip_id(index)]

    def keep(self, index: int, latents: latent_files.Latents) -> None:
        """Save a clip's latents, and add its line to the manifest.

        Raises:
            OSError: the disk is full, or the directory cannot be written.
        """
        save_latents(latents, self.clip_path(index))
        self.note(index, **manifest_fields(latents))

    def _add_clip_line(self, kind: str, key: int, about: dict[str, Any]) -> None:
        """Add the manifest's line of a clip; write the clip's shard if all the shard's clips are done or bad.

        `kind` is the kind of the line, `key` the clip's number; `about` are further fields of the line.
        """
        super()._add_clip_line(kind, key, about)
        self._write_shard_if_complete(key // self.shard_size)

    def _write_shard_if_complete(self, shard: int) -> None:
        """Join the latent files of a shard's clips to the shard and remove them, if no clip is missing.

        Bad clips are left out. With a file for each clip (safetensors) there is nothing to do.
        """
        if self.kind == formats.SAFETENSORS:
            return
        path = self.shard_path(shard)
        good = [index for index in self.members(shard) if index not in self.bad]  # done or missing
        if not all(self.is_done(index) for index in good):
            return
        if good and not path.exists():
            formats.write(self.kind, [(index, self.clip_path(index)) for index in good], path)
            self.add_line(SHARD, name=path.name, clips=len(good))
        for index in good:  # also the files of a run that was killed after it wrote the shard
            self.clip_path(index).unlink(missing_ok=True)


def save_latents(latents: latent_files.Latents, path: Path) -> None:
    """Write a clip's latent file, and make its directories, which an id such as "a/b" names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    latent_files.save(latents, path)


def manifest_fields(latents: latent_files.Latents) -> dict[str, Any]:
    """Return the fields of a manifest's line for a clip that is done."""
    source_fields = ("source_frames", "variable_frame_rate", "source_sha256")
    return {
        "latents": list(latents.tensor.shape),
        "frames": latents.num_frames,
        "fps": str(latents.fps),
        **{name: latents.about[name] for name in source_fields if name in latents.about},
    }
