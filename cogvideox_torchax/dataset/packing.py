"""Pack a directory of latent files into shards that trainers read: Parquet and WebDataset.

A *shard* is a file with the latents of several clips. It is made of the clips' latent files, and equal latent
files make equal shards.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cogvideox_torchax.dataset import sources
from cogvideox_torchax.dataset.directory import check_settings
from cogvideox_torchax.files import kinds, latents as latent_files, whole
from cogvideox_torchax.files.extras import needing

COLUMNS = {
    latent_files.TENSOR: "vae_latent",
    latent_files.LOGVAR: "vae_logvar",
    latent_files.SAMPLE: "vae_sample",
}
"""By the name of a tensor in a latent file, the beginning of its columns' names in Parquet."""
Members = Sequence[tuple[int, Path]]
"""The clips of a shard: each one's number in the data set, and its latent file."""


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
    _libraries()  # raises before the work, not after it
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
    write = _write_parquet if kind == "parquet" else _write_tar
    with whole.whole_file(output, directory=True) as place:
        for number, start in enumerate(starts):
            members = list(enumerate(files[start : start + shard_size], start))  # (clip's number, file)
            write(members, place / f"latents-{number:05}{kinds.SUFFIXES[kind]}")
    return len(files), len(starts)


def _libraries() -> tuple[Any, Any]:
    """Return the packages pyarrow and webdataset; raise `ImportError` if one is not installed."""
    with needing("data", "shards need pyarrow and webdataset", ImportError):
        import pyarrow.parquet
        import webdataset
    return pyarrow, webdataset


def _write_parquet(members: Members, path: Path) -> None:
    """Write the columns that FastVideo's loader reads, and our own.

    FastVideo's columns are its schema for text to video, in `fastvideo/dataset/dataloader/schema.py`.
    """
    arrow, _ = _libraries()
    text, integer, real, data = arrow.string(), arrow.int64(), arrow.float64(), arrow.binary()
    columns = dict.fromkeys(("id", "file_name", "caption", "media_type", "about"), text)
    columns |= {"width": integer, "height": integer, "num_frames": integer, "duration_sec": real, "fps": real}
    for name in (*COLUMNS.values(), "text_embedding"):
        columns |= {f"{name}_bytes": data, f"{name}_shape": arrow.list_(integer), f"{name}_dtype": text}
    # Latents hardly compress. The columns of the text, which hold zeros, do.
    compression = {name: "zstd" if name.startswith("text_") else "none" for name in columns}
    with arrow.parquet.ParquetWriter(path, arrow.schema(columns), compression=compression) as writer:
        for _, file in members:  # a row group for each clip: a reader then reads one clip at a time
            row = _row(latent_files.load(file))
            writer.write_table(arrow.Table.from_pylist([row], schema=arrow.schema(columns)))


def _row(latents: latent_files.Latents) -> dict[str, Any]:
    """Return a latent file's tensors and fields as a row of Parquet."""
    about, dtype = latents.about, str(latents.tensor.dtype)
    arrays = {  # in float32, because NumPy has no bfloat16
        COLUMNS[name]: tensor[0].float().contiguous().numpy()
        for name, tensor in latents.tensors.items()  # (1, C, T, H, W), of one clip
    }
    # A clip has no embedded text. FastVideo's loaders take zeros, in a text's shape, for a dropped text. The
    # published CogVideoX models take 226 tokens, 4096 wide.
    arrays["text_embedding"] = np.zeros((226, 4096), np.float32)
    return {
        **{name: about[name] for name in ("id", "caption", "width", "height")},
        **{"file_name": about["id"], "media_type": "video", "num_frames": latents.num_frames},
        **{"duration_sec": float(latents.num_frames / latents.fps), "fps": float(latents.fps)},
        # For what has no column: the model's config, the rate as a fraction, the tensors' dtype.
        "about": json.dumps({"latents": latents.fields, "dtype": dtype}, sort_keys=True),
        **{f"{name}_bytes": array.tobytes() for name, array in arrays.items()},
        **{f"{name}_shape": list(array.shape) for name, array in arrays.items()},
        **{f"{name}_dtype": "float32" for name in arrays},
    }


def _write_tar(members: Members, path: Path) -> None:
    """Write latent files as a WebDataset tar: for each clip a .json, its .safetensors and a .txt caption."""
    # Without a time and an owner, equal files make equal tars.
    options = {"user": "", "group": "", "mode": 0o644, "mtime": 0, "encoder": False}
    with path.open("wb") as file, _libraries()[1].TarWriter(file, **options) as tar:
        for index, member in members:
            latents = latent_files.load(member)
            fields = {name: latents.fields[name] for name in ("config", "num_frames")}
            description = json.dumps({**latents.about, **fields, "fps": float(latents.fps)}, sort_keys=True)
            texts = {"json": description.encode(), "txt": latents.about["caption"].encode()}
            tar.write({"__key__": f"{index:08}", "safetensors": member.read_bytes(), **texts})
