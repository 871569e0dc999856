"""Latents shown without a decoder: the fitted map. What `generate --preview` writes is in test_generate."""

from types import SimpleNamespace

import torch
from torch.nn.functional import avg_pool2d

from cogvideox_torchax.cli import preview


class LinearVAE:
    """A VAE whose latents are a mix of its pixels' mean colors: the map that is to be found exists."""

    dtype, spatial_compression_ratio = torch.float32, 8
    mix = torch.tensor([[1.0, 0.5, 0], [0, 2, 0], [0.3, 0, -1], [1, 1, 1]])

    def encode(self, x):
        mean = torch.einsum("oc,nchw->nohw", self.mix, avg_pool2d(x[:, :, 0], 8))[:, :, None] + 0.25
        return SimpleNamespace(latent_dist=SimpleNamespace(mode=lambda: mean))


def test_a_map_that_exists_is_found_and_its_colors_are_the_pixels():
    x = torch.rand(1, 3, 1, 16, 16, generator=torch.Generator().manual_seed(5)) * 2 - 1
    latents = LinearVAE().encode(x).latent_dist.mode()
    colors = preview.colors_of(latents.permute(0, 2, 1, 3, 4), preview.fit(LinearVAE()))
    assert colors.shape == (1, 1, 2, 2, 3)
    assert (colors[0, 0].permute(2, 0, 1) - (avg_pool2d(x[0, :, 0], 8) + 1) * 127.5).abs().max() <= 1
