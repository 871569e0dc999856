"""The examples that train a VAE and a pipeline, run on small models and small clips."""

import contextlib
import importlib
import json
from pathlib import Path
from unittest.mock import DEFAULT, Mock, patch

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLCogVideoX, CogVideoXPipeline
from PIL import Image
from safetensors.torch import load_file
from torch import nn

from tests import processes, reference
from tests.videos import moving_frames, write

CONFIG = {
    **reference.SMALL,
    **reference.TWO_SHALLOW_LEVELS,
    "_class_name": "AutoencoderKLCogVideoX",
    "latent_channels": 2,
}
FROM_NOTHING = ("clip.mp4", "--config", "config.json", "--frames", 9, "--size", "16x16")

pytestmark = pytest.mark.usefixtures("torchax_off", "material")


@pytest.fixture
def material(in_an_empty_directory):
    """Write a config, and a video of 20 frames of 24 x 40 pixels."""
    Path("config.json").write_text(json.dumps(CONFIG))
    write("clip.mp4", moving_frames(20))


@pytest.fixture
def program(monkeypatch):
    """Return the program's module, which takes its clips from the module `clips` beside it."""
    monkeypatch.syspath_prepend(str(processes.ROOT / "examples" / "train_vae"))
    return importlib.import_module("train")


@pytest.fixture
def run(program, monkeypatch):
    """Return a function that runs the program and returns its log."""

    def run(*arguments, output="run"):
        monkeypatch.setattr("sys.argv", ["train.py", *map(str, arguments), "-o", output])
        with torch.enable_grad():
            program.main()
        return json.loads(Path(output, "log.json").read_text())

    return run


@pytest.fixture
def run_until(program, run):
    """Return a function that runs the program until Ctrl-C before a step."""

    def run_until(number, *arguments, output="run"):
        steps = Mock(side_effect=[*[DEFAULT] * number, KeyboardInterrupt], wraps=program.Training.step)
        with (
            patch.object(program.Training, "step", lambda *given: steps(*given)),
            pytest.raises(SystemExit, match="interrupted; --resume goes on"),
        ):
            run(*arguments, output=output)

    return run_until


def weights_of(directory):
    return AutoencoderKLCogVideoX.from_pretrained(directory).state_dict()


def changed(before, after):
    """Return the halves of a VAE in which a weight differs."""
    return {name.partition(".")[0] for name in before if not torch.equal(before[name], after[name])}


@pytest.mark.slow
def test_a_training_from_nothing_lowers_the_loss_and_improves_a_held_out_clip(run):
    log = run(*FROM_NOTHING, "--steps", 60, "--validate", "clip.mp4#0-9", "--every", 40)
    losses = [line["l1"] for line in log if "l1" in line]
    assert len(losses) == 60
    assert sum(losses[-10:]) < 0.7 * sum(losses[:10])
    quality = {line["step"]: line["psnr"] for line in log if "psnr" in line}
    assert list(quality) == [0, 40, 60]
    assert quality[0] + 2 < quality[40] < quality[60]


def test_a_run_that_was_cut_short_goes_on_to_the_same_weights(run, run_until):
    given = (*FROM_NOTHING, "--steps", 5, "--every", 2, "--validate", "clip.mp4#0-9", "--augment")
    whole = run(*given)
    run_until(3, *given, output="cut")
    assert run(*given, "--resume", output="cut") == whole
    average = weights_of("run/vae")
    assert not changed(average, weights_of("cut/vae"))
    weights, _average, _adamw, muon, *_rates = torch.load("run/checkpoint.pt")["parts"]
    unchanged = [name for name in average if torch.equal(weights[name], average[name])]
    assert unchanged == [], "each weight is trained, and its average is what is saved"
    kernels = [name.split(".") for name, weight in weights.items() if weight.ndim > 3]
    inner = [name for name in kernels if not {"conv_in", "conv_out"} & {*name}]
    assert len(muon["param_groups"][0]["params"]) == len(inner)


@pytest.mark.parametrize(
    ("more", "rate", "halves"),
    [
        ((), 1e-5, {"decoder"}),
        (("--rate", 1e-3, "--gradient-checkpointing"), 1e-3, {"decoder"}),
        (("--train-encoder",), 1e-5, {"encoder", "decoder"}),
    ],
)
def test_of_given_weights_the_decoder_alone_is_trained_slowly_unless_asked(run, more, rate, halves):
    reference.small_vae(**CONFIG).save_pretrained("stock")
    run("clip.mp4", "--model", "stock", "--steps", 1, "--frames", 9, "--size", "24x40", *more)
    before, after = weights_of("stock"), weights_of("run/vae")
    assert changed(before, after) == halves
    largest = max((after[name] - before[name]).abs().max().item() for name in before)
    assert largest == pytest.approx(rate, rel=0.05), "the first update of AdamW is the learning rate"


