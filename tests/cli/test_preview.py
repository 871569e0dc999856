"""Latents shown without a decoder: the fitted map. What `generate --preview` writes is in test_generate."""

from types import SimpleNamespace

import numpy as np
import torch
from PIL import Image

from cogvideox_torchax.cli import preview


class LinearVAE:
    """A VAE whose latents are a mix of its pixels' mean colors: the map that is to be found exists."""

    dtype, spatial_compression_ratio = torch.float32, 8
    mix = torch.tensor([[1.0, 0.5, 0], [0, 2, 0], [0.3, 0, -1], [1, 1, 1]])

    def encode(self, x):
        means = torch.nn.functional.avg_pool2d(x[:, :, 0], 8)
        return posterior_of(torch.einsum("oc,nchw->nohw", self.mix, means)[:, :, None] + 0.25)


def posterior_of(mean):
    return SimpleNamespace(latent_dist=SimpleNamespace(mode=lambda: mean))


def test_a_map_that_exists_is_found_and_its_colors_are_the_pixels():
    weights = preview.fit(LinearVAE())
    x = torch.rand(1, 3, 1, 16, 16, generator=torch.Generator().manual_seed(5)) * 2 - 1
    latents = LinearVAE().encode(x).latent_dist.mode()
    want = (torch.nn.functional.avg_pool2d(x[:, :, 0], 8) + 1) * 127.5
    colors = preview.colors_of(latents.permute(0, 2, 1, 3, 4), weights)
    assert colors.shape == (1, 1, 2, 2, 3)
    assert (colors[0, 0].permute(2, 0, 1) - want[0]).abs().max() <= 1


def test_a_picture_shows_frames_from_the_first_to_the_last(tmp_path, monkeypatch):
    weights = torch.tensor([[1.0, 1, 1], [0, 0, 0]])  # of one channel, which is the color
    monkeypatch.setattr(preview, "fit", lambda vae: weights)
    said = []
    show = preview.preview_writer(torch.nn.Identity(), tmp_path / "steps.png", said.append)
    show(torch.linspace(-1, 1, 13).reshape(1, 13, 1, 1, 1).expand(1, 13, 1, 2, 2))
    assert ["for CogVideoX-5b half a minute" in line for line in said] == [True]
    middles = np.asarray(Image.open(tmp_path / "steps.png"))[3, 3::6, 0]
    assert np.abs(middles - np.array([0, 85, 170, 255])).max() < 20
