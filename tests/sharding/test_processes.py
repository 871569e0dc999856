"""Two processes of four devices each, over loopback: the numbers of one, and an end in time when one dies."""

import itertools
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import torch
from diffusers import FirstBlockCacheConfig, TaylorSeerCacheConfig
from peft import LoraConfig
from PIL import Image

from cogvideox_torchax import cli, load_pipeline, make_mesh, port, runtime
from cogvideox_torchax.files import latents
from cogvideox_torchax.pipelines.port import port_pipeline
from cogvideox_torchax.sharding import ProcessError, check_all_take_part
from tests import reference, small_pipelines
from tests.processes import ROOT, run_python
from tests.videos import moving_frames, write

pytestmark = pytest.mark.usefixtures("torchax_off")

TIMEOUT = 10
"""Seconds after which the tests' processes give up on each other."""


def start(directory, code, count=2):
    """Run Python code once a process, on eight devices in all.

    In it, `port`, `count` and `index` give the meeting point, the number of processes and which this is.
    """
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port = found.getsockname()[1]
    flags = re.sub(r"device_count=\d+", f"device_count={8 // count}", os.environ["XLA_FLAGS"])
    return [
        subprocess.Popen(
            [sys.executable, "-c", f"port, count, index = {port}, {count}, {index}\n{code}"],
            cwd=directory,
            env={**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(count)
    ]


def finish(processes, within):
    """Return each process's exit code and output, none later than `within` seconds from now."""
    deadline = time.monotonic() + within
    try:
        said = [process.communicate(timeout=deadline - time.monotonic()) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *texts) for process, texts in zip(processes, said, strict=True)]


@pytest.fixture
def directory(tmp_path, in_an_empty_directory):
    """Write a clip of 9 frames and a model of three levels, whose latents are 10 wide: no multiple of 8."""
    reference.small_vae(**reference.SHALLOW).save_pretrained("vae")
    write("clip.mp4", moving_frames(9))
    return tmp_path


TOGETHER = f"""
from cogvideox_torchax import cli
together = ["--quiet", "--distributed", "--coordinator", f"localhost:{{port}}", "--processes", "2"]
together += ["--process", str(index), "--timeout", "{TIMEOUT}", "--json"]
assert cli.main(["encode", "clip.mp4", "-o", "two.safetensors", "--model", "vae", *together]) == 0
assert cli.main(["decode", "one.safetensors", "-o", "two", *together]) == 0
# In three tiles, of which each process's devices hold columns of their own.
assert cli.main(["decode", "one.safetensors", "-o", "two-tiled", "--tiling", "32x24", *together]) == 0
import os
os.dup2(2, 1)  # stdout was for reports
from cogvideox_torchax import make_mesh
from cogvideox_torchax.vae import memory
memory._free_memory = lambda devices: (3 + index) * 2**40
assert memory.free_memory(make_mesh()) == 3 * 2**40
"""


def frames_of(directory):
    return [np.asarray(Image.open(path), np.int32) for path in sorted(directory.iterdir())]


@pytest.mark.slow
def test_two_processes_write_what_one_writes(directory):
    for command in (
        ("encode", "clip.mp4", "-o", "one.safetensors", "--model", "vae"),
        ("decode", "one.safetensors", "-o", "one"),
        ("decode", "one.safetensors", "-o", "one-tiled", "--tiling", "32x24"),
    ):
        assert cli.main([*command, "--quiet", "--backend", "torch"]) == 0
    first, second = finish(start(directory, TOGETHER), within=300)
    assert (first[0], second[0]) == (0, 0), first[2] + second[2]
    assert [len(said.splitlines()) for _, said, _ in (first, second)] == [3, 0], "a report for each command"
    one, two = (latents.load(f"{name}.safetensors").tensor for name in ("one", "two"))
    assert reference.largest_error(two, one) < 1e-5
    for ours, theirs in (("one", "two"), ("one-tiled", "two-tiled")):
        pairs = zip(frames_of(Path(ours)), frames_of(Path(theirs)), strict=True)
        # A pixel that lies between two bytes may round either way.
        assert [np.abs(one - two).max() <= 1 for one, two in pairs] == 9 * [True]
    names = {"clip.mp4", "vae", "one", "two", "one.safetensors", "two.safetensors", "one-tiled", "two-tiled"}
    assert {path.name for path in directory.iterdir()} == names


def videos():
    """Return frames by all devices, those of other processes too: by a LoRA and a cache, and with offload."""
    text = port(small_pipelines.build(), mesh=make_mesh(2))
    text.load_lora_weights("lora", adapter_name="lora")
    text.set_adapters("lora", 0.5)
    text.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.3))
    image = port(small_pipelines.build("image", "5b-I2V"), mesh=make_mesh(1))
    image.enable_model_cpu_offload()
    return {
        kind: runtime.to_torch(pipe(**small_pipelines.inputs(kind)).frames)
        for kind, pipe in (("text", text), ("image", image))
    }


