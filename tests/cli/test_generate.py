"""`generate` as a user meets it: stock diffusers' frames, stages, kills, and wrong input before any work."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import DEFAULT, Mock, patch

import numpy as np
import pytest
import torch
from diffusers import CogVideoXDPMScheduler
from PIL import Image
from safetensors.torch import load_file, save_file
from torch.nn.functional import avg_pool2d

from cogvideox_torchax import cli, make_mesh, port
from cogvideox_torchax.cli import common, devices, generation, preview, prompts
from cogvideox_torchax.files import latents
from cogvideox_torchax.pipelines import description, loading, transformer
from cogvideox_torchax.vae.directions import DECODE
from tests import processes, small_pipelines
from tests.files.test_latents import MADE
from tests.videos import moving_frames, pictures, read_all, write

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
    given = ("--prompt", "a panda", "--num-inference-steps", 4, "--dtype", "float32", "--quiet", *more)
    return ["generate", "--model", str(model), "-o", output, *map(str, given)]


def generate(model, *more, output="frames"):
    return cli.main(arguments(model, *more, output=output))


def made_by(pipe):
    """Return, as `pictures` does, what a pipeline makes of the request that `arguments` has."""
    pipe.set_progress_bar_config(disable=True)
    options = {"prompt": "a panda", "guidance_scale": 6.0, "output_type": "pil"}
    (frames,) = pipe(**small_pipelines.inputs("text", **options)).frames
    return np.stack([np.asarray(picture, int) for picture in frames])


@pytest.mark.parametrize(
    ("name", "more", "dtype", "of"),
    [
        pytest.param("text", ["--dp", 2, "--tp", 4], torch.float32, lambda pipe: pipe, id="on a mesh"),
        pytest.param("1.5", [], torch.float32, lambda pipe: pipe, id="of 1.5"),
        pytest.param("text", ["--dtype", "bfloat16"], torch.bfloat16, port, id="of Python in bfloat16"),
    ],
)
@pytest.mark.slow_cases(but=["on a mesh"])
def test_the_frames_are_those_of_stock_diffusers(models, name, more, dtype, of):
    want = made_by(of(small_pipelines.CLASSES["text"].from_pretrained(models(name), dtype=dtype)))
    assert generate(models(name), *more) == 0
    assert np.abs(pictures("frames") - want).max() <= 1


@pytest.mark.parametrize("stored", [(), ("--weights", "int8")], ids=["", "int8"])
@pytest.mark.slow_cases("int8")
def test_a_scheduler_its_settings_and_a_lora_are_taken_as_stock_diffusers_takes_them(models, stored):
    pipe = small_pipelines.CLASSES["text"].from_pretrained(models("text"))
    small_pipelines.save_lora(small_pipelines.one_layer(), "hub/folder")
    pipe.scheduler = CogVideoXDPMScheduler.from_config(pipe.scheduler.config, timestep_spacing="leading")
    pipe.load_lora_weights("hub/folder", adapter_name="mine")
    pipe.fuse_lora(lora_scale=0.5)
    pipe.unload_lora_weights()
    wanted = made_by(port(pipe, weights=stored[1]) if stored else pipe)
    scheduler = "CogVideoXDPMScheduler:timestep_spacing=leading"
    more = ("--lora", "hub:folder/pytorch_lora_weights.safetensors", "--scheduler", scheduler)
    for scale, differs in ((0.5, False), (1.0, True)):
        assert generate(models("text"), *more, *stored, "--lora-scale", scale, output=f"a{differs}") == 0
        assert (np.abs(pictures(f"a{differs}") - wanted).max() > 1) == differs
    assert json.loads(Path("aTrue.json").read_text())["request"]["scheduler"] == scheduler


def test_a_lora_in_a_folder_of_the_hub_is_downloaded_or_those_that_are_there_are_named(models, refused):
    small_pipelines.save_lora(small_pipelines.one_layer(), "hub/folder")
    there, download = "folder/pytorch_lora_weights.safetensors", Mock(return_value="hub")
    with (
        patch("huggingface_hub.snapshot_download", download),
        patch("huggingface_hub.list_repo_files", lambda _: ["README.md", there, "b.safetensors"]),
    ):
        assert generation._lora(f"some/loras:{there}", description.describe(models("text"), clip=False))
        said = refused(*arguments(models("text"), "--lora", "some/loras"))
    assert [(call.args, call.kwargs["allow_patterns"]) for call in download.call_args_list] == [
        (("some/loras",), [there]),
        (("some/loras",), ["pytorch_lora_weights.safetensors"]),
    ]
    assert "some/loras has no file pytorch_lora_weights.safetensors: give one of its files as" in said
    assert f"some/loras:FILE (b.safetensors, {there})" in said


@pytest.mark.parametrize(
    ("more", "mesh"),
    [
        (["--guidance-scale", 1], (1, None)),
        (["--guidance-scale", 1, "--dp", 2], (2, 1)),
        ([], (1, 1)),
        (["--tp", 4], (1, 4)),
    ],
)
def test_without_guidance_all_devices_share_one_pass(models, more, mesh):
    with (
        patch.object(generation.Generator, "load", side_effect=pytest.fail),
        patch.object(devices, "local_mesh", side_effect=ArithmeticError) as found,
    ):
        assert generate(models("text"), *more) == 1
    assert found.call_args.args == (*mesh, 8)
    assert make_mesh(heads=30).shape == {"dp": 1, "tp": 6}, "as many devices as divide them"


@pytest.fixture
def steps():
    """Return a mock that counts the steps of denoising."""
    model = transformer.CogVideoXTransformer3DModel
    with patch.object(model, "forward", autospec=True, side_effect=model.forward) as made:
        yield made


def test_a_run_goes_on_from_the_last_stage_that_is_there(models, steps, capsys):
    with patch.object(Image.Image, "save", autospec=True, side_effect=Image.Image.save) as save:
        assert generate(models("text"), "--preview", "steps.png", output="whole") == 0
    # Frames are written without a format.
    shown = {image.tobytes() for image, _path, *kind in (call.args for call in save.call_args_list) if kind}
    assert len(shown) == steps.call_count == 4, "one for each step"
    assert Image.open("steps.png").size == (3 * 3 * 8, 3 * 4)
    for more, left_out, made, number in (
        (["--until", "text"], {"transformer", "vae"}, {"frames.text.safetensors"}, 0),
        (
            ["--until", "latents"],
            {"text_encoder", "tokenizer"},
            {"frames.text.safetensors", "frames.latents.safetensors"},
            4,
        ),
    ):
        steps.reset_mock()
        with patch.object(loading, "load_pipeline", side_effect=loading.load_pipeline) as load:
            assert [generate(models("text"), *more) for _ in range(2)] == [0, 0]
        (call,) = load.call_args_list  # the second run does nothing
        assert {name for name, value in call.kwargs.items() if value is None} >= left_out
        assert steps.call_count == number
        assert {path.name for path in Path().glob("frames.*safetensors")} == made
    with patch.object(loading, "load_pipeline", side_effect=AssertionError("the VAE is enough")):
        assert [generate(models("text")) for _ in range(2)] == [0, 0]
    assert np.array_equal(pictures("frames"), pictures("whole"))
    said = capsys.readouterr()
    assert said.err.count("is there, made by the same request") == 3
    assert re.search("frames +5", said.out)
    assert json.loads(Path("frames.json").read_text())["request"]["num_inference_steps"] == 4


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
def test_a_conditioned_video_is_that_of_its_text_and_is_made_again_for_another_input(
    models, steps, name, more
):
    given = ["--guidance-scale", 1, "--tp", 1, "--num-inference-steps", 4, *more]
    for until, share in (("--until", "text"), 0), ((), 1):
        assert generate(models(name), *given, *until, output="a.mp4") == 0
        whole = steps.call_count
        assert bool(whole) == share
    small_pipelines.picture(seed=9).save("picture.png")
    write("clip.mp4", 255 - moving_frames(9), 8)
    before = Path("a.mp4").read_bytes()
    assert generate(models(name), *given, output="a.mp4") == 0
    assert steps.call_count == 2 * whole
    assert Path("a.mp4").read_bytes() != before


def test_a_failed_decode_loses_nothing(models, steps, capsys):
    with patch.object(common, "decode_to", side_effect=RuntimeError("out of memory")):
        assert generate(models("text"), output="my frames/") == 1
    assert capsys.readouterr().err.count("out of memory") == 1
    assert not Path("my frames").exists()
    with patch.object(loading, "load_pipeline", side_effect=AssertionError("the VAE is enough")):
        assert generate(models("text"), "--tiling", "8x16", "--fps", 5, output="my frames/") == 0
    assert steps.call_count == 4
    assert len(pictures("my frames")) == small_pipelines.FRAMES
    assert {path.name.removeprefix("my frames") for path in Path().glob("my*")} == {
        *("", ".json", ".latents.safetensors")
    }


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("name", ["frames.json", "frames.latents.safetensors", "frames.text.safetensors"])
def test_a_file_beside_the_video_that_is_not_its_own_is_left(models, refused, name, broken):
    if name == "frames.json":
        Path(name).write_text("{" if broken else '{"mine": 1}')
    else:
        latents.save(MADE, name)
        Path(name).write_bytes(Path(name).read_bytes()[: -100 if broken else None])
    before = Path(name).read_bytes()
    assert f"{name} is broken, or not of this command: move it away" in refused(*arguments(models("text")))
    assert Path(name).read_bytes() == before


@pytest.mark.parametrize(
    ("name", "clip", "fps", "frames", "made"),
    [
        ("text", False, 8, 4, (1, 5)),
        ("text", False, 8, 0, (1, 5)),
        ("text", False, 8, 10, (9, 13)),
        ("1.5", True, 16, 5, (4, 8)),
    ],
)
def test_counts_that_are_suggested_come_out_as_asked_or_it_is_said(models, name, clip, fps, frames, made):
    model = description.describe(models(name), clip=clip)
    assert model.fps == fps
    with pytest.raises(description.RequestError) as error:
        description.check_size(model, frames, 8, 16)
    asked, *said = (
        tuple(map(int, re.findall(r"\d+ or \d+", part)[0].split(" or ")))
        for part in re.split(r"\(", str(error.value).split("generates")[1])
    )
    vae = Mock(config=model.vae, num_latent_frames_batch_size=2)
    assert made == tuple(sum(DECODE.result_lengths(vae, model.latent_frames(count))) for count in asked)
    assert said == ([] if made == asked else [made])


BAD = {
    "frames": ("text", ["--frames", 4], "generates 1 or 5 of them"),
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
    "1.5 and a clip's frames": (
        "1.5",
        ["--video", "clip.mp4", "--frames", 5],
        r"generates 3 or 7 of them \(and makes 4 or 8\)",
    ),
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
        "there is no CogVideoXDMPScheduler, but CogVideoXDDIMScheduler, CogVideoXDPMScheduler, D",
    ),
    "a scheduler of flows": ("text", ["--scheduler", "FlowMatchEulerDiscreteScheduler"], "there is no Flow"),
    "a scheduler's setting": (
        "text",
        ["--scheduler", "CogVideoXDPMScheduler:timestep_spacing=trailing,spacing=3"],
        "there is no spacing, but beta_end, beta_schedule, beta_start, .*timestep_spacing",
    ),
    "a setting's value": (
        "text",
        ["--scheduler", "CogVideoXDPMScheduler:timestep_spacing=behind"],
        "cannot load the scheduler CogVideoXDPMScheduler:timestep_spacing=behind: behind is not supported",
    ),
    "no such LoRA": (
        "text",
        ["--lora", "none.safetensors"],
        "there is no model directory none.safetensors: ",
    ),
    "no such LoRA's name": (
        "text",
        ["--lora", "some/lora:a/b"],
        "cannot load some/lora from the hub, nor fr",
    ),
    "no such file of a LoRA": (
        "text",
        ["--lora", ".:folder/lora.safetensors"],
        r"has no file folder/lora.safetensors: give one of its files as .:FILE \(broken.safetensors, oth",
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
    "a long name": ("text", ["-o", "o" * 240], "File name too long"),
    "no text": ("text", ["--prompt", " "], "got an empty prompt: say what to show"),
}


@pytest.mark.parametrize(("name", "more", "words"), BAD.values(), ids=BAD)
@patch.object(loading, "load_pipeline", lambda *_, **__: pytest.fail("loaded"))
def test_wrong_input_is_one_line_before_any_weight_is_loaded(models, name, more, words, refused):
    assert re.search(words, refused(*arguments(models(name), *more)))
    assert not Path("frames").exists()


# Previews


class LinearVAE:
    """A VAE whose latents are a mix of its pixels' mean colors: the map that is to be found exists."""

    dtype, spatial_compression_ratio = torch.float32, 8
    mix = torch.tensor([[1.0, 0.5, 0], [0, 2, 0], [0.3, 0, -1], [1, 1, 1]])

    def encode(self, x):
        mean = torch.einsum("oc,nchw->nohw", self.mix, avg_pool2d(x[:, :, 0], 8))[:, :, None] + 0.25
        return SimpleNamespace(latent_dist=SimpleNamespace(mode=lambda: mean))


