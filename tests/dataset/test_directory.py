"""Directories of clips by the command line: what is done is skipped, and each fault is named."""

import contextlib
import json
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import pytest

from cogvideox_torchax import cli
from cogvideox_torchax.dataset import ClipError, EncodeClip, sources
from cogvideox_torchax.dataset.directory import LatentDirectory, VideoDirectory
from cogvideox_torchax.files import latents as latent_files, video, whole
from tests import reference
from tests.dataset.conftest import BAD, GOOD, OPTIONS, command, encode, tree, write_clip
from tests.processes import printed_by

pytestmark = pytest.mark.usefixtures("torchax_off")


def listing(directory, *entries):
    """Write a list of clips; return its path."""
    (directory / "clips.jsonl").write_text("\n".join(map(json.dumps, entries)))
    return directory / "clips.jsonl"


def failures(directory):
    """Return, by id, why clips of a directory have failed."""
    lines = (directory / "failed.jsonl").read_text().splitlines()
    return {entry["id"]: entry["error"] for entry in map(json.loads, lines)}


@pytest.fixture
def decode(encoded, tmp_path):
    return ["decode", str(encoded / "latents"), "-o", str(tmp_path / "out"), *OPTIONS]


def test_every_good_clip_is_a_file_bit_for_bit_and_every_bad_one_a_line(small, encoded):
    out = encoded / "latents"
    assert {
        path.relative_to(out).as_posix()
        for path in out.rglob("*")
        if not path.is_dir() or not any(path.iterdir())
    } == {*("failed.jsonl", "latents.json", *(f"{name}.safetensors" for name in GOOD))}
    for name in GOOD:
        latents = latent_files.load(out / f"{name}.safetensors")
        for tensor, value in small.wanted[name].tensors.items():
            assert latents.tensors[tensor].equal(value)
        assert (latents.about, latents.fps) == (small.wanted[name].about | {"caption": f"{name} — é"}, 10)
    assert sorted(failures(out)) == sorted(BAD)


def test_a_second_run_computes_only_new_clips_and_those_that_failed(small, encoded, tmp_path, capsys):
    shutil.copytree(small.clips, tmp_path / "in")
    shutil.copytree(encoded / "latents", tmp_path / "out")
    with patch.object(EncodeClip, "encode", None):
        assert encode(small, tmp_path / "out", "--json", clips=tmp_path / "in") == 1
    said = capsys.readouterr()
    assert (found := json.loads(said.out)) == found | {"done_before": 5, "bad": 2, "clips": 0}
    assert "bad clips left out: 2; the lines above say why\n" in said.err
    write_clip(tmp_path / "in/new.mp4")
    shutil.copy(tmp_path / "in/a.mp4", tmp_path / "in" / BAD[0])
    assert encode(small, tmp_path / "out", clips=tmp_path / "in") == 1
    before, found = tree(encoded / "latents"), tree(tmp_path / "out")
    assert found.keys() - before.keys() == {f"{name}.safetensors" for name in ("new.mp4", BAD[0])}
    assert found | before == found


def test_other_settings_are_refused_by_name_before_any_work_whatever_the_clips(
    small, encoded, other_weights, tmp_path, refused
):
    shutil.copytree(encoded / "latents", tmp_path / "out")
    write_clip(tmp_path / "in/new.mp4")
    for options, words in (
        (["--frames", 5], "frames is None there and 5 here"),
        (["--fps", 5], "fps is None there and '5' here"),
        (["--model", other_weights], "model_sha256 is"),
    ):
        assert f"other settings ({words}" in refused(
            *command(small, tmp_path / "out", *options, clips=tmp_path / "in")
        )
    (tmp_path / "out/latents.json").unlink()
    assert "has a.mp4.safetensors and no latents.json" in refused(*command(small, tmp_path / "out"))


def test_two_processes_make_what_one_makes_and_two_of_one_part_exclude_each_other(
    small, encoded, tmp_path, monkeypatch, refused
):
    monkeypatch.setattr("cogvideox_torchax.sharding.exit_at_once", lambda code: None)
    out, options = tmp_path / "out", ("--distributed", "--processes", 2, "--process")
    directory = LatentDirectory(out, small.unit, sources.clips(small.clips), slice(1, None, 2))
    assert list(directory.missing) == sorted([*GOOD, *BAD])[1::2]
    with directory.locked():
        assert f"cannot write {out}: another run" in refused(*command(small, out, *options, 1))
        assert encode(small, out, *options, 0) == 1
    assert encode(small, out, *options, 1) == 1
    assert tree(out) == tree(encoded / "latents")
    assert sorted(failures(out)) == sorted(BAD)


