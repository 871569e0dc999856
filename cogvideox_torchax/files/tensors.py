"""Read and write safetensors files of PyTorch tensors."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load as deserialized, save as serialized

from cogvideox_torchax.files.whole import whole_file
from cogvideox_torchax.runtime import to_torch


def save(tensors: Mapping[str, torch.Tensor], path: str | Path, metadata: dict[str, str]) -> None:
    """Write a safetensors file of tensors, which may be on JAX, and metadata: whole or not at all."""
    # safetensors takes contiguous PyTorch tensors.
    plain = {name: to_torch(tensor).contiguous() for name, tensor in tensors.items()}
    # Not by safetensors' own writer, which replaces the file: `whole_file` syncs and moves its own file.
    with whole_file(path) as temporary:
        temporary.write_bytes(serialized(plain, metadata=metadata))


def load(
    source: str | Path | bytes, refused: type[ValueError] = ValueError
) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """Return a safetensors file's metadata and tensors, by its path or from its bytes.

    Raise the error class `refused` if it is broken.
    """
    try:
        data = source if isinstance(source, bytes) else Path(source).read_bytes()
        tensors = deserialized(data)
    except (SafetensorError, OSError) as error:
        raise _broken(source, error, refused) from error
    # The file begins with the length of its JSON header, in eight bytes; `deserialized` drops the metadata.
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return header.get("__metadata__", {}), tensors


def metadata(path: str | Path, refused: type[ValueError]) -> dict[str, str]:
    """Return only the metadata of a safetensors file; raise the error class `refused` if it is broken."""
    try:
        with safe_open(path, framework="np") as file:  # reads no tensor
            return file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise _broken(path, error, refused) from error


def _broken(source: str | Path | bytes, error: Exception, refused: type[ValueError]) -> ValueError:
    name = "the file" if isinstance(source, bytes) else source
    return refused(f"{name} is truncated or no safetensors file ({error})")
