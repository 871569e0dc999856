"""Read and write safetensors files of PyTorch tensors."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes

from cogvideox_torchax.files.whole import whole_file
from cogvideox_torchax.runtime import to_torch


def serialized(tensors: Mapping[str, torch.Tensor], metadata: dict[str, str]) -> bytes:
    """Return the bytes of a safetensors file of tensors, which may be on JAX, and metadata."""
    # safetensors takes contiguous PyTorch tensors.
    plain = {name: to_torch(tensor).contiguous() for name, tensor in tensors.items()}
    return to_bytes(plain, metadata=metadata)


def save(tensors: Mapping[str, torch.Tensor], path: str | Path, metadata: dict[str, str]) -> None:
    """Write a safetensors file of tensors, which may be on JAX, and metadata: whole or not at all."""
    data = serialized(tensors, metadata)
    # Not by safetensors' own writer, which replaces the file: `whole_file` syncs and moves its own file.
    with whole_file(path) as temporary:
        temporary.write_bytes(data)


def load(
    path: str | Path, refused: type[ValueError] = ValueError
) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """Return a safetensors file's metadata and tensors; raise the error class `refused` if it is broken."""
    # The file is opened once: if another process replaces it, metadata and tensors are of one version.
    with readable(path, refused), safe_open(path, framework="pt") as file:
        # `file` is no dict, and can only be iterated over by `keys`.
        return file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def metadata(path: str | Path, refused: type[ValueError]) -> dict[str, str]:
    """Return only the metadata of a safetensors file; raise the error class `refused` if it is broken."""
    # "np": PyTorch is not needed, as no tensor is read.
    with readable(path, refused), safe_open(path, framework="np") as file:
        return file.metadata() or {}


@contextlib.contextmanager
def readable(path: str | Path, refused: type[ValueError]) -> Iterator[None]:
    """Turn safetensors' errors in the `with` block, which reads `path`, into the error class `refused`."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise refused(f"{path} is truncated or no safetensors file ({error})") from error
