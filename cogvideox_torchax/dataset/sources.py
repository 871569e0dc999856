"""The clips of a data set: a directory of videos, or a list of them."""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cogvideox_torchax.dataset.clip import Clip, ClipError, check_id
from cogvideox_torchax.files import faults, reports, video
from cogvideox_torchax.files.whole import WRITING

DISCARDED = r"\._.*|\.Trash.*|\.ipynb_checkpoints|__MACOSX|\$RECYCLE\.BIN|#recycle|@eaDir"
"""Names of files and folders that a system keeps of those that were deleted, copied or edited."""
HIDDEN = rf"\..*|{DISCARDED}"
FIELDS: dict[str, type] = {
    **dict.fromkeys(("path", "id", "caption"), str),
    **dict.fromkeys(("frames", "height", "width"), int),
}
"""Fields that a line of a .jsonl list may have, and their types."""


def files_below(
    directory: Path, suffixes: tuple[str, ...], say: Callable[[str], None], left_out: str = HIDDEN
) -> list[Path]:
    """Return the files of a kind in a directory and in those below it, each once, in order; follow links.

    Args:
        directory: where to look; its own name is not compared with `left_out`.
        suffixes: of the files that are looked for, in small letters; they may also be in capital ones.
        say: is told in a line of each folder that cannot be read.
        left_out: a regular expression: files and folders of such names are left out.
    """
    found, seen = [], set()
    walk = os.walk(directory, onerror=lambda error: say(f"left out: {error}"), followlinks=True)
    for folder, folders, names in walk:
        kept = [Path(folder, name) for name in sorted((*folders, *names)) if not re.fullmatch(left_out, name)]
        # `os.walk` enters these, by links last: so a folder has its own name rather than a link's.
        folders[:] = [path.name for path in sorted(kept, key=Path.is_symlink) if path.name in folders]
        if (place := os.path.realpath(folder)) in seen:
            folders.clear()
        else:
            found += (path for path in kept if path.suffix.lower() in suffixes and path.is_file())
        seen.add(place)
    return sorted(found)


def clips(path: str | Path, say: Callable[[str], None] = print) -> list[Clip]:
    """Return the clips of a directory and of the directories below it, or of a list, in a fixed order.

    In a directory a .txt file beside a clip, of the same name, is its caption. Linked directories are
    followed; hidden and discarded files are left out, and `say` is told of folders that cannot be read. A
    .txt list has a path on each line, a .jsonl list an object with `path` and optional `id`, `caption`,
    `frames`, `height` and `width`; paths are relative to the list.

    Raises:
        ClipError: the directory or list is missing or has no clip, a line is wrong, or an id comes twice.
    """
    path = Path(path)
    all_clips = _clips_below(path, say) if path.is_dir() else list(_listed_clips(path))
    if not all_clips:
        raise ClipError(
            f"{path} names no clips: a video ends in {', '.join(video.SUFFIXES)}; of pictures, make a video "
            "first (docs/command-line.md)"
        )
    for clip_id, count in Counter(clip.id for clip in all_clips).items():
        check_id(clip_id, f"{path}: ")
        if count > 1:
            raise ClipError(f"{path} names {clip_id} twice: give each clip an id of its own")
    return all_clips


def _clips_below(directory: Path, say: Callable[[str], None]) -> list[Clip]:
    return [
        Clip(file.relative_to(directory).as_posix(), file, _caption_beside(file))
        for file in files_below(directory, video.SUFFIXES, say)
    ]


def _caption_beside(file: Path) -> str:
    beside = file.with_suffix(".txt")
    return _read_text(beside).strip() if beside.is_file() else ""


def _read_text(path: Path) -> str:
    """Return the text of a UTF-8 file, without the byte order mark that Windows' editors write."""
    try:
        return path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ClipError(
            f"{path} is not in UTF-8 ({error.reason} at byte {error.start}): save it so"
        ) from error


def entries(
    path: Path, key: str, types: Mapping[str, type], owner: str, comments: tuple[str, ...] = ()
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number and the fields of each line of a list: of a .txt list its text under `key`.

    `types` has the fields that `owner`, such as a clip, may have. Empty lines, and those that begin with one
    of `comments`, are left out.

    Raises:
        ClipError: no file, no text in UTF-8, or a line with another field or type, or without the `key`.
    """
    if not path.is_file():
        raise ClipError(f"there is no file {path}")
    # Not `splitlines`, which splits at characters such as U+2028, too, and JSON allows these in a text.
    for number, line in enumerate(map(str.strip, _read_text(path).split("\n")), 1):
        if line and not line.startswith(comments):
            try:
                yield number, _fields_of(line, path, key, types, owner)
            except ClipError as error:
                raise ClipError(f"{path}, line {number}: {error}") from error


def _fields_of(line: str, path: Path, key: str, types: Mapping[str, type], owner: str) -> dict[str, Any]:
    try:
        in_text = path.suffix.lower() == ".txt"
        fields: dict[str, Any] = {key: line} if in_text else dict(reports.parse(line))
        fields = {name: value for name, value in fields.items() if value is not None}  # null is absent
        fields[key]  # for its error
        # Half a surrogate pair, which UTF-8 cannot hold, raises. A path may have other bytes than UTF-8's.
        "".join(str(value) for name, value in fields.items() if name != "path").encode()
    except (KeyError, TypeError, ValueError) as error:
        raise ClipError(f"an object with a {key}, in UTF-8, is wanted, got {line[:80]}") from error
    for name, value in fields.items():
        wanted_type, lowest = types.get(name, type(None)), 0 if name == "seed" else 1
        if wanted_type is int and isinstance(value, float) and value.is_integer():
            fields[name] = value = int(value)  # a column with an empty cell has floats
        # Not `isinstance`, for which a bool is an int. JSON may have 6 for 6.0.
        is_wanted = type(value) is wanted_type or (wanted_type is float and type(value) is int)
        names = {int: f"a whole number above {lowest - 1}", float: "a number", str: "a text"}
        faults.refuse(
            (name not in types, f"got {name}, which no {owner} has: it may have {', '.join(types)}"),
            (
                not is_wanted or (wanted_type is int and value < lowest),
                f"{name} is {value!r}, {names.get(wanted_type)} is wanted",
            ),
            error=ClipError,
        )
    return fields


def _listed_clips(path: Path) -> Iterator[Clip]:
    for _, fields in entries(path, "path", FIELDS, "clip"):
        file = Path(fields.pop("path"))  # all other fields are arguments of `Clip`
        is_below = not file.is_absolute() and ".." not in file.parts
        yield Clip(fields.pop("id", file.as_posix() if is_below else file.name), path.parent / file, **fields)


def latent_files(directory: Path, say: Callable[[str], None] = print) -> list[Path]:
    """Return the latent files in a directory and below it, ordered by their paths; files in the making not.

    Raises:
        ClipError: there are none.
    """
    # No more than these: an id, and so the path of its latents, may begin with a dot.
    left_out = rf"{DISCARDED}|.*{re.escape(WRITING)}"

    files = files_below(directory, (".safetensors",), say, left_out) if directory.is_dir() else []
    if not files:
        raise ClipError(f"{directory} holds no latent files (.safetensors): encode videos first")
    return files