def test_a_map_that_exists_is_found_and_its_colors_are_the_pixels():
    x = torch.rand(1, 3, 1, 16, 16, generator=torch.Generator().manual_seed(5)) * 2 - 1
    latents = LinearVAE().encode(x).latent_dist.mode()
    colors = preview.colors_of(latents.permute(0, 2, 1, 3, 4), preview.fit(LinearVAE()))
    assert colors.shape == (1, 1, 2, 2, 3)
    assert (colors[0, 0].permute(2, 0, 1) - (avg_pool2d(x[0, :, 0], 8) + 1) * 127.5).abs().max() <= 1


# Many prompts


def many(model, *more):
    given = ("--prompts", "prompts.jsonl", "--num-inference-steps", 2, "--dtype", "float32", "--quiet", *more)
    return ["generate", "--model", str(model), "-o", "out", *map(str, given)]


def records():
    """Return the records of the videos by id."""
    return {
        path.stem: json.loads(path.read_text())
        for path in Path("out").glob("*.json")
        if path.stem != "prompts"
    }


def videos():
    return {path.stem: (path.read_bytes(), path.stat().st_mtime_ns) for path in Path("out").glob("*.mp4")}


LINES = (
    '{"prompt": "a panda", "seed": 7}',
    "",
    '{"prompt": "the sea", "id": "sea", "guidance_scale": 1, "num_inference_steps": 3}',
    '{"prompt": "an egg", "negative_prompt": "a cat"}',
)


