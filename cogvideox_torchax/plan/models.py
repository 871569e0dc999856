"""The VAE without its weights, on torch's "meta" device: what `plan` compiles needs shapes alone."""

from pathlib import Path
from typing import Any

import torch

from cogvideox_torchax import runtime
from cogvideox_torchax.plan.chips import PlanError
from cogvideox_torchax.vae import checkpoint
from cogvideox_torchax.vae.torchax.autoencoder import AutoencoderKLCogVideoX

CONFIGS = {
    "2b": {"scaling_factor": 1.15258426},
    "5b": {"scaling_factor": 0.7},
    "1.5-5b": {"scaling_factor": 0.7, "invert_scale_latents": True},
}
"""The published VAEs, which differ in nothing that costs time: everything else is diffusers' default."""


def weightless_vae(model: str | None, dtype: torch.dtype) -> AutoencoderKLCogVideoX:
    """The ported VAE of a published config, a directory or a hub id, without its weights: shapes will do.

    Raises:
        PlanError, ModelError: a model whose config cannot be read.
    """
    config = CONFIGS.get(model or "5b")
    if config is None:
        config = _config_of(str(model))

    def build() -> AutoencoderKLCogVideoX:
        with torch.device("meta"):
            vae: Any = AutoencoderKLCogVideoX.from_config(config)
        return vae.to(dtype).eval()

    return runtime.without_torchax(build)


def _config_of(model: str) -> dict[str, Any]:
    directory = Path(model)
    if directory.exists():
        inside = directory / "vae"
        return checkpoint.read_config(inside if inside.is_dir() else directory)
    try:
        return dict(AutoencoderKLCogVideoX.load_config(model, subfolder="vae"))  # pyright: ignore
    except OSError as error:
        raise PlanError(f"cannot read the config of {model}: {' '.join(str(error).split())[:200]}") from error
