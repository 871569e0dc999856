"""The tables of the documents, and the report of a run."""

import re
from pathlib import Path

import pytest

from benchmarks import __main__ as command, draw, estimated_tables, jobs, pages, report

TIMES = {"start_s": 3.0, "lower_s": 0.5, "compile_s": 2.0}
GOOD = {
    "status": "ok",
    "check": {"passed": True, "relative_error": 1e-6, "rms_error": 1e-7},
    "whole": TIMES | jobs.spread([1.0, 3.0, 2.0]),
    "parts": [
        {"part": name, **TIMES, **jobs.spread([0.5]), "peak_bytes": None} for name in ("first", "later")
    ],
    "host_peak_bytes": 5_000_000,
}
WRONG = {"status": "wrong", "check": {"passed": False, "relative_error": 0.3}}
UNFIT = {"status": "does not fit", "reason": "RESOURCE_EXHAUSTED"}


def made_up(*results, **fields):
    """Return a report of results by way, of decoding."""
    return {
        **report.about(),
        "device": {"platform": "cpu", "kind": "cpu", "used": 1},
        "dtype": "float32",
        "mesh": {"dp": None, "tp": None},
        "results": [
            {"job": "decode", "way": way, "size": jobs.Size("tiny", 9, 16, 24)._asdict(), **found}
            for way, found in results
        ],
        **fields,
    }


def cells(text):
    return [
        [cell.strip() for cell in row.strip("|").split("|")] for row in text.splitlines() if row[:1] == "|"
    ]


@pytest.mark.parametrize(("page", "name"), draw.TABLES)
def test_a_page_shows_what_its_results_hold(page, name):
    text = (pages.ROOT / page).read_text()
    assert pages.filled(text, name, draw.TABLES[page, name]()) == text, "run: python -m benchmarks draw"


def test_every_result_is_drawn_or_linked(monkeypatch):
    opened, open_file = set(), Path.open
    monkeypatch.setattr(
        Path, "open", lambda path, *args, **how: opened.add(path.name) or open_file(path, *args, **how)
    )
    texts = [page.read_text() for page in (pages.ROOT / "docs").glob("*.md")]
    for drawn in draw.TABLES.values():
        drawn()
    linked = {name for text in texts for name in re.findall(r"benchmarks/results/([\w-]+\.json)", text)}
    assert {path.name for path in pages.RESULTS.rglob("*.json")} <= opened | linked


def test_sentences_say_what_the_tables_beside_them_say():
    """A step of 2b on eight chips beside four, and what fits on one v5e."""
    performance, planning, readme = (
        (pages.ROOT / page).read_text() for page in ("docs/performance.md", "docs/planning.md", "README.md")
    )
    rows = {tuple(row[:2]): row[2:] for text in (performance, planning) for row in cells(text)}
    four, eight = (float(rows["2b", f"v6e:{mesh}"][0]) for mesh in ("2x2, dp=2 tp=2", "2x4, dp=2 tp=4"))
    longer = "a step of 2b takes longer on eight chips than on four"
    assert (longer in " ".join(performance.split())) == (eight > four)
    assert (rows["5b", "1 v6e"][2], rows["5b", "1 v5e"][2]) == ("yes", "with offload")
    assert "fits on one v6e chip, and on one v5e chip with [offload]" in " ".join(readme.split())


@pytest.mark.parametrize("page", ["README.md", "docs/performance.md"])
def test_a_page_calls_estimates_as_short_as_the_intervals_do(page):
    late = round(100 * max(high for _low, high in estimated_tables.stretches().values()) - 100)
    text = " ".join((pages.ROOT / page).read_text().split())
    assert set(re.findall(r"up to (\d+) % too short", text)) == {str(late)}


def test_a_few_steps_take_less_and_no_negative_prompt():
    whole, few = (estimated_tables.video_seconds("5b", "v6e-1", steps) for steps in (None, 4))
    step = pages.estimate("one-pass-5b-v6e-1")["summary"]["with_collectives_s"]
    prompts, steps, *decoding = estimated_tables.spent(pages.estimate("pipeline-5b-v6e-1"))
    assert (whole, few) == pytest.approx(
        (prompts + steps + sum(decoding), prompts / 2 + 4 * step + sum(decoding))
    )


def test_a_page_without_the_marks_of_a_table_is_refused(refused):
    with pytest.raises(ValueError, match="no lines <!-- plans: begin -->"):
        pages.filled("text", "plans", "table")
    assert "got page nowhere.md: one of README.md" in refused("draw", "nowhere.md", main=command.main)


def test_a_result_has_a_row_for_the_whole_run_and_one_for_each_part():
    whole = GOOD["whole"] | {"warm_starts_s": [0.5, 0.75, 1.5]}
    estimated = GOOD | {"whole": whole, "flops": 4e9, "estimate": {"later": 0.25}}
    head, _line, *rows = cells(report.markdown(made_up(("torchax", estimated))))
    found = [dict(zip(head, row, strict=True)) for row in rows]
    assert [(row["part"], row["estimate over measured"]) for row in found] == [
        ("whole", ""),
        ("first", ""),
        ("later", "0.50"),
    ]
    assert found[0] == found[0] | {
        **{"cold start, s": "3", "warm start, s": "0.75", "GFLOP/s": "2"},
        **{"run, ms": "2e+03", "fastest to slowest": "1e+03 to 3e+03", "runs": "3"},
    }


def test_what_does_not_fit_or_is_wrong_is_said_and_shows_no_time_and_no_ratio():
    beyond = GOOD | {"check": GOOD["check"] | {"passed": False, "relative_error": 0.5}}
    text = report.markdown(made_up(("torch", UNFIT), ("flax", WRONG), ("torchax", beyond)))
    _head, _line, *rows = cells(text)
    assert [row[3] for row in rows[:3]] == [
        "does not fit: RESOURCE_EXHAUSTED",
        "wrong: relative error 3.0e-01",
        "5.0e-01, beyond the contract",
    ]
    assert not any(any(row[4:]) for row in rows[:2])
    assert "torchax/flax" not in text


FIELDS = {"commit": "a" * 40 + "+", "switched_off": {"group_norm": "wrong: 0.3"}}


@pytest.mark.parametrize(
    ("results", "fields", "words"),
    [
        (
            [("torchax", GOOD), ("flax", GOOD | {"whole": TIMES | jobs.spread([4.0])})],
            {},
            "\n\n- decode of tiny, 9 x 16 x 24: torchax/flax 0.50 (2e+03 ms / 4e+03 ms)\n",
        ),
        ([("torchax", GOOD)], FIELDS, f"commit {'a' * 12}+, "),
        ([("torchax", GOOD)], FIELDS, "\nKernel of group_norm switched off: wrong: 0.3.\n"),
    ],
)
def test_a_report_has_torchax_beside_flax_its_commit_and_kernels_that_are_off(results, fields, words):
    assert words in report.markdown(made_up(*results, **fields))
