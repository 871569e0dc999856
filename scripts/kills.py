"""Kills the command line while it works on clips: what it leaves in the end is that of an undisturbed run.

    PYTHONPATH=. python scripts/kills.py --clips 60 --kills 10

Clips are encoded by one process, in windows, and by two processes that share them; their latents are packed
and decoded; single clips are encoded, decoded and reconstructed. Each command is killed (SIGKILL) at random
times, and run again until it ends. Then all files but the lists of failed clips must equal, byte for byte,
those of an undisturbed run, and no complete file of a clip may have been written again. The model is a small
one with random weights, in PyTorch.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests import reference
from tests.dataset.conftest import write_clip

BAD_EVERY = 10
"""Every tenth clip is a truncated file."""
OPTIONS = ("--backend", "torch", "--quiet")


def make(root: Path, clips: int) -> None:
    """Write the model, and so many clips, of which every tenth is truncated."""
    for number in range(clips):
        path = root / "in" / f"{number % 7}" / f"{number:02}.mp4"
        write_clip(path, shift=5 * number, height=32, width=48)
        if number % BAD_EVERY == 5:
            path.write_bytes(path.read_bytes()[: 100 * (number % 4)])  # after 100 or 300 bytes
    reference.small_vae().save_pretrained(root / "vae")


def commands(root: Path, out: Path) -> dict[str, list[list[object]]]:
    """Return, by way to work, the arguments of each process of that way; they write into `out`.

    The ways to decode read what an undisturbed run of an earlier way has written below `root`.
    """
    model, clip = ("--model", root / "vae"), root / "in" / "0" / "00.mp4"
    encode = ["encode", root / "in", "-o", out / "encoded", *model, *OPTIONS]
    latents = root / "one process" / "whole" / "encoded"
    share = ["--distributed", "--processes", 2, "--process"]
    return {
        "one process": [encode],
        "two processes": [[*encode, *share, number] for number in range(2)],
        "windows": [[*encode, "--windows", "--frames", 4]],
        "pack": [["pack", latents, "-o", out / "packed", "--format", "parquet", "--shard-size", 8]],
        "decode a directory": [["decode", latents, "-o", out / "videos", *OPTIONS]],
        "encode": [["encode", clip, "-o", out / "a.safetensors", *model, *OPTIONS]],
        "decode": [["decode", root / "encode" / "whole" / "a.safetensors", "-o", out / "a.mp4", *OPTIONS]],
        "reconstruct": [["reconstruct", clip, "-o", out / "a.mp4", *model, *OPTIONS]],
    }


def start(command: list[object]) -> subprocess.Popen[bytes]:
    """Start the command line with arguments."""
    words = [sys.executable, "-m", "cogvideox_torchax.cli", *map(str, command)]
    return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def files(directory: Path) -> dict[str, bytes]:
    """Return the bytes of a directory's complete files by path, but for lists of failures."""
    found = (path for path in sorted(directory.rglob("*")) if path.is_file() and path.suffix != ".jsonl")
    names = {path.relative_to(directory).as_posix(): path for path in found}
    return {name: path.read_bytes() for name, path in names.items() if ".partial/" not in name}


def disturbed(root: Path, way: str, kills: int, chance: random.Random) -> dict[str, object]:
    """Work once undisturbed and once with kills; return a comparison of both.

    Args:
        root: directory of the clips, the model and all outputs.
        way: one of `commands`.
        kills: number of kills of running processes.
        chance: draws the times of kills, and the processes.

    Returns:
        The number of "kills", whether the files are "equal", and the numbers of files that were "changed"
        after they were complete, and of temporary files "left behind".
    """
    whole, out = root / way / "whole", root / way / "killed"
    for directory in (whole, out):
        directory.mkdir(parents=True)
    began = time.monotonic()
    for process in [start(command) for command in commands(root, whole)[way]]:
        process.wait()
    seconds = time.monotonic() - began
    work, killed = commands(root, out)[way], 0
    times: dict[str, set[int]] = {}  # by the path of a complete file: when it was written
    running = [start(command) for command in work]
    while killed < kills:
        time.sleep(chance.random() * seconds)
        victim = chance.randrange(len(work))
        killed += running[victim].poll() is None
        running[victim].kill()
        running[victim].wait()
        note_times(out, times)
        running[victim] = start(work[victim])
    for process in running:
        process.wait()
    note_times(out, times)
    return {
        "kills": killed,
        "equal": files(out) == files(whole) != {},
        "changed": sum(len(found) > 1 for found in times.values()),
        "left behind": len([*out.rglob(".*.partial*"), *out.rglob(".*.lock")]),
    }


def note_times(directory: Path, times: dict[str, set[int]]) -> None:
    """Add when each complete file of an output directory was written to the times of its path."""
    for name in (name for name in files(directory) if "/" in name):  # a single output is made again
        times.setdefault(name, set()).add((directory / name).stat().st_mtime_ns)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clips", type=int, default=60)
    parser.add_argument("--kills", type=int, default=10, help="of each way to work (default: 10)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    chance, wrong = random.Random(args.seed), []
    with tempfile.TemporaryDirectory(prefix="kills-") as directory:
        root = Path(directory)
        make(root, args.clips)
        for way in commands(root, root):
            found = disturbed(root, way, args.kills, chance)
            print(f"{way}: {found}", flush=True)
            if not found["equal"] or found["changed"] or found["left behind"]:
                wrong.append(way)
    sys.exit(f"not as undisturbed: {', '.join(wrong)}" if wrong else 0)


if __name__ == "__main__":
    main()
