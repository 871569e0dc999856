"""Kills the command line while it works on clips: what it leaves in the end is that of an undisturbed run.

    PYTHONPATH=. python scripts/kills.py --clips 60 --kills 10

Clips are encoded by one process and by two that share them, their latents decoded, and single clips encoded,
decoded and reconstructed. Each is killed (SIGKILL) so often, at random, and run again until it ends. Compared
are all files byte for byte, but the lists of what was done. Random weights of a small model, in PyTorch.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from cogvideox_torchax.dataset import manifest
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
    encode = ["encode", root / "in", "-o", out / "encoded", *model, "--format", "parquet", "--shard-size", 8]
    share = ["--distributed", "--processes", 2, "--process"]
    return {
        "one process": [encode],
        "two processes": [[*encode, *share, number] for number in range(2)],
        "decode a directory": [["decode", root / "one process" / "whole" / "encoded", "-o", out / "videos"]],
        "encode": [["encode", clip, "-o", out / "a.safetensors", *model]],
        "decode": [["decode", root / "encode" / "whole" / "a.safetensors", "-o", out / "a.mp4"]],
        "reconstruct": [["reconstruct", clip, "-o", out / "a.mp4", *model]],
    }


def start(command: list[object]) -> subprocess.Popen[bytes]:
    """Start the command line with arguments, and `OPTIONS`."""
    words = [sys.executable, "-m", "cogvideox_torchax.cli", *map(str, command), *OPTIONS]
    return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def files(directory: Path) -> dict[str, bytes]:
    """Return the bytes of a directory's files by path, except manifests, which depend on the kills."""
    found = (path for path in sorted(directory.rglob("*")) if path.is_file() and path.suffix != ".jsonl")
    return {str(path.relative_to(directory)): path.read_bytes() for path in found}


def disturbed(root: Path, way: str, kills: int, chance: random.Random) -> dict[str, object]:
    """Work once undisturbed and once with kills; return a comparison of both.

    Args:
        root: directory of the clips, the model and all outputs.
        way: one of `commands`.
        kills: number of kills of running processes.
        chance: draws the times of kills, and the processes.

    Returns:
        The number of "kills", whether the files are "equal", and the numbers of clips "done twice" and of
        temporary files "left behind".
    """
    whole, out = root / way / "whole", root / way / "killed"
    for directory in (whole, out):
        directory.mkdir(parents=True)
    began = time.monotonic()
    for process in [start(command) for command in commands(root, whole)[way]]:
        process.wait()
    seconds = time.monotonic() - began
    work, killed = commands(root, out)[way], 0
    running = [start(command) for command in work]
    while killed < kills:
        time.sleep(chance.random() * seconds)
        victim = chance.randrange(len(work))
        killed += running[victim].poll() is None
        running[victim].kill()
        running[victim].wait()
        running[victim] = start(work[victim])
    for process in running:
        process.wait()
    done = Counter(
        line.get("index", line.get("id"))
        for path in out.glob("*/")
        for line in manifest.lines(path)
        if line["kind"] == "done"
    )
    return {
        "kills": killed,
        "equal": files(out) == files(whole) != {},
        "done twice": sum(count > 1 for count in done.values()),
        "left behind": len([*out.rglob(".*.partial*"), *out.rglob("work/*")]),
    }


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
            if not found["equal"] or found["done twice"] or found["left behind"]:
                wrong.append(way)
    sys.exit(f"not as undisturbed: {', '.join(wrong)}" if wrong else 0)


if __name__ == "__main__":
    main()
