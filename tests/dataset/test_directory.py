"""Directories of clips by the command line: formats that others read, what is done is skipped, faults."""

import json
import os
import re
import shutil
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from cogvideox_torchax import cli
from cogvideox_torchax.dataset import Clip, ClipError, EncodeClip, formats, manifest, sources
from cogvideox_torchax.dataset.decoding import VideoDirectory
from cogvideox_torchax.files import latents as latent_files
from cogvideox_torchax.files import reports, video, whole
from tests import reference
from tests.dataset.conftest import BAD, GOOD, OPTIONS, command, encode, tree, write_clip

pytestmark = pytest.mark.usefixtures("torchax_off")


@pytest.mark.parametrize("kind", formats.SUFFIXES)
def test_every_good_clip_is_kept_bit_for_bit_and_every_bad_one_is_named(small, encoded, kind):
    suffix = formats.SUFFIXES[kind]
    found = {
        name: read() for path in (encoded / kind).rglob(f"*{suffix}") for name, read in formats.entries(path)
    }
    assert sorted(found) == sorted(GOOD)
    for name, latents in found.items():
        assert torch.equal(latents.tensor, small.wanted[name].tensor)
        assert torch.equal(latents.logvar, small.wanted[name].logvar)
        assert ({**latents.about, "caption": ""}, latents.fps) == (small.wanted[name].about, 10)
    assert found["a.mp4"].about["caption"] == "A ball — é."
    noted = [(line["id"], line["kind"]) for line in manifest.lines(encoded / kind) if "id" in line]
    assert sorted(noted) == sorted([*((name, "bad") for name in BAD), *((name, "done") for name in GOOD)])
    assert [*encoded.rglob("work/*")] == []


def test_a_second_run_computes_nothing_and_new_clips_go_into_new_shards(small, tmp_path, monkeypatch, capsys):
    clips = tmp_path / "in"
    shutil.copytree(small.clips, clips)
    options = ("--format", "parquet", "--shard-size", 3)
    assert encode(small, tmp_path / "out", *options, clips=clips) == 1
    before = tree(tmp_path / "out")
    monkeypatch.setattr("cogvideox_torchax.dataset.EncodeClip.encode", None)
    capsys.readouterr()
    assert encode(small, tmp_path / "out", *options, "--json", clips=clips) == 1
    said = json.loads(capsys.readouterr().out)
    assert (said["done_before"], said["bad"], said["clips"]) == (5, 2, 0)
    assert tree(tmp_path / "out") == before
    monkeypatch.undo()
    write_clip(clips / "aa.mp4")
    shutil.copy(clips / "a.mp4", clips / BAD[0])  # mended
    assert encode(small, tmp_path / "out", *options, "--retry-failed", clips=clips) == 1
    after = tree(tmp_path / "out")
    assert after | before == after | {"clips.json": before["clips.json"]}, "what was there stays"
    (new,) = set(after) - set(before)
    assert [name for name, _ in formats.entries(tmp_path / "out" / new)] == ["aa.mp4", BAD[0]]


def test_other_settings_are_refused_in_the_same_directory(small, encoded, refused):
    other = ("--format", "parquet", "--shard-size", 3, "--frames", 5)
    assert "other settings (frames)" in refused(*command(small, encoded / "parquet", *other))


