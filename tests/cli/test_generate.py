"""`generate` as a user meets it: stock diffusers' frames, stages, kills, and wrong input before any work."""

import json
import re
import shutil
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
from diffusers import CogVideoXDPMScheduler
from PIL import Image
from safetensors.torch import save_file

from cogvideox_torchax import cli, make_mesh, port
from cogvideox_torchax.cli import common, devices, generate as command, prompts, stages
from cogvideox_torchax.files import latents, tensors as tensor_files, video
from cogvideox_torchax.pipelines import description, loading
from cogvideox_torchax.pipelines.transformer import CogVideoXTransformer3DModel
from tests import small_pipelines
from tests.dataset.test_killed import KILLED
from tests.files.test_latents import MADE
from tests.files.test_video import moving_frames, write
from tests.processes import printed_by, run_python

pytestmark = pytest.mark.usefixtures("torchax_off", "in_an_empty_directory", "inputs")

MODELS = {
    "text": ("text", "5b"),
    "image": ("image", "5b"),
    "control": ("control", "5b"),
    "noisy": ("text", "5b", CogVideoXDPMScheduler),
    "1.5": ("text", "1.5"),
    "learned": ("image", "5b-I2V"),
}
"""Arguments of `saved`. A noisy model's scheduler draws noise in every step, and reads the one before."""


@pytest.fixture
def models(saved):
    return lambda name: saved(*MODELS[name])


@pytest.fixture
def inputs():
    small_pipelines.picture().save("picture.png")
    write("clip.mp4", moving_frames(9), 8)
    Path("broken.safetensors").write_bytes(b"x" * 99)
    save_file({"unet.conv.lora_A.weight": torch.zeros(2)}, "other.safetensors")


def arguments(model, *more, output="frames"):
    own = {"--prompt": "a panda", "--num-inference-steps": 4, "--dtype": "float32"}
    own = {} if "--from-stage" in more else own
    defaults = [part for pair in own.items() if pair[0] not in more for part in pair]
    return ["generate", "--model", str(model), "-o", output, "--quiet", *map(str, (*defaults, *more))]


def generate(model, *more, output="frames"):
    return cli.main(arguments(model, *more, output=output))


def pictures(directory):
    """Return the pictures of a directory as one array (T, H, W, 3) of integers."""
    return np.stack([np.asarray(Image.open(path), int) for path in sorted(Path(directory).iterdir())])


def made_by(pipe):
    """Return, as `pictures` does, what a pipeline makes of the request that `arguments` has."""
    pipe.set_progress_bar_config(disable=True)
    options = {"prompt": "a panda", "guidance_scale": 6.0, "output_type": "pil"}
    (frames,) = pipe(**small_pipelines.inputs("text", **options)).frames
    return np.stack([np.asarray(picture, int) for picture in frames])


@pytest.mark.parametrize(("name", "mesh"), [("text", ["--dp", 2, "--tp", 4]), ("1.5", [])])
@pytest.mark.slow_cases("1.5-*")
def test_the_frames_are_those_of_stock_diffusers(models, name, mesh):
    want = made_by(small_pipelines.CLASSES["text"].from_pretrained(models(name)))
    assert generate(models(name), *mesh) == 0
    assert not list(Path().glob("*.latents.safetensors")), "kept where nothing has failed"
    assert np.abs(pictures("frames") - want).max() <= 1


def test_a_scheduler_and_a_lora_are_taken_as_stock_diffusers_takes_them(models):
    made, stock = (small_pipelines.CLASSES["text"].from_pretrained(models("text")) for _ in range(2))
    small_pipelines.save_lora(made, "lora")
    stock.scheduler = CogVideoXDPMScheduler.from_config(stock.scheduler.config)
    stock.load_lora_weights("lora", adapter_name="mine")
    wanted = {}
    for scale in (0.5, 1.0):
        stock.set_adapters(["mine"], [scale])
        wanted[scale] = made_by(stock)
    lora = ("--lora", "lora", "--lora-scale", 0.5)
    assert generate(models("text"), "--scheduler", "CogVideoXDPMScheduler", *lora) == 0
    got = pictures("frames")
    assert np.abs(got - wanted[0.5]).max() <= 1
    assert np.abs(got - wanted[1.0]).max() > 1


