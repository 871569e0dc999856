"""Latent files: safetensors whose metadata says all that decoding needs to know."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from cogvideox_torchax.files.whole import whole_file
from cogvideox_torchax.runtime import to_torch, without_torchax

FORMAT = "cogvideox-torchax-latents/1"
TENSOR, LOGVAR, SAMPLE = "latents", "logvar", "sample"

SHAPING_FIELDS = (
    "in_channels",
    "out_channels",
    "block_out_channels",
    "latent_channels",
    "layers_per_block",
    "norm_num_groups",
    "temporal_compression_ratio",
    "scaling_factor",
    "shift_factor",
    "latents_mean",
    "latents_std",
    "invert_scale_latents",
    "use_quant_conv",
    "use_post_quant_conv",
)
"""Fields of a VAE's config in which two models must agree to read each other's latents."""


class LatentsError(ValueError):
    """A latent file that cannot be read, or that belongs to another model."""


@dataclass(frozen=True)
class Latents:
    """Latents (N, C, T, H, W) as the VAE's encoder gives them, not scaled, and where they come from.

    Attributes:
        tensor: the posterior's mean, or a sample where that alone was wanted.
        config: the config of the VAE that made them; holds `scaling_factor`, `shift_factor` and
            `invert_scale_latents`, which a diffusion pipeline applies on its own side.
        model: directory or hub id of that VAE.
        fps: of the source video.
        num_frames: of the source video.
        logvar: the logarithm of the posterior's variance, of the mean's shape; None where it was not kept.
        sample: drawn from the posterior, beside its mean; None where none was.
        about: what else is known: a data set keeps each clip's caption, sizes and hashes there.
    """

    tensor: torch.Tensor
    config: dict[str, Any]
    model: str
    fps: Fraction
    num_frames: int
    logvar: torch.Tensor | None = None
    sample: torch.Tensor | None = None
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """What is kept of the posterior, by the names that a file has for it."""
        kept = {TENSOR: self.tensor, LOGVAR: self.logvar, SAMPLE: self.sample}
        return {name: tensor for name, tensor in kept.items() if tensor is not None}

    def metadata(self) -> dict[str, str]:
        """All but the tensors, as a file says it."""
        shaping = {name: _plain(self.config.get(name)) for name in SHAPING_FIELDS}
        said = {
            "format": FORMAT,
            "config": json.dumps(shaping),
            "scaled": "false",
            "scaling_factor": json.dumps(shaping["scaling_factor"]),
            "shift_factor": json.dumps(shaping["shift_factor"]),
            "invert_scale_latents": json.dumps(shaping["invert_scale_latents"]),
            "model": self.model,
            "fps": str(self.fps),
            "num_frames": str(self.num_frames),
        }
        if self.about:
            said["about"] = json.dumps(self.about, sort_keys=True)
        return said

    def check_model(self, config: dict[str, Any]) -> None:
        """Raises `LatentsError` unless a VAE of this config can decode these latents."""
        for name in SHAPING_FIELDS:
            mine, its = (_plain(source.get(name)) for source in (self.config, config))
            if mine != its:
                raise LatentsError(
                    f"these latents are of another model: their {name} is {mine}, the model's is {its}; "
                    f"they were made with --model {self.model}"
                )


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def save(latents: Latents, path: str | Path) -> None:
    """Writes a latent file, whole or not at all; equal latents make equal bytes."""
    from safetensors.torch import save_file

    plain = {name: to_torch(tensor).contiguous() for name, tensor in latents.tensors.items()}
    with whole_file(path) as temporary:
        without_torchax(save_file, plain, temporary, metadata=latents.metadata())
        _sort_header(temporary)


def _sort_header(path: Path) -> None:
    """Puts the header of a safetensors file in order: its writer lists the metadata in one that changes from
    run to run."""
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        ordered = json.dumps(header, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
        if len(ordered) <= length:  # else the writer escapes less than JSON has to
            file.seek(8)
            file.write(ordered.ljust(length))


def load(path: str | Path, columns: Callable[[tuple[int, ...]], slice] | None = None) -> Latents:
    """Reads a latent file, of the posterior what decoding takes.

    Args:
        path: of the file.
        columns: which columns (last axis) to read, given the shape of the whole; the others are left zero.
            All of them where None.

    Raises:
        LatentsError: no file, no safetensors, truncated, without the tensor or the metadata of `save`, or
            with a field of it that is broken, which is named.
    """
    from safetensors import SafetensorError

    path = Path(path)
    if not path.is_file():
        raise LatentsError(f"there is no file {path}")
    try:
        metadata, tensor = without_torchax(_read, path, columns)
    except SafetensorError as error:
        raise LatentsError(f"{path} is truncated or no safetensors file ({error})") from error
    return assembled(path, metadata, {} if tensor is None else {TENSOR: tensor})


def about(path: Path) -> dict[str, Any]:
    """What a latent file says it is `about`; its tensors are not read.

    Raises:
        LatentsError: no safetensors, truncated, another format, or a broken field.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
    except SafetensorError as error:
        raise LatentsError(f"{path} is truncated or no safetensors file ({error})") from error
    if metadata.get("format") != FORMAT:
        raise _foreign(path)
    return _field(path, metadata, "about") if "about" in metadata else {}


