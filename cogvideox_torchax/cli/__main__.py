"""`python -m cogvideox_torchax.cli`."""

import sys

from cogvideox_torchax.cli import main

sys.exit(main())
