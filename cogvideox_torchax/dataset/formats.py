"""Shards of a data set in the formats that trainers read: Parquet, WebDataset, and safetensors.

Here a *shard* is a file with the latents of several clips. It is made of the clips' latent files, is written
whole or not at all, and equal latent files make equal shards. A shard has an *entry* for each clip.
"""

import contextlib
import functools
import io
import json
import tarfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cogvideox_torchax.files import latents as latent_files, reports
from cogvideox_torchax.files.extras import needing
from cogvideox_torchax.files.kinds import PARQUET, SAFETENSORS, SUFFIXES, WEBDATASET
from cogvideox_torchax.files.latents import Latents, LatentsError
from cogvideox_torchax.files.whole import whole_file

COLUMNS = {
    latent_files.TENSOR: "vae_latent",
    latent_files.LOGVAR: "vae_logvar",
    latent_files.SAMPLE: "vae_sample",
}
"""By the name of a tensor in a latent file, the beginning of its columns' names in Parquet."""
DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}
TEXT_SHAPE = 226, 4096
"""Tokens and width of the embedded text that published CogVideoX models are conditioned on."""


Members = Sequence[tuple[int, Path]]
"""The clips of a shard: each one's number in the data set, and its latent file."""


def write(kind: str, members: Members, path: Path) -> None:
    """Write a shard, whole or not at all, in a format of `SUFFIXES`; `LatentsError` for a broken file."""
    writers = {SAFETENSORS: _write_safetensors, PARQUET: _write_parquet, WEBDATASET: _write_tar}
    writers[kind](members, path)


def _write_safetensors(members: Members, path: Path) -> None:
    latent_files.save_shard((latent_files.load(file) for _, file in members), path)


Entry = tuple[str, Callable[[], Latents]]
"""A clip's id, and a function that reads the clip's latents when it is called."""


def entries(path: Path) -> list[Entry]:
    """List the entries of a shard, or the one of a latent file, without reading latents.

    Raises:
        LatentsError: the file is truncated or no shard; a returned function may raise it, too.
        ImportError: pyarrow is not installed.
    """
    listers = {".safetensors": _safetensors_entries, ".parquet": _parquet_entries, ".tar": _tar_entries}
    with _naming_errors(path):
        return [
            (clip_id, functools.partial(_read_entry, f"{path}, {clip_id!r}", read))
            for clip_id, read in listers[path.suffix](path)
        ]


def _read_entry(name: str, read: Callable[[], Latents]) -> Latents:
    """Return `read()`, an entry's latents; raise `LatentsError` if they are broken or of several videos."""
    with _naming_errors(name):
        latents = read()
    if len(latents.tensor) != 1:
        raise LatentsError(f"{name} holds {len(latents.tensor)} videos: one is wanted")
    return latents


@contextlib.contextmanager
def _naming_errors(name: str | Path) -> Iterator[None]:
    """Turn the errors of a broken file in the `with` block into a `LatentsError` with the file's `name`."""
    try:
        yield
    except LatentsError:  # it names the file already; as a `ValueError` it would be caught below
        raise
    except _BROKEN_FILE_ERRORS as error:
        raise LatentsError(f"{name} is truncated or holds no latents ({error}): make it again") from error


_BROKEN_FILE_ERRORS = (
    *(AttributeError, EOFError, LookupError, NotImplementedError, OSError, OverflowError),
    *(TypeError, ValueError, tarfile.TarError),
)
"""The errors that a broken file may cause in the code that reads it."""


def pyarrow() -> Any:
    """Return the package that reads and writes Parquet; raise `ImportError` if it is not installed."""
    with needing("data", "Parquet needs pyarrow", ImportError):
        import pyarrow.parquet
    return pyarrow