def test_a_file_of_prompts_makes_what_single_runs_make_and_goes_on_where_it_was(models, capsys):
    Path("prompts.jsonl").write_bytes("\r\n".join(("\ufeff" + LINES[0], *LINES[1:])).encode())
    assert cli.main(many(models("text"), "--seed", 5, "--json")) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["videos"], said["done_before"], said["bad"]) == (3, 0, 0)
    fields = ("prompt", "seed", "num_inference_steps")
    assert {
        name: [*(each["request"][field] for field in fields), each["frames"]]
        for name, each in records().items()
    } == {
        "00001": ["a panda", 7, 2, 5],
        "sea": ["the sea", 2005, 3, 5],
        "00004": ["an egg", 3005, 2, 5],
    }
    options = ["--prompt", "an egg", "--negative-prompt", "a cat", "--seed", 3005]
    assert generate(models("text"), *options, "--num-inference-steps", 2, output="alone.mp4") == 0
    assert (read_all("out/00004.mp4").int() - read_all("alone.mp4").int()).abs().max() <= 2
    # Another order of work, in two processes, with one video of the three to make again, and one edited.
    first = videos()
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
    with patch.object(loading, "load_pipeline", side_effect=AssertionError("all is done")):
        assert cli.main(many(models("text"), "--seed", 5)) == 0


