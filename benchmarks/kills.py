"""A data set encoded while its processes are killed: complete and bit-equal in the end, nothing done twice.

    PYTHONPATH=. python benchmarks/kills.py          # writes results/kills.json, and docs/datasets.md's table

60 clips, 6 of them bad, 10 kills each: by one process, by two that share them, by actors of a local Ray; the
decoding of the result, and `encode`, `decode` and `reconstruct` of single clips, are killed too: 50 kills in
all. A kill is SIGKILL, after a number of clips (a time, for single ones) drawn at random. Compared with an
undisturbed run: shards and lists byte for byte, videos too. Random weights of a small model, in PyTorch.
Processes are forked off one that has imported everything, so that they work instead of starting.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pyarrow.parquet  # noqa: F401 (what the forked processes import is imported before the first fork)
import torch

import cogvideox_torchax.backends.native
import cogvideox_torchax.dataset.decoding  # noqa: F401
from cogvideox_torchax import cli
from cogvideox_torchax.dataset import manifest
from cogvideox_torchax.files import reports
from cogvideox_torchax.versions import versions
from tests import reference
from tests.dataset.conftest import write_clip

FORMAT = "cogvideox-torchax-kills/1"
PAGE = Path("docs/datasets.md")
CLIPS, BAD, SHARD = 60, 6, 8
OPTIONS = ("--backend", "torch", "--quiet", "--json")


def forked(work: Callable[[], int], log: Path) -> int:
    """Runs `work` in a process of its own; returns its id."""
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        with log.open("ab", buffering=0) as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        torch.set_num_threads(1)
        code = work()
    finally:
        os._exit(code)


def ended(child: int) -> int | None:
    """A process's exit code, negative for a signal; None while it runs."""
    done, status = os.waitpid(child, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if done else None


def waited(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def make(root: Path) -> int:
    """The clips, of which some are bad, and the model."""
    good = CLIPS - BAD
    for number in range(good):
        write_clip(root / "in" / f"{number % 7}" / f"{number:02}.mp4", shift=5 * number, height=32, width=48)
    for number in range(BAD):
        data = (root / "in" / "0" / "00.mp4").read_bytes()
        half = data[: len(data) // 2] if number % 2 else b"no video"
        (root / "in" / f"{number}" / f"bad{number}.mp4").write_bytes(half)
    reference.small_vae(**reference.THREE_LEVELS).save_pretrained(root / "vae")
    return 0


def files(directory: Path) -> dict[str, bytes]:
    """What a run has made, but the manifests."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.suffix != ".jsonl"
    }


class Bench:
    """One directory of clips, and the ways in which they are worked on."""

    def __init__(self, root: Path, seed: int):
        self.root, self.log = root, root / "log"
        self.random = random.Random(seed)
        assert waited(forked(lambda: make(root), self.log)) == 0

    def command(self, out: Path) -> list[str]:
        given = ("encode", self.root / "in", "-o", out, "--model", self.root / "vae", "--format", "parquet")
        return [*map(str, (*given, "--shard-size", SHARD)), *OPTIONS]

    def encode(self, out: Path, process: tuple[int, int] | None = None) -> int:
        more = process and ("--distributed", "--process", str(process[0]), "--processes", str(process[1]))
        return forked(lambda: cli.main([*self.command(out), *(more or ())]), self.log)

    def single(self, name: str, source: Path, out: Path) -> int:
        model = () if name == "decode" else ("--model", str(self.root / "vae"))
        command = [name, str(source), "-o", str(out), *model, *OPTIONS]
        return forked(lambda: cli.main(command), self.log)

    def killed_on_the_way(
        self, out: Path, start: Callable[[int], int], processes: int, kills: int, progress: Callable[[], int]
    ) -> dict[str, Any]:
        """Starts processes again and again until `kills` of them were killed, then lets them end.

        Args:
            out: what they write.
            start: starts process i.
            processes: at a time.
            kills: how many.
            progress: how many clips are done.
        """
        running = {i: start(i) for i in range(processes)}
        starts, done = processes, 0
        total = CLIPS - BAD
        for kill in range(kills):
            left = total - 2 - progress()
            goal = progress() + self.random.randint(0, max(left // (kills - kill), 0))
            limit = time.monotonic() + 120
            alive = [i for i in running if ended_now(running, i) is None]
            if not alive:
                break
            victim = self.random.choice(alive)
            while progress() < goal and time.monotonic() < limit and ended_now(running, victim) is None:
                time.sleep(0.002)
            time.sleep(self.random.random() * 0.05)
            if ended_now(running, victim) is None:
                os.kill(running[victim], signal.SIGKILL)
                waited(running[victim])
                done += 1
            running[victim] = start(victim)
            starts += 1
        codes = [CODES.pop(running[i]) if running[i] in CODES else waited(running[i]) for i in running]
        return {"kills": done, "starts": starts, "exit_codes": codes}


CODES: dict[int, int] = {}


def ended_now(running: dict[int, int], which: int) -> int | None:
    """As `ended`; asked again, it says the same."""
    child = running[which]
    if child not in CODES:
        code = ended(child)
        if code is not None:
            CODES[child] = code
    return CODES.get(child)


def done_lines(out: Path) -> int:
    return sum(line["kind"] == "done" for line in manifest.lines(out)) if out.exists() else 0


def judged(out: Path, wanted: dict[str, bytes]) -> dict[str, Any]:
    """What there is in the end, against an undisturbed run."""
    found = files(out)
    counted = Counter((line["kind"], line.get("index", line.get("id"))) for line in manifest.lines(out))
    twice = [key for key, count in counted.items() if count > 1 and key[0] == "done"]
    return {
        "bit_equal": found == wanted,
        "files": len(found),
        "bad_clips": len({key for key in counted if key[0] == "bad"}),
        "done_twice": len(twice),
        "left_behind": len(list(out.rglob(".*.writing-*"))) + len(list((out / "work").glob("*"))),
    }


def singles(bench: Bench, kills: int) -> list[dict[str, Any]]:
    """`encode`, `decode` and `reconstruct` of one clip, each killed and then run to its end."""
    clip = bench.root / "in" / "0" / "00.mp4"
    results = []
    for name, suffix in (("encode", ".safetensors"), ("decode", ".mp4"), ("reconstruct", ".mp4")):
        source = bench.root / "encode" / "whole.safetensors" if name == "decode" else clip
        directory = bench.root / name
        directory.mkdir(exist_ok=True)
        started = time.monotonic()
        assert waited(bench.single(name, source, directory / f"whole{suffix}")) == 0
        seconds = time.monotonic() - started
        killed = runs = equal = 0
        while killed < kills and runs < 5 * kills:
            child = bench.single(name, source, directory / f"again{suffix}")
            time.sleep(bench.random.random() * seconds)
            if ended(child) is None:
                os.kill(child, signal.SIGKILL)
                waited(child)
                killed += 1
            assert waited(bench.single(name, source, directory / f"again{suffix}")) == 0
            again, whole = ((directory / f"{which}{suffix}").read_bytes() for which in ("again", "whole"))
            equal += again == whole
            runs += 1
        left = [path.name for path in directory.iterdir() if path.name.startswith(".")]
        results.append({"way": name, "kills": killed, "bit_equal": equal == runs, "left_behind": len(left)})
        print(results[-1], flush=True)
    return results


def decoding(bench: Bench, shards: Path, kills: int) -> dict[str, Any]:
    def start(out: Path) -> int:
        command = ["decode", str(shards), "-o", str(out), *OPTIONS]
        return forked(lambda: cli.main(command), bench.log)

    assert waited(start(bench.root / "videos")) == 0
    out = bench.root / "videos-killed"
    found = bench.killed_on_the_way(out, lambda _: start(out), 1, kills, lambda: done_lines(out))
    return {"way": "decode a directory", **found, **judged(out, files(bench.root / "videos"))}


RAY = """
import os, sys
from pathlib import Path
from cogvideox_torchax import cli
from cogvideox_torchax.dataset import ray as engine

class Known(engine.ClipActor):
    def __init__(self, recipe):
        super().__init__(recipe)
        Path(sys.argv[1], str(os.getpid())).write_text("")

engine.ClipActor = Known
sys.exit(cli.main(sys.argv[2:]))
"""


def on_ray(bench: Bench, wanted: dict[str, bytes], kills: int) -> dict[str, Any]:
    """Actors of a local Ray, killed one by one; the driver lives."""
    out, pids = bench.root / "ray", bench.root / "pids"
    pids.mkdir()
    command = [*bench.command(out), "--ray", "--actors", "2"]
    driver = subprocess.Popen(
        [sys.executable, "-c", RAY, str(pids), *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    killed = 0
    while killed < kills and driver.poll() is None:
        alive = [int(path.name) for path in pids.iterdir() if Path("/proc", path.name).exists()]
        finished = len(list((out / "work").glob("*.safetensors"))) if out.exists() else 0
        if not alive or done_lines(out) + finished < (killed + 1) * (CLIPS - BAD) // (kills + 2):
            time.sleep(0.01)
            continue
        time.sleep(bench.random.random() * 0.2)
        victim = bench.random.choice(alive)
        os.kill(victim, signal.SIGKILL)
        (pids / str(victim)).unlink()
        killed += 1
    _, errors = driver.communicate(timeout=900)
    assert driver.returncode == 1, errors[-2000:]  # as there are bad clips
    return {
        "way": "actors of a local Ray",
        "kills": killed,
        **judged(out, wanted),
    }


def drawn(document: dict[str, Any]) -> str:
    """The page's table."""
    head = ("what was killed", "kills", "equal byte for byte", "done twice", "left behind")
    rows = [
        (
            result["way"],
            str(result["kills"]),
            "yes" if result["bit_equal"] else "no",
            str(result.get("done_twice", "")),
            str(result["left_behind"]),
        )
        for result in document["results"]
    ]
    return reports.table(head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--output", type=Path, default=Path("benchmarks/results/kills.json"))
    parser.add_argument("--kills", type=int, default=10, help="of each way (default: 10)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--without-ray", action="store_true")
    args = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="kills-"))
    bench = Bench(root, args.seed)
    assert waited(bench.encode(root / "undisturbed")) == 1  # as there are bad clips
    wanted = files(root / "undisturbed")
    results = []
    for way, processes in (("one process", 1), ("two processes", 2)):
        out = root / way.replace(" ", "-")

        def start(i: int, out: Path = out, processes: int = processes) -> int:
            return bench.encode(out, None if processes == 1 else (i, processes))

        found = bench.killed_on_the_way(out, start, processes, args.kills, lambda out=out: done_lines(out))
        results.append({"way": way, **found, **judged(out, wanted)})
        print(results[-1], flush=True)
    results.append(decoding(bench, root / "undisturbed", args.kills // 2))
    print(results[-1], flush=True)
    results += singles(bench, args.kills // 2)
    if not args.without_ray:
        results.append(on_ray(bench, wanted, args.kills))
        print(results[-1], flush=True)
    document = {
        "format": FORMAT,
        "clips": CLIPS,
        "bad": BAD,
        "seed": args.seed,
        "kills": sum(result["kills"] for result in results),
        "all_bit_equal": all(result["bit_equal"] for result in results),
        "versions": versions("torch", "torchax", "jax", "diffusers"),
        "results": results,
    }
    reports.write_json(args.output, document)
    reports.fill(PAGE, "kills", drawn(document))
    print(json.dumps(document["kills"]), document["all_bit_equal"])
    shutil.rmtree(root)


if __name__ == "__main__":
    main()