def _schema(arrow: Any) -> Any:
    """Return the schema of a Parquet shard: the columns that FastVideo's loader reads, then our own.

    FastVideo's columns are its schema for text to video, in `fastvideo/dataset/dataloader/schema.py`.
    """
    text, data, integer = arrow.string(), arrow.binary(), arrow.int64()
    integers = arrow.list_(integer)

    def tensor(name: str) -> list[tuple[str, Any]]:
        """Return the three columns (name, type) of a tensor."""
        return [(f"{name}_bytes", data), (f"{name}_shape", integers), (f"{name}_dtype", text)]

    return arrow.schema(
        [
            ("id", text),
            *tensor("vae_latent"),
            *tensor("text_embedding"),
            ("file_name", text),
            ("caption", text),
            ("media_type", text),
            ("width", integer),
            ("height", integer),
            ("num_frames", integer),
            ("duration_sec", arrow.float64()),
            ("fps", arrow.float64()),
            # Our own columns. `about` has the settings of the encoding as JSON.
            *tensor("vae_logvar"),
            *tensor("vae_sample"),
            ("about", text),
        ]
    )


def _write_parquet(members: Members, path: Path) -> None:
    arrow = pyarrow()
    schema = _schema(arrow)
    # Latents hardly compress. The columns of the text, which hold zeros, do.
    compression = {name: "zstd" if name.startswith("text_") else "none" for name in schema.names}
    with (
        whole_file(path) as temporary,
        arrow.parquet.ParquetWriter(temporary, schema, compression=compression) as writer,
    ):
        for _, file in members:  # a row group for each clip: a reader then reads one clip at a time
            writer.write_table(arrow.Table.from_pylist([_row_of_file(file)], schema=schema))


def _row_of_file(file: Path) -> dict[str, Any]:
    """Return a latent file's tensors and fields as a row, by the columns of `_schema`."""
    latents = latent_files.load(file)
    about = latents.about
    # For what has no column: the model's config, the rate as a fraction, the tensors' dtype.
    description = {"latents": latents.fields, "dtype": str(latents.tensor.dtype)}
    row: dict[str, Any] = {
        "id": about["id"],
        # A clip has no embedded text. FastVideo's loaders take zeros, in a text's shape, for a dropped text.
        "text_embedding_bytes": np.zeros(TEXT_SHAPE, np.float32).tobytes(),
        "text_embedding_shape": list(TEXT_SHAPE),
        "text_embedding_dtype": "float32",
        "file_name": about["id"],
        "caption": about["caption"],
        "media_type": "video",
        "width": about["width"],
        "height": about["height"],
        "num_frames": latents.num_frames,
        "duration_sec": float(latents.num_frames / latents.fps),
        "fps": float(latents.fps),
        "about": json.dumps(description, sort_keys=True),
    }
    for name, tensor in latents.tensors.items():  # (1, C, T, H, W), of one clip
        # Stored in float32, because NumPy has no bfloat16; `description` has the dtype. With torchax on,
        # torch's methods would turn plain tensors into JAX's arrays. The default argument binds this round's
        # `tensor`.
        array = (lambda tensor=tensor: tensor[0].float().contiguous().numpy())()
        row |= {
            f"{COLUMNS[name]}_bytes": array.tobytes(),
            f"{COLUMNS[name]}_shape": list(array.shape),
            f"{COLUMNS[name]}_dtype": "float32",
        }
    return row


def _safetensors_entries(path: Path) -> list[Entry]:
    """Return the entries of a shard, or the one of a latent file; if that has no id, its name is the id."""
    ids = latent_files.shard_ids(path)
    if ids is not None:
        return [(clip_id, functools.partial(latent_files.load, path, clip_id)) for clip_id in ids]
    return [(latent_files.about(path).get("id", path.stem), functools.partial(latent_files.load, path))]


def _parquet_entries(path: Path) -> list[Entry]:
    with pyarrow().parquet.ParquetFile(path) as file:
        return [
            (clip_id, functools.partial(_parquet_latents, path, group, row_index, clip_id))
            # Our own row groups have one row, those of another writer may have several.
            for group in range(file.num_row_groups)
            for row_index, clip_id in enumerate(file.read_row_group(group, ["id"])["id"].to_pylist())
        ]


