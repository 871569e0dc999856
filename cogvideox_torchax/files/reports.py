"""Reports: JSON files that name their format, Markdown tables, and what commands print."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cogvideox_torchax.files.whole import check_file, whole_file


def parse(text: str | bytes) -> Any:
    """Return the value of a JSON text; raise `ValueError` for another text, or one nested too deep."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


def load(path: Path, wanted: str) -> dict[str, Any]:
    """Return the report in a file; raise `ValueError` unless its field "format" is `wanted`."""
    try:
        report = parse(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as a report ({error})") from error
    actual = report.get("format") if isinstance(report, dict) else None
    if actual != wanted:
        raise ValueError(f"{path} is of format {actual}, this version reads {wanted}: make it again")
    return report


def write_text(path: Path, text: str) -> Path:
    """Write a file, whole or not at all; return its path."""
    check_file(path)
    with whole_file(path) as temporary:
        temporary.write_text(text)
    return path


def write_json(path: Path, report: dict[str, Any]) -> Path:
    """Write a report that `load` reads, whole or not at all; return its path."""
    return write_text(path, json.dumps(report, indent=1) + "\n")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table with its columns lined up; each row has as many cells as the head."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
        for line in (head, ["-" * width for width in widths], *rows)
    )


def print_report(report: dict[str, Any], as_json: bool = False) -> None:
    width = max(len(key) for key in report)
    rows = (f"  {key.replace('_', ' '):<{width}}  {_shown(value)}" for key, value in report.items())
    print(json.dumps(report) if as_json else "\n".join(rows))


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 0.01 else f"{value:.2f}"
    return str(value)