def _foreign(path: Path) -> LatentsError:
    return LatentsError(
        f"{path} is no latent file of this program: write one with `cogvideox-torchax encode`"
    )


def loads(data: bytes, name: str | Path) -> Latents:
    """All that a latent file holds, of its bytes.

    Args:
        data: the file.
        name: of the file, for errors.

    Raises:
        LatentsError: as `load`.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load as load_tensors

    try:
        tensors = without_torchax(load_tensors, data)
    except SafetensorError as error:
        raise LatentsError(f"{name} is truncated or no safetensors file ({error})") from error
    metadata = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]).get("__metadata__", {})
    return assembled(Path(name), metadata, tensors)


def assembled(path: Path, metadata: dict[str, str], tensors: dict[str, torch.Tensor]) -> Latents:
    """Latents of a file's metadata and tensors.

    Args:
        path: of the file, for errors.
        metadata: as `Latents.metadata` gives it.
        tensors: as `Latents.tensors` does.

    Raises:
        LatentsError: no tensor, another format, or a broken field, which is named.
    """
    tensor = tensors.get(TENSOR)
    if metadata.get("format") != FORMAT or tensor is None:
        raise _foreign(path)
    if tensor.ndim != 5 or not tensor.dtype.is_floating_point:
        raise LatentsError(
            f"{path} holds {tensor.dtype} of shape {tuple(tensor.shape)}: floats (N, C, T, H, W) are wanted"
        )
    fields = {name: _field(path, metadata, name) for name in _FIELDS if name != "about"}
    for name in ("scaling_factor", "shift_factor", "invert_scale_latents"):
        value, configured = fields[name], fields["config"].get(name)
        if configured != value:
            raise LatentsError(f"{path} is broken: its {name} is {value}, its config's is {configured}")
    about = _field(path, metadata, "about") if "about" in metadata else {}
    given = {name: fields[name] for name in ("config", "model", "fps", "num_frames")}
    return Latents(tensor, **given, logvar=tensors.get(LOGVAR), sample=tensors.get(SAMPLE), about=about)


def _number(text: str) -> float:
    value = json.loads(text)
    if isinstance(value, bool) or not math.isfinite(value):
        raise ValueError
    return value


def _factor(text: str) -> float:
    value = _number(text)
    if value == 0:
        raise ValueError
    return value


def _number_or_null(text: str) -> float | None:
    return None if text == "null" else _number(text)


def _flag(text: str) -> bool:
    return {"true": True, "false": False}[text]


def _object(text: str) -> dict[str, Any]:
    return dict(json.loads(text))


def _rate(text: str) -> Fraction:
    rate = Fraction(text)
    if rate <= 0:
        raise ValueError
    return rate


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise ValueError
    return count


_FIELDS: dict[str, tuple[Callable[[str], Any], str]] = {
    "config": (_object, "a JSON object"),
    "scaling_factor": (_factor, "a finite number other than 0"),
    "shift_factor": (_number_or_null, "a finite number or null"),
    "invert_scale_latents": (_flag, "true or false"),
    "model": (str, "a name"),
    "fps": (_rate, "a number above 0"),
    "num_frames": (_count, "a whole number above 0"),
    "about": (_object, "a JSON object"),
}
"""How each field of the metadata is read, and what it has to be."""


def _field(path: Path, metadata: dict[str, str], name: str) -> Any:
    read, wanted = _FIELDS[name]
    try:
        return read(metadata[name])
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        found = repr(metadata[name]) if name in metadata else "missing"
        raise LatentsError(f"{path} is broken: its {name} is {found}, {wanted} is wanted") from error


def _read(
    path: Path, columns: Callable[[tuple[int, ...]], slice] | None
) -> tuple[dict[str, str], torch.Tensor | None]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        if TENSOR not in file.keys():  # noqa: SIM118 (no dict)
            return metadata, None
        stored = file.get_slice(TENSOR)
        shape = tuple(stored.get_shape())
        if columns is None or len(shape) != 5:
            return metadata, file.get_tensor(TENSOR)
        own = columns(shape)
        part = stored[:, :, :, :, own]
        tensor = torch.zeros(shape, dtype=part.dtype)
        tensor[..., own] = part
        return metadata, tensor
