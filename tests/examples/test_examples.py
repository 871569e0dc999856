"""The examples, run on small models as their first lines say."""

import asyncio
import contextlib
import json
import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import nbclient
import nbformat
import pytest

from cogvideox_torchax import cli
from cogvideox_torchax.files import video
from cogvideox_torchax.pipelines import description
from tests import processes, small_pipelines
from tests.dataset.conftest import write_clip
from tests.videos import pictures, read_all

EXAMPLES = processes.ROOT / "examples"

pytestmark = pytest.mark.usefixtures("torchax_off", "in_an_empty_directory")


def run(name: str, monkeypatch, *arguments: object):
    monkeypatch.setattr("sys.argv", [name, *map(str, arguments)])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


@pytest.mark.parametrize(("kind", "options"), [("text", ()), ("image", ("--image",))])
def test_a_small_pipeline_runs_and_is_one_that_generate_takes(kind, options, monkeypatch):
    run("small_pipeline.py", monkeypatch, "small", *options)
    assert description.describe("small", image=kind == "image", clip=False).size == (9, 64, 96)
    pipe = small_pipelines.CLASSES[kind].from_pretrained("small")
    few = {"height": 16, "num_inference_steps": 1, "output_type": "latent"}
    assert pipe(**small_pipelines.inputs(kind, **few)).frames.isfinite().all()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_text_to_video_on_a_mesh_writes_the_video(saved, monkeypatch, capsys):
    # A model whose positions fix the text's length.
    given = ("--model", saved("text", "2b"), "--frames", 5, "--steps", 2, "--dp", 2, "--tp", 4, "-o", "a.mp4")
    run("text_to_video_on_a_mesh.py", monkeypatch, "a panda", *given)
    assert "context over tp" in capsys.readouterr().out
    assert video.probe("a.mp4").num_frames == 5


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_image_to_video_with_a_lora_differs_from_the_one_without(saved, monkeypatch):
    small_pipelines.save_lora(small_pipelines.one_layer("image", "2b"), "lora")
    small_pipelines.picture().save("cat.png")
    given = ("--model", saved("image", "2b"), "--lora", "lora", "--frames", 5, "--steps", 2, "-o", "cat.mp4")
    run("image_to_video_with_a_lora.py", monkeypatch, "cat.png", "a panda", *given)
    with_it, without = read_all("cat.mp4"), read_all("cat-without.mp4")
    assert with_it.shape == without.shape == (1, 3, 5, 8, 16)
    assert not with_it.equal(without)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_four_steps_with_a_lora_are_those_of_stock_diffusers(saved, monkeypatch):
    model, lora = saved("text", "2b"), "lora/pytorch_lora_weights.safetensors"
    small_pipelines.save_lora(small_pipelines.one_layer("text", "2b"), "lora")
    given = ("--model", model, "--lora", "lora", "--file", Path(lora).name, "--frames", 5, "-o", "panda")
    run("few_steps.py", monkeypatch, "a panda", *given)
    few = (
        "--frames 5 --steps 4 --guidance-scale 1 --scheduler CogVideoXDPMScheduler:timestep_spacing=trailing"
    )
    given = (
        "--prompt",
        "a panda",
        "--model",
        model,
        "--lora",
        lora,
        *few.split(),
        "--quiet",
        "-o",
        "command",
    )
    assert cli.main(["generate", *given]) == 0
    assert len(pictures("panda")) == 5
    assert abs(pictures("panda") - pictures("command")).max() <= 1


def test_a_folder_is_encoded_and_read_by_a_trainer_without_its_bad_clip(
    shallow_directory, monkeypatch, capsys
):
    for i in range(2):
        write_clip(Path(f"clips/{i}.mp4"), shift=i, frames=5)
    Path("clips/bad.mp4").write_bytes(b"no video")
    given = ("--model", shallow_directory, "--dtype", "float32", "--bucket", "5x16x24", "-o", "latents")
    run("encode_a_folder.py", monkeypatch, "clips", *given)
    out = capsys.readouterr().out
    assert "left out bad.mp4" in out
    assert "a batch for the trainer: (2, 16, 2, 4, 6)" in out


@pytest.mark.slow
def test_the_notebook_runs_and_keeps_no_result():
    namespace: dict[str, object] = {}
    for source in code_of("torchax_or_flax"):
        exec(source.replace("9, 64, 96 ", "5, 16, 24 "), namespace)
    assert set(namespace["errors"]) == {"torchax", "flax"}
    assert max(max(pair) for pair in namespace["errors"].values()) < 1e-5
    assert namespace["first"]["torchax"][0] == 8, "two latent frames"


def read(name):
    """Return a notebook and its cells of code by their numbers."""
    notebook = nbformat.read(EXAMPLES / f"{name}.ipynb", nbformat.NO_CONVERT)
    cells = {i: cell for i, cell in enumerate(notebook.cells) if cell.cell_type == "code"}
    assert [cell.outputs for cell in cells.values()] == [[]] * len(cells), "no result is kept"
    return notebook, cells