@pytest.mark.slow
def test_on_jax_a_cut_run_has_the_losses_of_pytorch(run, run_until, program, monkeypatch):
    monkeypatch.setattr(program, "autocast", lambda device: contextlib.nullcontext())  # float32
    reference.small_vae(**CONFIG).save_pretrained("stock")
    given = ("clip.mp4", "--model", "stock", "--steps", 3, "--every", 1, "--frames", 9, "--size", "16x16")
    given = (*given, "--batch", 2, "--rate", 1e-3, "--validate", "clip.mp4#0-9")
    want = run(*given, output="torch")
    run_until(1, *given, "--device", "jax", "--dp", 2)
    got = run(*given, "--device", "jax", "--dp", 2, "--resume")
    for one, other in zip(got, want, strict=True):
        assert one.pop("clip", None) == other.pop("clip", None)
        assert one == pytest.approx(other, rel=1e-3)
    assert changed(weights_of("stock"), weights_of("run/vae")) == {"decoder"}


@pytest.mark.parametrize("shape", [(8, 3, 3, 3, 3), (4, 6, 3, 3)])
def test_muon_takes_a_kernel_as_the_matrix_of_its_output_channels(program, shape):
    start, *gradients = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    kernel = nn.Parameter(start.movedim(1, -1).contiguous().movedim(-1, 1))
    matrix = nn.Parameter(start.movedim(1, -1).flatten(1))
    ours, plain = program.Muon([kernel], lr=0.1), torch.optim.Muon([matrix], lr=0.1)
    for gradient in gradients:
        kernel.grad, matrix.grad = gradient, gradient.movedim(1, -1).flatten(1)
        ours.step()
        plain.step()
    assert not torch.equal(kernel, start)
    assert torch.equal(kernel.detach().movedim(1, -1).flatten(1), matrix.detach())


def test_losses_are_what_they_are_called(program, monkeypatch):
    monkeypatch.setattr(program, "autocast", lambda device: contextlib.nullcontext())
    vae, x = reference.small_vae(**CONFIG), reference.video(9, height=16, width=16)
    found = program.losses(vae, x, np.random.default_rng(3))
    posterior = vae.encode(x).latent_dist
    noise = torch.from_numpy(np.random.default_rng(3).standard_normal(posterior.mean.shape, np.float32))
    y = vae.decode(posterior.mean + posterior.std * noise).sample
    want = {
        "l1": nn.functional.l1_loss(y, x),
        "mse": nn.functional.mse_loss(y, x),
        "kl": posterior.kl().sum() / posterior.mean.numel(),
        "color": (y.mean((3, 4)) - x.mean((3, 4))).square().mean().sqrt(),
    }
    assert {name: loss.item() for name, loss in found.items()} == pytest.approx(
        {name: loss.item() for name, loss in want.items()}, rel=1e-4
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--size", "32x32"), "the clip clip.mp4 is 24 x 40: crops of 32 x 32 need at least as many rows"),
        (("--size", "24x48"), "the clip clip.mp4 is 24 x 40: crops of 24 x 48 need at least as many rows"),
        (("--size", "20x20"), "got --size 20x20: give multiples of 8"),
        (("--frames", 25), "the clip clip.mp4 has 20 frames: at least 25 are needed"),
        (("--frames", 8), r"got --frames 8: give 8 n \+ 1"),
        (("--every", 0), "got --every 0: at least 1"),
        (("--resume",), "the checkpoint run/checkpoint.pt: there is none to resume"),
        (("--validate", "clip.mp4#15-"), "the clip clip.mp4#15- has 5 frames: at least 9 are needed"),
        (("--validate", "gone.mp4"), "No such file or directory: 'gone.mp4'"),
        (("--config", "gone.json"), "No such file or directory: 'gone.json'"),
    ],
)
def test_what_cannot_be_trained_is_refused_in_one_line(run, arguments, words):
    with pytest.raises(SystemExit, match=rf"\A.*{words}.*\Z"):
        run(*FROM_NOTHING, *arguments)
    assert not Path("run").exists()


def test_a_run_is_neither_overwritten_nor_resumed_with_other_options(run, capsys):
    log = run(*FROM_NOTHING, "--steps", 1)
    for more, words in (
        (("--steps", 1), "it exists: --resume it, or give another -o"),
        (("--steps", 2, "--resume"), "is of a run with steps 1, not 2: resume it with the options"),
    ):
        with pytest.raises(SystemExit, match=words):
            run(*FROM_NOTHING, *more)
    assert run(f"{Path.cwd()}/./clip.mp4", *FROM_NOTHING[1:], "--steps", 1, "--resume") == log
    assert "the run is finished: run/checkpoint.pt has step 1 of 1" in capsys.readouterr().err


