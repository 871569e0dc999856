"""Where a data set's clips are: a directory of videos, or a list of them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cogvideox_torchax.dataset import formats
from cogvideox_torchax.dataset.clip import Clip, ClipError
from cogvideox_torchax.dataset.manifest import WORK
from cogvideox_torchax.files import video

LISTS = (".txt", ".jsonl")


def is_many(path: str | Path) -> bool:
    """Whether a path stands for many clips: a directory, or a list in .txt or .jsonl."""
    path = Path(path)
    return path.is_dir() or path.suffix in LISTS


def clips(path: str | Path) -> list[Clip]:
    """The clips of a directory, of those below it too, or of a list, in an order that stays.

    Beside a directory's clip a .txt file of the same name may hold its caption. A .txt list has a path a
    line, a .jsonl one an object with `path` and, as it likes, `id`, `caption`, `frames`, `height` and
    `width`; paths are relative to the list.

    Raises:
        ClipError: no such directory or list, none in it, a line that says no path, or an id that comes twice.
    """
    path = Path(path)
    found = _in_directory(path) if path.is_dir() else list(_in_list(path))
    if not found:
        raise ClipError(f"{path} names no clips: a video ends in {', '.join(video.SUFFIXES)}")
    seen: set[str] = set()
    for clip in found:
        if clip.id in seen:
            raise ClipError(f"{path} names {clip.id} twice: give each clip an id of its own")
        if clip.id.startswith(("/", "..")) or "/../" in clip.id:
            raise ClipError(f"{path} gives the id {clip.id}: it must not lead out of the output's directory")
        seen.add(clip.id)
    return found


def _in_directory(directory: Path) -> list[Clip]:
    files = (
        path for path in directory.rglob("*") if path.suffix.lower() in video.SUFFIXES and path.is_file()
    )
    return [
        Clip(file.relative_to(directory).as_posix(), file, _caption(file))
        for file in sorted(files, key=lambda file: file.relative_to(directory).as_posix())
    ]


def _caption(file: Path) -> str:
    beside = file.with_suffix(".txt")
    return beside.read_text().strip() if beside.is_file() else ""


def _in_list(path: Path) -> Iterator[Clip]:
    if not path.is_file():
        raise ClipError(f"there is no file {path}")
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        if path.suffix == ".txt":
            given: dict[str, Any] = {"path": line.strip()}
        else:
            try:
                given = dict(json.loads(line))
                given["path"] = str(given["path"])
            except (ValueError, KeyError, TypeError) as error:
                raise ClipError(
                    f"{path}, line {number}: an object with a path is wanted, got {line[:80]}"
                ) from error
        file = path.parent / given.pop("path")
        name = str(given.pop("id", _name(file, path.parent)))
        unknown = set(given) - {"caption", "frames", "height", "width"}
        if unknown:
            raise ClipError(f"{path}, line {number}: got {', '.join(sorted(unknown))}, which no clip has")
        yield Clip(name, file, **given)


def _name(file: Path, directory: Path) -> str:
    return (file.relative_to(directory) if file.is_relative_to(directory) else Path(file.name)).as_posix()


def _is_inner(path: Path) -> bool:
    """Whether a file is still being made: in a hidden directory, or waiting for its shard."""
    return path.parts[0] == WORK or any(part.startswith(".") for part in path.parts)


def shards(directory: Path) -> list[Path]:
    """The files of a directory that hold latents, those below it too.

    Raises:
        ClipError: none.
    """
    suffixes = tuple(formats.SUFFIXES.values())
    files = (path for path in directory.rglob("*") if path.suffix in suffixes and path.is_file())
    found = sorted(path for path in files if not _is_inner(path.relative_to(directory)))
    if not found:
        raise ClipError(f"{directory} holds no latents: they end in {', '.join(suffixes)}")
    return found