def test_connected_processes_report_when_the_block_that_redirects_stdout_has_ended(
    small, tmp_path, monkeypatch, capsys
):
    within = []
    monkeypatch.setattr("cogvideox_torchax.sharding.connect", lambda *_, **__: None)
    monkeypatch.setattr(
        "cogvideox_torchax.sharding.wait_for_all", lambda: within.append(capsys.readouterr().out)
    )
    decode = ["decode", str(tmp_path / "out"), "-o", str(tmp_path / "videos"), *OPTIONS]
    for work, code in ((command(small, tmp_path / "out"), 1), (decode, 0)):
        assert cli.main([*work, "--distributed", "--json"]) == code
        assert (within.pop(), json.loads(capsys.readouterr().out)["clips"]) == ("", len(GOOD))


def test_what_is_dropped_or_resampled_is_in_the_latents(small, tmp_path):
    for name, frames, rate in (("fast", 40, 24), ("slow", 12, 8), ("short", 4, 8)):
        write_clip(tmp_path / f"in/{name}.mp4", frames=frames, rate=rate)
    write_clip(tmp_path / "in/tiny.mp4", height=8, width=24)
    for name, options, wanted in (
        (
            "first/fast.mp4",
            (),
            {"source_fps": "24", "dropped_frames": 35, "source_height": 16, "first_frame": 0},
        ),
        (
            "windows/fast.mp4/00001",
            ("--windows", "--fps", 8),
            {"id": "fast.mp4/00001", "dropped_frames": 12, "first_frame": 15, "repeated_frames": 0},
        ),
    ):
        given = (tmp_path / Path(name).parts[0], "--buckets", "5x32x48", "--min-size", 16, *options)
        assert encode(small, *given, clips=tmp_path / "in") == 1
        found = latent_files.about(tmp_path / f"{name}.safetensors")
        assert found | wanted == found
    assert "is 8 x 24, at least 16 are wanted" in failures(tmp_path / "first")["tiny.mp4"]
    assert sorted(path.name for path in (tmp_path / "windows/slow.mp4").iterdir()) == [
        *("00000.safetensors", "00001.safetensors")
    ]


def test_a_list_gives_captions_sizes_and_ids(small, tmp_path):
    lines = (
        {"path": str(small.clips / "a.mp4"), "caption": "One.", "frames": 5},
        {"path": str(small.clips / "b.mp4"), "id": "other", "height": 8, "width": 8},
    )
    assert encode(small, tmp_path / "out", clips=listing(tmp_path, *lines)) == 0
    one, other = (latent_files.load(tmp_path / f"out/{name}.safetensors") for name in ("a.mp4", "other"))
    assert (one.about["caption"], one.num_frames, other.tensor.shape[-2:]) == ("One.", 5, (2, 2))


WRONG = {
    "no object": ("3", [], "line 1: an object with a path"),
    "no path": ('{"caption": "x"}', [], "line 1: an object with a path"),
    "an unknown field": ('{"path": "a.mp4", "fsp": 3}', [], "got fsp"),
    "an id twice": ('{"path": "a.mp4"}\n{"path": "a.mp4"}', [], "names a.mp4 twice"),
    "a way out": ('{"path": "a.mp4", "id": "../a"}', [], "must not lead out"),
    "an absolute id": ('{"path": "a.mp4", "id": "/a"}', [], "must not lead out"),
    "no count": ('{"path": "a.mp4"}\n{"path": "b.mp4", "frames": "5"}', [], "line 2: frames is '5', a whole"),
    "half an emoji": (r'{"path": "a.mp4", "caption": "cat \ud83d"}', [], "with a path, in UTF-8, is wanted"),
    "nothing": ("", [], f"names no clips: a video ends in {', '.join(video.SUFFIXES)}; of pictures, make"),
    "tiles": (None, ["--tiling", "21x32"], "multiples of 4"),
    "a bucket": (None, ["--buckets", "9x18x24"], "a side of 18 pixels"),
    "a height": (None, ["--height", 18, "--width", 24], "a side of 18 pixels"),
    "windows of no length": (None, ["--windows"], "windows of no length: give buckets or a number of frames"),
    "a rate": (None, ["--fps", 1001], "got 1001 frames a second: 1000 are the most"),
    "a mesh": (None, ["--tp", 2], "runs on one device"),
    "actors": (None, ["--actors", 2], "--actors is for Ray: add --ray"),
    "readers of Ray": (None, ["--ray", "--workers", 2], "Ray reads the clips itself: leave out --workers"),
    "a process": (None, ["--processes", 2, "--process", 0], "add --distributed"),
}


