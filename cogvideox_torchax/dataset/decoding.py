"""Decode a data set's latents to videos, one .mp4 a clip.

The output directory has two more files:

    videos.json         the config that the videos are made by
    videos-0.jsonl      the manifest, a file for each process: a line for each clip that is done or bad
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from cogvideox_torchax.dataset import formats, loop
from cogvideox_torchax.dataset.clip import DecodeClip
from cogvideox_torchax.dataset.manifest import BAD, OutputDirectory, ProcessShard, lines
from cogvideox_torchax.dataset.names import ClipError, check_file, check_id
from cogvideox_torchax.files import video
from cogvideox_torchax.files.latents import Latents, LatentsError
from cogvideox_torchax.files.whole import OutputError


class VideoDirectory(OutputDirectory):
    """A directory of decoded clips; a clip's key is its id.

    Args:
        directory: made where it is not there.
        shards: files of latents, of one clip or several; each process decodes some of the files.
        fps: frames a second; each clip's own where None.
        process_shard: the part of this process; None for a single process.
        retry: whether clips that were bad are tried again.
    """

    LIST, NAME, FORMAT = "videos.json", "videos", "cogvideox-torchax-videos/1"

    def __init__(
        self,
        directory: str | Path,
        shards: Sequence[Path],
        fps: Fraction | None = None,
        process_shard: ProcessShard | None = None,
        *,
        retry: bool = False,
    ):
        """Keep this process's share of `shards`, files of latents; `with` finds the missing videos.

        Without `fps` a video has the rate that its latent file records. With `retry` clips that were bad
        before are tried again.
        """
        super().__init__(directory, process_shard)
        self._shards = shards[self.process_shard.index :: self.process_shard.count]
        self._fps, self._retry = fps, retry

    def _scan(self) -> None:
        """Find out which clips have a video, which the manifest lists as bad, and which are missing.

        Raises:
            OutputError: videos of these clips are there, but no config of a run that decoded them.
        """
        manifest = lines(self.directory, self.NAME)
        bad_before = {line["id"]: line["error"] for line in manifest if line["kind"] == BAD}
        self._readers: dict[str, Callable[[], Latents]] = {}  # read a missing clip's latents, by its id
        for name, read in self._own_entries():
            if self._video_path(name).exists():  # whether or not a manifest lists the clip, even as bad
                self.done_before += 1
            elif name in bad_before and not self._retry:
                self.bad[name] = bad_before[name]
            else:
                self._readers[name] = read
        self.missing = list(self._readers)
        # A run writes its config before its first video. None: the config is not compared with this run's.
        if not self._load_state(None) and self.done_before:
            raise OutputError(
                f"{self.directory} holds videos of these names that were not decoded there: give another "
                "directory"
            )

    def _own_entries(self) -> Iterator[formats.Entry]:
        """Yield the entries, (id, function that reads the latents), of this process's shards.

        A shard that cannot be read, and a clip whose video cannot be written, are added to `bad` instead. If
        the videos of several clips would have one path, the first clip gets it, and the later clips are bad.
        """
        # For each clip: its shard, its id, and the function that reads its latents.
        shard_entries: list[tuple[Path, Any, Callable[[], Latents]]] = []
        for shard in self._shards:
            try:
                shard_entries += [(shard, name, read) for name, read in formats.entries(shard)]
            except LatentsError as error:
                self.bad[shard.name] = str(error)
        owners: dict[Path, tuple[str, Path]] = {}  # by a video's path: the clip's id, and its shard
        for shard, name, _read in shard_entries:
            if isinstance(name, str):  # a broken shard may have any value as an id: `check_id` refuses it
                owners.setdefault(self._video_path(name), (name, shard))
        # The files to be written: a video's path must not lead through one of them, as through a directory.
        files = {*owners, self.directory / self.LIST}
        for shard, name, read in shard_entries:
            try:
                check_id(name)
                check_file(name, self._video_path(name), self.directory, files)
                owner, owner_shard = owners[self._video_path(name)]
                if (owner, owner_shard) != (name, shard):
                    raise ClipError(f"its video would replace {owner}'s in {owner_shard}: give it another id")
                yield name, read
            except ClipError as error:
                self.bad[str(name)] = f"{shard}: {error}"

    def _video_path(self, name: str) -> Path:
        """Return the path of a clip's video; an id may end in .mp4 already."""
        return self.directory / f"{name.removesuffix('.mp4')}.mp4"

    def begin(self, config: dict[str, Any], **state: Any) -> None:
        """Write the config, with the requested frame rate as "fps", to a file of the directory.

        An earlier run's config in that file must be equal. `state` are further fields of the file.
        """
        super().begin({**config, "fps": None if self._fps is None else str(self._fps)}, **state)

    def first_latents(self) -> Latents | None:
        """Return the first readable latents of a clip that has no video yet; None if there are none."""
        for name in self.missing:
            with contextlib.suppress(*loop.IN_READING):  # `work`, which decodes all, meets the error again
                return self._readers[name]()
        return None

    def work(self, unit: DecodeClip, *, readers: int) -> Iterator[loop.Step]:
        """Decode the clips whose video is missing; yield the outcome of each.

        Frames are written chunk by chunk, so a clip may be of any length.

        Args:
            unit: decodes one clip's latents.
            readers: number of clips whose latents are read at a time.
        """

        def compute(given: tuple[str, Latents]) -> dict[str, Any]:
            """Decode a clip, given its (id, latents), into its video; return fields of its manifest line."""
            name, latents = given
            path = self._video_path(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            with video.writing(path, self._fps or latents.fps) as sink:
                written = video.write_all(sink, unit.stream(latents))
            return {"frames": written, "frames_encoded": latents.num_frames}

        return loop.work(
            jobs=self.missing,
            read=lambda name: (name, self._readers[name]()),
            compute=compute,
            keep=lambda name, about: self.note(name, **about),
            refuse=self.refuse,
            readers=readers,
        )
