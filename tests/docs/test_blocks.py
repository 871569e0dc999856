"""Every code block of README and docs: run on small models, or checked where it says why it is not run.

A page's blocks run in order, in one directory, the Python ones in one namespace, as a reader would type them.
What is replaced for them is in `SMALL`: names of published models by directories of small ones, sizes, steps.
"""

import ast
import functools
import importlib
import json
import math
import re
import runpy
import subprocess
import time
import tomllib
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import MethodType

import pytest
import torch

import benchmarks.__main__ as laboratory
from cogvideox_torchax import cli, port
from cogvideox_torchax.files import latents as latent_files, video
from examples import serve, stream_to_browser
from tests import reference, small_pipelines, videos
from tests.docs.blocks import PAGES, Block, blocks
from tests.examples.test_servers import Blank, served
from tests.processes import ROOT

RUN = {page: [block for block in blocks(page) if block.reason is None] for page in PAGES}
RUN = {page: found for page, found in RUN.items() if any(b.language in ("python", "bash") for b in found)}
SMALL = {
    "25x16x24": "9x16x24",
    "49, 480, 720": "5, 16, 24",
    "9, 480, 720": "5, 16, 24",
    "3, 480, 720": "3, 16, 24",
    "range(17)": "range(5)",
    "num_frames=17": "num_frames=5",
    "num_frames=49": "num_frames=5, num_inference_steps=2, height=8, width=16",
    "num_frames=97, num_inference_steps=4": "num_frames=33, num_inference_steps=2, height=8, width=16",
    "num_inference_steps=4, guidance_scale=1": "num_inference_steps=4, guidance_scale=1, num_frames=5",
    "sample_height=170, sample_width=96": "sample_height=8, sample_width=4",
    "(1, 16, 13, 60, 90)": "(1, 16, 3, 8, 16)",
    "batch=2, frames=13, height=60, width=90": "batch=2, frames=3, height=4, width=8",
    "tile_sample_min_height=240": "tile_sample_min_height=8",
    "tile_sample_min_width=360": "tile_sample_min_width=16",
    "A cat walks on the grass.": "a panda",
    "A cat walks.": "a panda",
    "--frames 17 --height 240 --width 360": "--frames 5 --height 16 --width 24",
    "--buckets 49x480x720,49x720x480": "--buckets 5x16x24",
    "--tiling 240x360": "--tiling 16x16",
    "--frames 49": "--frames 5",
    "--frames 9": "--frames 5",
}
"""Texts of the pages and their replacements in a run."""

OPTIONS = {
    "generate": ["--num-inference-steps", "2"],
    "demo": ["--height", "32", "--width", "48"],
}
"""Options that are added to a command with defaults."""


@pytest.fixture(scope="module")
def models(tmp_path_factory, small_vae):
    """Directories in place of published models."""
    root = tmp_path_factory.mktemp("models")
    for name, kind in (("CogVideoX-5b", "text"), ("CogVideoX-5b-I2V", "image")):
        pipe = small_pipelines.build(kind, text_encoder=small_pipelines.text_encoder(num_layers=1))
        pipe.save_pretrained(root / name)
    small_pipelines.save_lora(small_pipelines.build(), root / "BLADE" / "cogvideox-5b-psa-lora")
    return root


@pytest.fixture
def as_a_reader(in_an_empty_directory):
    """Enter a directory with a clip and a picture, with diffusers as it is when a script begins."""
    Path("clips").mkdir()
    for name in ("clip.mp4", "my.mp4", "walk.mp4", "clips/cat.mp4"):
        videos.write(name, torch.randint(0, 256, (1, 3, 5, 16, 24), dtype=torch.uint8), 8)
    small_pipelines.picture().save("cat.png")


def small(text: str, models) -> str:
    for published, replaced in SMALL.items():
        text = text.replace(published, replaced)
    return re.sub(r"(?:zai-org|GYP666)/(CogVideoX-5b(?:-I2V)?|BLADE)", lambda m: str(models / m[1]), text)


