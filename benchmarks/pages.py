"""The kept results, and the marks in the documents between which they are drawn."""

import re
from pathlib import Path
from typing import Any

from cogvideox_torchax.files.reports import load, parse, write_json, write_text
from cogvideox_torchax.versions import versions

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
TINY_PIPELINE = ROOT / "cogvideox_torchax" / "assets" / "tiny-pipeline"
DEMO_MODEL = TINY_PIPELINE / "vae"
FORMAT = "cogvideox-torchax-estimate/2"
"""The format of an estimate."""


def estimate(name: str) -> dict[str, Any]:
    """Return the kept estimate of a name in results/; `ValueError` if it is of another format."""
    return load(RESULTS / f"{name}.json", FORMAT)


def estimates(pattern: str) -> list[dict[str, Any]]:
    """Return the kept estimates whose names in results/ match a pattern, sorted by name."""
    return [estimate(path.stem) for path in sorted(RESULTS.glob(f"{pattern}.json"))]


def keep(name: str, report: dict[str, Any], *packages: str) -> None:
    """Write a report into results/, with the versions of the packages that its figures depend on."""
    write_json(RESULTS / f"{name}.json", {"versions": versions(*packages), **report})


def kept(name: str) -> dict[str, Any]:
    """Return the report of a name in results/, which is of this checkout's code as the results are."""
    return parse((RESULTS / f"{name}.json").read_text())


def fill(page: Path, name: str, drawn: str) -> None:
    """Put `drawn` into a Markdown page, between `<!-- name: begin -->` and `<!-- name: end -->`."""
    write_text(page, filled(page.read_text(), name, drawn))


def filled(text: str, name: str, drawn: str) -> str:
    """Return a page's text with `drawn` between the marks of that name; its tables without padding."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    if begin not in text or end not in text:
        raise ValueError(f"a page has no lines {begin} and {end} between which the results go")
    before, after = text.split(begin)[0], text.split(end)[1]
    drawn = re.sub(
        r"^\|.*\|$", lambda row: re.sub(r"  +", " ", re.sub(r"---+", "---", row[0])), drawn, flags=re.M
    )
    return f"{before}{begin}\n\n{drawn.rstrip()}\n\n{end}{after}"
