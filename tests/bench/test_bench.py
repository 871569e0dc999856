"""bench: a real run at a tiny size, and what its report says when something goes wrong."""

import copy
import json
import subprocess

import pytest

from benchmarks import report as drawn
from cogvideox_torchax import cli
from cogvideox_torchax.bench import ab, report, worker
from cogvideox_torchax.plan import jobs
from cogvideox_torchax.runtime import clock
from cogvideox_torchax.vae.directions import Direction

HALF = {
    "check": {"passed": True, "relative_error": 1e-6, "rms_error": 1e-7},
    "lower_s": 0.5,
    "compile_s": 2.0,
    "start_s": 3.0,
    "steady_s": [1.0, 3.0, 2.0],
    "first_chunk_s": [0.5],
}
ROUND = {
    "status": "ok",
    "device": "TPU v6 lite",
    "load_s": 1.0,
    "host_peak_bytes": 5_000_000,
    "device_peak_bytes": None,
    "encode": HALF,
    "decode": HALF,
}
REFERENCE = {"status": "ok", "flops": {"encode": 10**9, "decode": 10**9}, "output_frames": 9}


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
    "programs": [PROGRAM | {"name": "first", "seconds": 0.3}, PROGRAM],
    "summary": {"whole_video_s": 0.55, "fits": True},
}


def merged(backend="torchax", rounds=(ROUND, ROUND), case=ab.Case(9, 16, 24)):  # noqa: B008 (frozen)
    return ab.merge(backend, list(rounds), REFERENCE, case, "bfloat16")


def made_up_report(*results, cases=((9, 16, 24),)):
    options = ab.Options(model="tiny")
    entries = [
        {"frames": f, "height": h, "width": w, "reference": REFERENCE, "results": list(results)}
        for f, h, w in cases
    ]
    return {"format": ab.FORMAT, **ab.about(options), "options": vars(options), "cases": entries}