def test_two_shares_make_what_one_process_makes(small, encoded, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    monkeypatch.setattr("cogvideox_torchax.sharding.exit_at_once", None)  # bad clips are no reason to
    options = ("--format", "webdataset", "--shard-size", 3, "--distributed", "--processes", 2, "--process")
    assert [encode(small, out, *options, index) for index in (1, 0)] == [1, 1]
    assert capsys.readouterr().err.count("1 bad clip was left out") == 2, "each names its own"
    assert tree(out) == tree(encoded / "webdataset")
    assert len(list(out.glob("manifest-*.jsonl"))) == 2


def test_connected_processes_report_when_the_block_that_redirects_stdout_has_ended(
    small, tmp_path, monkeypatch, capsys
):
    within = []
    monkeypatch.setattr("cogvideox_torchax.sharding.connect", lambda *_, **__: None)
    monkeypatch.setattr(
        "cogvideox_torchax.sharding.wait_for_all", lambda: within.append(capsys.readouterr().out)
    )
    assert encode(small, tmp_path / "out", "--distributed", "--json") == 1
    assert (within, json.loads(capsys.readouterr().out)["clips"]) == ([""], len(GOOD))
    decode = ["decode", str(tmp_path / "out"), "-o", str(tmp_path / "videos"), *OPTIONS]
    assert cli.main([*decode, "--distributed", "--json"]) == 0
    assert (within, json.loads(capsys.readouterr().out)["clips"]) == (["", ""], len(GOOD))


def test_processes_that_begin_together_write_one_list(tmp_path, monkeypatch):
    clips, write = [Clip(f"{number}.mp4", "") for number in range(9)], reports.write_json

    def write_late(path, document):
        monkeypatch.setattr(reports, "write_json", write)
        write(path, document)  # as another process does, which still holds the lock when this one writes
        with whole.reserved(path, whole.WRITING):
            write(path, document)

    for kind, given in ((manifest.DatasetDirectory, ({}, clips)), (VideoDirectory, ([],))):
        monkeypatch.setattr(reports, "write_json", write_late)
        with kind(tmp_path / "out", *given, process_shard=manifest.ProcessShard(1, 2)) as directory:
            assert directory.missing == ([1, 3, 5, 7] if given[-1] else [])
            if kind is VideoDirectory:
                directory.begin({})
        assert reports.write_json is write


def test_a_list_gives_captions_sizes_and_ids(small, tmp_path):
    lines = [
        {"path": str(small.clips / "a.mp4"), "caption": "One.", "frames": 5},
        {"path": str(small.clips / "b.mp4"), "id": "other", "height": 8, "width": 8},
    ]
    (tmp_path / "clips.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert encode(small, tmp_path / "out", clips=tmp_path / "clips.jsonl") == 0
    one, other = (latent_files.load(tmp_path / f"out/{name}.safetensors") for name in ("a.mp4", "other"))
    assert (one.about["caption"], one.num_frames, other.tensor.shape[-2:]) == ("One.", 5, (2, 2))


WRONG = {
    "no object": ("3", [], "line 1: an object with a path"),
    "no path": ('{"caption": "x"}', [], "line 1: an object with a path"),
    "an unknown field": ('{"path": "a.mp4", "fsp": 3}', [], "got fsp"),
    "an id twice": ('{"path": "a.mp4"}\n{"path": "a.mp4"}', [], "names a.mp4 twice"),
    "a way out": ('{"path": "a.mp4", "id": "../a"}', [], "must not lead out"),
    "an absolute id": ('{"path": "a.mp4", "id": "/a"}', [], "must not lead out"),
    "no caption": ('{"path": "a.mp4", "caption": null}', [], "line 1: caption is None, a text"),
    "no count": ('{"path": "a.mp4"}\n{"path": "b.mp4", "frames": "5"}', [], "line 2: frames is '5', a whole"),
    "half an emoji": (r'{"path": "a.mp4", "caption": "cat \ud83d"}', [], "which UTF-8 cannot hold"),
    "nothing": (
        "",
        [],
        f"names no clips: a video ends in {', '.join(video.SUFFIXES)}; of pictures, make a video first",
    ),
    "tiles": (None, ["--tiling", "21x32"], "multiples of 4"),
    "a bucket of two sides": (None, ["--buckets", "9x16x24,49x480"], "FRAMESxHEIGHTxWIDTH"),
    "a bucket": (None, ["--buckets", "9x18x24"], "a side of 18 pixels"),
    "a height": (None, ["--height", 18, "--width", 24], "a side of 18 pixels"),
    "a mesh": (None, ["--tp", 2], "runs on one device"),
    "actors": (None, ["--actors", 2], "--actors is for Ray: add --ray"),
    "readers of Ray": (None, ["--ray", "--workers", 2], "Ray reads the clips itself: leave out --workers"),
    "a size of no shard": (None, ["--shard-size", 3], "--shard-size is for shards: add --format parquet or"),
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


LISTS = {
    "a file elsewhere": ("list.txt", "../in/a.mp4\n", ("a.mp4", "")),
    "a line separator": (
        "list.jsonl",
        '{"path": "a.mp4", "caption": "one\u2028two"}\n',
        ("a.mp4", "one\u2028two"),
    ),
    "the mark of Windows": ("list.jsonl", '\ufeff{"path": "a.mp4"}\n', ("a.mp4", "")),
    "the mark in a caption": ("a.txt", "\ufeffA ball.", ("a.mp4", "A ball.")),
}


@pytest.mark.parametrize(("name", "text", "wanted"), LISTS.values(), ids=LISTS)
def test_a_text_in_utf_8_gives_ids_and_captions(tmp_path, name, text, wanted):
    given = tmp_path if name == "a.txt" else tmp_path / name
    (tmp_path / "a.mp4").touch()
    (tmp_path / name).write_bytes(text.encode())
    assert [(clip.id, clip.caption) for clip in sources.clips(given)] == [wanted]
    (tmp_path / name).write_bytes("Ein Bär.".encode("latin-1"))
    with pytest.raises(ClipError, match=r"is not in UTF-8 \(.* at byte 5\): save it so"):
        sources.clips(given)


def test_an_entry_that_cannot_be_is_named_and_the_others_are_encoded(small, tmp_path, capsys):
    path = str(small.clips / "a.mp4")
    entries = {
        "a": {},
        "x" * 246 + ".mp4": {},
        "a.safetensors/b": {},
        "high": {"height": 8_000_000_000, "width": 24},
        "no memory": {"height": 2**16, "width": 2**16},
        "/".join(["x" * 200] * 21): {},
        "x/" * 1500 + "x": {},
        "no path": {"path": "\ud83d.mp4"},
        "bytes": {"path": os.fsdecode(b"\xff.mp4")},
        None: {"path": os.fsdecode(b"\xff.mp4")},
        "z": {},
    }
    lines = [{"path": path, **({"id": name} if name else {}), **given} for name, given in entries.items()]
    (tmp_path / "clips.jsonl").write_text("\n".join(map(json.dumps, lines)))
    for _ in range(2):
        assert encode(small, tmp_path / "out", clips=tmp_path / "clips.jsonl") == 1
        assert "9 bad clips were left out" in capsys.readouterr().err
        reasons = [line["error"] for line in manifest.lines(tmp_path / "out") if line["kind"] == manifest.BAD]
        assert sum("would have a name of 262 bytes, 255 are the most" in reason for reason in reasons) == 1
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        *("a.safetensors", "clips.json", "manifest-0.jsonl", "z.safetensors")
    ]
    assert encode(small, tmp_path / "tar", "--format", "webdataset", clips=tmp_path / "clips.jsonl") == 1
    assert "5 bad clips were left out" in capsys.readouterr().err
    with VideoDirectory(tmp_path / "videos", sources.shards(tmp_path / "tar")) as videos:
        assert "x" * 246 + ".mp4" in videos.missing
    clips = [Clip("\ud83d", path)]  # no list gives such an id
    with manifest.DatasetDirectory(tmp_path / "more", {}, clips, kind="webdataset") as output:
        assert (output.missing, list(output.bad_clips())) == ([], ["\ud83d"])


def test_a_clip_that_is_not_among_the_clips_any_more_is_named(small, tmp_path):
    clips = [Clip(name, small.clips / name) for name in GOOD]
    for given, missing, bad in ((clips, [0, 1, 2, 3, 4], []), (clips[1:], [1, 2, 3, 4], GOOD[:1])):
        with manifest.DatasetDirectory(tmp_path / "out", {}, given, kind="webdataset") as output:
            assert (output.missing, list(output.bad_clips())) == (missing, bad)


STATES = {
    "no clips": ("clips.json", lambda text: text.replace('"clips":', '"slips":')),
    "clips that are an object": (
        "clips.json",
        lambda text: text.replace('"clips": [', '"clips": {"": [') + "}",
    ),
    "clips that are a text": ("clips.json", lambda text: text.replace('"clips":', '"clips": "abc", "x":')),
    "a config that is a list": (
        "clips.json",
        lambda text: text.replace('"config": {', '"config": [], "x": {'),
    ),
    "clips that are numbers": ("clips.json", lambda text: text.replace('"a.mp4"', "3")),
    "a clip that leads out": ("clips.json", lambda text: text.replace('"a.mp4"', '"../a"')),
    "a list": ("clips.json", lambda text: "[]"),
    "nested too deep": ("clips.json", lambda text: "[" * 100_000),
    "no text": ("clips.json", lambda text: "\0"),
    "a line that is a list": ("manifest-0.jsonl", lambda text: "[]\n" + text),
    "a line without a number": ("manifest-0.jsonl", lambda text: '{"kind": "done"}\n' + text),
    "a line without a reason": ("manifest-0.jsonl", lambda text: '{"kind": "bad", "index": 3}\n' + text),
    "a line nested too deep": ("manifest-0.jsonl", lambda text: "[" * 100_000 + "\n" + text),
    "a line of another process": ("manifest-1.jsonl", lambda text: '{"kind": {}}\n'),
    "a line of videos without a name": ("videos-0.jsonl", lambda text: '{"kind": "done", "id": 3}\n'),
    "a list for videos": ("videos.json", lambda text: "[]"),
    "videos without a config": ("videos.json", lambda text: '{"format": "cogvideox-torchax-videos/1"}'),
}


@pytest.mark.parametrize(("name", "change"), STATES.values(), ids=STATES)
def test_a_broken_state_is_one_line(small, encoded, tmp_path, refused, name, change):
    out = tmp_path / "out"
    shutil.copytree(encoded / "safetensors", out)
    path = out / name
    path.write_text(change(path.read_text() if path.exists() else ""))
    given = command(small, out)
    if name.startswith("videos"):
        (out / "a.mp4").touch()
        given = ["decode", out, "-o", out, *OPTIONS]
    assert str(path) in refused(*given)


# Decoding


def test_bad_lines_of_others_are_not_this_process_s(encoded, tmp_path):
    shards = sources.shards(encoded / "safetensors")
    names = [formats.entries(path)[0][0] for path in shards]
    (tmp_path / "out").mkdir()
    lines = [
        json.dumps({"kind": "bad", "id": name, "error": "broken"}) + "\n" for name in (*names[:2], "gone")
    ]
    (tmp_path / "out/videos-1.jsonl").write_text("".join(lines))
    for index, bad in enumerate(names[:2]):
        with VideoDirectory(tmp_path / "out", shards, None, manifest.ProcessShard(index, 2)) as videos:
            assert videos.bad == {bad: "broken"}
            assert sorted(videos.missing) == sorted(set(names[index::2]) - {bad})


def test_latents_are_found_in_folders_of_any_name_but_those_of_runs(tmp_path):
    kept = ["work/a.mp4.safetensors", ".b/a.mp4.safetensors"]
    for name in (*kept, "work/00000001.safetensors", ".a.tar.partial"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert sorted(sources.shards(tmp_path)) == sorted(tmp_path / name for name in kept)


def test_an_id_without_a_place_of_its_own_below_the_output_is_bad(tmp_path, monkeypatch):
    ids = ["cat", "cat.mp4", "../../escaped", "/escaped", "a/../../escaped", "", None, "y" * 254]
    monkeypatch.setattr(formats, "entries", lambda path: [(name, None) for name in ids])
    with VideoDirectory(tmp_path / "out", [Path("latents.tar")]) as videos:
        assert videos.missing == ["cat"]
        assert set(videos.bad) == {str(name) for name in ids[1:]}
        assert "258 bytes" in videos.bad[ids[-1]]


def test_another_model_marks_no_latents_bad_and_a_broken_first_clip_is_its_own(
    small, encoded, tmp_path, refused
):
    reference.small_vae(norm_num_groups=2).save_pretrained(tmp_path / "vae")
    decode = ["decode", str(encoded / "webdataset"), "-o", str(tmp_path / "out"), *OPTIONS]
    assert "no model directory" in refused(*decode, "--model", "./none")
    assert not (tmp_path / "out").exists()
    assert "norm_num_groups" in refused(*decode, "--model", tmp_path / "vae")
    assert list(manifest.lines(tmp_path / "out", "videos")) == []
    shutil.copytree(encoded / "webdataset", tmp_path / "in")
    path = min((tmp_path / "in").glob("*.tar"))
    data = path.read_bytes()
    path.write_bytes(data.replace(rb"format\": 2", rb"format\": 3", 1))
    assert path.read_bytes() != data
    assert cli.main(["decode", str(tmp_path / "in"), *decode[2:]]) == 1
    assert [line["kind"] for line in manifest.lines(tmp_path / "out", "videos")].count("bad") == 1
    assert len(list((tmp_path / "out").rglob("*.mp4"))) == 4


@pytest.mark.parametrize("kind", formats.SUFFIXES)
def test_a_directory_of_latents_becomes_a_directory_of_videos(small, encoded, tmp_path, kind, capsys):
    arguments = ["decode", str(encoded / kind), "-o", str(tmp_path / "out"), *OPTIONS, "--json"]
    for before, clips in ((0, 5), (4, 1)):
        assert cli.main(arguments) == 0
        said = json.loads(capsys.readouterr().out)
        assert (said["done_before"], said["clips"]) == (before, clips)
        assert {name for name in tree(tmp_path / "out") if name.endswith(".mp4")} == set(GOOD)
        assert video.probe(tmp_path / "out" / "sub" / "c.mp4").num_frames == 9
        (tmp_path / "out" / "b.mp4").unlink()


def test_one_id_of_two_shards_is_named_and_a_video_that_is_there_is_not_bad(encoded, tmp_path):
    for name in ("one", "two"):
        shutil.copytree(encoded / "safetensors", tmp_path / "in" / name)
    shards = [path for name in ("one", "two") for path in sources.shards(tmp_path / "in" / name)]
    with VideoDirectory(tmp_path / "out", shards) as videos:
        assert (len(videos.missing), set(videos.bad)) == (len(GOOD), set(GOOD))
        assert "its video would replace b.mp4's in" in videos.bad["b.mp4"]
        videos.begin({})
    missing = []
    for index in range(2):
        with VideoDirectory(tmp_path / "out", shards, None, manifest.ProcessShard(index, 2)) as videos:
            missing += videos.missing
    assert sorted(missing) == GOOD, "each by one process"
    # One process found it bad; another made it, and its manifest is read before that of the first.
    for name, kind in (("videos-0.jsonl", manifest.DONE), ("videos-1.jsonl", manifest.BAD)):
        line = {"kind": kind, "id": "b.mp4", "error": "no memory"}
        (tmp_path / "out" / name).write_text(json.dumps(line) + "\n")
    (tmp_path / "out" / "b.mp4").touch()
    alone = sources.shards(tmp_path / "in" / "one")
    with VideoDirectory(tmp_path / "out", alone) as videos:
        assert (videos.bad, videos.done_before) == ({}, 1)


@pytest.mark.parametrize("kind", formats.SUFFIXES)
def test_a_truncated_shard_is_named_and_the_others_are_decoded(encoded, tmp_path, kind, capsys):
    shutil.copytree(encoded / kind, tmp_path / "in")
    path = min((tmp_path / "in").rglob(f"*{formats.SUFFIXES[kind]}"))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    (tmp_path / "in" / "other").mkdir()
    shutil.copy(path, tmp_path / "in" / "other")  # another of the same name
    assert cli.main(["decode", str(tmp_path / "in"), "-o", str(tmp_path / "out"), *OPTIONS]) == 1
    said = capsys.readouterr().err
    assert f"{path} is truncated" in said
    assert "2 bad clips were left out" in said
    assert "a line above or the manifest says why" in said
    assert 0 < len(list((tmp_path / "out").rglob("*.mp4"))) < 5


def test_videos_of_other_weights_or_rates_are_refused_in_the_same_directory(
    encoded, other_weights, tmp_path, refused
):
    shutil.copytree(encoded / "webdataset", tmp_path / "in")
    decode = ["decode", str(tmp_path / "in"), "-o", str(tmp_path / "out"), *OPTIONS]
    assert cli.main(decode) == 0
    for options, differing in (
        (["--fps", "5"], "fps"),  # of a directory where nothing is missing
        (["--dtype", "bfloat16"], "dtype"),
        (["--model", other_weights], "model_sha256"),
    ):
        assert differing in refused(*decode, *options)
        (tmp_path / "out/b.mp4").unlink(missing_ok=True)
    assert not (tmp_path / "out/b.mp4").exists()
    assert cli.main(decode) == 0


def test_videos_that_were_there_before_are_not_taken_for_decoded_ones(small, encoded, tmp_path, refused):
    shutil.copytree(small.clips, tmp_path / "clips")
    before = tree(tmp_path / "clips")
    said = refused("decode", encoded / "webdataset", "-o", tmp_path / "clips", *OPTIONS)
    assert "were not decoded there" in said
    assert tree(tmp_path / "clips") == before


def test_latents_and_their_videos_may_share_a_directory(small, tmp_path):
    out = tmp_path / "out"
    for _ in range(2):
        assert encode(small, out) == 1
        assert cli.main(["decode", str(out), "-o", str(out), *OPTIONS]) == 0
        assert {path.name for path in out.glob("*.mp4")} == {"a.mp4", "b.mp4", "z.mp4"}


def test_what_is_in_a_directory_is_said_by_headers_alone(encoded, monkeypatch):
    for name in ("load", "loads"):
        monkeypatch.setattr(latent_files, name, Mock(side_effect=AssertionError("tensors are read")))
    paths = sources.shards(encoded / "safetensors")
    assert sorted(name for path in paths for name, _ in formats.entries(path)) == sorted(GOOD)


# Faults


def test_parquet_without_pyarrow_is_a_line_before_any_work(small, tmp_path, monkeypatch, refused):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setattr(EncodeClip, "read", lambda *_: pytest.fail("a clip is read"))
    said = refused(*command(small, tmp_path / "out", "--format", "parquet"))
    assert "pip install 'cogvideox-torchax[data]'" in said
    assert not (tmp_path / "out").exists()


def test_a_full_disk_ends_the_run_with_a_line_and_the_next_goes_on(
    small, encoded, tmp_path, monkeypatch, capsys
):
    real, calls = latent_files.save, []

    def full(latents, path):
        calls.append(path)
        if len(calls) == 3:
            raise OSError(28, "No space left on device", str(path))
        real(latents, path)

    monkeypatch.setattr(latent_files, "save", full)
    options = ("--format", "webdataset", "--shard-size", 3)
    assert encode(small, tmp_path / "out", *options) == 1
    assert re.search(r"^cogvideox-torchax encode: .*No space left on device", capsys.readouterr().err, re.M)
    monkeypatch.undo()
    assert encode(small, tmp_path / "out", *options) == 1
    assert tree(tmp_path / "out") == tree(encoded / "webdataset")


def test_an_output_that_cannot_be_written_or_that_another_run_writes_is_a_line(small, tmp_path, refused):
    (tmp_path / "file").write_text("a file")
    assert "cannot write into" in refused(*command(small, tmp_path / "file"))
    (tmp_path / "out").mkdir()
    with manifest.open_manifest(tmp_path / "out", "manifest-0.jsonl"):
        assert "another run is writing" in refused(*command(small, tmp_path / "out"))


def test_a_torn_line_is_cut_and_the_whole_ones_stay(tmp_path):
    path = tmp_path / "manifest-0.jsonl"
    path.write_bytes(b'{"kind": "done", "index": 0}\n{"kind": "do')
    with manifest.open_manifest(tmp_path, path.name) as file:
        file.write(b'{"kind": "done", "index": 1}\n')
    assert [line["index"] for line in manifest.lines(tmp_path)] == [0, 1]