@pytest.mark.parametrize(("listed", "options", "words"), WRONG.values(), ids=WRONG)
def test_a_bad_list_or_a_wrong_option_is_one_line_and_marks_no_clip_bad(
    small, tmp_path, refused, listed, options, words
):
    (tmp_path / "clips.jsonl").write_text(listed or "")
    clips = small.clips if listed is None else tmp_path / "clips.jsonl"
    assert words in refused(*command(small, tmp_path / "out", *options, clips=clips))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        pytest.param("list.txt", "../in/a.mp4\n", ("a.mp4", ""), id="a file elsewhere"),
        pytest.param(
            "list.jsonl",
            '{"path": "a.mp4", "caption": "one\u2028two"}\n',
            ("a.mp4", "one\u2028two"),
            id="a line separator",
        ),
        pytest.param("list.jsonl", '\ufeff{"path": "a.mp4"}\n', ("a.mp4", ""), id="the mark of Windows"),
        pytest.param("a.txt", "\ufeffA ball.", ("a.mp4", "A ball."), id="the mark in a caption"),
    ],
)
def test_a_text_in_utf_8_gives_ids_and_captions(tmp_path, name, text, wanted):
    given = tmp_path if name == "a.txt" else tmp_path / name
    (tmp_path / "a.mp4").touch()
    (tmp_path / name).write_bytes(text.encode())
    assert [(clip.id, clip.caption) for clip in sources.clips(given)] == [wanted]
    (tmp_path / name).write_bytes("Ein Bär.".encode("latin-1"))
    with pytest.raises(ClipError, match=r"is not in UTF-8 \(.* at byte 5\): save it so"):
        sources.clips(given)


def test_linked_folders_are_followed_once_and_hidden_and_discarded_files_are_left_out(tmp_path):
    given = ["in/a.mp4", "in/b.FLV", "in/sub/c.mp4", "other/d.m2ts", "in/.own/e.safetensors", "in/still.webp"]
    discarded = [".a.partial/x", "._a.mp4", ".Trash-1000/x.mp4", ".ipynb_checkpoints/a.mp4", "__MACOSX/x.mp4"]
    for name in (*given, *(f"in/{name}{end}" for name in discarded for end in ("", ".safetensors"))):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for link in ("again other", "copy in/sub", "cycle in", ".linked other", "gone nothing"):
        (tmp_path / "in" / link.split()[0]).symlink_to(tmp_path / link.split()[1])
    found = [clip.id for clip in sources.clips(tmp_path / "in", pytest.fail)]
    assert found == ["a.mp4", "again/d.m2ts", "b.FLV", "sub/c.mp4"]
    assert sources.latent_files(tmp_path / "in", pytest.fail) == [tmp_path / "in/.own/e.safetensors"]
    assert [clip.id for clip in sources.clips(tmp_path / "in/.Trash-1000")] == ["x.mp4"]


def test_an_entry_that_cannot_be_is_named_and_the_others_are_encoded(small, tmp_path, capsys):
    bad = {
        "high": {"height": 8_000_000_000, "width": 24},
        "no memory": {"height": 2**16, "width": 2**16},
        "no path": {"path": "\ud83d.mp4"},
        "bytes": {"path": os.fsdecode(b"\xff.mp4")},
    }
    entries = {"a": {}, **bad, "z": {}}.items()
    lines = [{"path": str(small.clips / "a.mp4"), "id": name, **given} for name, given in entries]
    for _ in range(2):
        assert encode(small, tmp_path / "out", clips=listing(tmp_path, *lines)) == 1
        assert "bad clips left out: 4;" in capsys.readouterr().err
    assert failures(tmp_path / "out").keys() == bad.keys()
    assert sorted(path.name for path in (tmp_path / "out").iterdir() if path.is_file()) == [
        *("a.safetensors", "failed.jsonl", "latents.json", "z.safetensors")
    ]


