"""`train` as a user meets it: killed and resumed, bad clips, its tables and pictures."""

import contextlib
import csv
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLCogVideoX
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from cogvideox_torchax import cli
from cogvideox_torchax.files import video
from cogvideox_torchax.train import checkpoints, clips, report, run
from cogvideox_torchax.train.stages import TrainingSettings
from cogvideox_torchax.train.trainer import Trainer
from cogvideox_torchax.vae.pixels import from_uint8, to_uint8
from cogvideox_torchax.vae.quality import ssim
from cogvideox_torchax.vae.tolerances import psnr
from tests.conftest import torchax_disabled
from tests.files.test_full_disk import files_of_at_most
from tests.train.conftest import make_material

pytestmark = pytest.mark.usefixtures("torchax_off")

STEPS, COLOUR = 12, 2.0
OPTIONS = (
    *("--config", "config.json", "--settings", "settings.toml", "--steps", STEPS, "--frames", 9),
    *("--size", 16, "--checkpoint-every", 5, "--quiet"),
)


def arguments(output, *more, clips=("clip.mp4#0-19", "picture.png")):
    return [str(word) for word in ("train", *clips, "-o", output, *OPTIONS, *more)]


def table(path):
    with Path(path).open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    ("clip", "words"),
    [("picture.png", "is one: add a video"), ("gone.mp4", "none of the clips can be trained on")],
    ids=["pictures alone for whole frames", "nothing but bad clips"],
)
def test_clips_that_no_training_can_be_made_of_are_an_error(material, capsys, clip, words):
    assert cli.main(arguments("out", clips=(clip,))) == cli.USER_ERROR
    assert words in capsys.readouterr().err
    assert not Path("out/losses.csv").exists()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ('whole = "16"', "give HEIGHTxWIDTH in pixels"),
        ('whole = "16x40"', "must be multiples of 16"),
        ("whole = [16, 32]", "give HEIGHTxWIDTH in pixels"),
        ("cuts = 1", "give true or false"),
        ("mean_color_weight = -1", "give 0 or more"),
        ("mean_color_weight = true", "give 0 or more"),
        ("mean_color_weight = nan", "give 0 or more"),
        ("learning_rate_factor = 0", "give a number above 0"),
        ('learning_rate_factor = "1"', "give a number above 0"),
        ("rate = 1", "got rate: the fields are cuts, mean_color_weight, learning_rate_factor, whole"),
        ("rate", "settings.toml has no training settings"),
        (f"rate = {'[' * 100_000}", "settings.toml has no training settings"),
        ("[1]", "config.json is not a JSON object"),
        ("[" * 100_000, "config.json is not valid JSON"),
    ],
)
def test_settings_or_a_config_that_is_none_is_one_line(material, refused, settings, words):
    Path("config.json" if "config" in words else "settings.toml").write_text(settings)
    assert words in refused(*arguments("out"))


def test_a_training_takes_its_settings_and_is_not_resumed_with_another(material, refused, monkeypatch):
    taken, real = [], clips.Sampler
    monkeypatch.setattr(clips, "Sampler", lambda *args, **named: taken.append(named) or real(*args, **named))
    assert cli.main(arguments("out", "--steps", 1)) == 0
    assert taken == [{"seed": 0, "cuts": True}]
    settings = Path("settings.toml")
    settings.write_text(settings.read_text() + "learning_rate_factor = 0.5\n")
    assert "is of a training with settings" in refused(*arguments("out", "--steps", 1, "--resume"))
    more_steps = refused(*arguments("out", "--steps", 2, "--resume"))
    assert "begin another with its weights (--model out/vae)" in more_steps
    shutil.rmtree("out/vae")  # as if it had been killed: the weights are written at the end
    assert "this one has 2: give the same\n" in refused(*arguments("out", "--steps", 2, "--resume"))


@pytest.mark.parametrize(
    "change", [{"settings": "[1]"}, {"settings": "[" * 100_000}, {"step": "x"}, {"seconds": None}]
)
def test_a_broken_checkpoint_is_one_line(tmp_path, change):
    checkpoints.save(tmp_path, {"a": torch.zeros(1)}, step=1, seconds=1.0, settings={})
    path = tmp_path / checkpoints.NAME
    with safe_open(path, "pt") as file:
        metadata = {name: text for name, text in {**file.metadata(), **change}.items() if text is not None}
    save_file({"a": torch.zeros(1)}, path, metadata)
    with pytest.raises(ValueError, match="is broken"):
        checkpoints.load(tmp_path, settings={})


