"""Networks without their weights, on torch's "meta" device: `plan` needs the weights' shapes alone."""

from collections.abc import Callable
from typing import Any

import torch

from cogvideox_torchax import runtime
from cogvideox_torchax.files.models import ModelError, locate
from cogvideox_torchax.vae import checkpoint
from cogvideox_torchax.vae.torchax.autoencoder import AutoencoderKLCogVideoX

CONFIGS = {
    "2b": {"scaling_factor": 1.15258426},
    "5b": {"scaling_factor": 0.7},
    "1.5-5b": {"scaling_factor": 0.7, "invert_scale_latents": True},
}
"""The published VAEs, which differ in nothing that costs time: everything else is diffusers' default."""


def weightless_vae(model: str, dtype: torch.dtype, device: str = "meta") -> AutoencoderKLCogVideoX:
    """Return the ported VAE without weights on the device "meta" of torch, or with random ones on another.

    `model` is a published config of `CONFIGS`, a directory or a hub id; `ModelError` if it has no config.
    """
    config = CONFIGS.get(model)
    if config is None:
        try:
            config = checkpoint.read_config(locate(model, "vae", files=("config.json",)))
        except ModelError as error:
            raise ModelError(f"{error}; of published models plan knows {', '.join(CONFIGS)}") from error
    return build(lambda: AutoencoderKLCogVideoX.from_config(config), dtype, device)


def build(make: Callable[[], Any], dtype: torch.dtype, device: str) -> Any:
    """Return the network `make()` in evaluation mode, built on a device of torch.

    torchax is off meanwhile: it would break building on "meta".
    """

    def built() -> Any:
        with torch.device(device):
            # Not `.to(dtype)`: diffusers' own method warns at every cast.
            return torch.nn.Module.to(make(), dtype).eval()

    return runtime.without_torchax(built)