def _parquet_latents(path: Path, group: int, row_index: int, clip_id: Any) -> Latents:
    """Return the latents in a row of a row group; `LatentsError` if the row's id is no longer `clip_id`."""
    columns = [
        "id",
        "about",
        *(f"{column}_{part}" for column in COLUMNS.values() for part in ("bytes", "shape")),
    ]
    with pyarrow().parquet.ParquetFile(path) as file:
        (row,) = file.read_row_group(group, columns).slice(row_index, 1).to_pylist()
    if row["id"] != clip_id:
        raise LatentsError(f"{path} holds {row['id']} where {clip_id} was: it was changed, run again")
    description = reports.parse(row["about"])  # "latents": the latent file's fields; "dtype": its tensors'
    dtype = DTYPES[description["dtype"]]
    tensors = {}
    for tensor_name, column in COLUMNS.items():
        if row[f"{column}_bytes"] is not None:
            shape = row[f"{column}_shape"]
            if min(shape) < 1:  # `reshape` would take -1 for a size to compute
                raise ValueError(f"its {column} has the shape {shape}")
            values = np.frombuffer(row[f"{column}_bytes"], np.float32).reshape(1, *shape)
            # A copy: PyTorch warns of a read-only view. The default argument binds this round's `values`.
            tensors[tensor_name] = (lambda values=values: torch.from_numpy(values.copy()).to(dtype))()
    return latent_files.from_fields(path, description["latents"], tensors)


def _write_tar(members: Members, path: Path) -> None:
    """Write latent files as a WebDataset tar: for each clip a .json, its .safetensors and a .txt caption."""
    with whole_file(path) as temporary, tarfile.open(temporary, "w", format=tarfile.USTAR_FORMAT) as tar:
        for index, file in members:
            data = file.read_bytes()
            latents = latent_files.loads(data, file)
            fields = {name: latents.fields[name] for name in ("config", "num_frames")}
            description = {**latents.about, **fields, "fps": float(latents.fps)}
            contents = {
                ".json": json.dumps(description, sort_keys=True).encode(),
                ".safetensors": data,
                ".txt": latents.about["caption"].encode(),
            }
            for suffix, content in contents.items():
                # A new `TarInfo` has no time and no owner: equal files make equal tars.
                info = tarfile.TarInfo(f"{index:08}{suffix}")
                info.size, info.mode = len(content), 0o644
                tar.addfile(info, io.BytesIO(content))


def _tar_entries(path: Path) -> list[Entry]:
    # Of a clip's *members*, its files in the tar, STEM.safetensors and STEM.json are read. The latter may be
    # missing.
    with tarfile.open(path, "r:") as tar:  # "r:" refuses a compressed tar
        members = {member.name: member for member in tar if member.isfile()}
        end = tar.offset  # the end of the last member, where a block of zeros ends a complete tar
    if path.stat().st_size < end + tarfile.BLOCKSIZE:  # truncated after a member, which tarfile accepts
        raise LatentsError(f"{path} is truncated, as its end is missing: make it again")

    def read_member(name: str) -> bytes:
        with path.open("rb") as file:
            file.seek(members[name].offset_data)
            return file.read(members[name].size)

    def read_latents(name: str) -> Latents:
        return latent_files.loads(read_member(name), f"{path}, {name}")

    def read_id(stem: str) -> Any:
        """Return the id in the member `stem`.json of a clip; `stem` if there is no such member."""
        with _naming_errors(f"{path}, {stem}.json"):
            return reports.parse(read_member(f"{stem}.json"))["id"] if f"{stem}.json" in members else stem

    tar_entries: list[Entry] = []
    for name in (name for name in members if name.endswith(SUFFIXES[SAFETENSORS])):
        stem = Path(name).stem
        try:
            tar_entries.append((read_id(stem), functools.partial(read_latents, name)))
        except LatentsError:
            # The clip's .json is broken. Other clips of the tar can be read, so the listing goes on. In place
            # of a function that reads latents, this clip's entry has `read_id`, which raises the error again.
            tar_entries.append((name, functools.partial(read_id, stem)))
    return tar_entries