@pytest.mark.usefixtures("as_a_reader", "torchax_off")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", RUN)
@pytest.mark.slow
def test_the_blocks_of_a_page_run(page, models):
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in RUN[page]:
        text = small(block.text, models)
        if block.language == "python":
            with torch.enable_grad():
                exec(compile(text, f"{page}:{block.line}", "exec"), namespace)
        if block.language == "bash":
            for words in Block(page, block.line, "bash", text, None).commands:
                run(words, f"{page}:{block.line}")


def run(words: list[str], where: str):
    """Run this package's commands; check that names in other commands exist."""
    check(words, where)
    if words[0] == "cogvideox-torchax":
        added = OPTIONS.get(words[1], [])
        assert cli.main([*words[1:], *(added if not {*added[::2]} & {*words} else [])]) == 0, (
            f"{where}: {words}"
        )
    elif words[0] == "python":
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("sys.argv", words[1:])
            runpy.run_path(str(ROOT / words[1]), run_name="__main__")


@pytest.mark.parametrize(
    "block",
    [block for page in PAGES for block in blocks(page)],
    ids=lambda block: f"{block.page}:{block.line}",
)
def test_what_a_block_names_is_there(block):
    assert block.language != "commands", "write commands between ```bash and ```: they run, or say why not"
    if block.language == "python":
        assert block.reason is None, "Python blocks run, all of them"
        ast.parse(block.text)
    for script in re.findall(r"<<'END'\n(.*?)^END$", block.text, re.DOTALL | re.MULTILINE):
        imports = [line for line in ast.parse(script).body if isinstance(line, ast.ImportFrom)]
        exec(compile(ast.Module(imports, []), block.page, "exec"), {})
    if block.language == "sh":  # of a machine that is rented: this package's commands and pip's extras
        ours = [line for line in block.text.splitlines() if line.startswith(("cogvideox-torchax ", "pip "))]
        block = replace(block, text="\n".join(ours))
    assert block.language != "bash" or block.commands, f"{block.page}:{block.line} holds no command"
    if block.language in ("bash", "sh"):
        for words in block.commands:
            check(words, f"{block.page}:{block.line}")


def check(words: list[str], where: str):
    """Check that this package's parser takes a command line, and that files, targets and extras exist."""
    program, *rest = words
    of_laboratory = rest[:2] == ["-m", "benchmarks"]
    if program == "cogvideox-torchax" or of_laboratory:
        try:
            laboratory.parser().parse_args(rest[2:]) if of_laboratory else cli.parser().parse_args(rest)
        except SystemExit as left:
            if left.code:
                pytest.fail(f"{where}: no such command or option: {' '.join(words)}")
    elif program == "python" and rest[:1] == ["-m"]:
        assert importlib.util.find_spec(rest[1]), f"{where}: no module {rest[1]}"
    elif program == "python":
        assert (ROOT / rest[0]).is_file(), f"{where}: no file {rest[0]}"
    elif program == "make":
        targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        assert {word for word in rest if "=" not in word} <= targets, f"{where}: no such target"
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert {*re.findall(r"(?<=[\[,])\w+(?=[\],])", " ".join(rest))} <= {*extras}, (
            f"{where}: no such extra"
        )
    else:
        assert program in ("git", "cd", "ln", "pre-commit", "source", "curl"), (
            f"{where}: {program} is unknown"
        )


@pytest.mark.usefixtures("in_an_empty_directory", "torchax_off")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_curl_lines_are_answered(native_vae, tmp_path):
    prompts, latents = (block for block in blocks("docs/examples.md") if "curl" in block.text)
    app = serve.make_app(Blank(port(small_pipelines.one_layer())), {"5x8x16": (5, 8, 16)}, tmp_path, 2, 8)
    with served(app) as site:
        send, state, fetch, delete = (functools.partial(curl, line, site) for line in prompts.commands)
        made = json.loads(send())["id"]
        while json.loads(state(ID=made))["status"] != "completed":
            time.sleep(0.01)
        fetch(ID=made)
        assert video.probe("cat.mp4").num_frames == 5
        assert json.loads(delete(ID=made))["deleted"]
        assert "error" in json.loads(state(ID=made))
    z = reference.latents(3, height=2, width=3)
    latent_files.save(
        latent_files.Latents(z, dict(native_vae.config), "small", Fraction(8), 9), "clip.safetensors"
    )
    with served(stream_to_browser.make_app(native_vae, queue=1, largest=100_000)) as site:
        upload, watch = (functools.partial(curl, line, site) for line in latents.commands)
        watch(NAME=upload().strip().rpartition("/")[2])
    assert Path("clip.mjpeg").read_bytes().count(b"Content-Type: image/jpeg") == 9


