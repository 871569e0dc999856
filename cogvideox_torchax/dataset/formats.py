"""Shards of a data set in the formats that trainers read, Parquet and WebDataset: written, and read again.

A *shard* is a file with the latents of several clips, and has an *entry* for each. It is made of the clips'
latent files; equal latent files make equal shards.
"""

import json
import tarfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cogvideox_torchax.files import latents as latent_files, reports
from cogvideox_torchax.files.extras import needing
from cogvideox_torchax.files.latents import Latents, LatentsError
from cogvideox_torchax.runtime import without_torchax

SUFFIXES = {"parquet": ".parquet", "webdataset": ".tar"}
"""By format, the suffix of a shard's file."""
LATENTS = ".safetensors"
"""The suffix of a clip's latent file."""
COLUMNS = {
    latent_files.TENSOR: "vae_latent",
    latent_files.LOGVAR: "vae_logvar",
    latent_files.SAMPLE: "vae_sample",
}
"""By the name of a tensor in a latent file, the beginning of its columns' names in Parquet."""
DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}

Entry = tuple[str, Callable[[], Latents]]
"""A clip's id, and a function that reads the clip's latents when it is called."""

_BROKEN_FILE_ERRORS = (
    *(AttributeError, EOFError, LookupError, NotImplementedError, OSError, OverflowError),
    *(TypeError, ValueError, tarfile.TarError),
)
"""The errors that a broken file may cause in the code that reads it."""


def libraries() -> tuple[Any, Any]:
    """Return the packages pyarrow and webdataset; raise `ImportError` if one is not installed."""
    with needing("data", "shards need pyarrow and webdataset", ImportError):
        import pyarrow.parquet
        import webdataset
    return pyarrow, webdataset


def write(kind: str, members: Sequence[tuple[int, Path]], path: Path) -> None:
    """Write a shard in a format of `SUFFIXES`; `LatentsError` for a broken file.

    `members` are the clips: each one's number in the data set, and its latent file.
    """
    (_write_parquet if kind == "parquet" else _write_tar)(members, path)


def entries(path: Path) -> list[Entry]:
    """List the entries of a shard, or the one of a latent file, without reading latents.

    Raises:
        LatentsError: the file is truncated or no shard; a returned function may raise it, too.
        ImportError: pyarrow is not installed.
    """
    listers = {LATENTS: _file_entries, ".parquet": _parquet_entries, ".tar": _tar_entries}
    listed = _read(path, lambda: list(listers[path.suffix](path)))
    return [(clip_id, partial(_read, f"{path}, {clip_id!r}", read)) for clip_id, read in listed]


def _read(name: str | Path, read: Callable[[], Any]) -> Any:
    """Return `read()`; raise `LatentsError` if what it reads, `name`, is broken, or of several videos."""
    try:
        found = read()
        if isinstance(found, Latents) and len(found.tensor) != 1:
            raise LatentsError(f"{name} holds {len(found.tensor)} videos: one is wanted")
        return found
    except LatentsError:  # it names the file already; as a `ValueError` it would be caught below
        raise
    except _BROKEN_FILE_ERRORS as error:
        raise LatentsError(f"{name} is truncated or holds no latents ({error}): make it again") from error


def _file_entries(path: Path) -> Iterator[Entry]:
    # If the file has no id, its name is the id.
    yield latent_files.about(path).get("id", path.stem), partial(latent_files.load, path)


def _write_parquet(members: Sequence[tuple[int, Path]], path: Path) -> None:
    """Write the columns that FastVideo's loader reads, and our own.

    FastVideo's columns are its schema for text to video, in `fastvideo/dataset/dataloader/schema.py`.
    """
    arrow, _ = libraries()
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


def _row(latents: Latents) -> dict[str, Any]:
    """Return a latent file's tensors and fields as a row of Parquet."""
    about, dtype = latents.about, str(latents.tensor.dtype)
    arrays = {  # in float32, because NumPy has no bfloat16
        COLUMNS[name]: without_torchax(lambda x: x[0].float().contiguous().numpy(), tensor)
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


def _parquet_entries(path: Path) -> Iterator[Entry]:
    table = libraries()[0].parquet.read_table(path, columns=["id"], partitioning=None)
    yield from ((clip_id, partial(_parquet_latents, path, clip_id)) for clip_id in table["id"].to_pylist())


def _parquet_latents(path: Path, clip_id: str) -> Latents:
    """Return the latents in the row of a clip, in whatever row group it is."""
    # Row groups are chosen by the statistics of their ids.
    read_table = partial(libraries()[0].parquet.read_table, path, filters=[("id", "=", clip_id)])
    columns = ["about", *(f"{column}_{part}" for column in COLUMNS.values() for part in ("bytes", "shape"))]
    (row,) = read_table(columns=columns, partitioning=None).to_pylist()
    description = reports.parse(row["about"])  # "latents": the latent file's fields; "dtype": its tensors'
    arrays = {  # of memory that may be written, for PyTorch
        name: np.frombuffer(bytearray(row[f"{column}_bytes"]), np.float32).reshape(1, *row[f"{column}_shape"])
        for name, column in COLUMNS.items()
        if row[f"{column}_bytes"] is not None
    }
    dtype = DTYPES[description["dtype"]]
    tensors = {
        name: without_torchax(lambda x: torch.from_numpy(x).to(dtype), x) for name, x in arrays.items()
    }
    return latent_files.from_fields(path, description["latents"], tensors)


def _write_tar(members: Sequence[tuple[int, Path]], path: Path) -> None:
    """Write latent files as a WebDataset tar: for each clip a .json, its .safetensors and a .txt caption."""
    # Without a time and an owner, equal files make equal tars.
    options = {"user": "", "group": "", "mode": 0o644, "mtime": 0, "encoder": False}
    with path.open("wb") as file, libraries()[1].TarWriter(file, **options) as tar:
        for index, member in members:
            data = member.read_bytes()
            latents = latent_files.loads(data, member)
            fields = {name: latents.fields[name] for name in ("config", "num_frames")}
            description = json.dumps({**latents.about, **fields, "fps": float(latents.fps)}, sort_keys=True)
            texts = {"json": description.encode(), "txt": latents.about["caption"].encode()}
            tar.write({"__key__": f"{index:08}", "safetensors": data, **texts})


def _tar_entries(path: Path) -> Iterator[Entry]:
    # By `tarfile`, as webdataset would read the tar from its beginning for each clip.
    with tarfile.open(path, "r:") as tar:  # "r:" refuses a compressed tar
        members = {member.name: member for member in tar if member.isfile()}
        end = tar.offset  # the end of the last member, where a block of zeros ends a complete tar
    if path.stat().st_size < end + tarfile.BLOCKSIZE:  # truncated after a member, which tarfile accepts
        raise LatentsError(f"{path} is truncated, as its end is missing: make it again")

    def data_of(name: str) -> bytes:
        with path.open("rb") as file:
            file.seek(members[name].offset_data)
            return file.read(members[name].size)

    for name in (name for name in members if name.endswith(LATENTS)):
        clip_id, about = name.removesuffix(LATENTS), f"{name.removesuffix(LATENTS)}.json"
        try:
            clip_id = reports.parse(data_of(about))["id"] if about in members else clip_id
            yield clip_id, lambda name=name: latent_files.loads(data_of(name), f"{path}, {name}")
        except (LookupError, TypeError, ValueError):  # other clips of the tar can be read
            yield name, lambda about=about: reports.parse(data_of(about))["id"]
