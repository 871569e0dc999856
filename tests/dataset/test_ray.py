"""Encoding on a local Ray, in a process of its own, whose actors are killed on the way."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cogvideox_torchax import cli
from cogvideox_torchax.files.whole import OutputError
from tests.dataset.conftest import BAD, OPTIONS, tree

ENCODE = """
import os, signal, sys
from pathlib import Path

clips, model, out = sys.argv[1:]
import ray
from cogvideox_torchax.dataset import Recipe, sources
from cogvideox_torchax.dataset import ray as engine

class Dying(engine.ClipActor):
    def __call__(self, batch):
        found = super().__call__(batch)
        killed = Path(out + ".killed")
        if len(list(Path(out, "work").glob("*.safetensors"))) >= 2 and not killed.exists():
            killed.write_text("")
            os.kill(os.getpid(), signal.SIGKILL)  # the clip is in its place, nobody was told
        return found

engine.ClipActor = Dying
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=10**8)
ray.data.DataContext.get_current().enable_progress_bars = False
shelf = engine.encode(sources.clips(clips), Recipe(model, "torch"), out, kind="webdataset", shard_size=3)
print("bad", sorted(shelf.ids[index] for index in shelf.bad))
"""


@pytest.mark.slow
def test_an_actor_that_is_killed_is_replaced_and_the_result_is_the_command_lines(small, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    given = [str(small.clips), small.model, str(tmp_path / "ray")]
    ended = subprocess.run(
        [sys.executable, "-c", ENCODE, *given], env=environment, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stdout.splitlines()[-1] == f"bad {BAD}"
    assert (tmp_path / "ray.killed").exists()
    options = ("--format", "webdataset", "--shard-size", "3", "--model", small.model, *OPTIONS)
    assert cli.main(["encode", str(small.clips), "-o", str(tmp_path / "alone"), *options]) == 1
    shards = lambda name: {key: data for key, data in tree(tmp_path / name).items() if key.endswith(".tar")}  # noqa: E731
    assert shards("ray") == shards("alone")
    shutil.rmtree(tmp_path / "ray")


def test_an_id_that_comes_twice_or_leads_elsewhere_is_refused(small, tmp_path):
    from cogvideox_torchax.dataset import Clip, ClipError
    from cogvideox_torchax.dataset import ray as engine

    for ids, words in ((("a.mp4", "a.mp4"), "a.mp4 twice"), (("../a.mp4",), "must not lead out")):
        with pytest.raises(ClipError, match=words):
            engine.encode([Clip(name, small.clips / "a.mp4") for name in ids], small.recipe, tmp_path / "out")


def test_an_actor_refuses_a_clip_that_cannot_be_read_and_ends_where_the_output_cannot_be_written(
    small, tmp_path, monkeypatch
):
    from cogvideox_torchax.dataset import ray as engine

    def failing(error):
        def fail(*args):
            raise error

        return fail

    clip = json.dumps({"id": "a.mp4", "source": str(small.clips / "a.mp4")})
    row = {"index": [0], "path": [str(tmp_path / "a.safetensors")], "clip": [clip]}
    actor = engine.ClipActor(small.recipe)
    with monkeypatch.context() as patch:
        patch.setattr("cogvideox_torchax.files.video.probe", failing(OSError(5, "Input/output error")))
        (line,) = actor(row)["line"]
    assert "Input/output error" in json.loads(line)["error"]
    monkeypatch.setattr("cogvideox_torchax.files.latents.save", failing(OutputError("not writable")))
    with pytest.raises(OutputError, match="not writable"):
        actor(row)