@pytest.mark.slow
def test_in_bfloat16_the_frames_are_those_of_python_but_for_the_rounding_to_bytes(models):
    pipe = port(small_pipelines.CLASSES["text"].from_pretrained(models("text"), dtype=torch.bfloat16))
    assert generate(models("text"), "--dtype", "bfloat16") == 0
    assert np.abs(pictures("frames") - made_by(pipe)).max() <= 1


@pytest.mark.parametrize(("name", "rate"), [("text", 8), ("1.5", 16)])
def test_the_rate_is_that_of_the_model_unless_one_is_given(models, name, rate):
    assert command._frame_rate_of(str(models(name))) == rate


@pytest.fixture
def steps():
    """Return a mock that counts the steps of denoising."""
    with patch.object(
        CogVideoXTransformer3DModel, "forward", autospec=True, side_effect=CogVideoXTransformer3DModel.forward
    ) as made:
        yield made


def test_every_stage_takes_up_to_the_same_frames(models, steps, capsys):
    model = models("text")
    with patch.object(Image.Image, "save", autospec=True, side_effect=Image.Image.save) as save:
        assert generate(model, "--save-stages", "kept", "--preview", "steps.png", "--fps", 5) == 0
    assert "a linear map of latents that explains" in capsys.readouterr().err
    # Frames are written without a format.
    shown = {image.tobytes() for image, _path, *kind in (call.args for call in save.call_args_list) if kind}
    assert len(shown) == 4, "one for each step"
    assert Image.open("steps.png").size == (3 * 3 * 8, 3 * 4)
    assert {path.stem for path in Path("kept").iterdir()} == {"text", "latents"}
    before = latents.load("kept/latents.safetensors")
    assert before.fps == 5
    for stage in ("latents", "text"):
        more = ["--num-inference-steps", 4] if stage == "text" else []
        steps.reset_mock()
        assert generate(model, "--save-stages", "kept", "--from-stage", stage, *more, output=stage) == 0
        assert steps.call_count == {"latents": 0, "text": 4}[stage]
        assert np.array_equal(pictures(stage), pictures("frames")), stage
        assert torch.equal(latents.load("kept/latents.safetensors").tensor, before.tensor), stage


def test_a_cache_skips_steps_and_says_how_many(models, capsys):
    assert generate(models("text"), "--cache", "pab") == 0
    assert "--cache pab: 2 of 4 steps skipped, in whole or in part\n" in capsys.readouterr().err


CONDITIONED = {
    "image to video": ("image", ["--image", "picture.png"]),
    "video to video": ("noisy", ["--video", "clip.mp4", "--strength", 0.75]),
    "control": ("control", ["--video", "clip.mp4"]),
}


@pytest.mark.parametrize(("name", "more"), CONDITIONED.values(), ids=CONDITIONED)
@pytest.mark.slow_cases(but=["image to video"])
def test_a_conditioned_video_is_sampled_again_from_its_text(models, steps, name, more):
    kept = ["--save-stages", "kept", "--guidance-scale", 1, "--num-inference-steps", 4, *more]
    assert generate(models(name), *kept) == 0
    whole = steps.call_count
    assert generate(models(name), *kept, "--from-stage", "text", output="again") == 0
    assert steps.call_count == 2 * whole
    assert np.array_equal(pictures("again"), pictures("frames"))


def test_a_failed_decode_loses_nothing(models, capsys):
    with patch.object(common, "decode_to", side_effect=RuntimeError("out of memory")):
        assert generate(models("text"), "--tiling", "8x16", output="my frames/") == 1
        assert generate(models("text"), "--save-stages", "kept") == 1
    said, kept = capsys.readouterr().err, Path("my frames.latents.safetensors")
    assert said.count("out of memory") == 2
    advised = f"cogvideox-torchax decode '{kept}' -o 'my frames/' --dtype float32 --tiling 8x16"
    assert f"the latents are kept: {advised}\n" in said
    assert not Path("my frames").exists()
    assert torch.equal(latents.load(kept).tensor, latents.load(stages.path_of("kept", "latents")).tensor)
    kept.unlink()
    assert generate(models("text"), "--save-stages", "kept", "--from-stage", "latents") == 0
    assert len(pictures("frames")) == small_pipelines.FRAMES