def tiny_notebook(name):
    """Return a client of a notebook that runs on a CPU in the working directory, and its cells of code."""
    notebook, cells = read(f"notebooks/{name}")
    first = cells[min(cells)]
    assert "TINY = False " in first.source
    # The checkout is found from the folder of the notebook, where its reader starts it.
    source = first.source.replace("TINY = False ", "TINY = True ")
    first.source = f"import os\nos.chdir({str(EXAMPLES)!r})\n{source}\nos.chdir({str(Path.cwd())!r})"
    return nbclient.NotebookClient(notebook, timeout=600), cells


def code_of(name):
    """Return the code of a notebook's cells."""
    return [cell.source for cell in read(name)[1].values()]


@pytest.mark.parametrize("name", ["one_chip", "eight_chips"])
@pytest.mark.parametrize(("changed", "restarts"), [("torch", True), ("rich", False)])
def test_a_notebook_prints_what_pip_changes_and_asks_for_a_restart(
    name, changed, restarts, monkeypatch, capsys
):
    had = {"torch": "2.9", "jax": "0.9", "rich": "13"}
    versions = iter([had, had, had | {changed: "99", "added": "1"}])  # the first is of the refused run
    monkeypatch.setattr(
        "importlib.metadata.distributions",
        lambda: [SimpleNamespace(name=each, version=version) for each, version in next(versions).items()],
    )
    monkeypatch.setattr("sys.path", [*sys.path])
    popen = Mock(return_value=contextlib.nullcontext(SimpleNamespace(stdout=[], returncode=0)))
    monkeypatch.setattr("subprocess.Popen", popen)
    install, *_ = code_of(f"notebooks/{name}")
    with pytest.raises(SystemExit, match="into REPOSITORY"):
        exec(install, {})
    exec(install.replace('REPOSITORY = ""', 'REPOSITORY = "https://host/it"'), {})
    (clone,), (pip,) = (call.args for call in popen.call_args_list)
    assert (clone[:2], "https://host/it" in clone) == (["git", "clone"], True)
    assert "cogvideox-torchax/constraints.txt" in " ".join(pip)
    first, *rest = capsys.readouterr().out.splitlines()
    assert first == f"{changed}: {had[changed]} is now 99"
    assert ["restart the session" in line for line in rest] == [True] * restarts


@pytest.mark.parametrize("name", ["one_chip", "eight_chips"])
def test_a_notebook_outside_a_checkout_takes_the_bundled_pipeline_of_the_installed_package(name, capsys):
    _install, load, *_, measure = code_of(f"notebooks/{name}")
    namespace = {"TINY": True, "CHECKOUT": Path("none"), "Path": Path, "sys": sys}
    exec(load.partition("print(jax")[0], namespace)
    assert (namespace["MODEL"] / "model_index.json").is_file()
    exec(measure, namespace)
    assert capsys.readouterr().out == "The measurement needs a checkout of the repository.\n"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one_chip", "eight_chips"])
def test_a_notebook_of_small_chips_runs_from_top_to_bottom_on_a_cpu(name):
    client, cells = tiny_notebook(name)
    asyncio.run(client.async_execute())  # which closes its event loop, as `execute` does not
    texts = ["".join(each.get("text", "") for each in cell.outputs) for cell in cells.values()]
    assert max(sum("it/s" not in line for line in text.splitlines()) for text in texts) < 40, "no flood"
    _install, load, make, again, few, measure = texts
    assert "eight" not in name or load.count("CpuDevice") == 8
    for text, path in ((make, "first.mp4"), (again, "second.mp4"), (few, "few.mp4")):
        assert "9 frames in " in text
        assert video.probe(path).num_frames == 9
    assert "device-quick/device.json to a new issue" in measure
    report = json.loads(Path("device-quick/device.json").read_text())
    assert [result["status"] for result in report["results"]] == ["ok"]
    assert [report["mesh"]["dp"], report["mesh"]["tp"]] == ([2, 4] if "eight" in name else [None, None])
    kinds = [kind for cell in cells.values() for each in cell.outputs for kind in each.get("data", {})]
    assert kinds.count("image/png") == 2, "each preview is replaced by the next"
    assert kinds.count("text/html") >= 2, "the videos play in the page"
    assert "text/markdown" in kinds


@pytest.mark.slow
def test_an_interrupt_stops_a_notebooks_video_between_steps_and_the_next_cell_works():
    client, cells = tiny_notebook("one_chip")
    install, load, make, again, _few, _measure = cells
    # The last step ends with the interrupt: the video cannot be done before.
    cells[make].source, replaced = re.subn(
        "(?=        if step % 5 == 4:\n)",
        '        while path == "first.mp4" and step == 19:\n            time.sleep(0.1)\n',
        cells[make].source,
    )
    assert replaced == 1

    async def run_and_interrupt():
        async with client.async_setup_kernel():
            for i in (install, load):
                await client.async_execute_cell(cells[i], i)
            making = asyncio.ensure_future(client.async_execute_cell(cells[make], make))
            while not (Path("preview.png").exists() or making.done()):
                await asyncio.sleep(0.1)
            await client.km.interrupt_kernel()
            with pytest.raises(nbclient.exceptions.CellExecutionError, match="KeyboardInterrupt"):
                await making
            assert not Path("first.mp4").exists()
            await client.async_execute_cell(cells[again], again)

    asyncio.run(run_and_interrupt())
    assert video.probe("second.mp4").num_frames == 9
