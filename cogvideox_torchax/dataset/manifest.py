"""What a data set's directory holds, and what is still to be done: the files are the truth, the manifest says
how they came.

    clips.json           the recipe, and the clips in the order in which they got their numbers
    manifest-0.jsonl     a line for each clip done or bad and for each shard; a file for each process
    work/00000012.safetensors    a clip that waits for its shard
    latents-00000.parquet        a shard: clips 0 to 63, or as many of them as could be encoded

A clip's number says which shard it goes into, so shards do not depend on where a run was ended. New clips of
a later run get new numbers that begin a new shard.
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cogvideox_torchax.dataset import formats
from cogvideox_torchax.dataset.clip import WORK, ClipError, check_file, check_text
from cogvideox_torchax.files import latents as latent_files
from cogvideox_torchax.files import reports
from cogvideox_torchax.files.latents import Latents
from cogvideox_torchax.files.whole import OutputError

FORMAT = "cogvideox-torchax-clips/1"
LIST = "clips.json"
DONE, BAD, SHARD = "done", "bad", "shard"


@dataclass(frozen=True)
class Share:
    """Which of several processes this one is; shard k is the work of process k modulo `count`."""

    index: int = 0
    count: int = 1


class Manifest:
    """The lines that one process has written, and those that it can read of the others.

    Raises:
        OutputError: another process that lives writes the same file.
    """

    def __init__(self, directory: Path, name: str):
        try:
            self._file = open(directory / name, "a+b", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise OutputError(f"cannot write into {directory}: {error.strerror}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise OutputError(f"another run is writing {directory / name}: wait for it, or end it") from error
        except OSError:  # no locks on this file system
            pass
        self._cut_torn_line()

    def _cut_torn_line(self) -> None:
        """Removes what a killed run has written of its last line."""
        self._file.seek(0)
        written = self._file.read()
        self._file.truncate(written.rfind(b"\n") + 1)

    def add(self, kind: str, **line: Any) -> None:
        self._file.write(json.dumps({"kind": kind, **line}).encode() + b"\n")
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def check_recipe(directory: Path, was: dict[str, Any], recipe: dict[str, Any]) -> None:
    """Raises `OutputError` where a directory's clips were made by another recipe."""
    recipe = json.loads(json.dumps(recipe))
    differing = sorted(key for key in recipe if was.get(key) != recipe[key])
    if differing:
        raise OutputError(
            f"{directory} holds clips that were made with other settings "
            f"({', '.join(differing)}): give those, or another directory"
        )


def lines(directory: Path, name: str = "manifest") -> Iterator[dict[str, Any]]:
    """The whole lines of all processes' files of this name."""
    for path in sorted(directory.glob(f"{name}-*.jsonl")):
        for text in path.read_bytes().split(b"\n")[:-1]:
            with contextlib.suppress(ValueError):
                yield json.loads(text)


