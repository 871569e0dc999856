"""The weights that a training from scratch begins with."""

from typing import Any

import torch
from torch import nn

QUIET = -6.0
"""The log-variance that the encoder begins with: its samples are next to its means."""


def initialize(vae: Any, *, seed: int) -> None:
    """Draws the weights of a stock VAE so that it learns from the first step on.

    Each convolution keeps its input's variance; a residual branch begins small; a spatial norm begins as a
    plain one, with a gain of 1.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in vae.modules():
            if isinstance(module, nn.Conv3d | nn.Conv2d):
                module.weight.normal_(std=module.weight[0].numel() ** -0.5, generator=generator)
                if module.bias is not None:
                    module.bias.zero_()
        for name, parameter in vae.named_parameters():
            _settle(name, parameter)
        latents = vae.config.latent_channels
        moments = vae.encoder.conv_out.conv
        moments.weight[latents:] *= 0.02
        moments.bias[latents:] = QUIET
        vae.decoder.conv_out.conv.weight *= 0.3


def _settle(name: str, parameter: torch.Tensor) -> None:
    if name.endswith("conv2.conv.weight") or name.endswith("conv_b.conv.weight"):
        parameter *= 0.3
    if name.endswith("conv_y.conv.weight"):
        parameter *= 0.2
    if name.endswith("conv_y.conv.bias"):
        parameter.fill_(1.0)