def test_the_settings_of_the_bundled_model_are_valid():
    settings = TrainingSettings.load(Path(__file__).parents[2] / "examples/tiny-vae.toml")
    assert settings == TrainingSettings(
        cuts=True, mean_color_weight=10, learning_rate_factor=0.12, whole=(128, 192)
    )


def step_of(directory):
    """Return a checkpoint's number of steps."""
    with safe_open(f"{directory}/checkpoint.safetensors", "pt") as file:
        return int(file.metadata()["step"])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the directory of a training left alone, which lies beside its material."""
    root = tmp_path_factory.mktemp("training")
    make_material(root)
    with contextlib.chdir(root), torchax_disabled(), torch.enable_grad():
        assert cli.main(arguments("whole", "--validate", "clip.mp4#0-9")) == 0
    return root / "whole"


def test_killed_and_resumed_every_loss_is_that_of_a_training_left_alone(whole, material, monkeypatch):
    program = [sys.executable, "-m", "cogvideox_torchax.cli", *arguments("killed")]
    process = subprocess.Popen(program, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    while not Path("killed/checkpoint.safetensors").exists():
        assert process.poll() is None, "ended before it had written anything"
        time.sleep(0.01)
    process.kill()
    process.wait()
    with Path("killed/losses.csv").open("a") as file:
        file.write("11,1.0,1.0,1.0,1.0,1.0,1.0,1.0\n12,1.0,0.")  # later than the checkpoint, and cut short
    left, made = STEPS - step_of("killed"), []
    real = Trainer.step
    monkeypatch.setattr(Trainer, "step", lambda trainer: made.append(trainer) or real(trainer))
    assert cli.main(arguments("killed", "--resume")) == 0
    assert len(made) == left < STEPS == len(table(whole / "losses.csv"))
    assert table("killed/losses.csv") == table(whole / "losses.csv")
    one, other = (load_file(path / "checkpoint.safetensors") for path in (whole, Path("killed")))
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_a_second_training_in_the_directory_of_a_running_one_is_refused(material, refused, monkeypatch):
    def step(trainer, real=Trainer.step):
        monkeypatch.setattr(Trainer, "step", real)
        for more in ([], ["--resume"]):
            assert "cannot write out: another run is writing it" in refused(*arguments("out", *more))
        return real(trainer)

    monkeypatch.setattr(Trainer, "step", step)
    assert cli.main(arguments("out", "--steps", 1)) == 0
    assert len(table("out/losses.csv")) == 1


def test_two_clips_of_one_name_to_validate_with_are_refused(material, capsys):
    Path("other").mkdir()
    shutil.copy("clip.mp4", "other")
    held_out = ("--validate", "clip.mp4", "--validate", "other/clip.mp4")
    assert cli.main(arguments("out", "--steps", 1, *held_out)) == cli.USER_ERROR
    assert "got --validate clip.mp4, clip.mp4: pictures are named" in capsys.readouterr().err


HEAD = ",".join(run.HEADS[run.VALIDATION]) + "\r\n"


@pytest.mark.parametrize("left", ["", "step,min", f"{HEAD}1,0.1,a,20,0.5\r\n1,0.2,a", f"{HEAD}1,0.2,a,20,0."])
def test_a_table_that_a_full_disk_cut_short_goes_on(tmp_path, left):
    (tmp_path / run.VALIDATION).write_text(left)
    run._remove_lines_after(tmp_path / run.VALIDATION, 1)
    with (tmp_path / run.VALIDATION).open(newline="") as file:
        head, *lines = csv.reader(file)
    assert tuple(head) == run.HEADS[run.VALIDATION]
    assert [line[0] for line in lines] == ["1"] * ("0.1" in left)


def test_what_a_training_writes_is_none_of_its_clips(material):
    Path("clips").mkdir()
    for name in ("clip.mp4", "picture.png"):
        Path(name).rename(f"clips/{name}")
    common = ("clips/run", "--steps", 2)
    assert cli.main(arguments(*common, "--validate", "clips/clip.mp4#0-9", clips=["clips"])) == 0
    assert len(list(Path("clips").rglob("*.png"))) > 1
    assert cli.main(arguments(*common, "--resume", clips=["clips"])) == 0  # of the same clips: all is done


def test_a_signal_ends_it_with_a_checkpoint_of_the_last_step(material, monkeypatch):
    real, more = Trainer.step, ("--checkpoint-every", 1000)

    def step(trainer):
        if trainer.step_number == 2:
            signal.raise_signal(signal.SIGTERM)
        return real(trainer)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", step)
        assert cli.main(arguments("ended", *more)) == cli.INTERRUPTED
    lines = table("ended/losses.csv")
    assert len(lines) == step_of("ended") == 3
    assert cli.main(arguments("ended", *more, "--resume")) == 0
    assert [int(line["step"]) for line in table("ended/losses.csv")] == list(range(1, STEPS + 1))
    assert table("ended/losses.csv")[:3] == lines


def test_what_was_measured_is_in_its_tables_and_pictures(whole, monkeypatch):
    monkeypatch.chdir(whole.parent)
    lines = table("whole/validation.csv")
    assert [int(line["step"]) for line in lines] == [5, 10, 12]
    assert {line["clip"] for line in lines} == {"clip.mp4#0-9"}
    assert all(0 < float(line["psnr"]) < 40 and -1 < float(line["ssim"]) < 1 for line in lines)
    vae = AutoencoderKLCogVideoX.from_pretrained("whole/vae")
    kept = load_file("whole/checkpoint.safetensors")
    assert all(torch.equal(weight, kept[f"average/{name}"]) for name, weight in vae.named_parameters())
    assert not all(torch.equal(kept[f"weights/{name}"], kept[f"average/{name}"]) for name in vae.state_dict())
    source = torch.stack(list(video.read_frames("clip.mp4", video.Framing(24, 40), 9)), 2)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        mean = vae.encode(from_uint8(source, "float32")).latent_dist.mode().float()
        got = to_uint8(vae.decode(mean).sample.float())
    assert float(lines[-1]["psnr"]) == pytest.approx(psnr(got, source), abs=0.05)
    assert float(lines[-1]["ssim"]) == pytest.approx(ssim(got, source), abs=0.01)
    for line in table("whole/losses.csv"):
        parts = float(line["l1"]) + 4 * float(line["mse"]) + 1e-3 * float(line["kl"])
        parts += COLOUR * float(line["mean_color"])
        assert float(line["loss"]) == pytest.approx(parts, rel=1e-5)
    for name in ("clip.mp4#0-9.png", "curves.png"):
        with Image.open(f"whole/{name}") as picture:
            assert min(picture.size) > 100


def test_a_full_disk_ends_a_training_in_one_line_and_leaves_nothing_half_written(
    material, capsys, monkeypatch
):
    # The model's file is too large; tests/files/test_full_disk.py has a checkpoint that is.
    monkeypatch.setattr(checkpoints, "save", lambda *_, **__: None)
    few = ("--steps", 1, "--checkpoint-every", 1)
    assert cli.main(arguments("whole", *few)) == 0
    (model,) = Path("whole").rglob("*.safetensors")
    capsys.readouterr()
    with files_of_at_most(model.stat().st_size // 2):
        assert cli.main(arguments("full", *few)) == 1
    assert re.fullmatch(".*too large.*\n", capsys.readouterr().err)
    assert sorted(path.name for path in Path("full").iterdir()) == ["losses.csv", "validation.csv"]


def test_curves_are_means_over_equal_parts_of_a_table_of_numbers(tmp_path, monkeypatch):
    losses, validation = tmp_path / run.LOSSES, tmp_path / run.VALIDATION
    validation.write_text("step,minutes,clip,psnr,ssim\n")
    losses.write_text("step,l1,mean_color\n1,0.5,4\n2,0.25,5\n3,1e-7,6\n4,3,7\n")
    monkeypatch.setattr(report, "POINTS", 2)
    found = report.curves(losses, validation)
    assert found == {
        "losses": {"step": [1.5, 3.5], "l1": [0.375, 1.5], "mean_color": [4.5, 6.5]},
        "validation": [],
    }
    losses.write_text("step,l1\n1,0.5\n2,x\n")
    with pytest.raises(ValueError, match="Cannot convert string 'x'"):
        report.curves(losses, validation)
