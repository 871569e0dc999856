"""Shards of latents in the formats that trainers read: Parquet, WebDataset, or a safetensors file a clip.

A shard is made of the clips' latent files, whole or not at all, and equal files make an equal shard.
"""

import functools
import io
import json
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from cogvideox_torchax.files import latents as latent_files
from cogvideox_torchax.files.latents import Latents, LatentsError
from cogvideox_torchax.files.whole import whole_file
from cogvideox_torchax.runtime import without_torchax

SAFETENSORS, PARQUET, WEBDATASET = "safetensors", "parquet", "webdataset"
SUFFIXES = {SAFETENSORS: ".safetensors", PARQUET: ".parquet", WEBDATASET: ".tar"}
COLUMNS = {
    latent_files.TENSOR: "vae_latent",
    latent_files.LOGVAR: "vae_logvar",
    latent_files.SAMPLE: "vae_sample",
}


def write(kind: str, members: Sequence[tuple[int, Path]], path: Path) -> None:
    """Writes a shard.

    Args:
        kind: "parquet" or "webdataset".
        members: each clip's number in the data set and its latent file.
        path: of the shard.

    Raises:
        LatentsError: a latent file that cannot be read.
        ValueError: a package that is missing.
    """
    with whole_file(path) as temporary:
        (_write_parquet if kind == PARQUET else _write_tar)(members, temporary)


Entry = tuple[str, Callable[[], Latents]]
"""A clip's id, and what reads all that was kept of it."""


def entries(path: Path) -> list[Entry]:
    """The clips of a shard, or the one of a latent file; nothing but their names is read yet.

    Raises:
        LatentsError: a file that is truncated, or no such shard; reading a clip may raise it too.
    """
    if not path.is_file():
        raise LatentsError(f"there is no file {path}")
    if path.suffix == SUFFIXES[SAFETENSORS]:
        about = latent_files.about(path)
        return [(about.get("id", path.stem), lambda: latent_files.loads(path.read_bytes(), path))]
    return _parquet_entries(path) if path.suffix == SUFFIXES[PARQUET] else _tar_entries(path)


def check(kind: str) -> None:
    """Raises `ValueError` where what this format is written with is not installed."""
    if kind == "parquet":
        _arrow()


def _arrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError("Parquet needs pyarrow: pip install 'cogvideox-torchax[data]'") from error
    return pyarrow


def _schema(arrow: Any) -> Any:
    """The columns that FastVideo's loader reads (`fastvideo/dataset/dataloader/schema.py`, text to video),
    then ours."""
    text, count, numbers, data = arrow.string(), arrow.int64(), arrow.list_(arrow.int64()), arrow.binary()
    tensor = lambda name: [(f"{name}_bytes", data), (f"{name}_shape", numbers), (f"{name}_dtype", text)]  # noqa: E731
    return arrow.schema(
        [
            ("id", text),
            *tensor("vae_latent"),
            *tensor("text_embedding"),
            ("file_name", text),
            ("caption", text),
            ("media_type", text),
            ("width", count),
            ("height", count),
            ("num_frames", count),
            ("duration_sec", arrow.float64()),
            ("fps", arrow.float64()),
            *tensor("vae_logvar"),
            *tensor("vae_sample"),
            ("about", text),
        ]
    )


def _write_parquet(members: Sequence[tuple[int, Path]], path: Path) -> None:
    arrow = _arrow()
    schema = _schema(arrow)
    with arrow.parquet.ParquetWriter(path, schema, compression="none") as writer:
        for _, file in members:  # each a row group of its own, so that a reader need not hold several
            writer.write_table(arrow.Table.from_pylist([_row(file)], schema=schema))


