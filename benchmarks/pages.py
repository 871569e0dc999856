"""The kept results, and the marks in the documents between which they are drawn."""

import re
from pathlib import Path
from typing import Any

from cogvideox_torchax.files.reports import load, write_text

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
FORMAT = "cogvideox-torchax-estimate/1"
"""The format of an estimate."""


def estimate(name: str) -> dict[str, Any]:
    """Return the kept estimate of a name in results/."""
    return load(RESULTS / f"{name}.json", FORMAT)


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
