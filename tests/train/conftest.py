"""A tiny model and tiny clips, for trainings of seconds."""

import json

import numpy as np
import pytest
from PIL import Image

from tests.files.test_video import moving_frames, write
from tests.reference import SMALL, TWO_SHALLOW_LEVELS

TINY = {
    **SMALL,
    **TWO_SHALLOW_LEVELS,
    "block_out_channels": (4, 4),
    "norm_num_groups": 2,
    "latent_channels": 2,
}


@pytest.fixture(autouse=True)
def _gradients():
    import torch

    with torch.enable_grad():
        yield


def make_material(directory):
    """Write a config, settings, a video of 24 x 40 pixels and a picture."""
    config = {"_class_name": "AutoencoderKLCogVideoX", **TINY}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "settings.toml").write_text('cuts = true\nmean_color_weight = 2\nwhole = "16x32"\n')
    write(directory / "clip.mp4", moving_frames(20))
    noise = np.random.default_rng(0).integers(0, 256, (40, 48, 3), dtype=np.uint8)
    Image.fromarray(noise).save(directory / "picture.png")


@pytest.fixture
def material(tmp_path, in_an_empty_directory):
    """Return a working directory with material."""
    make_material(tmp_path)
    return tmp_path
