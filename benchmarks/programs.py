"""The table of public programs that `scripts/programs_of_others.py` ran."""

from typing import Any

from benchmarks.pages import RESULTS
from cogvideox_torchax.files.reports import load, table

FORMAT = "programs/1"
RESULT = RESULTS / "programs_of_others.json"
HEAD = ("program", "commit", "devices", "error", "first call, s", "second call, s")


def drawn(document: dict[str, Any] | None = None) -> str:
    """Return a table with a row for each program and set of devices; by default that of the kept run."""
    rows = []
    for row in (document or load(RESULT, FORMAT))["rows"]:
        if "failed" in row:
            figures = (row["failed"], "", "")
        else:
            again = f", {row['compiled']} compiled" if row["compiled"] else ""
            left = f", {', '.join(row['left_on_host'])} on the host" if row["left_on_host"] else ""
            figures = (f"{row['error']:.0e}{left}", f"{row['first_s']:.1f}", f"{row['second_s']:.1f}{again}")
        rows.append((row["program"], row["commit"], row["devices"], *figures))
    return table(HEAD, rows)