def test_latents_that_are_kept_are_decoded_on_the_mesh_that_is_asked_for(monkeypatch):
    monkeypatch.setattr(common, "load_vae", lambda *given: given)
    args = cli.parser().parse_args(["generate", "--model", "m", "-o", "x.mp4", "--tp", "4"])
    with devices.process_group(args) as group:
        vae = command._vae_for(args, MADE, group.mesh)
    assert vae == ("m", "torchax", "float32", make_mesh(1, 4))


BAD = {
    "frames": ("text", ["--frames", 4], "generates 3 or 5 of them"),
    "size": ("text", ["--height", 10], "multiples of 8"),
    "positions of 1.5": (
        "1.5",
        ["--height", 16, "--width", 8],
        "has positions for at most height=8, width=16; try height=8, width=8",
    ),
    "learned positions": ("learned", ["--image", "picture.png", "--height", 16], "height=8, width=16 alone"),
    "a strength of no video": ("text", ["--strength", 0.5], "without a video to start from"),
    "a negative prompt of no guidance": (
        "text",
        ["--negative-prompt", "a cat", "--guidance-scale", 1],
        "--guidance-scale 1.0, which does not use it",
    ),
    "a strength without steps": ("text", ["--video", "clip.mp4", "--strength", 0.2], "no step is left"),
    "1.5 and a clip's frames": ("1.5", ["--video", "clip.mp4", "--frames", 5], "generates 3 or 7 of them"),
    "long prompt": ("text", ["--prompt", "a panda plays " * 9], r"tokens: .* takes 16; shorten it"),
    "an image for a text model": ("text", ["--image", "picture.png"], "takes no image"),
    "no image": ("image", [], "takes an image"),
    "no control video": ("control", [], "takes a control video"),
    "not an image": ("image", ["--image", "clip.mp4"], "as an image"),
    "no such image": ("image", ["--image", "none.png"], "there is no file or directory"),
    "not a clip": ("text", ["--video", "picture.png"], r"1 frames, 5 are wanted|cannot be read as a video"),
    "too few frames": ("text", ["--video", "clip.mp4", "--frames", 11], "has 9 frames, 11 are wanted"),
    "tiles": ("text", ["--tiling", "9x16"], "got tiles of 9 x 16 pixels"),
    "mesh": ("text", ["--tp", 99], "99 devices, where there are 8"),
    "a preview in JPEG": ("text", ["--preview", "steps.jpg"], "goes into a .png file"),
    "a scheduler's name": (
        "text",
        ["--scheduler", "CogVideoXDMPScheduler"],
        "no such scheduler for CogVideoX; the nearest names are CogVideoXDPMScheduler, CogVideoXDDIM",
    ),
    "no scheduler": ("text", ["--scheduler", "CogVideoXPipeline"], "the nearest names are CogVideoXD"),
    "a scheduler of flows": ("text", ["--scheduler", "FlowMatchEulerDiscreteScheduler"], "no such scheduler"),
    "no such LoRA": ("text", ["--lora", "none.safetensors"], "there is no LoRA none.safetensors: give"),
    "no such LoRA's directory": (
        "text",
        ["--lora", "some/where/none"],
        "there is no model directory some/where/none",
    ),
    "not a LoRA's file": ("text", ["--lora", "picture.png"], "cannot load the LoRA picture.png: "),
    "a broken LoRA": ("text", ["--lora", "broken.safetensors"], "cannot load the LoRA broken.safetensors: "),
    "another model's LoRA": ("text", ["--lora", "other.safetensors"], "one of a LoRA for CogVideoX's trans"),
    "a scale of no LoRA": ("text", ["--lora-scale", 0.5], "without a LoRA: pass --lora"),
    "no such cache": ("text", ["--cache", "none"], "first-block:THRESHOLD .*pab:N .*fastercache:N"),
    "a cache's value": ("text", ["--cache", "first-block:x"], "it takes first-block:THRESHOLD"),
    "nothing to skip": ("text", ["--cache", "pab:1"], "nothing would be skipped"),
    "no ratios": ("text", ["--cache", "magcache"], "RATIOS.json, a list that magcache:calibrate prints"),
    "a cache of guidance": ("text", ["--cache", "fastercache", "--guidance-scale", 1], "without guidance"),
    "stages without a directory": ("text", ["--from-stage", "text"], "pass --save-stages"),
    "no such stage": ("text", ["--from-stage", "text", "--save-stages", "none"], "there is no stage"),
    "no latents": (
        "text",
        ["--from-stage", "latents", "--save-stages", "none"],
        "there is no stage none/latents.safetensors: resume from 'text'",
    ),
}