CONNECT = f"""
import cogvideox_torchax.sharding
from cogvideox_torchax.sharding import connect, wait_for_all
connect(f"localhost:{{port}}", count, index, timeout={TIMEOUT})
from tests.sharding.test_processes import *
"""
VIDEOS = f"""{CONNECT}
torch.save(videos(), f"{{count}}-{{index}}.pt")
options = ["--quiet", "--distributed", "--coordinator", f"localhost:{{port}}", "--processes", str(count)]
options += ["--process", str(index), "--model", "pipe", "--prompt", "a panda", "--num-inference-steps", "2"]
options += "--frames 5 --height 8 --width 16 --dtype float32 --dp 2 --tp 4 --cache first-block:0.1".split()
options += ["--preview", f"{{count}}.png"]
assert cli.main(["generate", *options, "-o", f"frames-{{count}}"]) == 0
if count == 2:
    cogvideox_torchax.sharding.exit_at_once = print
    assert cli.main(["generate", *options, "-o", "none.mp4", "--seed", str(index)]) == 2
wait_for_all()
"""


@pytest.mark.slow
def test_a_pipeline_of_two_processes_makes_in_each_the_frames_of_one(tmp_path, in_an_empty_directory):
    small_pipelines.save_lora(small_pipelines.one_layer(), "lora")
    small_pipelines.build().save_pretrained("pipe")
    # The one process connects too, to itself: so its sums over devices are by gloo, in the same order.
    ended = finish([*start(tmp_path, VIDEOS), *start(tmp_path, VIDEOS, count=1)], within=600)
    assert [code for code, _, _ in ended] == [0, 0, 0], [said for _, _, said in ended]
    one, first, second = map(torch.load, ("1-0.pt", "2-0.pt", "2-1.pt"))
    assert set(one) == {"text", "image"}
    for name, other in itertools.product(one, (first, second)):
        assert torch.equal(other[name], one[name])
    pictures = [*Path("frames-2").iterdir()]
    assert len(pictures) == 5
    for path in (*pictures, Path("2.png")):
        assert path.read_bytes() == Path(str(path).replace("2", "1", 1)).read_bytes()
    assert "generate: process 1 has another --seed than process 0" in ended[0][2]
    assert "generate: process 0 has another --seed than process 1" in ended[1][2]
    assert not [*Path().glob("none*")]


def latents_of_a_step(pipe, **prompt):
    call = small_pipelines.inputs("text", num_inference_steps=1, guidance_scale=1, output_type="latent")
    return runtime.to_torch(pipe(**call | (prompt or EMBEDDED)).frames)


EMBEDDED = {"prompt": None, "prompt_embeds": torch.ones(1, 16, 32)}
ANOTHER_PROMPT = f"""{CONNECT}
pipe = port(small_pipelines.one_layer(), mesh=make_mesh(2))
try:
    latents_of_a_step(pipe, prompt=f"panda {{index}}")
except ProcessError as error:
    print(error)
torch.save(latents_of_a_step(pipe), f"{{index}}.pt")
wait_for_all()
"""