@pytest.mark.usefixtures("torchax_off")
@pytest.mark.slow
def test_a_tiny_run_writes_every_field(model_directory, tmp_path, capsys):
    arguments = [
        "--model",
        str(model_directory),
        "--frames",
        "1",
        "--height",
        "16",
        "--width",
        "16",
        "--backends",
        "torch",
        "torchax",
    ]
    arguments += ["--repetitions", "1", "--warmups", "0", "--rounds", "1", "--quiet", "--json"]
    assert cli.main(["bench", *arguments, "-o", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads((tmp_path / "ab.json").read_text())
    assert found.keys() >= {"format", "date", "commit", "versions", "host", "options", "cases"}
    (case,) = found["cases"]
    assert case["reference"]["flops"]["decode"] > 0
    assert [result["backend"] for result in case["results"]] == ["torch", "torchax"]
    for result in case["results"]:
        assert result["status"] == "ok", result
        for kind in Direction:
            half = result[kind]
            assert half["check"]["passed"]
            assert half.keys() >= {
                "lower_s",
                "compile_cold_s",
                "start_cold_s",
                "start_warm_s",
                "first_frame_s",
            }
            assert len(half["steady"]["all_s"]) == 1
    assert "| torchax" in (tmp_path / "ab.md").read_text()
    assert (tmp_path / "ab-bars.png").read_bytes().startswith(b"\x89PNG")


def test_rounds_are_merged_into_cold_warm_median_and_spread():
    warm = copy.deepcopy(ROUND)
    warm["encode"] |= {"start_s": 0.7, "steady_s": [5.0, 4.0]}
    half = merged(rounds=(ROUND, warm))["encode"]
    assert (half["start_cold_s"], half["start_warm_s"], half["compile_cold_s"]) == (3.0, 0.7, 2.0)
    assert half["steady"] == {"median_s": 3.0, "min_s": 1.0, "max_s": 5.0, "all_s": [1.0, 3.0, 2.0, 5.0, 4.0]}
    assert half["frames_per_s"] == 3.0
    assert half["share_of_peak"] == pytest.approx(1e9 / 3 / 918e12)
    assert merged(rounds=(ROUND | {"device": "cpu"},))["encode"]["share_of_peak"] is None


def test_what_does_not_fit_or_is_wrong_is_said_and_shows_no_time():
    unfit = {"status": "does not fit", "reason": "RESOURCE_EXHAUSTED"}
    wrong = copy.deepcopy(ROUND) | {"status": "wrong"}
    wrong["encode"] = {"check": {"passed": False, "relative_error": 0.3}}
    text = report.markdown(made_up_report(merged("a", [unfit]), merged("b", [wrong]), merged()))
    assert "does not fit: RESOURCE_EXHAUSTED" in text
    rows = [line for line in text.splitlines() if line.startswith("| b ")]
    assert ["wrong (relative error 3.0e-01)" in row for row in rows] == [True, False]
    assert not any("2 (1 to 3)" in row for row in rows)


def test_memory_that_ran_out_is_told_from_other_failures():
    assert worker.failure(RuntimeError("RESOURCE_EXHAUSTED: of memory"))["status"] == "does not fit"
    assert worker.failure(MemoryError("6 GB"))["status"] == "does not fit"
    assert worker.failure(RuntimeError("no such op"))["status"] == "failed"


def test_a_failing_process_is_a_result_and_not_the_end(tmp_path):
    task = worker.Task("torch", str(tmp_path / "none"), "float32", 1, 16, 16, 1, 0, "none.npz")
    found = ab._run_process(task, {}, tmp_path, timeout=0.01)
    assert found == {"status": "failed", "reason": "not done after 0 s"}


@pytest.mark.parametrize(
    ("code", "found"),
    [
        (3, {"status": "failed", "reason": "exit code 3: no such op"}),
        (-9, {"status": "does not fit", "reason": "killed, as the system does when host memory runs out"}),
    ],
)
def test_a_process_that_leaves_no_answer_is_a_result_too(tmp_path, monkeypatch, code, found):
    ended = subprocess.CompletedProcess([], code, "", "Traceback\nno such op\n")
    monkeypatch.setattr(ab.subprocess, "run", lambda *_, **__: ended)
    task = worker.Task("torch", str(tmp_path / "none"), "float32", 1, 16, 16, 1, 0, "none.npz")
    assert ab._run_process(task, {}, tmp_path, timeout=1) == found


def test_an_answer_is_judged_by_the_contract_of_its_dtype():
    import torch

    want = torch.ones(2, 3)
    assert worker.check(want + 5e-6, want, "float32", None)["passed"]
    assert not worker.check(want + 5e-5, want, "float32", None)["passed"]
    assert not worker.check(want * float("nan"), want, "float32", None)["passed"]
    assert worker.check(want + 1.05e-2, want, "bfloat16", 1e-2)["passed"]
    assert not worker.check(want + 1.2e-2, want, "bfloat16", 1e-2)["passed"]
    assert not worker.check(want[:1], want, "float32", None)["passed"]


def test_nested_compile_spans_count_once():
    spans = [("c", 0.0, 4.0), ("c", 1.0, 2.0), ("c", 3.0, 5.0), ("other", 0.0, 9.0)]
    assert clock.union(spans, ("c",)) == 5.0


def test_a_sweep_varies_one_axis_at_a_time():
    base = ab.Case(9, 64, 96)
    assert ab.sweep(base, []) == [base]
    cases = ab.sweep(base, ["frames=9,17", "size=64x96,128x192"])
    assert cases == [base, ab.Case(17, 64, 96), ab.Case(9, 128, 192)]


@pytest.mark.parametrize("axis", ["frames=a", "depth=3", "size=64", "size=60x96", "frames=0"])
@pytest.mark.usefixtures("torchax_off")
def test_a_bad_sweep_is_one_line(axis, capsys):
    assert cli.main(["bench", "--sweep", axis]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_builds_are_compared_where_both_were_run_and_right():
    wrong = merged("flax") | {"status": "wrong"}
    both, one, bad = (
        made_up_report(*results)
        for results in ((merged("flax"), merged("torch")), (merged("torch"),), (merged("flax"), wrong))
    )
    both["cases"][0]["results"].append(merged("torchax"))
    lines = drawn.builds([both, one, bad]).splitlines()
    assert [line.split("|")[4].strip() for line in lines[2:]] == ["torch", "torchax", "flax"]
    assert [cell.strip() for cell in lines[3].split("|")[3:8]] == [
        "9 x 16 x 24",
        "torchax",
        "1.0e-06",
        "3",
        "3",
    ]


def test_docs_are_redrawn_between_their_marks(tmp_path):
    (tmp_path / "results").mkdir()
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "benchmarks.md"
    runs, plans = (f"<!-- {name}: begin -->\nstale\n<!-- {name}: end -->" for name in ("bench ab", "plan"))
    page.write_text(f"before\n{runs}\nbetween\n{plans}\nafter\n")
    comparison = tmp_path / "docs" / "migration.md"
    comparison.write_text("<!-- builds: begin -->\nstale\n<!-- builds: end -->")
    performance = tmp_path / "docs" / "performance.md"
    performance.write_text("<!-- composition: begin -->\nstale\n<!-- composition: end -->")
    found = made_up_report(merged(), cases=((9, 16, 24), (17, 16, 24), (9, 32, 48)))
    (tmp_path / "results" / "ab-x.json").write_text(json.dumps(found))
    (tmp_path / "results" / "plan-x.json").write_text(json.dumps(PLAN))
    drawn.redraw(tmp_path / "results", tmp_path / "docs")
    once = page.read_text()
    drawn.redraw(tmp_path / "results", tmp_path / "docs")
    assert page.read_text() == once
    assert once.startswith("before\n")
    assert once.endswith("after\n")
    assert "stale" not in once
    table = once.split("between")[1]
    assert "decode 9 x 480 x 720, model 5b, bfloat16, v6e:1x1, dp=1 tp=1" in table
    row = "torchax 250 100 50 80 20 1 12 50 20% 300 0.55 2.0 5.0 yes 30"
    assert row.split() in [line.replace("|", " ").split() for line in table.splitlines()]
    assert "stale" not in comparison.read_text()
    composition = performance.read_text()
    assert "stale" not in composition
    row = "decode 480 x 720, 1 chip, steady chunk 2 262.0 15.0 0.0 5.0 100.0 50.0 80.0 12.0"
    assert row.split() in [line.replace("|", " ").split() for line in composition.splitlines()]
    images = sorted(path.name for path in (tmp_path / "docs" / "images").iterdir())
    assert images == ["ab-x-bars.png", "ab-x-frames.png", "ab-x-size.png"]
    (tmp_path / "results" / "ab-x.json").write_text(json.dumps(found | {"format": "other/2"}))
    with pytest.raises(ValueError, match="other/2"):
        drawn.redraw(tmp_path / "results", tmp_path / "docs")