@pytest.mark.parametrize(("name", "more", "words"), BAD.values(), ids=BAD)
def test_wrong_input_is_one_line_before_any_weight_is_loaded(models, name, more, words, monkeypatch, refused):
    model = models(name)
    monkeypatch.setattr(loading, "load_pipeline", lambda *_, **__: pytest.fail("loaded"))
    said = refused(*arguments(model, *more))
    assert re.search(words, said), said
    assert not Path("frames").exists()
    assert not Path("none").exists(), "stages to resume from are not made"


def test_a_prompt_is_needed(models, refused):
    assert "give --prompt" in refused("generate", "--model", models("text"), "-o", "frames")


@pytest.fixture
def kept(models, in_an_empty_directory):
    """Stages without a run: as `generate` leaves them."""
    model = description.describe(str(models("text")), image=False, clip=False)
    size = dict(zip(("frames", "height", "width"), model.size, strict=True))
    request = stages.Request(prompt="a panda", **size, num_inference_steps=4, dtype="float32")
    Path("kept").mkdir()
    embeddings = {name: torch.zeros(1, 16, 32) for name in ("prompt_embeds", "negative_prompt_embeds")}
    stages.save_text("kept", embeddings, request=request, model=model.fingerprint)
    return request


CONTRADICTED = {
    "another model": ("1.5", ["--num-inference-steps", 4], "another model"),
    "another prompt": ("text", ["--prompt", "b"], "made with --prompt 'a panda'"),
    "no guidance": ("text", ["--guidance-scale", 1], "made with guidance"),
}


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize(("name", "more", "words"), CONTRADICTED.values(), ids=CONTRADICTED)
def test_a_stage_that_the_request_contradicts_is_refused(models, name, more, words, refused):
    assert words in refused(*arguments(models(name), "--save-stages", "kept", "--from-stage", "text", *more))


@pytest.mark.usefixtures("kept")
def test_a_stage_that_is_broken_or_another_or_of_another_model_is_refused(models, refused):
    def error(stage):
        return refused(*arguments(models("text"), "--save-stages", "kept", "--from-stage", stage))

    text = stages.path_of("kept", "text")
    metadata, tensors = tensor_files.load(text, ValueError)
    request = json.loads(metadata["request"])
    del request["dtype"]  # a request's own default is another
    save_file(tensors, text, metadata | {"request": json.dumps(request)})
    assert "is broken (it has no dtype)" in error("text")
    text.write_bytes(text.read_bytes()[:-100])
    assert "truncated" in error("text")
    save_file(tensors, text)
    assert "no 'text' stage" in error("text")
    latents.save(replace(MADE, config={**MADE.config, "latent_channels": 4}), "kept/latents.safetensors")
    assert "of another model" in error("latents")


@pytest.mark.usefixtures("kept")
def test_latents_that_are_kept_take_no_other_request_and_have_their_rate(models, refused):
    config = json.loads(Path(models("text"), "vae/config.json").read_text())
    made = latents.Latents(torch.zeros(1, 16, 3, 4, 8), config, "vae", Fraction(5), small_pipelines.FRAMES)
    latents.save(made, "kept/latents.safetensors")
    again = ("--save-stages", "kept", "--from-stage", "latents")
    for option, value in {
        **{"--prompt": "a dog", "--num-inference-steps": "9", "--preview": "a.png"},
        **{"--scheduler": "DDIMScheduler", "--lora": "other.safetensors", "--lora-scale": "0.5"},
    }.items():
        assert f"leave {option} out" in refused(*arguments(models("text"), *again, option, value))
    for more, fps in (([], 5), (["--fps", 10], 10)):
        assert generate(models("text"), *again, *more, output="x.mp4") == 0
        assert video.probe("x.mp4").fps == fps


