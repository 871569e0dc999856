"""The config of the Flax build, which has the fields of diffusers' config.json."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from cogvideox_torchax.vae import checkpoint, chunks

DOWN_BLOCK = "CogVideoXDownBlock3D"
UP_BLOCK = "CogVideoXUpBlock3D"


@dataclasses.dataclass(frozen=True)
class FlaxAutoencoderKLCogVideoXConfig:
    """The config of CogVideoX's VAE, with the names and defaults of diffusers' `AutoencoderKLCogVideoX`.

    `scaling_factor`, `shift_factor`, `latents_mean`, `latents_std` and `invert_scale_latents` change nothing
    in the VAE. A pipeline scales the latents by them.

    Raises:
        ModelError: the Flax build does not have a block type, the activation or a size.
    """

    in_channels: int = 3
    out_channels: int = 3
    down_block_types: tuple[str, ...] = (DOWN_BLOCK,) * 4
    up_block_types: tuple[str, ...] = (UP_BLOCK,) * 4
    block_out_channels: tuple[int, ...] = (128, 256, 256, 512)
    latent_channels: int = 16
    layers_per_block: int = 3
    act_fn: str = "silu"
    norm_eps: float = 1e-6
    norm_num_groups: int = 32
    temporal_compression_ratio: float = 4
    sample_height: int = 480
    sample_width: int = 720
    scaling_factor: float = 1.15258426
    shift_factor: float | None = None
    latents_mean: tuple[float, ...] | None = None
    latents_std: tuple[float, ...] | None = None
    force_upcast: float = True
    use_quant_conv: bool = False
    use_post_quant_conv: bool = False
    invert_scale_latents: bool = False

    def __post_init__(self) -> None:
        levels = len(self.block_out_channels)
        is_time_supported = (
            2**self.time_doublings == self.temporal_compression_ratio and self.time_doublings < levels
        )
        # Of each field that may not have any value: whether its value is supported, and which ones are.
        checks = {
            "down_block_types": (self.down_block_types == (DOWN_BLOCK,) * levels, f"{levels} {DOWN_BLOCK}"),
            "up_block_types": (self.up_block_types == (UP_BLOCK,) * levels, f"{levels} {UP_BLOCK}"),
            "act_fn": (self.act_fn in ("silu", "swish"), "'silu'"),
            "temporal_compression_ratio": (is_time_supported, f"a power of two below {2**levels}"),
            "norm_num_groups": (
                not any(channels % self.norm_num_groups for channels in self.block_out_channels),
                f"a divisor of each of {self.block_out_channels}",
            ),
        }
        for field, (is_supported, supported) in checks.items():
            if not is_supported:
                raise checkpoint.ModelError(
                    f"{field} is {getattr(self, field)!r}: the Flax build takes {supported}"
                )

    @property
    def time_doublings(self) -> int:
        """Number of levels whose block halves the frames in encoding, and doubles them in decoding."""
        return chunks.temporal_steps(self.temporal_compression_ratio)

    @property
    def spatial_compression_ratio(self) -> int:
        """Number of a video's pixels for each latent pixel, along one axis."""
        return 2 ** (len(self.block_out_channels) - 1)

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "FlaxAutoencoderKLCogVideoXConfig":
        """Return the config with the fields of diffusers' dict, but those whose names begin with `_`.

        Raises:
            ModelError: the Flax build does not know a field that is not None.
        """
        # diffusers' class ignores `sample_size`, which old files have, and a field that is None changes
        # nothing. A config must be hashable, so the JSON's lists become tuples.
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in config.items()
            if value is not None and not name.startswith("_") and name != "sample_size"
        }
        for name in fields.keys() - {field.name for field in dataclasses.fields(cls)}:
            raise checkpoint.ModelError(
                f"the config has {name} = {fields[name]!r}, which the Flax build does not know: "
                "use the torchax build, or remove the field if the model does not depend on it"
            )
        return cls(**fields)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as diffusers' class takes them."""
        return dataclasses.asdict(self)