ON_RAY = """
import json, os, signal, sys
from pathlib import Path

from cogvideox_torchax import cli
from cogvideox_torchax.cli import prompts

class Dying(prompts.PromptActor):
    def __call__(self, row):
        found = super().__call__(row)
        killed = Path(json.loads(row["request"])["output"]).parent.with_suffix(".killed")
        if not killed.exists():
            killed.write_text("")
            os.kill(os.getpid(), signal.SIGKILL)  # the video is in its place, nobody was told
        return found

prompts.PromptActor = Dying
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_two_actors_on_ray_one_of_them_killed_make_the_videos_of_one_process(models):
    Path("prompts.jsonl").write_text("\n".join((*LINES, '{"prompt": ""}')))
    command = many(str(Path(models("text")).absolute()), "--json")
    ended = processes.run_python(ON_RAY, *command, "--ray", "--actors", "2")
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


WRONG_LINES = {
    "no object": ("3", "an object with a prompt, in UTF-8, is wanted, got 3"),
    "no prompt": ('{"seed": 3}', "an object with a prompt"),
    "no prompt but null": ('{"prompt": null}', "an object with a prompt"),
    "an unknown field": (
        '{"prompt": "a", "stpes": 3}',
        "got stpes, which no prompt has: it may have prompt, negative_prompt, image, video, id, seed, num_",
    ),
    "half a second": ('{"prompt": "a", "seed": 42.5}', "seed is 42.5, a whole number above -1 is wanted"),
    "true": ('{"prompt": "a", "seed": true}', "seed is True, a whole number above -1 is wanted"),
    "a text for a number": ('{"prompt": "a", "seed": "3"}', "seed is '3', a whole number above -1 is wanted"),
    "no steps": ('{"prompt": "a", "num_inference_steps": 0}', "num_inference_steps is 0, a whole number abo"),
    "half an emoji": (r'{"prompt": "cat \ud83d"}', "an object with a prompt, in UTF-8"),
}


@pytest.mark.parametrize(("line", "words"), WRONG_LINES.values(), ids=WRONG_LINES)
def test_a_line_of_another_form_is_told_with_its_number_before_anything_is_made(models, line, words, refused):
    Path("prompts.jsonl").write_text(f"{LINES[0]}\n{line}")
    assert f"prompts.jsonl, line 2: {words}" in refused(*many(models("text")))
    assert not Path("out").exists()


BAD_LINES = {
    "an empty prompt": ('{"prompt": ""}', "got an empty prompt: say what to show"),
    "an image for a text model": (
        '{"prompt": "a", "image": "picture.png"}',
        "is a CogVideoXPipeline, and takes no image beside the prompt: got an image",
    ),
    "a seed of 65 bits": (
        '{"prompt": "a", "seed": 18446744073709551616}',
        "got the seed 18446744073709551616",
    ),
    "a long prompt": (json.dumps({"prompt": "a panda plays " * 9}), "takes 16; shorten it"),
    "an id that leads out": ('{"prompt": "a", "id": "../a"}', "must not lead out"),
    "an id twice": ('{"prompt": "a", "id": "00001"}', "its id 00001 is that of line 1: give another"),
    "a copy's id": ('{"prompt": "a", "id": "00001-2"}', "its id 00001-2 is that of line 1: give another"),
    "the settings' name": ('{"prompt": "a", "id": "prompts"}', "its id prompts is that of the settings"),
    "an id of 250 bytes": (json.dumps({"prompt": "a", "id": "i" * 250}), "File name too long"),
    "a video of somebody else": (
        '{"prompt": "a", "id": "mine"}',
        "has no record, so this command has not made it",
    ),
}


def test_a_bad_line_is_told_with_its_number_and_the_others_are_made(models, capsys):
    Path("prompts.jsonl").write_text("\n".join((LINES[0], *(line for line, _ in BAD_LINES.values()))))
    Path("out").mkdir()
    again = ("--num-videos-per-prompt", 2)
    with patch.object(prompts.PromptDirectory, "work", side_effect=RuntimeError("killed")):
        assert cli.main(many(models("text"), *again)) == 1  # has written the settings
    Path("out/mine.mp4").write_bytes(b"mine")
    assert cli.main(many(models("text"), *again)) == 1
    said = capsys.readouterr().err
    for number, (_, words) in enumerate(BAD_LINES.values(), 2):
        assert re.search(f"^bad: line {number}: .*{re.escape(words)}", said, re.MULTILINE), (number, words)
    assert Path("out/mine.mp4").read_bytes() == b"mine"
    Path("out/mine.mp4").unlink()
    assert {name: each["request"]["seed"] for name, each in records().items()} == {"00001": 7, "00001-2": 8}


def test_a_prompt_that_fails_leaves_the_others_and_is_tried_again(models, capsys):
    Path("prompts.txt").write_text("a panda\n\nthe sea\n")
    command = [*many(models("text"), "--prompts", "prompts.txt"), "--until", "text"]
    encode = Mock(
        wraps=generation.Generator._encode, side_effect=[ArithmeticError("step 1 gave NaN"), DEFAULT]
    )
    with patch.object(generation.Generator, "_encode", lambda *given: encode(*given)):
        assert cli.main(command) == 1
    assert "bad video 00001: step 1 gave NaN\n" in capsys.readouterr().err
    assert json.loads(Path("out/failed-prompts.jsonl").read_text())["error"] == "line 1: step 1 gave NaN"
    assert [path.name for path in Path("out").glob("*.text.safetensors")] == ["00003.text.safetensors"]
    assert cli.main(command) == 0
    assert len(list(Path("out").glob("*.text.safetensors"))) == 2


OTHER_LISTS = ("list.csv", "list.md", "list", "/dev/stdin", "picture.png")
WRONG_LISTS = {
    "a prompt beside": (["--prompt", "a"], "leave them out, or --prompts"),
    "a preview": (["--preview", "steps.png"], "leave them out, or --prompts"),
    "more videos than a line has seeds": (
        ["--num-videos-per-prompt", 1001],
        "at most 1000, as many seeds as",
    ),
    **{
        f"a list in {name}": (["--prompts", name], f"got prompts in {name}: give a .txt file")
        for name in OTHER_LISTS
    },
    "Ray and shares": (["--ray", "--distributed"], "leave out --distributed"),
    "actors without Ray": (["--actors", "2"], "add --ray"),
    "no such file": (["--prompts", "none.txt"], "there is no file or directory none.txt"),
    "no prompts": (["--prompts", "empty.txt"], "empty.txt has no prompts: write one on each line"),
    "not UTF-8": (["--prompts", "latin.TXT"], "is not in UTF-8"),
    "a file for an output": (["-o", "out.mp4"], "many videos go into a directory"),
    "an image for a text model": (["--image", "picture.png"], "takes no image"),
    "another process": (["--processes", 2], "add --distributed"),
}


@pytest.mark.parametrize(("more", "words"), WRONG_LISTS.values(), ids=WRONG_LISTS)
def test_a_wrong_list_is_one_line_before_anything_is_made(models, more, words, refused):
    Path("prompts.jsonl").write_text(LINES[0])
    Path("empty.txt").write_text("\n \n# a comment\n")
    Path("latin.TXT").write_bytes(b"caf\xe9")
    for name in OTHER_LISTS:
        Path(name).touch()
    assert words in refused(*many(models("text"), *more))
    assert not Path("out").exists()


def save_model(seed):
    network = small_pipelines.transformer("5b", seed, num_layers=1)
    small_pipelines.one_layer(transformer=network).save_pretrained("m1")


@patch.object(prompts.PromptDirectory, "work", lambda *_: iter(()))
def test_videos_of_other_settings_are_refused_and_those_of_the_same_model_by_another_name_are_not(refused):
    Path("prompts.jsonl").write_text(LINES[0])
    Path("ratios.json").write_text("[1, 2]")
    save_model(0)
    small_pipelines.save_lora(small_pipelines.one_layer(), "lora")
    given = ("--lora", "lora", "--cache", "magcache:ratios.json")
    for name in ("m1", "./m1", "m1/", Path("m1").absolute(), "../" + Path().absolute().name + "/m1"):
        assert cli.main(many(name, *given)) == 0
    for option, value, words in (
        ("--guidance-scale", 3, "guidance_scale is 6.0 there and 3.0 here"),
        ("--fps", 3, "fps is '8'"),
        ("--steps", 3, "num_inference_steps is 2 there and 3 here"),
        ("--weights", "int8", "weights is None there and 'int8' here"),
        ("--scheduler", "CogVideoXDPMScheduler", "scheduler is None there"),
        ("--lora-scale", 0.5, "lora_scale is 1.0 there and 0.5 here"),
        ("--tiling", "8x16", "tiling is None there"),
        ("--cache", "pab", "cache is 'magcache:"),
    ):
        assert words in refused(*many("m1", *given, option, value))
    Path("ratios.json").write_text("[1, 3]")
    assert "cache is 'magcache:" in refused(*many("m1", *given))
    Path("ratios.json").write_text("[1, 2]")
    lora = Path("lora/pytorch_lora_weights.safetensors")
    save_file({name: value + 1 for name, value in load_file(lora).items()}, lora)
    assert "lora_sha256 is " in refused(*many("m1", *given))
    shutil.rmtree("out")
    assert cli.main(many("m1")) == 0
    save_model(1)
    assert "model_sha256 is " in refused(*many("m1"))
    assert "prompts" in refused(*arguments("m1", "--num-videos-per-prompt", 2))


def test_the_stages_of_many_prompts_are_gone_on_from(models, steps):
    Path("prompts.txt").write_text("a panda\n\nthe sea\n")
    command = many(models("text"), "--prompts", "prompts.txt")
    assert cli.main([*command, "--until", "latents"]) == 0
    assert steps.call_count == 4
    assert {path.name for path in Path("out").iterdir()} == {
        *("prompts.json", "00001.latents.safetensors", "00003.latents.safetensors")
    }
    with patch.object(loading, "load_pipeline", side_effect=AssertionError("the VAE is enough")):
        assert cli.main(command) == 0
        assert cli.main([*command, "--until", "text"]) == 0
    assert len(list(Path("out").glob("*.mp4"))) == 2


def test_a_line_is_taken_as_pandas_writes_it_and_comments_are_no_prompts(models):
    Path("prompts.JSONL").write_text(
        "# a\n // b\n;c\n"
        '{"prompt": "a", "seed": 42.0, "negative_prompt": null, "id": null, "guidance_scale": 3}\n'
        '{"prompt": "b", "num_inference_steps": 3.0}\n'
        '{"prompt": "c", "num_inference_steps": 4}'
    )
    with patch.object(prompts.PromptDirectory, "work", autospec=True, return_value=iter(())) as work:
        assert cli.main(many(models("text"), "--prompts", "prompts.JSONL")) == 0
    made = work.call_args.args[0].missing.values()
    assert [(each.seed, each.num_inference_steps) for each in made] == [(42, 2), (4000, 3), (5000, 4)]
