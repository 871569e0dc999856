"""Files are whole or not there; what killed runs leave is removed, what live ones write in is not."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cogvideox_torchax.files import whole
from cogvideox_torchax.files.whole import whole_file, workplace

WRITER = """
import sys, time
from cogvideox_torchax.files.whole import whole_file
with whole_file(sys.argv[1]) as temporary:
    temporary.write_text(sys.argv[2])
    print(temporary.parent, flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def start():
    """Starts a process that writes a file and waits, before it is whole, for a line; gives it and its
    directory."""
    processes = []

    def started(path, text="other"):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), text],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process, Path(process.stdout.readline().strip())

    yield started
    for process in processes:
        process.kill()
        process.communicate()


def write(path, text="mine"):
    with whole_file(path) as temporary:
        temporary.write_text(text)


def kill(process):
    process.send_signal(signal.SIGKILL)
    process.wait()


def test_what_a_link_leads_to_is_written_and_the_link_stays(tmp_path):
    (tmp_path / "far").mkdir()
    (tmp_path / "near").mkdir()
    (tmp_path / "near/a").symlink_to(tmp_path / "far/a")
    (tmp_path / "near/frames").symlink_to(tmp_path / "far/frames")
    (tmp_path / "far/frames").mkdir()
    write(tmp_path / "near/a")
    with whole_file(tmp_path / "near/frames") as temporary:
        temporary.mkdir()
        (temporary / "0.png").write_text("a frame")
    assert (tmp_path / "near/a").is_symlink()
    assert (tmp_path / "far/a").read_text() == "mine"
    assert (tmp_path / "near/frames").is_symlink()
    assert listed(tmp_path / "far/frames") == ["0.png"]
    assert listed(tmp_path / "near") == ["a", "frames"]


def test_a_device_or_a_pipe_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path(os.devnull)):
        with pytest.raises(whole.OutputError, match="a device or a pipe"):
            write(path)


def listed(directory):
    return sorted(entry.name for entry in directory.iterdir())


@pytest.mark.parametrize("name", ["a.txt", "a [1]*.txt", "x" * 250 + ".txt", "é" * 120 + ".txt"])
def test_what_a_killed_run_left_is_removed_by_the_next_of_the_same_output(tmp_path, start, name):
    process, left = start(tmp_path / name)
    kill(process)
    assert left.is_dir()
    assert left.name.startswith(f".{name[:10]}")
    write(tmp_path / "another.txt")
    assert left.is_dir()
    write(tmp_path / name)
    assert listed(tmp_path) == sorted([name, "another.txt"])
    assert (tmp_path / name).read_text() == "mine"


def test_two_live_runs_of_one_output_both_write_it(tmp_path, start):
    path = tmp_path / "a.txt"
    process, directory = start(path)
    write(path)
    assert directory.is_dir()
    assert path.read_text() == "mine"
    process.communicate("go on\n", timeout=60)
    assert process.returncode == 0
    assert path.read_text() == "other"
    assert listed(tmp_path) == ["a.txt"]


def test_two_of_one_process_do_too(tmp_path):
    path = tmp_path / "a.txt"
    with whole_file(path) as outer:
        outer.write_text("outer")
        write(path, "inner")
        assert path.read_text() == "inner"
    assert path.read_text() == "outer"
    assert listed(tmp_path) == ["a.txt"]


def test_runs_that_begin_and_die_at_once_leave_each_other_alone(tmp_path, start):
    path = tmp_path / "a.txt"
    running = [start(path, str(i)) for i in range(4)]
    for process, _ in running[::2]:
        kill(process)
    for process, directory in running[1::2]:
        assert directory.is_dir()
        process.communicate("go on\n", timeout=60)
        assert process.returncode == 0
    assert path.read_text() == "3"
    write(path)
    assert listed(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("moment", ["mkdtemp", "_open_lock"])
def test_a_directory_found_before_it_was_locked_is_made_again(tmp_path, monkeypatch, moment):
    path, owner = tmp_path / "a.txt", whole.tempfile if moment == "mkdtemp" else whole
    real, calls = getattr(owner, moment), []

    def and_then_another_run_begins(*args, **options):
        calls.append(real(*args, **options))
        result = calls[-1]
        if len(calls) == 1:
            whole._remove_left(path)
            assert listed(tmp_path) == []
        return result

    monkeypatch.setattr(owner, moment, and_then_another_run_begins)
    write(path)
    assert len(calls) > 1
    assert listed(tmp_path) == ["a.txt"]


def test_another_machines_directory_goes_when_nothing_was_written_for_a_day(tmp_path, monkeypatch, start):
    path = tmp_path / "a.txt"
    process, left = start(path)
    kill(process)
    monkeypatch.setattr(whole.socket, "gethostname", lambda: "another-machine")
    write(path)
    assert left.is_dir()
    yesterday = time.time() - whole.SILENCE - 60
    for entry in (*left.iterdir(), left):
        os.utime(entry, (yesterday, yesterday))
    write(path)
    assert listed(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("name", [".a.txt.settings", ".a.txt.writing-notes", ".a.txt.writing-abcdefgh"])
def test_a_users_own_directories_stay(tmp_path, name):
    (tmp_path / name).mkdir()
    os.utime(tmp_path / name, (0, 0))
    write(tmp_path / "a.txt")
    assert listed(tmp_path) == sorted([name, "a.txt"])


def test_where_the_file_system_knows_no_locks_files_are_written_and_nothing_is_removed(
    tmp_path, monkeypatch, start
):
    process, left = start(tmp_path / "a.txt")
    kill(process)

    def flock(*_):
        raise OSError("no locks available")

    monkeypatch.setattr(whole.fcntl, "flock", flock)
    write(tmp_path / "a.txt")
    assert listed(tmp_path) == sorted([left.name, "a.txt"])


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_a_file_has_the_umasks_mode_whoever_wrote_it(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        with whole_file(tmp_path / "a.txt") as temporary:
            temporary.touch(mode=0o600)  # as safetensors does
    finally:
        os.umask(before)
    assert (tmp_path / "a.txt").stat().st_mode & 0o777 == mode


def test_a_directory_of_its_own_is_gone_afterwards_whatever_is_in_it(tmp_path):
    with workplace(tmp_path / "a.txt") as directory:
        (directory / "part").write_text("x")
        assert directory.parent == tmp_path
    assert listed(tmp_path) == []
