"""The functions of the VAE's blocks give what diffusers' layers of the same parameters give."""

from functools import partial

import jax.numpy as jnp
import pytest
import torch
from diffusers.models.autoencoders import autoencoder_kl_cogvideox as diffusers_vae

from cogvideox_torchax.vae import blocks
from tests.vae.conftest import check_close

GROUPS, EPS = {"num_groups": 2}, {"eps": 0.1}
residual = partial(diffusers_vae.CogVideoXResnetBlock3D, 8, temb_channels=0, groups=2, **EPS)
LAYERS = {
    "residual_block": (residual, GROUPS | EPS),
    "residual_block with a shortcut": (partial(residual, out_channels=4), GROUPS | EPS),
    # Diffusers' spatial norms do not take `eps`.
    "residual_block with latents": (partial(residual, spatial_norm_dim=3), GROUPS | {"eps": 1e-6}),
    "spatial_norm with latents": (
        partial(diffusers_vae.CogVideoXSpatialNorm3D, 8, 3, groups=2),
        GROUPS | {"eps": 1e-6},
    ),
    "causal_conv": (partial(diffusers_vae.CogVideoXCausalConv3d, 8, 6, 3), {}),
    "pointwise_conv": (partial(diffusers_vae.CogVideoXSafeConv3d, 8, 6, 1), {}),
    "downsample": (
        partial(diffusers_vae.CogVideoXDownsample3D, 8, 6, compress_time=True),
        {"compress_time": True},
    ),
    "upsample": (partial(diffusers_vae.CogVideoXUpsample3D, 8, 6, compress_time=True), {"expand_time": True}),
}
"""Diffusers' layer for a function's name, and the function's options."""


def params_of(layer):
    """Return a layer's parameters by name, a kernel as (*window, I, O)."""
    return {
        name: jnp.asarray(value.permute(*range(2, value.ndim), *range(min(value.ndim, 2))[::-1]))
        for name, value in layer.named_parameters()
    }


@torch.no_grad()
@pytest.mark.parametrize(("name", "make", "options"), [(name, *LAYERS[name]) for name in LAYERS], ids=LAYERS)
def test_a_block_is_diffusers_layer(name, make, options):
    layer, function, draw = make(), getattr(blocks, name.split()[0]), torch.Generator().manual_seed(0)
    for value in layer.parameters():
        value.copy_(torch.randn(value.shape, generator=draw) / 4)
    caches = {}, {}  # keywords of the layer, and of the function
    for frames, latents in ((5, 2), (4, 1)):
        x, zq = (torch.randn(1, *shape, generator=draw) for shape in ((8, frames, 6, 8), (3, latents, 3, 4)))
        arrays = [jnp.asarray(tensor.movedim(1, -1)) for tensor in (x, zq)][: 2 if "latents" in name else 1]
        want = layer(x, **({"zq": zq} if "latents" in name else {}), **caches[0])
        got = function(params_of(layer), *arrays, **caches[1], **options)
        if name.startswith(("residual", "causal")):
            (want, cache), (got, new_cache) = want, got
            caches = {"conv_cache": cache}, {"cache": new_cache}
        want = want[0] if isinstance(want, tuple) else want
        check_close(jnp.moveaxis(got, -1, 1), want)