@pytest.mark.slow
def test_another_prompt_is_an_error_in_each_process_and_the_same_prompt_gives_the_same(
    tmp_path, in_an_empty_directory
):
    ended = finish(start(tmp_path, ANOTHER_PROMPT), within=120)
    assert [code for code, _, _ in ended] == [0, 0], [said for _, _, said in ended]
    for other, (_, said, _) in enumerate(reversed(ended)):
        assert f"process {other} has another prompt than process {1 - other}: every process must" in said
    pipe = port(small_pipelines.one_layer(), mesh=make_mesh(2))
    for index in range(2):
        assert reference.largest_error(torch.load(f"{index}.pt"), latents_of_a_step(pipe)) < 1e-6


class Described(Exception):
    """The fingerprints of a call, by name."""


@pytest.fixture
def ported(monkeypatch):
    """Return a pipeline on a mesh as if of several processes, whose calls end with `Described`."""

    def end(_mesh, call):
        raise Described(json.dumps(call))

    monkeypatch.setattr("cogvideox_torchax.pipelines.call.of_several_processes", lambda mesh: True)
    monkeypatch.setattr("cogvideox_torchax.pipelines.call.check_same", end)
    return port(small_pipelines.one_layer(), mesh=make_mesh(2))


def fingerprints(pipe, **arguments):
    with pytest.raises(Described) as caught:
        pipe(**arguments)
    return json.loads(str(caught.value))


CALLS = {
    "another prompt": ({"prompt": "a"}, {"prompt": "b"}, ["prompt"]),
    "another size": ({"height": 8, "width": 8}, {"height": 16, "width": 16}, ["height", "width"]),
    "another seed": (*({"generator": torch.Generator().manual_seed(seed)} for seed in (0, 1)), ["generator"]),
    "other latents": (*({"latents": x.bfloat16()} for x in torch.eye(2)), ["latents"]),
    "equal seeds": (*({"generator": torch.Generator().manual_seed(seed)} for seed in (0, 0)), []),
    "equal pictures": (*({"attention_kwargs": {"a": small_pipelines.picture()}} for _ in range(2)), []),
    "equal functions": (*({"callback_on_step_end": lambda *_: {}} for _ in range(2)), []),
    "methods of others": (*({"callback_on_step_end": Counter(of).update} for of in "ab"), []),
}


@pytest.mark.parametrize(("one", "other", "differing"), CALLS.values(), ids=CALLS)
def test_a_call_differs_in_its_arguments(ported, one, other, differing):
    before, after = fingerprints(ported, **one), fingerprints(ported, **other)
    with pytest.raises(Described, match='"prompt"'):
        ported.encode_prompt(prompt="a")
    assert [name for name in {**before, **after} if before.get(name) != after.get(name)] == differing


def _other_scheduler(pipe):
    pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config, timestep_spacing="leading")


CHANGES = (
    ("generator", lambda pipe: torch.rand(1)),  # torch's own, which draws if a call has none
    ("vae", lambda pipe: pipe.vae.enable_tiling()),
    ("vae", lambda pipe: pipe.vae.to(torch.bfloat16)),
    ("scheduler", _other_scheduler),
    ("transformer", lambda pipe: pipe.transformer.add_adapter(LoraConfig(target_modules=["to_q"]))),
    ("transformer", lambda pipe: pipe.transformer.set_adapters("default", 0.5)),
    ("transformer", lambda pipe: pipe.transformer.enable_cache(TaylorSeerCacheConfig(use_lite_mode=True))),
    ("text_encoder", lambda pipe: setattr(pipe, "text_encoder", None)),
    ("mesh", lambda pipe: port(pipe, mesh=make_mesh(1))),
)


def test_a_call_differs_in_its_pipeline(ported):
    for name, change in CHANGES:
        before = fingerprints(ported)
        assert fingerprints(ported) == before
        change(ported)
        after = fingerprints(ported)
        assert name in [each for each in before if before[each] != after[each]]


