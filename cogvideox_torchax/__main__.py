"""`python -m cogvideox_torchax COMMAND ...`, which is `cogvideox-torchax COMMAND ...`."""

import sys

from cogvideox_torchax.cli import main

if __name__ == "__main__":
    sys.exit(main())
