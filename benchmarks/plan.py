"""The TPU compiler's figures for each build, kept in results/ for the tables in docs/.

    python benchmarks/plan.py CASE [BACKEND ...]

A case takes minutes for each backend. `python benchmarks/report.py` then draws the tables.
"""

import argparse
import sys
from pathlib import Path

from cogvideox_torchax.backends import Use, names
from cogvideox_torchax.cli import main

RESULTS = Path(__file__).parent / "results"
BACKENDS = names(Use.PLAN)
SMALL = "--frames 49 --height 480 --width 720"
WIDE = "--frames 49 --height 720 --width 1280"
LARGE = "--frames 81 --height 768 --width 1360"
STILL = "--frames 1 --height 480 --width 720"
ONE_CHUNK = "--frames 13 --height 480 --width 720"
CASES = {
    "v6e-1-decode": f"--topology v6e:1x1 {SMALL}",
    "v6e-1-encode": f"--topology v6e:1x1 {SMALL} --encode",
    "v6e-1-decode-still": f"--topology v6e:1x1 {STILL}",
    "v6e-1-encode-still": f"--topology v6e:1x1 {STILL} --encode",
    "v6e-1-encode-13": f"--topology v6e:1x1 {ONE_CHUNK} --encode",
    "v6e-1-decode-wide": f"--topology v6e:1x1 {WIDE}",
    "v6e-8-decode-small": f"--topology v6e:2x4 --tp 8 {SMALL}",
    "v6e-8-decode": f"--topology v6e:2x4 --tp 8 {LARGE}",
    "v6e-8-encode": f"--topology v6e:2x4 --tp 8 {LARGE} --encode",
    **{
        f"{topology.partition(':')[0]}-{tp}-decode": f"--topology {topology} --tp {tp} {SMALL}"
        for topology, tp in (
            ("v5e:1x1", 1),
            ("v5e:2x4", 8),
            ("v5p:1x1x1", 1),
            ("v5p:2x2x2", 8),
            ("tpu7x:1x1x1", 1),
            ("tpu7x:2x2x1", 8),
        )
    },
}


def plan(case: str, backend: str) -> int:
    """Write results/plan-CASE-BACKEND.json."""
    output = RESULTS / f"plan-{case}-{backend}.json"
    options = f"--model 5b --no-advice --backend {backend} {CASES[case]}".split()
    return main(["plan", *options, "-o", str(output)])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("case", choices=CASES)
    parser.add_argument(
        "backends", nargs="*", metavar="BACKEND", help=f"of {', '.join(BACKENDS)}; all by default"
    )
    arguments = parser.parse_args()
    sys.exit(max(plan(arguments.case, backend) for backend in arguments.backends or BACKENDS))
