"""bench: a real run at a tiny size, and what its report says when something goes wrong."""

import json
import re
import sys

import pytest

from benchmarks import report as drawn
from cogvideox_torchax import cli
from cogvideox_torchax.bench import ab, measure, report, worker
from cogvideox_torchax.bench.ladder import Size
from cogvideox_torchax.plan import jobs
from cogvideox_torchax.runtime import clock
from cogvideox_torchax.vae.directions import Direction


def times(*seconds, start=3.0):
    return {"start_s": start, "lower_s": 0.5, "compile_s": 2.0, **measure.spread(list(seconds))}


ROUND = {
    "status": "ok",
    "check": {"passed": True, "relative_error": 1e-6, "rms_error": 1e-7},
    "device": "TPU v6 lite",
    "load_s": 1.0,
    "whole": times(1.0, 3.0, 2.0),
    "parts": [{"part": name, **times(0.5), "peak_bytes": None} for name in ("first", "later")],
    "host_peak_bytes": 5_000_000,
}


PROGRAM = {
    "name": "later",
    "frames": 2,
    "seconds": 0.25,
    "shares": {"convolutions": 0.1, "copies": 0.05, "other": 0.08, "kernels": 0.02},
    "kernels": 3,
    "kernels_by_bytes": 1,
    "kernel_times": {
        "norm_conv3d": {"seconds": 0.015},
        "modulated": {"seconds": 0.002},
        "scaled": {"seconds": 0.003},
    },
    "collective_seconds": {"all-reduce": 0.01, "all-gather": 0.002},
    "floor_seconds": 0.05,
    "temp_bytes": 2e9,
    "peak_bytes": 5e9,
    "seconds_with_collectives": 0.262,
    "collectives": {},
    "compile_seconds": 30.0,
}
PLAN = {
    "format": jobs.FORMAT,
    "job": {"kind": "decode", "frames": 9, "height": 480, "width": 720, "tile": None},
    "topology": "v6e:1x1",
    "mesh": {"dp": 1, "tp": 1},
    "backend": "torchax",
    "dtype": "bfloat16",
    "model": "5b",
    "versions": {"libtpu": "0.0.1", "jax": "0.10"},
    "programs": [PROGRAM | {"name": "first", "seconds": 0.3, "seconds_with_collectives": 0.312}, PROGRAM],
    "summary": {"chunks": 2, "whole_video_s": 0.55, "with_collectives_s": 0.574, "fits": True},
}


SIZES = [Size("tiny", *video) for video in ((9, 16, 24), (17, 16, 24), (9, 32, 48))]


def merged(rounds=(ROUND, ROUND)):
    return ab.merge(list(rounds), 9, 10**9, "bfloat16")


def made_up_report(*results, sizes=SIZES[:1]):
    """Return a report of results by way, of both directions."""
    entries = [
        {"job": kind, "way": way, "size": size._asdict(), **result}
        for size in sizes
        for kind in Direction
        for way, result in results
    ]
    about = {"format": ab.FORMAT, **report.about(), "model_name": "tiny"}
    return {**about, "options": vars(ab.Options(model="tiny")), "results": entries}


