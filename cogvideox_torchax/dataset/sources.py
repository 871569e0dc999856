"""The clips of a data set: a directory of videos, or a list of them."""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cogvideox_torchax.dataset.clip import Clip
from cogvideox_torchax.dataset.names import ClipError, check_ids
from cogvideox_torchax.files import reports, video
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
    directory: Path, is_wanted: Callable[[Path], bool], say: Callable[[str], None], left_out: str = HIDDEN
) -> list[Path]:
    """Return the wanted files in a directory and in those below it, also by links, each directory once.

    Args:
        directory: where to look; its own name is not compared with `left_out`.
        is_wanted: whether a file is of the kind that is looked for.
        say: is told in a line how many files are left out, and in one each of folders that cannot be read.
        left_out: a regular expression: files and folders of such names are left out.
    """

    def is_left_out(path: Path) -> bool:
        return any(re.fullmatch(left_out, part) for part in path.relative_to(directory).parts)

    found, seen, tops = [], set(), [directory]
    for top in tops:  # linked folders are appended: they come after all folders that are not linked
        for folder, folders, names in os.walk(top, onerror=lambda error: say(f"left out: {error}")):
            if (place := os.path.realpath(folder)) in seen:
                folders.clear()  # which `os.walk` would enter
                continue
            seen.add(place)
            tops += [
                path
                for path in (Path(folder, name) for name in sorted(folders))
                if path.is_symlink() and not is_left_out(path)
            ]
            found += [path for name in names if is_wanted(path := Path(folder, name)) or not path.exists()]
    kept = [path for path in found if path.exists() and not is_left_out(path)]
    if len(kept) < len(found):
        say(
            f"left out: {len(found) - len(kept)} files that are hidden, discarded or links to nothing, such "
            f"as {min(set(found) - set(kept))}"
        )
    return kept


def clips(path: str | Path, say: Callable[[str], None] = print) -> list[Clip]:
    """Return the clips of a directory and of the directories below it, or of a list, in a fixed order.

    In a directory a .txt file beside a clip, of the same name, is its caption. Linked directories are
    followed; hidden and discarded files are left out, and counted by `say`. A .txt list has a path on each
    line, a .jsonl list an object with `path` and optional `id`, `caption`, `frames`, `height` and `width`;
    paths are relative to the list.

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
    check_ids((clip.id for clip in all_clips), str(path))
    return all_clips


def _clips_below(directory: Path, say: Callable[[str], None]) -> list[Clip]:
    files = files_below(directory, video.is_video, say)
    return [
        Clip(file.relative_to(directory).as_posix(), file, _caption_beside(file))
        for file in sorted(files, key=lambda file: file.relative_to(directory).as_posix())
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


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a list that are not empty, with their numbers; `ClipError` for no text in UTF-8."""
    if not path.is_file():
        raise ClipError(f"there is no file {path}")
    # Not `splitlines`, which splits at characters such as U+2028, too, and JSON allows these in a text.
    for number, line in enumerate(_read_text(path).split("\n"), 1):
        if line.strip():
            yield number, line.strip()


def fields_of(line: str, path: Path, key: str, types: Mapping[str, type], owner: str) -> dict[str, Any]:
    """Return the fields of a list's line: its text under `key` in a .txt list, an object's in a .jsonl list.

    `types` has the fields that `owner`, such as a clip, may have. `ClipError` for another field or type, or
    without the `key`.
    """
    try:
        in_text = path.suffix.lower() == ".txt"
        fields: dict[str, Any] = {key: line} if in_text else dict(reports.parse(line))
        fields = {name: value for name, value in fields.items() if value is not None}  # null is absent
        fields[key]  # for its error
    except (KeyError, TypeError, ValueError) as error:
        raise ClipError(f"an object with a {key} is wanted, got {line[:80]}") from error
    for name, value in fields.items():
        if name not in types:
            raise ClipError(f"got {name}, which no {owner} has: it may have {', '.join(types)}")
        if types[name] is int and isinstance(value, float) and value.is_integer():
            fields[name] = value = int(value)  # a column with an empty cell has floats
        wanted_type, lowest = types[name], 0 if name == "seed" else 1
        # Not `isinstance`, for which a bool is an int. JSON may have 6 for 6.0.
        is_wanted = type(value) is wanted_type or (wanted_type is float and type(value) is int)
        if not is_wanted or (wanted_type is int and value < lowest):
            names = {int: f"a whole number above {lowest - 1}", float: "a number", str: "a text"}
            raise ClipError(f"{name} is {value!r}, {names[wanted_type]} is wanted")
        # A path is not checked here: `names.check_file` refuses its clip alone, and not the whole list.
        checked_text = "" if name == "path" else str(value)
        try:
            checked_text.encode()  # raises for a text that UTF-8 cannot hold
        except UnicodeEncodeError as error:
            raise ClipError(f"{name} is {value!r}, which UTF-8 cannot hold ({error.reason})") from error
    return fields


def _listed_clips(path: Path) -> Iterator[Clip]:
    for number, line in lines(path):
        try:
            fields = fields_of(line, path, "path", FIELDS, "clip")
        except ClipError as error:
            raise ClipError(f"{path}, line {number}: {error}") from error
        file = path.parent / fields.pop("path")  # all other fields are arguments of `Clip`
        yield Clip(fields.pop("id", _relative_name(file, path.parent)), file, **fields)


def _relative_name(file: Path, directory: Path) -> str:
    """Return a file's path below a directory, or its bare name if it lies elsewhere."""
    # A path such as DIRECTORY/../clip.mp4 begins with the directory, but is not below it.
    below = file.relative_to(directory) if file.is_relative_to(directory) else Path(file.name)
    return file.name if ".." in below.parts else below.as_posix()


def latent_files(directory: Path, say: Callable[[str], None] = print) -> list[Path]:
    """Return the latent files in a directory and below it, ordered by their paths; files in the making not.

    Raises:
        ClipError: there are none.
    """

    def is_wanted(path: Path) -> bool:
        is_whole = not any(part.endswith(WRITING) for part in path.relative_to(directory).parts)
        return path.suffix == ".safetensors" and is_whole and path.is_file()

    # No more than `DISCARDED`: an id, and so the path of its latents, may begin with a dot.
    files = files_below(directory, is_wanted, say, DISCARDED) if directory.is_dir() else []
    if not files:
        raise ClipError(f"{directory} holds no latent files (.safetensors): encode videos first")
    return sorted(files)