def curl(words: list[str], site: str, **names: str) -> str:
    """Run a line of a page with the address of a server, and names that an earlier line has printed."""
    line = [word.replace("http://127.0.0.1:8000", site) for word in words]
    line = [re.sub(r"\b(ID|NAME)\b", lambda match: names[match[1]], word) for word in line]
    return subprocess.run([*line, "--silent"], check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize(
    ("index", "link"),
    [
        ("README.md", r"\(docs/([\w-]+\.md)"),
        ("CHANGELOG.md", r"\(docs/([\w-]+\.md)"),
        ("mkdocs.yml", r": ([\w-]+\.md)$"),
    ],
)
def test_a_reader_finds_every_page(index, link):
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert pages <= set(re.findall(link, (ROOT / index).read_text(), re.MULTILINE))


@pytest.mark.parametrize("page", PAGES)
def test_a_test_that_a_page_names_is_there(page):
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for name in re.findall(r"`(test_\w+)`", (ROOT / page).read_text()):
        assert f"\ndef {name}(" in tests


# Answers of the page of questions: they do on JAX what they do in PyTorch.


def frames(pipe, **options):
    return pipe(**small_pipelines.inputs("text", num_inference_steps=2, **options)).frames


def of_both(change, version="5b", **options):
    """Return frames of a pipeline in PyTorch and of a ported one, both after a change."""
    pipes = small_pipelines.build(version=version), port(small_pipelines.build(version=version))
    for pipe in pipes:
        change(pipe)
    return [frames(pipe, **options) for pipe in pipes]


def riflex():
    """Return the function of the page."""
    (block,) = (block for block in blocks("docs/questions.md") if "def riflex" in block.text)
    namespace: dict[str, object] = {}
    exec(block.text.partition("pipe._prepare")[0], namespace)
    return namespace["riflex"]


def test_riflex_stretches_the_second_frequency_of_time_alone():
    pipe, angle = small_pipelines.build(), torch.arange(25) * (0.9 * 2 * math.pi / 25)
    found, want = (
        torch.stack(tables).view(2, 25, -1, 16)
        for tables in (
            riflex()(pipe, 8, 16, 25, "cpu"),
            pipe._prepare_rotary_positional_embeddings(8, 16, 25, "cpu"),
        )
    )
    second, waves = slice(2, 4), torch.stack([angle.cos(), angle.sin()])[:, :, None, None]
    torch.testing.assert_close(found[..., second], waves.expand_as(found[..., second]))
    want[..., second] = found[..., second]
    assert torch.equal(found, want)


@pytest.mark.usefixtures("torchax_off")
@pytest.mark.slow
def test_riflex_acts_on_jax_as_in_pytorch():
    def stretch(pipe):
        pipe._prepare_rotary_positional_embeddings = MethodType(riflex(), pipe)

    stock, ported = of_both(stretch, num_frames=33)
    assert reference.largest_error(ported, stock) < 1e-5
    assert reference.largest_error(frames(small_pipelines.build(), num_frames=33), stock) > 1e-3


@pytest.mark.usefixtures("torchax_off")
@pytest.mark.slow
def test_a_model_of_1_5_with_swapped_sample_sizes_makes_upright_videos():
    def swap(pipe):
        config = pipe.transformer.config
        pipe.transformer.register_to_config(
            sample_height=config.sample_width, sample_width=config.sample_height
        )

    stock, ported = of_both(swap, "1.5", height=16, width=8)
    assert ported.shape[-2:] == (16, 8)
    assert reference.largest_error(ported, stock) < 1e-5
