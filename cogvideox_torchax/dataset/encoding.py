"""Encode many clips into a directory: a latent file for each, or a directory with one file for each window.

A latent file names its settings; a directory has latents of the same settings only.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from cogvideox_torchax.dataset import loop, sources
from cogvideox_torchax.dataset.clip import Clip, DecodedClip, EncodeClip
from cogvideox_torchax.dataset.directory import OutputDirectory, ProcessShard, check_settings
from cogvideox_torchax.dataset.names import ClipError, check_file
from cogvideox_torchax.files import latents as latent_files
from cogvideox_torchax.files.whole import whole_file

Written = tuple[contextlib.ExitStack, list[dict[str, Any]]]
"""A stack that, when it is closed, puts a clip's output in its place; and the `about` of each latents."""


class LatentDirectory(OutputDirectory):
    """A directory of latents, to which the missing ones of some clips are added.

    `missing` has each `Clip` by its id.

    Args:
        directory: made if it does not exist.
        unit: encodes the clips.
        clips: all clips, of all processes.
        shard: the part of this process.
        retry: whether clips that failed in an earlier run are tried again.

    Raises:
        OutputError: the directory cannot be written, or holds latents of other settings.
        LatentsError: a latent file in the directory is broken.
    """

    FAILED = "failed.jsonl"

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
        for file in sources.latent_files(self.directory):
            check_settings(latent_files.about(file).get("settings"), settings, file)
        paths = {self.path(clip) for clip in clips}
        for clip in clips[self.shard.index :: self.shard.count]:
            try:
                check_file(clip.id, self.path(clip), self.directory, paths, is_directory=unit.config.windows)
                self.add(clip.id, self.path(clip), clip)
            except ClipError as error:
                self.refuse(clip.id, str(error))

    def path(self, clip: Clip) -> Path:
        return self.directory / (clip.id if self._unit.config.windows else f"{clip.id}.safetensors")

    def work(self, *, readers: int = loop.READERS) -> Iterator[loop.Step]:
        """Encode the missing clips; yield the outcome of each, with each latents' `about` as its result.

        `readers` is the number of clips that are read at a time.
        """
        for step in loop.work(
            jobs=self.missing,
            read=lambda clip_id: self._unit.read(self.missing[clip_id]),
            compute=lambda decoded: write(self._unit, decoded, self.path(decoded.clip)),
            keep=lambda _, written: written[0].close(),  # waits for the disk, in a thread of its own
            refuse=self.refuse,
            readers=readers,
        ):
            yield replace(step, result=step.result[1]) if step.result else step


def write(unit: EncodeClip, decoded: DecodedClip, path: Path) -> Written:
    """Encode a clip into a temporary file or directory, which `Written` puts in the place of `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    abouts = []
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(whole_file(path, directory=unit.config.windows))
        for latents in unit.encode_all(decoded):
            file = place / f"{len(abouts):05}.safetensors" if unit.config.windows else place
            file.write_bytes(latent_files.dumps(latents))
            abouts.append(latents.about)
        return stack.pop_all(), abouts


def write_at_once(unit: EncodeClip, decoded: DecodedClip, path: Path) -> list[dict[str, Any]]:
    """Encode a clip into `path`; return the `about` of each of its latents."""
    place, abouts = write(unit, decoded, path)
    place.close()
    return abouts


class Changes:
    """Counts what becomes of clips' frames, by the `about` of the latents."""

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
        """Count a clip, given the `about` of each of its latents."""
        for about in abouts[:1]:  # the windows of a clip share what is counted
            fps, is_variable = about["settings"]["fps"], about["variable_frame_rate"]
            self._rates.add(Fraction(fps or about["source_fps"]))
            self._counts.update(
                latents=len(abouts),
                frames_dropped=about["dropped_frames"],
                frames_repeated=about["repeated_frames"],
                clips_resampled=bool(fps) and (is_variable or Fraction(fps) != Fraction(about["source_fps"])),
                clips_of_variable_rate=is_variable and not fps,
                clips_enlarged=about["enlarged"] > 1,
            )

    def report(self) -> dict[str, Any]:
        """Return the counts, and the latents' frames a second: one number, or least and most."""
        rates = [f"{float(rate):.6g}" for rate in sorted(self._rates)]
        return {**self._counts, "fps": " to ".join(dict.fromkeys(rates[:1] + rates[-1:]))}
