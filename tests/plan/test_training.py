"""The plan of a training step, of a small VAE and for this machine's CPU."""

import json
from pathlib import Path

import pytest
import torch

from cogvideox_torchax import cli
from cogvideox_torchax.plan import models
from tests import reference

pytestmark = pytest.mark.usefixtures("torchax_off")

SMALLEST = {**reference.SMALL, **reference.THREE_LEVELS}


@pytest.mark.slow
def test_a_training_step_is_planned_by_its_halves_with_what_the_optimizer_keeps(
    monkeypatch, tmp_path, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(models.CONFIGS, "5b", SMALLEST)
    size = ["--frames", "1", "--height", "16", "--width", "16"]
    command = ["plan", "--platform", "cpu", "--dtype", "float32", "--network", "train-step", *size]
    assert cli.main([*command, "-o", "plan.json"]) == 0
    assert "train-step" in capsys.readouterr().out
    document = json.loads(Path("plan.json").read_text())
    encode, decode = document["programs"]
    assert (encode["name"], decode["name"]) == ("train encode", "train decode")
    weights = sum(4 * weight.numel() for weight in models.weightless_vae("5b", torch.float32).parameters())
    summary, gib = document["summary"], 2**30
    assert summary["optimizer_GiB"] * gib == pytest.approx(2 * weights)
    # Every weight has its gradient, and so has the input.
    assert weights < summary["gradients_GiB"] * gib < 1.1 * weights
    parts = ("weights_and_inputs_GiB", "temporaries_GiB_at_most", "gradients_GiB", "optimizer_GiB")
    assert summary["peak_memory_GiB_at_most"] == pytest.approx(sum(summary[part] for part in parts))
