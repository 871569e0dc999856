"""Messages of other packages do not reach a user's terminal."""

import subprocess
import sys

import pytest

TALK = """
import sys, warnings
from cogvideox_torchax import cli
assert cli.main(["encode", "none.mp4", "-o", "z.safetensors", *sys.argv[1:]]) == 2
from diffusers.utils import logging as diffusers
from transformers.utils import logging as transformers
for logging in (diffusers, transformers):
    logging.get_logger(logging.__name__).warning("accelerate was not found")
    list(logging.tqdm([1], desc="Loading pipeline components"))
warnings.warn("a warning")
"""


@pytest.mark.parametrize("options", [(), ("--quiet",)])
def test_no_warning_of_another_package_is_shown_and_no_bar_where_quiet(options):
    command = [sys.executable, "-c", TALK, *options]
    written = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert "accelerate" not in written
    assert "a warning" not in written
    assert ("Loading pipeline components" in written) == (not options)
