"""Shared by the benchmarks: the option to draw without measuring, and tables put into the pages of docs/."""

import argparse
import re
from pathlib import Path

from cogvideox_torchax.files.reports import write_text


def draws_only(description: str) -> bool:
    """Parse a benchmark's command line; return whether its tables are to be drawn from the kept results."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draw", action="store_true", help="measure nothing: draw the kept results")
    return parser.parse_args().draw


def fill(page: Path, name: str, drawn: str) -> None:
    """Put `drawn` into a Markdown page, between `<!-- name: begin -->` and `<!-- name: end -->`.

    Tables go there without padding.
    """
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    text = page.read_text()
    if begin not in text or end not in text:
        raise ValueError(f"{page} has no lines {begin} and {end} between which the results go")
    before, after = text.split(begin)[0], text.split(end)[1]
    drawn = re.sub(
        r"^\|.*\|$", lambda row: re.sub(r"  +", " ", re.sub(r"---+", "---", row[0])), drawn, flags=re.M
    )
    write_text(page, f"{before}{begin}\n\n{drawn.rstrip()}\n\n{end}{after}")
