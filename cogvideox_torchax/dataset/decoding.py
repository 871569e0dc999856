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
        """Keep `shards`, files of latents of all processes; `with` finds this process's missing videos.

        Without `fps` a video has the rate that its latent file records. With `retry` clips that were bad
        before are tried again.
        """
        super().__init__(directory, process_shard)
        self._shards, self._fps, self._retry = shards, fps, retry

    def _scan(self) -> None:
        """Find out which clips have a video, which the manifest lists as bad, and which are missing.

        Raises:
            OutputError: videos of these clips are there, but no config of a run that decoded them.
        """
        manifest_lines = lines(self.directory, self.NAME)  # of all processes
        bad_before = {line["id"]: line["error"] for line in manifest_lines if line["kind"] == BAD}
        self._readers: dict[str, Callable[[], Latents]] = {}  # read a missing clip's latents, by its id
        for clip_id, read in self._own_entries():
            if self._video_path(clip_id).exists():  # whether or not a manifest lists the clip, even as bad
                self.done_before += 1
            elif clip_id in bad_before and not self._retry:
                self.bad[clip_id] = bad_before[clip_id]
            else:
                self._readers[clip_id] = read
        self.missing = list(self._readers)
        # A run writes its config before its first video. An empty config equals any: this run's is compared
        # in `begin`.
        if not self._load_state({}) and self.done_before:
            raise OutputError(
                f"{self.directory} holds videos of these names that were not decoded there: give another "
                "directory"
            )

    def _own_entries(self) -> Iterator[formats.Entry]:
        """Yield the entries, (id, function that reads the latents), of this process's shards.

        A shard that cannot be read, and a clip whose video cannot be written, are added to `bad` instead. If
        the videos of several clips would have one path, the first clip gets it, and the later clips are bad.
        """
        own = {*self._shards[self.process_shard.index :: self.process_shard.count]}
        # For each clip of all processes, of which several may have one path: its shard, its id, and the
        # function that reads its latents.
        clips: list[tuple[Path, Any, Callable[[], Latents]]] = []
        for shard in self._shards:
            try:
                clips += [(shard, clip_id, read) for clip_id, read in formats.entries(shard)]
            except LatentsError as error:
                if shard in own:
                    self.bad[str(shard)] = str(error)
        owners: dict[Path, tuple[str, Path]] = {}  # by a video's path: the first clip's id, and its shard
        for shard, clip_id, _read in clips:
            if isinstance(clip_id, str):  # a broken shard may have any value as an id: `check_id` refuses it
                owners.setdefault(self._video_path(clip_id), (clip_id, shard))
        # The files to be written: a video's path must not lead through one of them, as through a directory.
        files = {*owners, self.directory / self.LIST}
        for shard, clip_id, read in (clip for clip in clips if clip[0] in own):
            try:
                check_id(clip_id)
                path = self._video_path(clip_id)
                check_file(clip_id, path, self.directory, files)
                owner_id, owner_shard = owners[path]
                if (owner_id, owner_shard) != (clip_id, shard):
                    raise ClipError(
                        f"its video would replace {owner_id}'s in {owner_shard}: give it another id"
                    )
                yield clip_id, read
            except ClipError as error:
                self.bad[str(clip_id)] = f"{shard}: {error}"

    def _video_path(self, clip_id: str) -> Path:
        """Return the path of a clip's video; an id may end in .mp4 already."""
        return self.directory / f"{clip_id.removesuffix('.mp4')}.mp4"

    def begin(self, config: dict[str, Any], *, write: bool = True) -> None:
        """Write the config, with the requested frame rate as "fps", to a file of the directory.

        An earlier run's file, whose config must be equal, stays as it is. Without `write` nothing is written.

        Raises:
            OutputError: the file of an earlier run is broken, or has another config.
        """
        config = {**config, "fps": None if self._fps is None else str(self._fps)}
        while not self._load_state(config) and write:
            self._save_state(config)

    def first_latents(self) -> Latents | None:
        """Return the first readable latents of a clip that has no video yet; None if there are none."""
        for clip_id in self.missing:
            with contextlib.suppress(*loop.IN_READING):  # `work`, which decodes all, meets the error again
                return self._readers[clip_id]()
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
            clip_id, latents = given
            path = self._video_path(clip_id)
            path.parent.mkdir(parents=True, exist_ok=True)
            with video.writing(path, self._fps or latents.fps) as sink:
                written = video.write_all(sink, unit.stream(latents))
            return {"frames": written, "frames_encoded": latents.num_frames}

        return loop.work(
            jobs=self.missing,
            read=lambda clip_id: (clip_id, self._readers[clip_id]()),
            compute=compute,
            keep=lambda clip_id, about: self.note(clip_id, **about),
            refuse=self.refuse,
            readers=readers,
        )