def test_a_folder_gives_its_videos_and_pictures_and_a_range_its_frames(program):
    Image.new("RGB", (32, 24)).save("picture.png")
    Path("cycle").symlink_to(".")
    Path("._clip.mp4").symlink_to("clip.mp4")
    assert list(program.files([".", "other.mp4"])) == ["clip.mp4", "picture.png", "other.mp4"]
    assert program.load("picture.png", 9, (16, 16)).shape == (1, 3, 24, 32)
    whole, part = program.load("clip.mp4", 9, (16, 16)), program.load("clip.mp4#3-14", 9, (16, 16))
    assert torch.equal(part, whole[3:14])
    assert torch.equal(program.load("clip.mp4#3-", 9, (16, 16)), whole[3:])


def crops(program, source, count=100, frames=9, **options):
    return program.Sampler([source], (16, 24), **options).batch(np.random.default_rng(0), count, frames)


def colored(height, width, blues):
    """Return frames whose red is the row, whose green is the column, and whose blue is given, for each."""
    axes = torch.tensor(blues), 3 * torch.arange(height), 3 * torch.arange(width)
    blue, red, green = torch.meshgrid(*axes, indexing="ij")
    return torch.stack([red, green, blue], 1).to(torch.uint8)


def test_crops_are_parts_of_the_clip_in_its_order(program):
    batch = (crops(program, colored(40, 60, range(0, 200, 10))) + 1) * 127.5
    assert batch.shape == (100, 3, 9, 16, 24)
    assert min(batch[:, 0].diff(dim=2).min(), batch[:, 1].diff(dim=3).min()) > 2.9
    assert (batch[:, 2].diff(dim=1) - 10).abs().max() < 0.1
    assert set((batch[:, 2, 0, 0, 0] / 10).round().int().tolist()) == set(range(12))
    scale = batch[:, 0, 0].diff(dim=1).mean((1, 2)) / 3
    assert 1 <= scale.min() < 1.1
    assert 2.2 < scale.max() <= 2.6


def test_a_picture_is_seen_through_a_moving_camera(program):
    steps = crops(program, colored(60, 80, [99]))[:, :2].mean((3, 4)).diff(dim=2).abs() * 127.5 / 3
    assert 0.1 < steps.mean() < 1, "pixels of the picture that the camera moves in a frame"


def test_augmented_crops_are_cut_reversed_mirrored_and_tinted(program):
    video = torch.full((20, 3, 40, 60), 40, dtype=torch.uint8)
    video[10:, :, :, 30:] = 200
    batches = [crops(program, video, augment=augment) for augment in (False, True)]
    plain, augmented = (batch.mean((1, 3, 4)).diff(dim=1).min() for batch in batches)
    assert augmented < -0.1 < -1e-6 <= plain, "reversed in time, or cut to another scene"
    plain, augmented = (batch[..., 0].mean() - batch[..., -1].mean() for batch in batches)
    assert plain < -0.3 < augmented
    plain, augmented = ((batch - batch.mean(1, keepdim=True)).abs().amax((1, 2, 3, 4)) for batch in batches)
    assert plain.max() < 1e-6
    assert 0.3 < (augmented > 0.01).float().mean() < 0.7
    assert batches[1].abs().max() <= 1


# A pipeline, for a few steps of few clips


@pytest.fixture
def train(monkeypatch):
    """Return a function that trains for a number of steps, as one command does, and returns the log."""
    monkeypatch.syspath_prepend(str(processes.ROOT / "examples" / "train_pipeline"))
    from examples.train_pipeline import train as program

    monkeypatch.setattr(program, "CLIPS", 8)
    options = ["--files=1", "--batch=2", "--every=1", "--scenes=1", "--decay=1"]

    def train(output, steps):
        with torch.enable_grad():
            program.train(program.parser().parse_args(["-o", output, *options, "--steps", str(steps)]))
        return json.loads(Path(output, "log.json").read_text())

    return train


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_a_training_that_goes_on_ends_as_one_without_a_break(train):
    train("halted", 3)
    straight, halted = train("straight", 5), train("halted", 5)
    assert [entry["loss"] for entry in straight] == [entry["loss"] for entry in halted]
    assert straight[3].keys() >= {"seen", "unseen scene", "unseen pair"}
    weights = "straight/pipeline/transformer/diffusion_pytorch_model.safetensors"
    assert {weight.dtype for weight in load_file(weights).values()} == {torch.bfloat16}
    assert CogVideoXPipeline.from_pretrained("straight/pipeline").transformer is not None
