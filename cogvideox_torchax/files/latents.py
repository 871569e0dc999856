"""Read and write latent files: safetensors whose metadata is a JSON object with all that decoding needs."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load as deserialized, save as serialized

from cogvideox_torchax.files import kinds, reports
from cogvideox_torchax.files.whole import whole_file
from cogvideox_torchax.runtime import to_torch

KEY, FORMAT = "cogvideox-torchax", 2
"""The key of a file's metadata that holds the JSON object, and the version of its fields."""
TENSOR, LOGVAR, SAMPLE = "latents", "logvar", "sample"
"""Names of the tensors in a file; see `Latents`."""

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
        tensor: the posterior's mean, or a sample if only a sample was wanted.
        config: the config of the VAE that made them. Diffusion pipelines scale latents by its
            `scaling_factor`, `shift_factor` and `invert_scale_latents`.
        model: directory or hub id of that VAE.
        fps, num_frames: of the source video.
        logvar: the posterior's log-variance, in the mean's shape; None if it was not kept.
        sample: a sample of the posterior beside its mean; None if none was kept.
        about: further fields: in a data set the clip's caption, sizes and hashes.
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
        """The tensors that are not None, by their names in a file."""
        optional = {TENSOR: self.tensor, LOGVAR: self.logvar, SAMPLE: self.sample}
        return {name: tensor for name, tensor in optional.items() if tensor is not None}

    @property
    def fields(self) -> dict[str, Any]:
        """The JSON object in a latent file: all but the tensors."""
        return {
            "format": FORMAT,
            "model": self.model,
            "config": {name: self.config.get(name) for name in SHAPING_FIELDS},
            "fps": str(self.fps),
            "num_frames": self.num_frames,
            "about": self.about,
        }

    def check_model(self, config: dict[str, Any]) -> None:
        """Raise `LatentsError` unless a VAE of this config can decode these latents."""
        for name in SHAPING_FIELDS:
            # JSON makes lists of tuples.
            own, wanted = (
                list(each) if isinstance(each, tuple) else each
                for each in (self.config.get(name), config.get(name))
            )
            if own != wanted:
                raise LatentsError(
                    f"these latents are of another model: their {name} is {own}, the model's is {wanted}; "
                    f"they were made with --model {self.model}"
                )


def save(latents: Latents, path: str | Path) -> None:
    """Write a latent file, whole or not at all; equal latents make equal bytes."""
    save_tensors(latents.tensors, latents.fields, path)


def save_tensors(tensors: Mapping[str, torch.Tensor], fields: dict[str, Any], path: str | Path) -> None:
    """Write a file of tensors, which may be on JAX, and a JSON object: whole or not at all."""
    # safetensors takes contiguous PyTorch tensors.
    plain = {name: to_torch(tensor).contiguous() for name, tensor in tensors.items()}
    # Not by safetensors' own writer, which replaces the file: `whole_file` syncs and moves its own file.
    with whole_file(path) as temporary:
        temporary.write_bytes(serialized(plain, {KEY: json.dumps(fields, sort_keys=True)}))


def load(source: str | Path | bytes) -> Latents:
    """Read a latent file, by its path or from its bytes.

    Raises:
        LatentsError: the file is missing, broken or not of this program.
    """
    metadata, tensors = load_tensors(source)
    arguments, tensor = _arguments(source, metadata), tensors.get(TENSOR, torch.empty(0))
    if tensor.ndim != 5 or not tensor.numel() or not tensor.dtype.is_floating_point:
        raise LatentsError(
            f"{_name(source)} holds {tensor.dtype} of shape {tuple(tensor.shape)}: floats of shape "
            "(N, C, T, H, W), without an empty axis, are wanted"
        )
    return Latents(tensor, **arguments, logvar=tensors.get(LOGVAR), sample=tensors.get(SAMPLE))


def load_tensors(source: str | Path | bytes) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """Return the metadata and the tensors of a safetensors file; `LatentsError` if it is broken."""
    try:
        data = source if isinstance(source, bytes) else Path(source).read_bytes()
        tensors = deserialized(data)
    except (SafetensorError, OSError) as error:
        raise LatentsError(f"{_name(source)} is truncated or no safetensors file ({error})") from error
    # The file begins with the length of its JSON header, in eight bytes; `deserialized` drops the metadata.
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return header.get("__metadata__", {}), tensors


def load_metadata(path: Path) -> dict[str, str]:
    """Return the metadata of a safetensors file alone; `LatentsError` if it is broken."""
    try:
        with safe_open(path, framework="np") as file:  # reads no tensor
            return file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise LatentsError(f"{path} is truncated or no safetensors file ({error})") from error


def about(path: Path) -> dict[str, Any]:
    """Return the field `about` of a latent file, without reading its tensors."""
    return _arguments(path, load_metadata(path))["about"]


def _name(source: str | Path | bytes) -> str | Path:
    return "the file" if isinstance(source, bytes) else source


def _arguments(source: str | Path | bytes, metadata: dict[str, str]) -> dict[str, Any]:
    """Return those fields of a latent file's metadata that are arguments of `Latents`."""
    try:
        fields = reports.parse(metadata[KEY])
        if fields["format"] != FORMAT:
            raise ValueError(f"its format is {fields['format']}, this version reads {FORMAT}")
        types = {"model": str, "config": dict, "fps": kinds.frame_rate, "num_frames": int, "about": dict}
        return {name: make(fields[name]) for name, make in types.items()}
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise LatentsError(
            f"{_name(source)} is broken, or no latent file of this program ({error!r:.99}): write one with "
            "`cogvideox-torchax encode`"
        ) from error
