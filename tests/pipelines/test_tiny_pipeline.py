"""The bundled pipeline shows what prompts say, by the judge of the example that trained it."""

import diffusers
import numpy as np
import pytest
import torch

from cogvideox_torchax import make_mesh, port
from cogvideox_torchax.cli.common import TINY_PIPELINE
from examples.train_pipeline import scenes

BAR = 0.75
"""The least share of right videos, of few, that a working pipeline makes."""

pytestmark = [pytest.mark.usefixtures("torchax_off"), pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("where", ["PyTorch", "one device", "mesh"])
@pytest.mark.slow_cases(but=["one device"])
def test_its_videos_show_what_prompts_say(where):
    pipe = diffusers.CogVideoXPipeline.from_pretrained(TINY_PIPELINE, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    if where != "PyTorch":
        port(pipe, mesh=make_mesh(2, 4) if where == "mesh" else None)
    chosen = [scene for name in scenes.GROUPS[:2] for scene in scenes.drawn(name, 4)]
    assert scenes.shares(chosen, scenes.sample(pipe, chosen, 0, steps=10, batch=8))["all"] >= BAR


def test_the_judge_reads_rendered_clips_right_and_reversed_ones_wrong():
    rng = np.random.default_rng(0)
    for scene in (scenes.SCENES[i] for i in rng.integers(len(scenes.SCENES), size=40)):
        clip = scenes.render(scene, rng)
        assert scenes.judge(clip) == scene
        assert (scenes.judge(clip[::-1]) == scene) == (scene.motion == "still")