def _row(file: Path) -> dict[str, Any]:
    latents = latent_files.loads(file.read_bytes(), file)
    about, described = latents.about, {"latents": latents.metadata(), "dtype": str(latents.tensor.dtype)}
    row: dict[str, Any] = {
        "id": about["id"],
        "text_embedding_bytes": b"",
        "text_embedding_shape": [],
        "text_embedding_dtype": "float32",
        "file_name": about["id"],
        "caption": about["caption"],
        "media_type": "video",
        "width": about["width"],
        "height": about["height"],
        "num_frames": latents.num_frames,
        "duration_sec": float(latents.num_frames / latents.fps),
        "fps": float(latents.fps),
        # What no column says: the model's config, the rate as a fraction, the hashes.
        "about": json.dumps(described, sort_keys=True),
    }
    for name, column in COLUMNS.items():
        tensor = latents.tensors.get(name)
        array = None if tensor is None else without_torchax(_float32, tensor[0])
        row[f"{column}_bytes"] = None if array is None else array.tobytes()
        row[f"{column}_shape"] = None if array is None else list(array.shape)
        row[f"{column}_dtype"] = None if array is None else "float32"
    return row


def _float32(tensor: torch.Tensor) -> Any:
    """As an array; NumPy, and so every reader, knows no bfloat16, whose values float32 has too."""
    return tensor.float().contiguous().numpy()


def _parquet_entries(path: Path) -> list[Entry]:
    arrow = _arrow()
    broken = (arrow.ArrowInvalid, OSError, KeyError, TypeError, ValueError)

    def refused(error: Exception) -> LatentsError:
        return LatentsError(f"{path} is truncated or no Parquet file of latents ({error}): make it again")

    def read(group: int) -> Latents:
        try:
            with arrow.parquet.ParquetFile(path) as file:
                return _of_row(path, file.read_row_group(group).to_pylist()[0])
        except LatentsError:
            raise
        except broken as error:
            raise refused(error) from error

    try:
        names = arrow.parquet.read_table(path, columns=["id"], partitioning=None).column("id").to_pylist()
    except broken as error:
        raise refused(error) from error
    return [(name, functools.partial(read, group)) for group, name in enumerate(names)]


def _of_row(path: Path, row: dict[str, Any]) -> Latents:
    about = json.loads(row["about"])
    dtype = getattr(torch, about["dtype"].removeprefix("torch."))
    tensors = {}
    for name, column in COLUMNS.items():
        if row[f"{column}_bytes"] is not None:
            values = torch.frombuffer(bytearray(row[f"{column}_bytes"]), dtype=torch.float32)
            tensors[name] = values.reshape(1, *row[f"{column}_shape"]).to(dtype)
    return latent_files.assembled(path, about["latents"], tensors)


def _write_tar(members: Sequence[tuple[int, Path]], path: Path) -> None:
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for index, file in members:
            data = file.read_bytes()
            latents = latent_files.loads(data, file)
            described = {**latents.about, "fps": float(latents.fps), "num_frames": latents.num_frames}
            _add(tar, f"{index:08}.json", json.dumps(described, sort_keys=True).encode())
            _add(tar, f"{index:08}.safetensors", data)
            _add(tar, f"{index:08}.txt", latents.about["caption"].encode())


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(data), 0o644
    tar.addfile(entry, io.BytesIO(data))


def _tar_entries(path: Path) -> list[Entry]:
    def read(entry: tarfile.TarInfo) -> bytes:
        with path.open("rb") as file:
            file.seek(entry.offset_data)
            return file.read(entry.size)

    def latents(entry: tarfile.TarInfo) -> Latents:
        return latent_files.loads(read(entry), f"{path}, {entry.name}")

    try:
        with tarfile.open(path, "r:") as tar:
            members = {entry.name: entry for entry in tar}
            end = tar.offset
        found = []
        for name, entry in members.items():
            if name.endswith(SUFFIXES[SAFETENSORS]):
                about = members.get(f"{Path(name).stem}.json")
                stored = Path(name).stem if about is None else json.loads(read(about)).get("id")
                found.append((stored, functools.partial(latents, entry)))
    except (tarfile.TarError, EOFError, ValueError) as error:
        raise LatentsError(f"{path} is truncated or no tar of latents ({error}): make it again") from error
    if path.stat().st_size < end + tarfile.BLOCKSIZE:  # cut between two of its members
        raise LatentsError(f"{path} is truncated, as its end is missing: make it again")
    return found
