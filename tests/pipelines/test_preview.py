"""Latents shown without a decoder: the fitted map, and the picture that `generate --preview` writes."""

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from cogvideox_torchax import cli, runtime
from cogvideox_torchax.pipelines import preview
from tests import small_pipelines


class LinearVAE:
    """A VAE whose latents are a mix of its pixels' mean colors: the map that is to be found exists."""

    dtype, spatial_scale = torch.float32, 8
    mix = torch.tensor([[1.0, 0.5, 0], [0, 2, 0], [0.3, 0, -1], [1, 1, 1]])

    def encode(self, x):
        means = torch.nn.functional.avg_pool2d(x[:, :, 0], 8)
        mixed = torch.einsum("oc,nchw->nohw", self.mix, means)[:, :, None] + 0.25
        return type("Output", (), {"latent_dist": type("D", (), {"mode": lambda self: mixed})()})()


def test_a_map_that_exists_is_found_and_its_colors_are_the_pixels():
    found = preview._fit(LinearVAE(), seed=0)
    assert found.explained > 0.9999
    x = torch.rand(1, 3, 1, 16, 16, generator=torch.Generator().manual_seed(5)) * 2 - 1
    latents = LinearVAE().encode(x).latent_dist.mode()
    want = (torch.nn.functional.avg_pool2d(x[:, :, 0], 8) + 1) * 127.5
    colors = found(latents.permute(0, 2, 1, 3, 4))
    assert colors.shape == (1, 1, 2, 2, 3)
    assert (colors[0, 0].permute(2, 0, 1) - want[0]).abs().max() <= 1


@pytest.mark.slow
def test_how_much_is_explained_is_measured_on_other_pictures():
    class Noise(LinearVAE):
        def encode(self, x):
            noise = torch.randn(1, 4000, 1, 8, 8)
            return type("Output", (), {"latent_dist": type("D", (), {"mode": lambda self: noise})()})()

    assert preview._fit(Noise(), seed=0).explained < 0.1  # so many channels would fit what they have seen


@pytest.mark.usefixtures("torchax_off")
@pytest.mark.filterwarnings("ignore")
def test_generate_shows_its_steps_in_a_picture(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    pipe = small_pipelines.build("text", text_encoder=small_pipelines.text_encoder(num_layers=1))
    runtime.without_torchax(pipe.save_pretrained, "model")
    seen = []
    inherited = Image.Image.save
    monkeypatch.setattr(
        Image.Image, "save", lambda image, *args: (seen.append(image.tobytes()), inherited(image, *args))
    )
    given = ("--prompt", "a panda", "--model", "model", "--steps", "3", "--dtype", "float32", "-o", "a.mp4")
    assert cli.main(["generate", *given, "--preview", "steps.png", "--quiet", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["frames"] == small_pipelines.FRAMES
    assert "a linear map of latents that explains" in printed.err
    assert len(set(seen)) == 3, "one for each step"
    assert Image.open("steps.png").size == (3 * 3 * 8, 3 * 4)
    assert cli.main(["generate", *given, "--preview", "steps.jpg"]) == 2
    assert Path("a.mp4").exists()