CALLING = f"""
import json, os, signal, time
from cogvideox_torchax import make_mesh, runtime
from cogvideox_torchax.sharding import ProcessError, check_same, connect, exit_at_once, processes
connect(f"localhost:{{port}}", count, index, timeout={TIMEOUT})

def said(on, **call):
    try:
        check_same(on, call)
    except ProcessError as error:
        return str(error)

other = {{"prompt": "b", "seed": 0}} if index else {{"prompt": "a"}}
found = [said(make_mesh(), prompt="a"), said(make_mesh(), **other)]
found += [said(make_mesh(1 + index), prompt="a", mesh=index), said(make_mesh(), prompt="b")]
open(f"{{index}}.json", "w").write(json.dumps(found))
END
"""
NOT_COMING = """
if index:
    time.sleep(60)
processes.CALL_TIMEOUT = 2
print(said(make_mesh(), prompt="c"), flush=True)
exit_at_once(1)
"""
KILLED = """
if index:
    os.kill(os.getpid(), signal.SIGKILL)
print(said(make_mesh(), prompt="c"), flush=True)
exit_at_once(1)
"""


@pytest.mark.parametrize(
    ("end", "words"),
    [
        pytest.param(NOT_COMING, "within 2 s", id="one that does not come"),
        pytest.param(KILLED, "has ended", id="one that is killed", marks=pytest.mark.slow),
    ],
)
def test_a_process_that_makes_another_call_or_none_is_an_error_in_time(tmp_path, end, words):
    first, second = start(tmp_path, CALLING.replace("END", end))
    ((code, own, error),) = finish([first], within=60 + 2 * TIMEOUT)
    second.kill()
    second.communicate()
    assert code == 1, error
    for index in range(2):
        same, differing, mesh, again = json.loads((tmp_path / f"{index}.json").read_text())
        assert (same, again) == (None, None), "a call that failed leaves nothing for the next one"
        assert f"process {1 - index} has another prompt, seed than process {index}: every" in differing
        assert f"process {1 - index} has another mesh than" in mesh
    assert re.search(f"another process has not made the call of process 0.*{words}", own, re.DOTALL)


@pytest.mark.parametrize("place", [load_pipeline, port_pipeline])
def test_chips_of_several_slices_are_refused_before_anything_is_moved(place, monkeypatch):
    chips = np.array([SimpleNamespace(platform="tpu", slice_index=index) for index in range(2)])
    monkeypatch.setattr("cogvideox_torchax.pipelines.loading.check_mesh", lambda mesh: None)
    with pytest.raises(ProcessError, match="chips of one slice, and the mesh has those of 2"):
        place("a-pipeline", mesh=SimpleNamespace(devices=chips))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        pytest.param(["--distributed", "--processes", 2], "pass both", id="one of two"),
        pytest.param(
            ["--tp", 9], "a mesh of dp=1 x tp=9, 9 devices, where there are 8", id="too many devices"
        ),
    ],
)
def test_options_that_cannot_be_met_are_one_line(directory, refused, options, words):
    assert words in refused("encode", "clip.mp4", "-o", "z.safetensors", "--model", "vae", *options)


def test_a_mesh_that_leaves_a_process_out_is_refused(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    with pytest.raises(ProcessError, match="4 of 8 devices, and none of processes 1, 2: take all of them"):
        check_all_take_part(make_mesh(1, 4))


def test_a_process_that_failed_waits_for_no_other_with_a_traceback_either(directory, monkeypatch, capsys):
    left = []
    monkeypatch.setattr("cogvideox_torchax.sharding.exit_at_once", left.append)
    Path("broken.mp4").write_text("no video")
    command = "encode broken.mp4 -o z.safetensors --model vae --distributed --traceback"
    assert (cli.main(command.split()), left) == (2, [2])
    assert "Traceback" in capsys.readouterr().err


def test_processes_that_nobody_names_are_told_how_to_meet():
    """It runs in a process of its own: one whose devices are in use can join no other."""
    ended = run_python(
        "from cogvideox_torchax.sharding import connect; connect()",
        TPU_SKIP_MDS_QUERY="1",  # no TPU pod's server to wait for
    )
    assert re.search("ProcessError: cannot join the other processes.*pass a coordinator", ended.stderr)
