"""Loops over clips, on one machine and on Ray: what overlaps, and which errors are a clip's own."""

import json
import threading
import weakref
from unittest.mock import Mock, patch

import pytest

from cogvideox_torchax.dataset import loop
from cogvideox_torchax.files import video, whole
from tests.dataset.conftest import BAD, command, encode, tree
from tests.processes import run_python


def test_reading_and_writing_overlap_with_computing():
    kept, is_read, is_computed = [], *([threading.Event() for _ in range(5)] for _ in range(2))

    def read(job):
        is_read[job].set()
        return job

    def compute(job):
        assert job > 0 or is_read[2].wait(30), "the third is read while the first is computed"
        is_computed[job].set()
        return job

    def keep(job, _):
        assert job > 0 or is_computed[1].wait(30), "the second is computed while the first is written"
        kept.append(job)

    steps = loop.work(range(5), read, compute, keep, Mock(), readers=2)
    assert [step.job for step in steps] == kept == list(range(5))


def test_an_error_of_a_write_ends_the_loop():
    compute, write = Mock(), Mock(side_effect=OSError("the disk is full"))
    with pytest.raises(OSError, match="full"):
        list(loop.work(range(5), Mock(), compute, write, Mock()))
    assert compute.call_count < 5


def test_the_frames_of_a_clip_are_freed_once_they_are_encoded():
    alive = weakref.WeakValueDictionary()

    def read(job):
        alive[job] = frames = {job}
        return frames

    steps = loop.work(range(2), read, lambda frames: "latents", Mock(), Mock(), readers=1)
    assert [step.job in alive for step in steps] == [False, False]


@pytest.mark.parametrize(
    ("error", "own"),
    [
        (MemoryError(), True),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9"), True),
        (OverflowError("value too large"), True),
        (ValueError("bad"), True),
        (ValueError(), True),
        (RuntimeError("a broken program"), False),
        (whole.OutputError("not writable"), False),
    ],
    ids=repr,
)
@pytest.mark.parametrize("half", ["read", "compute"])
def test_an_error_of_one_clip_is_its_own_and_one_of_the_program_ends_the_loop(error, own, half):
    def fail(job):
        if job == 1:
            raise error
        return job

    halves, write, refuse = {"read": lambda job: job, "compute": lambda job: job, half: fail}, Mock(), Mock()
    given = {"jobs": range(3), **halves, "write": write, "refuse": refuse}
    if own:
        words = "out of memory" if isinstance(error, MemoryError) else type(error).__name__
        assert [step.error is None for step in loop.work(**given)] == [True, False, True]
        assert [made.args[0] for made in write.call_args_list] == [0, 2]
        refuse.assert_called_once_with(1, str(error) or words)
    elif (half, type(error)) != ("read", whole.OutputError):
        with pytest.raises(type(error)):
            list(loop.work(**given))


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
    ended = run_python(ENCODE, *command(small, tmp_path / "ray"), "--ray", "--json")
    assert ended.returncode == 1, ended.stderr[-3000:]
    assert all(f"bad clip {name}" in ended.stderr for name in BAD)
    assert "Deprecat" not in ended.stderr
    report = json.loads(ended.stdout)  # and nothing else, whatever Ray prints
    assert report["computing_s"] > 0
    assert (report["clips"], report["bad"], report["device"]) == (5, 2, "Ray")
    assert (tmp_path / "ray.killed").exists()
    assert encode(small, tmp_path / "alone") == 1
    assert tree(tmp_path / "ray") == tree(tmp_path / "alone")


def test_on_ray_a_cluster_that_is_not_there_and_shares_are_refused(small, tmp_path, refused, monkeypatch):
    monkeypatch.setattr("ray.init", Mock(side_effect=ConnectionError("nobody listens")))
    monkeypatch.setattr("cogvideox_torchax.sharding.exit_at_once", lambda code: None)
    given = command(small, tmp_path / "out")
    assert "no Ray cluster at here:1" in refused(*given, "--ray", "here:1")
    assert "leave out" in refused(*given, "--ray", "--distributed")


def test_an_actor_measures_its_work_refuses_a_clip_that_cannot_be_read_and_ends_where_it_cannot_write(
    small, tmp_path
):
    from cogvideox_torchax.dataset import ray as engine

    row = {
        "clip": json.dumps({"id": "a.mp4", "source": str(small.clips / "a.mp4")}),
        "path": str(tmp_path / "a.safetensors"),
    }
    actor = engine.ClipActor(small.config)
    with patch.object(video.Video, "frames", side_effect=OSError(5, "Input/output error")):
        assert "Input/output error" in actor(row)["error"]
    done = actor({**row, "path": str(tmp_path / "b.safetensors")})
    assert min(done["waited"], done["computed"]) > 0
    with (
        patch.object(engine, "save", side_effect=whole.OutputError("not writable")),
        pytest.raises(whole.OutputError, match="not writable"),
    ):
        actor(row)