class Shelf:
    """A directory of encoded clips that fills up: what is there, what is missing, and how to add to it.

    Args:
        directory: made where it is not there.
        recipe: what the clips are made by, as JSON; a directory has one for good.
        ids: of the clips that are wanted.
        kind: of `formats`.
        shard_size: clips a shard; with a file a clip it is 1.
        share: of this process.
        retry: whether clips that were bad get another number, and another chance.

    Attributes:
        ids: of all clips by their numbers, those of earlier runs first; None for a number that no clip has.
        bad: why clips could not be encoded, by their numbers.

    Raises:
        OutputError: a directory that cannot be written, or one that was made by another recipe.
    """

    def __init__(
        self,
        directory: str | Path,
        recipe: dict[str, Any],
        ids: Sequence[str],
        *,
        kind: str = formats.SAFETENSORS,
        shard_size: int = 64,
        share: Share | None = None,
        retry: bool = False,
    ):
        formats.check(kind)
        self.directory = Path(directory)
        self.kind = kind
        self.shard_size = 1 if kind == formats.SAFETENSORS else shard_size
        self.share = share or Share()
        recipe = {**recipe, "format": kind, "shard_size": self.shard_size}
        try:
            (self.directory / WORK).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"cannot write into {self.directory}: {error.strerror}") from error
        self._manifest = Manifest(self.directory, f"manifest-{self.share.index}.jsonl")
        self.bad: dict[int, str] = {}
        self._noted: set[int] = set()
        for line in lines(self.directory):
            if line["kind"] == BAD:
                self.bad[line["index"]] = line["error"]
            elif line["kind"] == DONE:
                self._noted.add(line["index"])
        self.ids = self._listed(recipe, ids, retry)

    def _listed(self, recipe: dict[str, Any], ids: Sequence[str], retry: bool) -> list[str | None]:
        path = self.directory / LIST
        known: list[str | None] = []
        if path.exists():
            listed = reports.load(path, FORMAT)
            check_recipe(self.directory, listed["recipe"], recipe)
            known = listed["clips"]
        last = {name: index for index, name in enumerate(known)}
        new = [name for name in ids if name not in last or (retry and last[name] in self.bad)]
        if new:
            known += [None] * (-len(known) % self.shard_size)
            known += new
            reports.write_json(path, {"format": FORMAT, "recipe": recipe, "clips": known})
        return known

    def __enter__(self) -> "Shelf":
        return self

    def __exit__(self, *_: object) -> None:
        self._manifest.close()

    def shard_of(self, index: int) -> int:
        return index // self.shard_size

    def members(self, shard: int) -> list[int]:
        """The numbers of a shard's clips."""
        numbers = range(shard * self.shard_size, min((shard + 1) * self.shard_size, len(self.ids)))
        return [number for number in numbers if self.ids[number] is not None]

    @property
    def numbers(self) -> dict[str, int]:
        """The number of each clip; the newest, where one was tried again."""
        return {name: number for number, name in enumerate(self.ids) if name is not None}

    @property
    def shards(self) -> range:
        """The numbers of the shards of this process's share."""
        return range(self.share.index, -(-len(self.ids) // self.shard_size), self.share.count)

    def shard_path(self, shard: int) -> Path:
        suffix = formats.SUFFIXES[self.kind]
        if self.kind == formats.SAFETENSORS:
            return self.directory / f"{self.ids[shard]}{suffix}"
        return self.directory / f"latents-{shard:05}{suffix}"

    def clip_path(self, index: int) -> Path:
        """Where a clip's latents are put when they are done."""
        if self.kind == formats.SAFETENSORS:
            return self.shard_path(index)
        return self.directory / WORK / f"{index:08}.safetensors"

    def is_done(self, index: int) -> bool:
        return self.clip_path(index).exists() or self.shard_path(self.shard_of(index)).exists()

    def pending(self) -> list[int]:
        """The numbers of the clips that this process has to encode; writes the shards that lack no clip."""
        missing = []
        taken = {self.clip_path(index) for index, name in enumerate(self.ids) if name is not None}
        for shard in self.shards:
            for index in self.members(shard):
                try:
                    check_text(self.ids[index] or "")
                    check_file(self.clip_path(index), self.directory, taken)
                except ClipError as error:
                    if index not in self.bad:
                        self.refuse(index, str(error))
            lacking = [i for i in self.members(shard) if i not in self.bad and not self.is_done(i)]
            for index in self.members(shard):
                if index not in self.bad and index not in lacking and index not in self._noted:
                    self._note(index)  # its run was killed before it could
            if not lacking:
                self._close(shard)
            missing += lacking
        return missing

    def keep(self, index: int, latents: Latents) -> None:
        """Puts a clip's latents where they belong, and its shard when it was the last that this lacked.

        Raises:
            OSError: no room, or a directory that cannot be written.
        """
        path = self.clip_path(index)
        path.parent.mkdir(parents=True, exist_ok=True)
        latent_files.save(latents, path)
        self.note(index, **described(latents))

    def note(self, index: int, **about: Any) -> None:
        """Writes down that a clip's latents are where they belong; its shard, if it was the last."""
        self._note(index, **about)
        self._close_if_whole(self.shard_of(index))

    def refuse(self, index: int, reason: str) -> None:
        """Writes down that a clip cannot be encoded."""
        self.bad[index] = reason
        self._manifest.add(BAD, index=index, id=self.ids[index], error=reason)
        self._close_if_whole(self.shard_of(index))

    def _note(self, index: int, **about: Any) -> None:
        self._noted.add(index)
        self._manifest.add(DONE, index=index, id=self.ids[index], **about)

    def _close_if_whole(self, shard: int) -> None:
        if all(index in self.bad or self.is_done(index) for index in self.members(shard)):
            self._close(shard)

    def _close(self, shard: int) -> None:
        """Makes a shard of its clips, and removes these."""
        if self.kind == formats.SAFETENSORS:
            return
        path = self.shard_path(shard)
        good = [index for index in self.members(shard) if index not in self.bad]
        if good and not path.exists():
            formats.write(self.kind, [(index, self.clip_path(index)) for index in good], path)
            self._manifest.add(SHARD, name=path.name, clips=len(good))
        for index in good:
            self.clip_path(index).unlink(missing_ok=True)


def described(latents: Latents) -> dict[str, Any]:
    """What a manifest's line says of a clip that is done."""
    named = ("source_frames", "variable_frame_rate", "source_sha256")
    about = {name: latents.about[name] for name in named if name in latents.about}
    return {
        "latents": list(latents.tensor.shape),
        "frames": latents.num_frames,
        "fps": str(latents.fps),
        **about,
    }