def test_a_new_generation_takes_the_stages_of_the_one_before_away(models, kept, monkeypatch):
    model = description.describe(str(models("text")), image=False, clip=False)
    assert stages.load_text("kept", model.fingerprint).request == kept
    monkeypatch.setattr(
        small_pipelines.CLASSES["text"], "check_inputs", Mock(side_effect=RuntimeError("killed"))
    )
    for more in ([], ["--from-stage", "text", "--num-inference-steps", 4]):
        Path("kept/latents.safetensors").touch()
        assert generate(models("text"), "--save-stages", "kept", *more) == 1
        assert [path.name for path in Path("kept").iterdir()] == ["text.safetensors"]
    Path("kept/latents.safetensors").touch()
    monkeypatch.setattr(stages, "save_text", Mock(side_effect=RuntimeError("killed")))
    assert generate(models("text"), "--save-stages", "kept") == 1
    assert not Path("kept/latents.safetensors").exists(), "of the text before"


# Many prompts


KILLED_AT = range(2, 32)
"""Openings, renamings and so on in the output directory at which a run is killed."""


def many(model, *more):
    given = ("--prompts", "prompts.jsonl", "--num-inference-steps", 2, "--dtype", "float32", "--quiet", *more)
    return ["generate", "--model", str(model), "-o", "out", *map(str, given)]


def records(directory="out"):
    """Return the records of a directory's videos by id, without what differs from run to run."""
    found = {path.stem: json.loads(path.read_text()) for path in Path(directory).glob("*.json")}
    found.pop("prompts", None)
    assert {path.stem for path in Path(directory).glob("*.mp4")} == found.keys(), "one for each video"
    return {
        name: {key: value for key, value in record.items() if key != "seconds"}
        for name, record in found.items()
    }


def videos(directory="out"):
    return {path.stem: (path.read_bytes(), path.stat().st_mtime_ns) for path in Path(directory).glob("*.mp4")}


LINES = (
    '{"prompt": "a panda", "seed": 7}',
    "",
    '{"prompt": "the sea", "id": "sea", "guidance_scale": 1, "steps": 3}',
    '{"prompt": "an egg", "negative_prompt": "a cat"}',
)


def test_a_file_of_prompts_makes_what_single_runs_make_and_goes_on_where_it_was(models, capsys):
    Path("prompts.jsonl").write_bytes("\r\n".join(("\ufeff" + LINES[0], *LINES[1:])).encode())
    assert cli.main(many(models("text"), "--seed", 5, "--json")) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["videos"], said["done_before"], said["bad"]) == (3, 0, 0)
    made, first = records(), videos()
    assert {name: (each["prompt"], each["seed"], each["frames"]) for name, each in made.items()} == {
        "00001": ("a panda", 7, 5),
        "sea": ("the sea", 2005, 5),
        "00004": ("an egg", 3005, 5),
    }
    assert made["sea"]["request"]["num_inference_steps"] == 3
    for name, options in (
        ("00001", ["--prompt", "a panda", "--seed", 7]),
        ("00004", ["--prompt", "an egg", "--negative-prompt", "a cat", "--seed", 3005]),
    ):
        assert generate(models("text"), *options, "--num-inference-steps", 2, output=f"{name}-alone.mp4") == 0
        one, other = (
            torch.cat(list(video.read_frames(path, video.Framing(8, 16), 5))).int()
            for path in (f"out/{name}.mp4", f"{name}-alone.mp4")
        )
        assert (one - other).abs().max() <= 2
    # Another order of work, in two processes, with one video of the three to make again, and one edited.
    Path("out/sea.mp4").unlink()
    Path("prompts.jsonl").write_text("\n".join((*LINES[:3], LINES[3].replace("a cat", "a dog"))))
    for process in (1, 0):
        shares = ("--distributed", "--processes", 2, "--process", process)
        assert cli.main(many(models("text"), "--seed", 5, *shares)) == 0
    again = videos()
    assert again["00001"] == first["00001"], "not made again"
    assert again["sea"][0] == first["sea"][0], "the same bytes"
    assert again["00004"] != first["00004"]
    assert records()["00004"]["request"]["negative_prompt"] == "a dog"
    with patch.object(prompts, "Generator", side_effect=AssertionError("all is done")):
        assert cli.main(many(models("text"), "--seed", 5)) == 0


