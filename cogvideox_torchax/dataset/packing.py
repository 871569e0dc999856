"""Pack a directory of latent files into shards of Parquet or WebDataset."""

from collections.abc import Callable
from pathlib import Path

from cogvideox_torchax.dataset import formats, sources
from cogvideox_torchax.dataset.directory import check_settings
from cogvideox_torchax.files import kinds, latents as latent_files, whole


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
        kind: a format of `kinds.SUFFIXES`.
        shard_size: number of clips in a shard; the last one has the remainder.
        say: is told how many files are left out, as hidden or discarded.

    Returns:
        The number of clips, and of shards.

    Raises:
        LatentsError, ClipError: a latent file is broken, or there are none.
        OutputError: the output cannot be written, or the latents are of several settings.
        ImportError: pyarrow or webdataset is not installed.
    """
    formats.libraries()  # raises before the work, not after it
    output = whole.check_output(output)
    whole.remove_leftover(output)
    is_used = output.is_file() or (output.is_dir() and any(output.iterdir()))
    whole.refuse(output, (is_used, "it is not empty; give a new directory, or an empty one"))
    files = sources.latent_files(Path(directory), say)
    # All files must have the first file's settings; `check_settings` refuses a first file that has none.
    settings = latent_files.about(files[0]).get("settings")
    for file in files:
        check_settings(latent_files.about(file).get("settings"), settings or {}, file)
    starts = range(0, len(files), shard_size)
    with whole.whole_file(output, directory=True) as place:
        for number, start in enumerate(starts):
            members = list(enumerate(files[start : start + shard_size], start))  # (clip's number, file)
            formats.write(kind, members, place / f"latents-{number:05}{kinds.SUFFIXES[kind]}")
    return len(files), len(starts)