# Decoding


def test_a_directory_of_latents_becomes_a_directory_of_videos(decode, tmp_path, capsys):
    for before, clips in ((0, 5), (4, 1)):
        assert cli.main([*decode, "--json"]) == 0
        said = json.loads(capsys.readouterr().out)
        assert (said["done_before"], said["clips"]) == (before, clips)
        assert {name for name in tree(tmp_path / "out") if name.endswith(".mp4")} == set(GOOD)
        assert video.probe(tmp_path / "out" / "sub" / "c.mp4").num_frames == 9
        (tmp_path / "out" / "b.mp4").unlink()


def test_an_id_without_a_place_of_its_own_below_the_output_is_bad(tmp_path, monkeypatch):
    ids = ["cat", "cat.mp4", "../../escaped", "/escaped", "a/../../escaped", "", None]
    files = [Path(f"{number}.safetensors") for number in range(len(ids))]
    monkeypatch.setattr(latent_files, "about", lambda path: {"id": ids[int(path.stem)]})
    videos = VideoDirectory(tmp_path / "out", files)
    assert list(videos.missing) == ["cat"]
    assert set(videos.bad) == set(map(str, files[1:]))


def test_another_model_marks_no_latents_bad(decode, tmp_path, refused):
    reference.small_vae(**reference.SHALLOW, norm_num_groups=2).save_pretrained(tmp_path / "vae")
    assert "no model directory" in refused(*decode, "--model", "./none")
    assert not (tmp_path / "out").exists()
    assert "norm_num_groups" in refused(*decode, "--model", tmp_path / "vae")
    assert list((tmp_path / "out").iterdir()) == []


def test_one_id_of_two_files_is_named_and_each_clip_is_one_process_s(encoded, tmp_path):
    for name in ("one", "two"):
        shutil.copytree(encoded / "latents", tmp_path / "in" / name)
    files = sources.latent_files(tmp_path / "in")
    one, two = (VideoDirectory(tmp_path / "out", files, None, slice(index, None, 2)) for index in range(2))
    assert sorted([*one.missing, *two.missing]) == GOOD
    assert (len(one.bad), len(two.bad)) == (len(GOOD), 0)
    second = f"{tmp_path}/in/two/b.mp4.safetensors"
    assert f"its video would replace that of {tmp_path}/in/one/b.mp4" in one.bad[second]
    one.save_or_check_settings({})
    (tmp_path / "out/b.mp4").touch()
    videos = VideoDirectory(tmp_path / "out", files[: len(GOOD)])
    assert (videos.bad, videos.done_before) == ({}, 1), "another process made it"


def test_videos_of_other_weights_or_rates_are_refused_in_the_same_directory(
    decode, other_weights, tmp_path, refused
):
    assert cli.main(decode) == 0
    for options, differing in (
        (["--fps", "5"], "fps is None there and '5' here"),  # of a directory where nothing is missing
        (["--dtype", "bfloat16"], "dtype"),
        (["--model", other_weights], "model_sha256"),
    ):
        assert differing in refused(*decode, *options)
        (tmp_path / "out/b.mp4").unlink(missing_ok=True)
    assert not (tmp_path / "out/b.mp4").exists()
    assert cli.main(decode) == 0


def test_latents_and_their_videos_may_share_a_directory_and_other_videos_are_not_taken_for_decoded_ones(
    small, tmp_path, refused
):
    out, decode = tmp_path / "out", ("decode", tmp_path / "out", "-o", tmp_path / "out", *OPTIONS)
    for _ in range(2):
        assert encode(small, out) == 1
        assert cli.main([*map(str, decode)]) == 0
        assert {path.name for path in out.glob("*.mp4")} == {"a.mp4", "b.mp4", "z.mp4"}
    (out / "videos.json").unlink()
    before = tree(out)
    assert "has a.mp4 and no videos.json, so this command has not made it" in refused(*decode)
    assert tree(out) == before


