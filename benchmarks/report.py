"""Redraws the tables and plots of docs/benchmarks.md from benchmarks/results/."""

import sys
from pathlib import Path

from cogvideox_torchax.bench.report import redraw

ROOT = Path(__file__).parents[1]

if __name__ == "__main__":
    try:
        redraw(ROOT / "benchmarks" / "results", ROOT / "docs")
    except ValueError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
