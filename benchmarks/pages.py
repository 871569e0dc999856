"""Puts tables into the pages of docs/."""

import re
from pathlib import Path

from cogvideox_torchax.files.reports import write_text


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