# Faults


def test_an_output_that_cannot_be_written_is_a_line(small, tmp_path, refused):
    (tmp_path / "file").write_text("a file")
    assert "cannot write into" in refused(*command(small, tmp_path / "file"))
    clips = listing(tmp_path, {"path": str(small.clips / "a.mp4"), "id": "x" * 250})
    assert "File name too long" in refused(*command(small, tmp_path / "out", clips=clips))


def test_of_processes_that_begin_together_one_fixes_the_settings_of_all(encoded, tmp_path):
    videos = VideoDirectory(tmp_path / "out", sources.latent_files(encoded / "latents"))

    def save(number):
        with contextlib.suppress(whole.OutputError):
            videos.save_or_check_settings({"number": number})
            return number

    with ThreadPoolExecutor(8) as threads:
        (saved,) = {*threads.map(save, range(8))} - {None}
    assert json.loads((tmp_path / "out/videos.json").read_text())["settings"] == {"number": saved}


# Runs that are killed, each at another step: the next one ends as an undisturbed one


WAYS = {
    "encode": ("encode", "{clips}", "--model", "{model}", *OPTIONS),
    "encode windows": ("encode", "{clips}", "--model", "{model}", "--windows", "--frames", "4", *OPTIONS),
    "pack": ("pack", "{latents}", "--format", "parquet", "--shard-size", "1"),
    "decode": ("decode", "{latents}", *OPTIONS),
    "generate": ("generate", "--prompts", "{prompts}", "--model", "{pipeline}", "--steps", "2", "--quiet"),
}
MOMENTS = (*range(2, 12, 2), *range(18, 90, 16))
HIDDEN = re.compile(r"\.(partial|lock)(/|$)")
RECORD = re.compile(r"\d\.json$")  # of a video, which comes before it
KILLED = """
import os, signal, sys
import pyarrow.parquet, torch  # these here once, not in each child
from diffusers import AutoencoderKLCogVideoX
from cogvideox_torchax import cli

def killer(place, moment):
    left = moment
    def hook(event, args):
        nonlocal left
        if event in ("open", "os.rename", "os.mkdir", "os.rmdir") and place in str(args[0]):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
    return hook

for given in sys.argv[1:]:  # each in a process of its own, which need not import all that again
    place, *command = given.split("|")
    child = os.fork()
    if not child:
        torch.set_num_threads(1)
        # At the so many-th opening, renaming and so on in the place, whose name is the number.
        sys.addaudithook(killer(place, int(os.path.basename(place))))
        os._exit(cli.main([*command, "-o", os.path.join(place, "out")]))
    print("ended by", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.slow
def test_what_a_killed_run_left_is_whole_and_the_next_completes_it_bit_for_bit(
    small, encoded, saved, tmp_path, way
):
    given = {"clips": small.clips, "model": small.model, "latents": encoded / "latents"}
    given |= {"prompts": tmp_path / "prompts.txt", "pipeline": saved()}
    given["prompts"].write_text("a panda\nthe sea\nan egg\n")
    command = [word.format_map(given) for word in WAYS[way]]
    code = cli.main([*command, "-o", str(tmp_path / "whole")])
    wanted = tree(tmp_path / "whole")
    outputs = [tmp_path / str(moment) / "out" for moment in MOMENTS]
    for out in outputs:
        out.parent.mkdir()
    ended = printed_by(KILLED, *("|".join((str(out.parent), *command)) for out in outputs))
    assert ended.count("ended by -9") > 4
    for out in outputs:
        left = {name: data for name, data in tree(out).items() if not HIDDEN.search(name)}
        assert left.items() <= wanted.items(), "only whole files have their names"
        times = {name: (out / name).stat().st_mtime_ns for name in left if not RECORD.search(name)}
        assert cli.main([*command, "-o", str(out)]) in ((code,) if way != "pack" or not left else (2,))
        assert tree(out) == wanted
        assert times == {name: (out / name).stat().st_mtime_ns for name in times}, "nothing is made again"
        assert not [path for path in out.parent.rglob(".*") if path.suffix in (".partial", ".lock")]
