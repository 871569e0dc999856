"""The same as `cogvideox-torchax bench ab`; `python benchmarks/ab.py --help` shows the options."""

import sys

from cogvideox_torchax.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "ab", *sys.argv[1:]]))
