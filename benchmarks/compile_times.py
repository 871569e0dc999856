"""How long do a TPU's programs compile, and in how much memory of the machine that compiles?

python benchmarks/compile_times.py run [WORDS ...]    # compiles jobs that are not kept yet: minutes each
python benchmarks/compile_times.py                    # draws what is kept into docs/planning.md

Each job is a `plan` in a process of its own. What `benchmarks/plan.py` keeps of the same jobs is taken over.
WORDS choose jobs by words of their names, as in `run decode 480`. After a change of the programs, delete
results/compile-times.json first.
"""

import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from plan import CASES, RESULTS

from cogvideox_torchax.cli import main
from cogvideox_torchax.files.reports import fill, load, table, write_json
from cogvideox_torchax.plan.jobs import FORMAT as FORMAT_OF_PLANS
from cogvideox_torchax.versions import versions

RESULT, PAGE = RESULTS / "compile-times.json", RESULTS.parents[1] / "docs" / "planning.md"
FORMAT = "cogvideox-torchax compile times 1"

SIZES = (480, 720), (720, 1280), (768, 1360), (1360, 768)
CHIPS = {"one chip": "--topology v6e:1x1", "eight chips": "--topology v6e:2x4 --tp 8"}
FRAMES = {"decode": (1, 8, 49), "encode": (1, 8, 13, 49)}
"""Of 1, 8, 9, 13, 49 and 81 frames those whose programs differ: 9 and 81 have the programs of 49, and 13 to
decode have those of 8 and the later one of 49."""

LIMIT = 900
"""Seconds for a job's one or two programs."""


def jobs() -> dict[str, str]:
    """What `plan` is told, by name."""
    found = {}
    for chips, topology in CHIPS.items():
        for height, width in SIZES:
            for kind, numbers in FRAMES.items():
                for frames in numbers:
                    size = f"--frames {frames} --height {height} --width {width}"
                    options = f"{topology} {size}{' --encode' if kind == 'encode' else ''}"
                    found[f"{kind} {frames} x {height} x {width}, {chips}"] = options
    return found


def kept(options: str) -> Path | None:
    """What `benchmarks/plan.py` keeps of a job, or of one of 81 frames where it has 49."""
    same = {options, options.replace("--frames 49", "--frames 81")}
    found = (RESULTS / f"plan-{case}-torchax.json" for case, said in CASES.items() if said in same)
    return next((path for path in found if path.exists() and "process_bytes" in path.read_text()), None)


def compile_job(options: str, output: Path) -> bool:
    """Plans in a process of its own; whether it ended in time."""
    child = os.fork()
    if not child:
        signal.alarm(LIMIT)
        code = 70
        try:
            code = main(["plan", "--model", "5b", "--no-advice", *options.split(), "-o", str(output)])
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code not in (0, -signal.SIGALRM):
        raise RuntimeError(f"`plan {options}` ended with {code}")
    return code == 0


def read(name: str, plan: Path) -> dict[str, Any]:
    document = load(plan, FORMAT_OF_PLANS)
    read_of_each = ("name", "frames", "compile_seconds", "temp_bytes")
    programs = [{key: program[key] for key in read_of_each} for program in document["programs"]]
    return {"job": name, "process_bytes": document["process_bytes"], "programs": programs}


def run(words: list[str]) -> None:
    of_now = versions("jax", "libtpu")
    report: dict[str, Any] = {"format": FORMAT, "versions": of_now, "limit": LIMIT, "jobs": []}
    if RESULT.exists() and load(RESULT, FORMAT)["versions"] == of_now:
        report = load(RESULT, FORMAT)
    known = {row["job"] for row in report["jobs"]}
    for name, options in jobs().items():
        if name in known or not set(words) <= set(name.replace(",", "").split()):
            continue
        with tempfile.TemporaryDirectory() as scratch:
            plan = kept(options) or Path(scratch) / "plan.json"
            in_time = plan.exists() or compile_job(options, plan)
            report["jobs"].append(read(name, plan) if in_time else {"job": name, "programs": []})
        write_json(RESULT, report)


def draw() -> None:
    report = load(RESULT, FORMAT)
    order = [*jobs()]
    rows = []
    for row in sorted(report["jobs"], key=lambda row: order.index(row["job"])):
        seconds = {program["name"]: f"{program['compile_seconds']:.0f}" for program in row["programs"]}
        first = seconds.get("first", f"more than {report['limit']}")
        memory = f"{row['process_bytes'] / 2**30:.1f}" if seconds else ""
        rows.append((row["job"], first, seconds.get("later", ""), memory))
    fill(PAGE, "compile times", table(("job", "first chunk, s", "steady chunk, s", "GiB"), rows))


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:
        run(sys.argv[2:])
    draw()
