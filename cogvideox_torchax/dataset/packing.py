"""Pack a directory of latent files into shards: Parquet, WebDataset, or safetensors of several clips."""

from collections.abc import Callable
from pathlib import Path

from cogvideox_torchax.dataset import formats, sources
from cogvideox_torchax.dataset.directory import check_settings
from cogvideox_torchax.dataset.names import ClipError
from cogvideox_torchax.files import latents as latent_files
from cogvideox_torchax.files.whole import WRITING, check_output, hidden, refuse, remove_leftover, whole_file


def pack(
    directory: str | Path,
    output: str | Path,
    kind: str,
    shard_size: int = 64,
    say: Callable[[str], None] = print,
) -> tuple[int, int]:
    """Write the clips of a directory that `encode` has finished into a new directory of shards.

    The output is complete or absent. Clips are in the order of their paths; equal latent files make equal
    shards.

    Args:
        directory: holds latent files, which may be in directories of any depth.
        output: directory of the shards `latents-00000` and so on; it must not exist, or be empty.
        kind: a format of `formats.SUFFIXES`.
        shard_size: number of clips in a shard; the last one has the remainder.
        say: is told how many files are left out, as hidden or discarded.

    Returns:
        The number of clips, and of shards.

    Raises:
        LatentsError, ClipError: a latent file is broken, or there are none.
        OutputError: the output cannot be written, or the latents are of several settings.
        ImportError: pyarrow is not installed.
    """
    if Path(directory).is_file():
        raise ClipError(f"{directory} is a file: give a directory that `encode` has written")
    if kind == formats.PARQUET:
        formats.pyarrow()  # raises before the work, not after it
    output = check_output(output)
    # A run that was killed after it had put the output in place may have left its hidden directory.
    remove_leftover(hidden(output, WRITING))
    refuse(
        output,
        (
            output.is_file() or (output.is_dir() and any(output.iterdir())),
            "it is not empty; give a new directory, or an empty one",
        ),
    )
    files = sources.latent_files(Path(directory), say)
    if not files:
        raise ClipError(f"{directory} holds no latent files: give a directory that `encode` has written")
    # All files must have the first file's settings; `check_settings` refuses a first file that has none.
    settings = latent_files.about(files[0]).get("settings")
    for file in files:
        check_settings(latent_files.about(file).get("settings"), settings or {}, file)
    starts = range(0, len(files), shard_size)
    with whole_file(output, directory=True) as place:
        for number, start in enumerate(starts):
            members = list(enumerate(files[start : start + shard_size], start))  # (clip's number, file)
            formats.write(kind, members, place / f"latents-{number:05}{formats.SUFFIXES[kind]}")
    return len(files), len(starts)
