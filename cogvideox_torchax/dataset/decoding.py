"""A data set's latents to videos, one .mp4 a clip.

videos.json         what they are made by
videos-0.jsonl      a line for each video done or latents bad; a file for each process
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from cogvideox_torchax.dataset import formats, loop
from cogvideox_torchax.dataset.clip import ClipError, DecodeClip, check_file, check_id
from cogvideox_torchax.dataset.manifest import BAD, DONE, Manifest, Share, check_recipe, lines
from cogvideox_torchax.files import reports, video
from cogvideox_torchax.files.latents import Latents, LatentsError
from cogvideox_torchax.files.whole import OutputError

FORMAT = "cogvideox-torchax-videos/1"
LIST, NAME = "videos.json", "videos"


class Videos:
    """A directory of decoded clips that fills up.

    Args:
        directory: made where it is not there.
        shards: the files that hold the latents.
        fps: frames a second; each clip's own where None.
        share: of this process: every so-manieth shard.
        retry: whether clips that were bad are tried again.

    Attributes:
        missing: ids that have no video yet.
        bad: why clips could not be decoded.
        done_before: how many videos there were.
    """

    def __init__(
        self,
        directory: str | Path,
        shards: Sequence[Path],
        fps: Fraction | None,
        share: Share,
        *,
        retry: bool = False,
    ):
        self.directory = Path(directory)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"cannot write into {self.directory}: {error.strerror}") from error
        self._fps = fps
        self._manifest = Manifest(self.directory, f"{NAME}-{share.index}.jsonl")
        noted: dict[str, str] = {}
        for line in lines(self.directory, NAME):
            if line["kind"] == BAD and not retry:
                noted[line["id"]] = line["error"]
        self.bad: dict[str, str] = {}
        self._readers: dict[str, Callable[[], Latents]] = {}
        self.done_before = 0
        owners: dict[Path, tuple[str, Path]] = {self.directory / LIST: ("", self.directory / LIST)}
        found = list(self._entries(list(shards)[share.index :: share.count]))
        for shard, name, _ in found:
            with contextlib.suppress(ClipError):
                check_id(name)
                owners.setdefault(self._path(name), (name, shard))
        for shard, name, read in found:
            try:
                check_id(name)
                path = self._path(name)
                check_file(path, self.directory, owners)
                if owners[path] != (name, shard):
                    owner, where = owners[path]
                    raise ClipError(f"its video would be that of {owner} in {where}: give it another id")
            except ClipError as error:
                self.bad[str(name)] = f"{shard}: {error}"
                continue
            # Another process's manifest may be read after the one that tells of its success.
            if path.exists():
                self.done_before += 1
            elif name in noted:
                self.bad[name] = noted[name]
            else:
                self._readers[name] = read
        self.missing = list(self._readers)
        # Whoever makes a video has written down its recipe before.
        if self.done_before and not (self.directory / LIST).exists():
            raise OutputError(
                f"{self.directory} holds videos of these names that were not decoded there: give another "
                "directory"
            )

    def _entries(self, shards: Sequence[Path]) -> Iterator[tuple[Path, Any, Callable[[], Latents]]]:
        """Yield the shard, the id and the reader of each clip; note the shards that cannot be read."""
        for shard in shards:
            try:
                yield from ((shard, *entry) for entry in formats.entries(shard))
            except LatentsError as error:
                self.bad[shard.name] = str(error)

    def __enter__(self) -> "Videos":
        return self

    def __exit__(self, *_: object) -> None:
        self._manifest.close()

    def _path(self, name: str) -> Path:
        return self.directory / f"{name.removesuffix('.mp4')}.mp4"

    def begin(self, recipe: dict[str, Any]) -> None:
        """Writes down what videos are made by, as JSON; a directory has one recipe for good.

        Raises:
            OutputError: there are videos of another recipe.
        """
        path = self.directory / LIST
        recipe = {**recipe, "fps": None if self._fps is None else str(self._fps)}
        if path.exists():
            check_recipe(self.directory, reports.load(path, FORMAT)["recipe"], recipe)
        else:
            reports.write_json(path, {"format": FORMAT, "recipe": recipe})

    def first(self) -> Latents | None:
        """The first missing clip's latents that can be read; None where there are none."""
        for name in self.missing:
            with contextlib.suppress(ValueError, OSError):  # what `work` finds again, and refuses
                return self._readers[name]()
        return None

    def work(self, unit: DecodeClip, *, readers: int) -> Iterator[loop.Step]:
        """Decodes what is missing; frames are written as they come, so a clip may be of any length."""

        def compute(given: tuple[str, Latents]) -> dict[str, Any]:
            name, latents = given
            path = self._path(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            written = 0
            with video.writing(path, self._fps or latents.fps) as sink:
                for frames in unit.stream(latents):
                    sink.write(frames)
                    written += frames.shape[2]
            return {"frames": written, "frames_encoded": latents.num_frames}

        def keep(name: str, line: dict[str, Any]) -> None:
            self._manifest.add(DONE, id=name, **line)

        def refuse(name: str, reason: str) -> None:
            self.bad[name] = reason
            self._manifest.add(BAD, id=name, error=reason)

        def read(name: str) -> tuple[str, Latents]:
            return name, self._readers[name]()

        yield from loop.work(self.missing, read, compute, keep, refuse, readers=readers)