@pytest.mark.usefixtures("torchax_off")
@pytest.mark.slow
def test_a_tiny_run_writes_every_field(model_directory, tmp_path, capsys):
    video = "--frames 1 --height 16 --width 16"
    options = "--backends torch torchax --repetitions 1 --warmups 0 --rounds 1 --quiet --json"
    paths = ["--model", str(model_directory), "-o", str(tmp_path)]
    assert cli.main(["bench", *video.split(), *options.split(), *paths]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads((tmp_path / "ab.json").read_text())
    assert found.keys() >= {"format", "date", "commit", "versions", "host", "options", "results"}
    ways = [(result["job"], result["way"]) for result in found["results"]]
    assert ways == [(kind, way) for kind in Direction for way in ("torch", "torchax")]
    starts = {"lower_s", "compile_s", "start_cold_s", "start_warm_s", "first_chunk_s"}
    for result in found["results"]:
        assert (result["status"], result["check"]["passed"]) == ("ok", True), result
        assert result["flops_per_s"] > 0
        assert result.keys() >= starts
        assert len(result["steady"]["all_s"]) == 1
    assert re.search(r"\| encode +\| torchax ", (tmp_path / "ab.md").read_text())
    assert (tmp_path / "ab-bars.png").read_bytes().startswith(b"\x89PNG")


def test_rounds_are_merged_into_cold_warm_median_and_spread():
    warm = ROUND | {"whole": times(5.0, 4.0, start=0.7)}
    found = merged(rounds=(ROUND, warm))
    assert (found["start_cold_s"], found["start_warm_s"], found["compile_s"]) == (3.0, 0.7, 2.0)
    assert found["steady"] == measure.spread([1.0, 3.0, 2.0, 5.0, 4.0])
    assert (found["steady"]["median_s"], found["frames_per_s"]) == (3.0, 3.0)
    assert found["share_of_peak"] == pytest.approx(1e9 / 3 / 918e12)
    assert merged(rounds=(ROUND | {"device": "cpu"},))["share_of_peak"] is None


def test_what_does_not_fit_or_is_wrong_is_said_and_shows_no_time():
    unfit = {"status": "does not fit", "reason": "RESOURCE_EXHAUSTED"}
    wrong = {"status": "wrong", "check": {"passed": False, "relative_error": 0.3}}
    text = report.markdown(made_up_report(("a", merged([unfit])), ("b", merged([wrong])), ("c", merged())))
    assert "does not fit: RESOURCE_EXHAUSTED" in text
    rows = [line for line in text.splitlines() if "| b " in line]
    assert ["wrong: relative error 3.0e-01" in row for row in rows] == [True, True]
    assert not any("2 (1 to 3)" in row for row in rows)
    assert text.count("2 (1 to 3)") == 2


def test_memory_that_ran_out_is_told_from_other_failures():
    errors = RuntimeError("RESOURCE_EXHAUSTED: of memory"), MemoryError("6 GB"), RuntimeError("no such op")
    assert [worker.failure(error)["status"] for error in errors] == ["does not fit"] * 2 + ["failed"]


CRASHES = "import sys; sys.stdin.readline(); sys.stderr.write('Traceback\\nno such op\\n'); {ends}"


@pytest.mark.parametrize(
    ("ends", "found"),
    [
        ("sys.exit(3)", {"status": "failed", "reason": "exit code 3: no such op"}),
        (
            "import os; os.kill(os.getpid(), 9)",
            {"status": "does not fit", "reason": "killed, as the system does when host memory runs out"},
        ),
        ("import time; time.sleep(60)", {"status": "failed", "reason": "not done after 1 s"}),
    ],
)
def test_a_process_that_leaves_no_answer_is_a_result_too(tmp_path, monkeypatch, ends, found):
    monkeypatch.setattr(worker, "COMMAND", (sys.executable, "-S", "-c", CRASHES.format(ends=ends)))
    asked = worker.Worker(tmp_path, limit=1.0 if "sleep" in ends else 60.0)
    assert asked.ask("measure", {}, {}) == found
    assert asked.ask("measure", {}, {}) == found  # of another process


ECHOES = """
import json, os, sys
for line in sys.stdin:
    asked = json.loads(line)["request"]
    found = {"status": asked["status"], "process": os.getpid(), "seen": os.environ.get("SEEN")}
    print(json.dumps(found), flush=True)
"""


def test_a_process_goes_on_until_something_fails_or_the_environment_changes(tmp_path, monkeypatch):
    monkeypatch.setattr(worker, "COMMAND", (sys.executable, "-S", "-c", ECHOES))
    asked = worker.Worker(tmp_path, limit=60.0)
    wanted = [("ok", "a"), ("ok", "a"), ("failed", "a"), ("ok", "a"), ("ok", "b"), ("ok", "b")]
    found = [asked.ask("measure", {"status": status}, {"SEEN": seen}) for status, seen in wanted]
    asked.close()
    assert [each["seen"] for each in found] == [seen for _, seen in wanted]
    processes = [each["process"] for each in found]
    assert [processes.index(each) for each in processes] == [0, 0, 0, 3, 4, 4]


def test_an_answer_is_judged_by_the_contract_of_its_dtype():
    import torch

    want = torch.ones(2, 3)
    for got, dtype, passes in (
        (want + 5e-6, "float32", True),
        (want + 5e-5, "float32", False),
        (want * float("nan"), "float32", False),
        (want[:1], "float32", False),
        (want + 1.05e-2, "bfloat16", True),
        (want + 1.2e-2, "bfloat16", False),
    ):
        assert measure.check(got, want, dtype, 1e-2 if dtype == "bfloat16" else 0.0)["passed"] == passes
    assert not measure.check(want + 5e-6, want, "float32", 0.0, allowed=0.0)["passed"]


def test_nested_compile_spans_count_once():
    spans = [("c", 0.0, 4.0), ("c", 1.0, 2.0), ("c", 3.0, 5.0), ("other", 0.0, 9.0)]
    assert clock.covered_seconds(spans, ("c",)) == 5.0


def test_a_sweep_varies_one_axis_at_a_time():
    base = Size("tiny", 9, 64, 96)
    assert ab.sweep(base, []) == [base]
    cases = ab.sweep(base, ["frames=9,17", "size=64x96,128x192"])
    assert cases == [base, base._replace(frames=17), base._replace(height=128, width=192)]


@pytest.mark.parametrize("axis", ["frames=a", "depth=3", "size=64", "size=60x96", "frames=0"])
@pytest.mark.usefixtures("torchax_off")
def test_a_bad_sweep_is_one_line(axis, refused):
    assert refused("bench", "--sweep", axis)


def test_a_comparison_is_drawn_over_frames_and_over_size(tmp_path):
    found = made_up_report(("torch", merged()), ("torchax", merged()), sizes=SIZES)
    paths = report.draw(found, tmp_path / "ab")
    assert [path.name for path in paths] == ["ab-bars.png", "ab-frames.png", "ab-size.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


def test_compile_times_are_those_of_the_jobs_that_the_table_names():
    times = [{"name": name, "compile_seconds": seconds} for name, seconds in (("first", 99.4), ("later", 63))]
    found = [
        {"job": f"{video}, one chip", "process_bytes": 2**31, "programs": times}
        for video in ("decode 49 x 480 x 720", "decode 8 x 480 x 720")
    ]
    rows = drawn.compile_times({"jobs": found}).splitlines()[2:]
    assert [row.replace("|", " ").split() for row in rows] == [
        ["decode", "49", "x", "480", "x", "720,", "one", "chip", "99", "63", "2.0"]
    ]


def test_docs_are_redrawn_between_their_marks(tmp_path):
    results, docs = tmp_path / "results", tmp_path / "docs"
    results.mkdir()
    docs.mkdir()
    marks = {
        "performance.md": ("plans", "compile-times"),
        "kernels.md": ("composition",),
        "accuracy.md": ("rounding",),
        "planning.md": ("sample",),
    }
    for name, parts in marks.items():
        text = "between\n".join(f"<!-- {part}: begin -->\nstale\n<!-- {part}: end -->\n" for part in parts)
        (docs / name).write_text(f"before\n{text}after\n")
    rows = (
        {"name": "128 to 3", "torch": 0.4, "0": 0.2, "2": 0.3, "4": 0.5},
        {"name": "a", "torch": 1, "4": 1},
    )
    for name, content in (("compile-times", {"jobs": []}), ("rounding", {"rows": rows}), ("plan-x", PLAN)):
        (results / f"{name}.json").write_text(json.dumps(content))
    drawn.redraw(results, docs)
    first = {name: (docs / name).read_text() for name in marks}
    drawn.redraw(results, docs)
    assert first == {name: (docs / name).read_text() for name in marks}
    for text in first.values():
        assert re.fullmatch(r"before\n(?s:.*)after\n", text)
        assert "stale" not in text
    table = first["performance.md"].split("between")[0]
    assert "Model 5b, bfloat16, libtpu 0.0.1, jax 0.10:" in table
    for row, text in (
        ("decode 9 x 480 x 720 1 v6e torchax 312 262 0.57 5.0", table),
        ("decode 480 x 720, 1 chip, steady chunk of 2 262.0 15.0 0.0 5.0 230.0 12.0", first["kernels.md"]),
    ):
        assert row.split() in [line.replace("|", " ").split() for line in text.splitlines()]
    assert "| 128 to 3 | 0.50 | 0.75 | 1.25 |\n| a | | | 1.00 |\n" in first["accuracy.md"]
    assert "  whole video s       0.55\n" in first["planning.md"]
    (results / "plan-x.json").write_text(json.dumps(PLAN | {"format": "other/2"}))
    with pytest.raises(ValueError, match="other/2"):
        drawn.redraw(results, docs)