ON_RAY = """
import os, signal, sys
from pathlib import Path

from cogvideox_torchax import cli
from cogvideox_torchax.cli import prompts

class Dying(prompts.PromptActor):
    def __call__(self, row):
        found = super().__call__(row)
        killed = Path(row["path"]).parent.with_suffix(".killed")
        if not killed.exists():
            killed.write_text("")
            os.kill(os.getpid(), signal.SIGKILL)  # the video is in its place, nobody was told
        return found

prompts.PromptActor = Dying
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_two_actors_on_ray_one_of_them_killed_make_the_videos_of_one_process(models):
    bad = '{"prompt": "a panda", "height": 3}'
    Path("prompts.jsonl").write_text("\n".join((*LINES, bad)))
    command = many(str(Path(models("text")).absolute()), "--json")
    ended = run_python(ON_RAY, *command, "--ray", "--actors", "2")
    assert ended.returncode == 1, ended.stderr[-3000:]
    assert "bad: line 5" in ended.stderr
    report = json.loads(ended.stdout)  # and nothing else, whatever Ray prints
    assert (report["videos"], report["bad"], report["device"]) == (3, 1, "Ray")
    assert Path("out.killed").exists()
    made, files = records(), videos()
    shutil.rmtree("out")
    assert cli.main(command) == 1
    assert records() == made
    assert {name: pair[0] for name, pair in videos().items()} == {k: pair[0] for k, pair in files.items()}


BAD_LINES = {
    "no object": ("3", "an object with a prompt is wanted, got 3"),
    "no prompt": ('{"seed": 3}', "an object with a prompt is wanted"),
    "an unknown field": ('{"prompt": "a", "stpes": 3}', "got stpes, which no prompt has"),
    "a text for a number": ('{"prompt": "a", "seed": "3"}', "seed is '3', a whole number above -1 is wanted"),
    "a seed of 65 bits": (
        '{"prompt": "a", "seed": 18446744073709551616}',
        "got the seed 18446744073709551616",
    ),
    "no steps": ('{"prompt": "a", "steps": 0}', "steps is 0, a whole number above 0"),
    "a long prompt": (json.dumps({"prompt": "a panda plays " * 9}), "takes 16; shorten it"),
    "an id that leads out": ('{"prompt": "a", "id": "../a"}', "must not lead out"),
    "an id twice": ('{"prompt": "a", "id": "00001"}', "its id 00001 is that of line 1: give it another"),
    "the settings' name": ('{"prompt": "a", "id": "prompts"}', "is that of the settings' file"),
    "half an emoji": (r'{"prompt": "cat \ud83d"}', "which UTF-8 cannot hold"),
    "a video of somebody else": (
        '{"prompt": "a", "id": "mine"}',
        "has no record, so this command has not made it",
    ),
}


def test_a_bad_line_is_told_with_its_number_at_the_end_and_the_others_are_made(models, capsys):
    Path("prompts.jsonl").write_text("\n".join((LINES[0], *(line for line, _ in BAD_LINES.values()))))
    Path("out").mkdir()
    again = ("--num-videos-per-prompt", 2)
    with patch.object(prompts.PromptDirectory, "work", side_effect=RuntimeError("killed")):
        assert cli.main(many(models("text"), *again)) == 1  # has written the settings
    Path("out/mine.mp4").write_bytes(b"mine")
    assert cli.main(many(models("text"), *again)) == 1
    said = capsys.readouterr().err
    for number, (_, words) in enumerate(BAD_LINES.values(), 2):
        name = "mine" if "somebody" in words or "no record" in words else f"line {number}"
        assert re.search(f"^bad: {name}: .*{re.escape(words)}", said, re.MULTILINE), (number, words)
    assert Path("out/mine.mp4").read_bytes() == b"mine"
    Path("out/mine.mp4").unlink()
    made = records()
    assert {name: each["seed"] for name, each in made.items() if "mine" not in name} == {
        "00001": 7,
        "00001-2": 8,
    }


def test_a_prompt_that_fails_leaves_the_others_and_is_tried_again_when_asked(models, capsys):
    Path("prompts.txt").write_text("a panda\n\nthe sea\n")
    command = many(models("text"), "--prompts", "prompts.txt")
    real = prompts.Generator.__call__

    def fail(self, request, path):
        if request.prompt == "a panda":
            raise ArithmeticError("step 1 gave NaN")
        return real(self, request, path)

    with patch.object(prompts.Generator, "__call__", fail):
        assert cli.main(command) == 1
    assert "bad: 00001: line 1: step 1 gave NaN; --retry-failed" in capsys.readouterr().err
    assert records().keys() == {"00003"}
    assert cli.main(command) == 1
    assert cli.main([*command, "--retry-failed"]) == 0
    assert records().keys() == {"00001", "00003"}


WRONG_LISTS = {
    "a prompt beside": (["--prompt", "a"], "leave them out, or --prompts"),
    "stages": (["--save-stages", "kept"], "leave them out, or --prompts"),
    "Ray and shares": (["--ray", "--distributed"], "leave out --distributed"),
    "actors without Ray": (["--actors", "2"], "add --ray"),
    "no such file": (["--prompts", "none.txt"], "there is no file or directory none.txt"),
    "no prompts": (["--prompts", "empty.txt"], "empty.txt has no prompts: write one on each line"),
    "not UTF-8": (["--prompts", "clip.mp4"], "is not in UTF-8"),
    "a file for an output": (["-o", "out.mp4"], "many videos go into a directory"),
    "an image for a text model": (["--image", "picture.png"], "takes no image"),
    "another process": (["--processes", 2], "add --distributed"),
}


@pytest.mark.parametrize(("more", "words"), WRONG_LISTS.values(), ids=WRONG_LISTS)
def test_a_wrong_list_is_one_line_before_anything_is_made(models, more, words, refused):
    Path("prompts.jsonl").write_text(LINES[0])
    Path("empty.txt").write_text("\n \n")
    assert words in refused(*many(models("text"), *more))
    assert not Path("out").exists()


def test_videos_of_other_settings_are_refused_and_options_of_many_need_a_list(models, refused):
    Path("prompts.jsonl").write_text(LINES[0])
    with patch.object(prompts.PromptDirectory, "work", return_value=iter(())):
        assert cli.main(many(models("text"))) == 0
    for option, words in (
        ("--guidance-scale", "guidance_scale is 6.0 there and 3.0 here"),
        ("--fps", "fps is '8'"),
    ):
        assert words in refused(*many(models("text"), option, 3))
    for more in (["--num-videos-per-prompt", 2], ["--retry-failed"]):
        assert "prompts" in refused(*arguments(models("text"), *more))


@pytest.mark.slow
def test_a_killed_run_of_prompts_loses_nothing_and_leaves_nothing_half(models):
    Path("prompts.jsonl").write_text("\n".join(LINES))
    command = [*many(models("text"))]
    del command[command.index("-o") : command.index("-o") + 2]
    command[command.index("prompts.jsonl")] = str(Path("prompts.jsonl").absolute())
    assert cli.main([*command, "-o", "whole"]) == 0
    wanted, whole = records("whole"), videos("whole")
    places = [Path(str(moment)).absolute() for moment in KILLED_AT]
    for place in places:
        place.mkdir()
    ended = printed_by(KILLED, *("|".join((str(place), *command)) for place in places))
    assert ended.count("ended by -9") == len(places)
    for place in places:
        left = videos(place / "out")
        assert {name: data for name, (data, _) in left.items()}.items() <= {
            name: data for name, (data, _) in whole.items()
        }.items()
        assert left.keys() <= {path.stem for path in (place / "out").glob("*.json")}
        assert cli.main([*command, "-o", str(place / "out")]) == 0
        assert records(place / "out") == wanted
        made = videos(place / "out")
        assert {name: data for name, (data, _) in made.items()} == {
            name: data for name, (data, _) in whole.items()
        }
        assert {name: made[name] for name in left} == left, "nothing is made again"
        assert not [path for path in place.rglob(".*") if path.suffix in (".partial", ".lock")]
