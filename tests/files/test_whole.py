"""Files are whole or not there, and what killed writers leave is removed; two writers do not mix."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from cogvideox_torchax.files import whole
from cogvideox_torchax.files.whole import LockedError, OutputError, whole_file

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
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "writing\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def write(path, directory=False):
    with whole_file(path, directory=directory) as place:
        assert not (list(place.iterdir()) if directory else place.read_bytes())
        (place / "1.png" if directory else place).write_text("mine")


def listed(directory):
    return sorted(entry.name for entry in directory.iterdir())


def files_in(directory):
    """Return the text of every file, hidden ones too, by its path."""
    found = (path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.read_text() for path in found}


def test_what_a_link_leads_to_is_written_and_the_link_stays(tmp_path):
    (tmp_path / "far/frames").mkdir(parents=True)
    (tmp_path / "near").mkdir()
    for name in ("a", "frames"):
        (tmp_path / "near" / name).symlink_to(tmp_path / "far" / name)
        write(tmp_path / "near" / name, directory=name == "frames")
        assert (tmp_path / "near" / name).is_symlink()
    assert files_in(tmp_path / "far") == {"a": "mine", "frames/1.png": "mine"}
    assert listed(tmp_path / "near") == ["a", "frames"]


def test_a_device_or_a_pipe_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path(os.devnull)):
        with pytest.raises(OutputError, match="a device or a pipe"):
            write(path)


@pytest.mark.parametrize("directory", [False, True], ids=["file", "directory"])
def test_where_the_work_fails_what_was_there_stays(tmp_path, directory):
    (tmp_path / "a").mkdir() if directory else (tmp_path / "a").write_text("before")

    def fail():
        with whole_file(tmp_path / "a", directory=directory) as place:
            (place / "1.png" if directory else place).write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert files_in(tmp_path) == ({} if directory else {"a": "before"})
    assert listed(tmp_path) == ["a"]


@pytest.mark.parametrize("name", ["a.txt", "a [1]*.txt", "x" * 251 + ".txt", "é" * 120 + ".txt", "frames"])
def test_what_a_killed_writer_left_is_removed_by_the_next_of_the_same_output(tmp_path, name):
    directory = name == "frames"
    with writer(tmp_path / name, directory) as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert len(listed(tmp_path)) == 1
        write(tmp_path / name, directory)
    assert listed(tmp_path) == [name]
    assert not directory or listed(tmp_path / name) == ["1.png"]


@pytest.mark.parametrize("directory", [False, True], ids=["file", "directory"])
def test_a_second_writer_is_refused_and_the_first_is_left_alone(tmp_path, directory):
    with writer(tmp_path / "a", directory) as process:
        with pytest.raises(OutputError, match="another run is writing it"):
            write(tmp_path / "a", directory)
        write(tmp_path / "b")
        process.communicate("go on\n", timeout=60)
        assert process.returncode == 0
    assert files_in(tmp_path) == {"a/0.png" if directory else "a": "other", "b": "mine"}


@pytest.mark.parametrize("another_begins", [False, True])
def test_a_writer_that_ends_while_the_next_one_opens_its_place_is_left_alone(
    tmp_path, monkeypatch, another_begins
):
    """The next one then locks a directory that is gone, or one that another has made anew under the name."""
    path, place, real = tmp_path / "a", whole.hidden(tmp_path / "a", whole.WRITING), whole.fcntl.flock

    def flock(handle, operation):
        monkeypatch.undo()
        place.rmdir()
        if another_begins:
            place.mkdir()
        real(handle, operation)

    monkeypatch.setattr(whole.fcntl, "flock", flock)
    with whole_file(path) as temporary:
        temporary.write_text("mine")
        with pytest.raises(OutputError, match="another run is writing it"):
            write(path)
    assert files_in(tmp_path) == {"a": "mine"}


def test_without_locks_the_later_writer_writes_and_the_earlier_one_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(whole.fcntl, "flock", Mock(side_effect=OSError("no locks available")))
    with pytest.raises(LockedError, match="cannot be locked"), whole_file(tmp_path / "a"):
        write(tmp_path / "a")
    assert files_in(tmp_path) == {"a": "mine"}


@pytest.mark.parametrize("directory", [False, True], ids=["file", "directory"])
def test_what_was_written_is_on_the_disk_before_its_name_and_then_the_name(tmp_path, monkeypatch, directory):
    done, names = [], {}

    def inode(handle):
        return names.get(os.fstat(handle).st_ino)

    monkeypatch.setattr(whole.os, "fsync", lambda handle: done.append(inode(handle)))
    monkeypatch.setattr(whole.os, "replace", lambda a, b, real=os.replace: (done.append("named"), real(a, b)))
    with whole_file(tmp_path / "a", directory=directory) as place:
        names |= {tmp_path.stat().st_ino: "parent", place.stat().st_ino: "output"}
        if directory:
            (place / "1.png").touch()
            names[(place / "1.png").stat().st_ino] = "frame"
    assert done == [*(["frame"] if directory else []), "output", "named", "parent"]


def test_the_directory_of_an_exchange_goes_with_its_run_or_with_the_next_one_of_the_output(tmp_path):
    directory = whole.hidden(tmp_path / "a", whole.EXCHANGE)
    for next_run in (lambda: write(tmp_path / "a"), lambda: contextlib.nullcontext()):
        directory.mkdir()
        (directory / "left").touch()
        next_run()
        with whole.reserved(tmp_path / "a", whole.EXCHANGE):
            assert listed(directory) == []
            (directory / "part").write_text("x")
            write(tmp_path / "a")
            assert listed(directory) == ["part"]
        assert listed(tmp_path) == ["a"]
