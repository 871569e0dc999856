"""The example that trains a pipeline, run for a few steps of few clips."""

import json
from pathlib import Path

import diffusers
import pytest
import torch
from safetensors.torch import load_file

from tests.processes import ROOT

pytestmark = [
    pytest.mark.usefixtures("torchax_off", "in_an_empty_directory"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture
def train(monkeypatch):
    """Return a function that trains for a number of steps, as one command does, and returns the log."""
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "train_pipeline"))
    from examples.train_pipeline import train as program

    monkeypatch.setattr(program, "CLIPS", 8)
    options = ["--files=1", "--batch=2", "--every=1", "--scenes=1", "--decay=1"]

    def train(output, steps):
        with torch.enable_grad():
            program.train(program.parser().parse_args(["-o", output, *options, "--steps", str(steps)]))
        return json.loads(Path(output, "log.json").read_text())

    return train


@pytest.mark.slow
def test_a_training_that_goes_on_ends_as_one_without_a_break(train):
    train("halted", 3)
    straight, halted = train("straight", 5), train("halted", 5)
    assert [entry["loss"] for entry in straight] == [entry["loss"] for entry in halted]
    assert straight[3].keys() >= {"seen", "unseen scene", "unseen pair"}
    weights = "straight/pipeline/transformer/diffusion_pytorch_model.safetensors"
    assert {weight.dtype for weight in load_file(weights).values()} == {torch.bfloat16}
    assert diffusers.CogVideoXPipeline.from_pretrained("straight/pipeline").transformer is not None
