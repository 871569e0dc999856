"""Encoding on a local Ray, in a process of its own, whose actors are killed on the way."""

import json
from unittest.mock import Mock

import pytest

from cogvideox_torchax import cli
from cogvideox_torchax.files.whole import OutputError
from tests.dataset.conftest import BAD, command, tree
from tests.processes import run_python

ENCODE = """
import os, signal, sys
from pathlib import Path

import ray
from cogvideox_torchax import cli
from cogvideox_torchax.dataset import ray as engine

out = sys.argv[sys.argv.index("-o") + 1]

class Dying(engine.ClipActor):
    def __call__(self, row):
        found = super().__call__(row)
        killed = Path(out + ".killed")
        if len(list(Path(out).rglob("*.safetensors"))) >= 2 and not killed.exists():
            killed.write_text("")
            os.kill(os.getpid(), signal.SIGKILL)  # the clip is in its place, nobody was told
        return found

engine.ClipActor = Dying
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_an_actor_that_is_killed_is_replaced_and_the_result_is_that_of_one_machine(small, tmp_path):
    def of(name):
        return command(small, tmp_path / name)

    ended = run_python(ENCODE, *of("ray"), "--ray", "--json")
    assert ended.returncode == 1, ended.stderr[-3000:]
    assert all(f"bad clip {name}" in ended.stderr for name in BAD)
    report = json.loads(ended.stdout)  # and nothing else, whatever Ray prints
    assert (report["clips"], report["bad"], report["device"]) == (5, 2, "Ray")
    assert (tmp_path / "ray.killed").exists()
    assert cli.main(of("alone")) == 1
    assert tree(tmp_path / "ray") == tree(tmp_path / "alone")


def test_on_ray_a_cluster_that_is_not_there_and_shares_are_refused(small, tmp_path, refused, monkeypatch):
    monkeypatch.setattr("ray.init", Mock(side_effect=ConnectionError("nobody listens")))
    monkeypatch.setattr("cogvideox_torchax.sharding.exit_at_once", lambda code: None)
    given = command(small, tmp_path / "out")
    assert "no Ray cluster at here:1" in refused(*given, "--ray", "here:1")
    assert "leave out" in refused(*given, "--ray", "--distributed")


def test_an_actor_refuses_a_clip_that_cannot_be_read_and_ends_where_the_output_cannot_be_written(
    small, tmp_path, monkeypatch
):
    from cogvideox_torchax.dataset import ray as engine

    clip = {"id": "a.mp4", "source": str(small.clips / "a.mp4")}
    row = {"clip": json.dumps(clip), "path": str(tmp_path / "a.safetensors")}
    actor = engine.ClipActor(small.config)
    with monkeypatch.context() as patch:
        patch.setattr(
            "cogvideox_torchax.files.video.probe", Mock(side_effect=OSError(5, "Input/output error"))
        )
        assert "Input/output error" in actor(row)["error"]
    monkeypatch.setattr(
        "cogvideox_torchax.dataset.directory.whole_file", Mock(side_effect=OutputError("not writable"))
    )
    with pytest.raises(OutputError, match="not writable"):
        actor(row)
