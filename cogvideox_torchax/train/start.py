"""The weights that a training from scratch begins with."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from cogvideox_torchax.backends import Backend
from cogvideox_torchax.files.models import read_json

QUIET = -6.0
"""The log-variance that the encoder begins with: samples of the posterior are close to its means."""
SMALLER = {"conv2.conv.weight": 0.3, "conv_b.conv.weight": 0.3, "conv_y.conv.weight": 0.2}
"""Factors of weights, by the ends of their names.

"conv2" is a residual block's last convolution; "conv_b" gives a spatial norm's shift, "conv_y" its gain.
"""


def load(kind: type[Backend], mesh: Any, *, model: str | None, config: str | None, seed: int) -> Backend:
    """Return a backend (one way to run the VAE) with the model to train, in float32.

    Args:
        kind: the backend's class.
        mesh: mesh that the model is split over; None for one device.
        model: a directory or a hub id of weights to begin with; None to draw weights.
        config: path of a config.json, whose model gets drawn weights; used without `model`.
        seed: seed of weights that are drawn.

    Raises:
        ValueError: a config that cannot be read.
    """
    if model:
        backend = kind.load(model, torch.float32, mesh)
    else:
        vae = kind.model_class.from_config(read_json(Path(str(config))))
        initialize(vae, seed=seed)
        if mesh is not None:
            vae.place_on(mesh)
        backend = kind(vae)
    if not kind.compiled_by_jax:  # PyTorch convolves faster if kernels are stored channels last
        _channels_last(backend.vae)
    return backend


def _channels_last(vae: Any) -> None:
    """Store the kernels of `vae`'s convolutions channels last: on a CPU PyTorch then takes half the time."""
    layouts = {4: torch.channels_last, 5: torch.channels_last_3d}
    for weight in vae.parameters():
        if weight.ndim in layouts:
            weight.data = weight.data.contiguous(memory_format=layouts[weight.ndim])


def initialize(vae: Any, *, seed: int) -> None:
    """Draw the weights of diffusers' VAE, in place, so that it learns from the first step on.

    Each convolution keeps its input's variance; a residual branch begins small; a spatial norm begins close
    to a plain norm, with a gain of 1; decoded frames begin close to gray.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in vae.modules():
            if isinstance(module, nn.Conv3d | nn.Conv2d):
                # One output is a sum of `inputs` products: weights of variance 1 / inputs keep the input's.
                inputs = module.weight[0].numel()
                module.weight.normal_(std=inputs**-0.5, generator=generator)
                if module.bias is not None:
                    module.bias.zero_()
        for name, parameter in vae.named_parameters():
            # Residual branches, and the shifts and gains of spatial norms, begin small.
            parameter *= next((factor for end, factor in SMALLER.items() if name.endswith(end)), 1.0)
            if name.endswith("conv_y.conv.bias"):  # the gain of a spatial norm
                parameter.fill_(1.0)
        latents = vae.config.latent_channels
        # This layer gives the latents' means, then their log-variances. The log-variances begin almost
        # constant, at the bias: samples are close to the means.
        moments = vae.encoder.conv_out.conv
        moments.weight[latents:] *= 0.02
        moments.bias[latents:] = QUIET
        vae.decoder.conv_out.conv.weight *= 0.3  # frames close to 0, which is gray
