"""Files are whole or not there: of killed writers, of two at a time, on a full disk."""

import contextlib
import fcntl
import os
import resource
import subprocess
import sys
from dataclasses import replace

import pytest

from cogvideox_torchax.dataset import packing
from cogvideox_torchax.files import latents, reports, whole
from tests import videos
from tests.files.test_latents import MADE

WRITER = """
import sys
from cogvideox_torchax.files.whole import whole_file
directory = bool(sys.argv[2])
with whole_file(sys.argv[1], directory=directory) as place:
    (place / "0.png" if directory else place).write_text("other")
    print("writing", flush=True)
    sys.stdin.readline()
"""


@contextlib.contextmanager
def writer(path, directory=False):
    """Start a process that has written half of an output and waits for a line."""
    command = [sys.executable, "-c", WRITER, str(path), "yes" if directory else ""]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "writing\n"
            yield process
        finally:
            process.kill()


def write(path, directory=False):
    with whole.whole_file(path, directory=directory) as place:
        assert not (list(place.iterdir()) if directory else place.read_bytes())
        (place / "1.png" if directory else place).write_text("mine")


def write_half(path):
    path.write_text("half")
    raise KeyboardInterrupt


def listed(directory):
    return sorted(entry.name for entry in directory.iterdir())


def files_in(directory):
    """Return the text of every file, hidden ones too, by its path."""
    return {
        path.relative_to(directory).as_posix(): path.read_text()
        for path in directory.rglob("*")
        if path.is_file()
    }


def test_what_a_link_leads_to_is_written_and_the_link_stays(tmp_path):
    (tmp_path / "far/frames").mkdir(parents=True)
    (tmp_path / "near").mkdir()
    for name in ("a", "frames"):
        (tmp_path / "near" / name).symlink_to(tmp_path / "far" / name)
        write(tmp_path / "near" / name, directory=name == "frames")
        assert (tmp_path / "near" / name).is_symlink()
    assert files_in(tmp_path / "far") == {"a": "mine", "frames/1.png": "mine"}
    assert listed(tmp_path / "near") == ["a", "frames"]


@pytest.mark.parametrize("name", ["pipe", os.devnull])
def test_a_device_or_a_pipe_is_not_replaced(tmp_path, name):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(whole.OutputError, match="a device or a pipe"):
        write(tmp_path / name)


@pytest.mark.parametrize("directory", [False, True], ids=["file", "directory"])
def test_where_the_work_fails_what_was_there_stays(tmp_path, directory):
    (tmp_path / "a").mkdir() if directory else (tmp_path / "a").write_text("before")
    with pytest.raises(KeyboardInterrupt), whole.whole_file(tmp_path / "a", directory=directory) as place:
        write_half(place / "1.png" if directory else place)
    assert files_in(tmp_path) == ({} if directory else {"a": "before"})
    assert listed(tmp_path) == ["a"]


@pytest.mark.parametrize("name", ["a.txt", "a [1]*.txt", "é" * 100 + ".txt", "frames"])
def test_what_a_killed_writer_left_is_removed_by_the_next_of_the_same_output(tmp_path, name):
    directory = name == "frames"
    with writer(tmp_path / name, directory) as process:
        process.kill()
        process.wait()
        assert len(listed(tmp_path)) == 2
        write(tmp_path / name, directory)
    assert listed(tmp_path) == [name]
    assert not directory or listed(tmp_path / name) == ["1.png"]


@pytest.mark.parametrize("directory", [False, True], ids=["file", "directory"])
def test_a_second_writer_is_refused_and_the_first_is_left_alone(tmp_path, directory):
    with writer(tmp_path / "a", directory) as process:
        with pytest.raises(whole.OutputError, match="another run is writing it"):
            write(tmp_path / "a", directory)
        write(tmp_path / "b")
        process.communicate("go on\n", timeout=60)
        assert process.returncode == 0
    assert files_in(tmp_path) == {"a/0.png" if directory else "a": "other", "b": "mine"}


@pytest.mark.parametrize("another_begins", [False, True])
def test_a_writer_that_ends_while_the_next_one_opens_its_lock_is_left_alone(
    tmp_path, monkeypatch, another_begins
):
    """The next one then locks a file that is gone, or whose name another has made anew."""
    path, real, other = tmp_path / "a", fcntl.flock, contextlib.ExitStack()

    def flock(handle, operation):
        lock = whole.hidden(path, whole.LOCK)
        # Of another file, filelock only asks whether its disk has such locks.
        if lock.exists() and os.path.samestat(os.fstat(handle), lock.stat()):
            monkeypatch.undo()
            lock.unlink()
            if another_begins:
                other.enter_context(whole.whole_file(path)).write_text("other")
        real(handle, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with (
        other,
        pytest.raises(whole.OutputError, match="run") if another_begins else contextlib.nullcontext(),
    ):
        write(path)
    assert files_in(tmp_path) == {"a": "other" if another_begins else "mine"}


@pytest.mark.parametrize("directory", [False, True], ids=["file", "directory"])
def test_what_was_written_is_on_the_disk_before_its_name(tmp_path, monkeypatch, directory):
    done, names = [], {}  # names by inode
    monkeypatch.setattr(whole.os, "fsync", lambda handle: done.append(names.get(os.fstat(handle).st_ino)))
    monkeypatch.setattr(whole.os, "replace", lambda a, b, real=os.replace: (done.append("named"), real(a, b)))
    with whole.whole_file(tmp_path / "a", directory=directory) as place:
        names[place.stat().st_ino] = "output"
        if directory:
            (place / "1.png").touch()
            names[(place / "1.png").stat().st_ino] = "frame"
    assert done == [*(["frame"] if directory else []), "output", "named"]


pytestmark = pytest.mark.usefixtures("torchax_off")

ABOUT = {"id": "a", "caption": "a cat", "width": 40, "height": 24}


@contextlib.contextmanager
def files_of_at_most(size):
    """Make every write of this process beyond `size` bytes of a file fail, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def write_video(path):
    videos.write(path, videos.moving_frames(60 if path.suffix == ".mp4" else 9))


def write_shards(path):
    clips = path.parent.parent / "clips"
    clips.mkdir(exist_ok=True)
    latents.save(replace(MADE, about={**ABOUT, "settings": {}}), clips / "a.safetensors")
    packing.pack(clips, path, path.stem)


WRITERS = {
    "clip.mp4": write_video,
    "clip.gif": write_video,
    "frames": write_video,
    "z.safetensors": lambda path: latents.save(MADE, path),
    "report.json": lambda path: reports.write_json(path, {"text": "x" * 9999}),
    "parquet": write_shards,
    "webdataset": write_shards,
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path, name):
    for place in ("whole", "full"):
        (tmp_path / place).mkdir()
    WRITERS[name](tmp_path / "whole" / name)
    size = max(path.stat().st_size for path in (tmp_path / "whole").rglob("*") if path.is_file())
    for room in (0, 1, size // 2, size - 1):
        with files_of_at_most(room), pytest.raises(OSError, match="too large"):
            WRITERS[name](tmp_path / "full" / name)
        assert not list((tmp_path / "full").iterdir())


@pytest.mark.parametrize("name", WRITERS)
def test_what_is_written_may_be_read_by_those_whom_the_umask_lets(tmp_path, name):
    (tmp_path / "ordinary").touch()
    (tmp_path / "out").mkdir()
    WRITERS[name](tmp_path / "out" / name)
    assert len({path.stat().st_mode for path in tmp_path.rglob("*") if path.is_file()}) == 1
