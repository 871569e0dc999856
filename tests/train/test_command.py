"""`train` as a user meets it: killed and resumed, bad clips, its tables and pictures."""

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from cogvideox_torchax import cli

pytestmark = pytest.mark.usefixtures("torchax_off")

STEPS, COLOUR = 24, 2.0
OPTIONS = (
    *("--config", "config.json", "--steps", STEPS, "--frames", 9, "--size", 16, "--every", 5, "--quiet"),
    *("--cuts", "--colour", COLOUR),
)


def arguments(output, *more, clips=("clip.mp4#0-19", "picture.png")):
    return [str(word) for word in ("train", *clips, "-o", output, *OPTIONS, *more)]


def table(path):
    with Path(path).open(newline="") as file:
        return list(csv.DictReader(file))


def start(output, *more):
    program = [sys.executable, "-m", "cogvideox_torchax.cli", *arguments(output, *more)]
    return subprocess.Popen(program, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})


def wait_for(path, process):
    while not Path(path).exists():
        assert process.poll() is None, "ended before it had written anything"
        time.sleep(0.01)


@pytest.fixture
def whole(material):
    assert cli.main(arguments("whole", "--validate", "clip.mp4#0-9")) == 0
    return table("whole/losses.csv")


def test_killed_and_resumed_every_loss_is_that_of_a_training_left_alone(whole):
    process = start("killed")
    wait_for("killed/checkpoint.safetensors", process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    with Path("killed/losses.csv").open("a") as file:
        file.write("23,1.0,1.0,1.0,1.0,1.0,1.0,1.0\n24,1.0,0.")  # later than the checkpoint, and cut short
    assert cli.main(arguments("killed", "--resume")) == 0
    assert len(whole) == STEPS
    assert table("killed/losses.csv") == whole
    left, right = (load_file(f"{name}/checkpoint.safetensors") for name in ("whole", "killed"))
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


def test_what_a_training_writes_is_none_of_its_clips(material):
    Path("clips").mkdir()
    for name in ("clip.mp4", "picture.png"):
        Path(name).rename(f"clips/{name}")
    some = arguments("clips/run", "--steps", 2, "--validate", "clips/clip.mp4#0-9", clips=["clips"])
    assert cli.main(some) == 0
    assert len(list(Path("clips").rglob("*.png"))) > 1
    more = arguments("clips/run", "--steps", 2, "--resume", clips=["clips"])
    assert cli.main(more) == 0  # of the same clips: nothing is left to do


def test_a_signal_ends_it_with_a_checkpoint_of_the_last_step(material):
    process = start("ended", "--every", 1000)
    wait_for("ended/losses.csv", process)
    process.send_signal(signal.SIGINT)
    assert process.wait() in (0, cli.INTERRUPTED)
    lines = table("ended/losses.csv")
    assert cli.main(arguments("ended", "--resume")) == 0
    assert [int(line["step"]) for line in table("ended/losses.csv")] == list(range(1, STEPS + 1))
    assert table("ended/losses.csv")[: len(lines)] == lines


def test_what_was_measured_is_in_its_tables_and_pictures(whole):
    lines = table("whole/validation.csv")
    assert [int(line["step"]) for line in lines] == [5, 10, 15, 20, 24]
    assert {line["clip"] for line in lines} == {"clip.mp4#0-9"}
    assert all(0 < float(line["psnr"]) < 40 and -1 < float(line["ssim"]) < 1 for line in lines)
    for line in whole:
        parts = float(line["l1"]) + 4 * float(line["mse"]) + 1e-3 * float(line["kl"])
        parts += COLOUR * float(line["colour"])
        assert float(line["loss"]) == pytest.approx(parts, rel=1e-5)
    for name in ("clip.mp4#0-9.png", "curves.png"):
        with Image.open(f"whole/{name}") as picture:
            assert min(picture.size) > 100
