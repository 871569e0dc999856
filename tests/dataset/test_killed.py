"""Runs of the command line that are killed, each at another step: the next one ends as an undisturbed one."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cogvideox_torchax import cli
from cogvideox_torchax.dataset import EncodeClip, manifest
from tests.dataset.conftest import GOOD, OPTIONS, encode, tree

pytestmark = [pytest.mark.usefixtures("torchax_off"), pytest.mark.slow]

STEPS = {
    "before a clip is in place": "parquet",
    "before its line": "webdataset",
    "before the shard": "parquet",
    "before the shard's line": "webdataset",
    "after it": "parquet",
}
KILLED = """
import os, signal, sys
import pyarrow.parquet, torch  # these here once, not in each child
from diffusers import AutoencoderKLCogVideoX
from cogvideox_torchax import cli
from cogvideox_torchax.dataset import formats, manifest
from cogvideox_torchax.files import latents as latent_files
from cogvideox_torchax.files import video

die = lambda: os.kill(os.getpid(), signal.SIGKILL)
done = []

def save(latents, path, real=latent_files.save):
    if step == "before a clip is in place" and len(done) == 2:
        with formats.whole_file(path) as temporary:
            temporary.write_bytes(b"half")
            die()
    real(latents, path)
    done.append(path)
    if step == "before its line" and len(done) == 3:
        die()

def write(kind, members, path, real=formats.write):
    if step == "before the shard":
        with formats.whole_file(path) as temporary:
            temporary.write_bytes(b"half")
            die()
    real(kind, members, path)
    if step == "before the shard's line":
        die()

def add(self, kind, real=manifest.OutputDirectory.add_line, **line):
    real(self, kind, **line)
    if step == "after it" and kind == "shard":
        die()
    if step == "decode" and kind == "done":
        done.append(line)

def frame(self, frames, real=video._Mp4Sink.write):
    real(self, frames)
    if step == "decode" and len(done) == 2:
        die()

latent_files.save, formats.write, manifest.OutputDirectory.add_line = save, write, add
video._Mp4Sink.write = frame
for given in sys.argv[1:]:  # each in a process of its own, which need not import all that again
    step, *command = given.split("|")
    child = os.fork()
    if not child:
        torch.set_num_threads(1)
        os._exit(cli.main([*command, "--backend", "torch", "--quiet"]))
    print(step, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def killed(small, encoded, tmp_path_factory):
    """Return the remains of runs that were killed, each at another step."""
    root = tmp_path_factory.mktemp("killed")
    given = []
    for step, kind in STEPS.items():
        options = ("--model", small.model, "--format", kind, "--shard-size", "3")
        given.append("|".join((step, "encode", str(small.clips), "-o", str(root / step), *options)))
    decode = ("decode", "decode", str(encoded / "webdataset"), "-o", str(root / "decode"))
    ended = subprocess.run(
        [sys.executable, "-c", KILLED, *given, "|".join(decode)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    assert [line.split()[-1] for line in ended.stdout.splitlines()] == ["-9"] * 6, ended.stderr
    return root


@pytest.mark.parametrize("step", STEPS)
def test_what_a_killed_run_left_the_next_completes_bit_for_bit(
    small, encoded, killed, tmp_path, step, monkeypatch
):
    out, kind = tmp_path / "out", STEPS[step]
    shutil.copytree(killed / step, out)
    finished = {line["id"] for line in manifest.lines(out) if line["kind"] == "done"}
    computed, real = [], EncodeClip.encode
    monkeypatch.setattr(
        EncodeClip, "encode", lambda self, reading: computed.append(reading.clip.id) or real(self, reading)
    )
    assert encode(small, out, "--format", kind, "--shard-size", 3) == 1
    assert not finished & set(computed)
    assert 0 < len(computed) < len(GOOD)
    assert tree(out) == tree(encoded / kind)
    assert not list(out.rglob(".*.partial"))
    lines = [(line["kind"], line.get("index", line.get("name"))) for line in manifest.lines(out)]
    assert len(lines) == len(set(lines))


def test_a_run_killed_while_it_decodes_leaves_whole_videos_alone(encoded, killed, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(killed / "decode", out)
    finished = {Path(line["id"]).name for line in manifest.lines(out, "videos") if line["kind"] == "done"}
    before = {path.name: path.stat().st_mtime_ns for path in out.rglob("*.mp4") if path.name in finished}
    assert 1 < len(before) == len(finished) < len(GOOD)  # one more may lie there, without its line yet
    command = ["decode", str(encoded / "webdataset"), "-o"]
    assert cli.main([*command, str(out), *OPTIONS]) == 0
    assert cli.main([*command, str(tmp_path / "undisturbed"), *OPTIONS]) == 0
    assert tree(out) == tree(tmp_path / "undisturbed")
    after = {path.name: path.stat().st_mtime_ns for path in out.rglob("*.mp4")}
    assert {name: after[name] for name in before} == before
